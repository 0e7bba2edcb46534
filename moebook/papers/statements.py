"""What a paper claims, one entry a claim, in ``<paper>/claims.yaml``: checked when it is read."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from moebook.errors import nearest, refuse
from moebook.papers.printed import PAPERS, folder
from moebook.results import TIERS, UNITS

KINDS = ("direction", "number")
DIRECTIONS = ("greater", "less", "equal")


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One claim of a paper, and the recorded value that tests it.

    The *effect* is the recorded value minus the reference (or the value itself without one).

    Attributes:
        id: ``<paper>.<name>``, unique.
        sentence: The claim in our words.
        where: Table, row, equation or section of the paper.
        quantity: What is measured.
        kind: ``direction`` (the sign of the effect) or ``number`` (its size).
        direction: Side of the effect: greater or less than 0, or equal to it; None for a number
            that claims no side.
        reference: Another recorded value's name, or a number in `unit`, or None.
        claimed: The effect that the paper prints, in `unit`; None where it prints none.
        unit: Unit of the recorded value, one of `results.UNITS`.
        printed: The paper's numbers as it prints them.
        tolerance: How far the effect may be from `claimed` to count as reproduced (for `equal`, and
            for numbers below the paper's scale too), in `unit`; None where nothing is printed.
        why: Why this tolerance.
        scales: Tiers at which the value may be recorded.
        notebook: File name of the notebook without its ending, such as ``01_pesc``.
        value: Name of the recorded value.
        function: Dotted path of the code that implements what is claimed.
        exact: The value is computed, not sampled: it needs no seeds and has no interval.
    """

    id: str
    sentence: str
    where: str
    quantity: str
    kind: str
    direction: str | None
    reference: str | float | None
    claimed: float | None
    unit: str
    printed: str
    tolerance: float | None
    why: str
    scales: tuple[str, ...]
    notebook: str
    value: str
    function: str
    exact: bool = False

    @property
    def paper(self) -> str:
        """Short name of the paper."""
        return self.id.split(".")[0]

    @property
    def run(self) -> str:
        """Short name of the notebook, as ``moebook run`` takes it."""
        return self.notebook[3:]


FIELDS = {field.name: field for field in dataclasses.fields(Claim)}
TEXTS = ("id", "sentence", "where", "quantity", "printed", "why", "notebook", "value", "function")


def claims(paper: str | None = None) -> list[Claim]:
    """The claims of one paper, or of all four, in the order of their files.

    Raises:
        Refusal: E-NAME for an unknown paper; E-FORMAT with file and line for a malformed file.
    """
    names = [folder(paper).name] if paper else PAPERS
    return [claim for name in names for claim in _read(folder(name) / "claims.yaml", name)]


def claim(name: str) -> Claim:
    """One claim by its id; an unknown one is refused with the nearest (E-NAME)."""
    known = {claim.id: claim for claim in claims()}
    if name not in known:
        refuse("E-NAME", f"unknown claim '{name}'; {nearest(name, known)}")
    return known[name]


@cache
def _read(path: Path, paper: str) -> tuple[Claim, ...]:
    found: dict[str, Claim] = {}
    for line, entry in _entries(path):
        place = f"{paper}/{path.name}:{line}"
        one = _claim(place, paper, entry)
        if one.id in found:
            refuse("E-FORMAT", f"{place}: claim '{one.id}' stands twice")
        found[one.id] = one
    return tuple(found.values())


def _entries(path: Path) -> Iterator[tuple[int, Any]]:
    """Each entry with the line on which it starts."""
    text = path.read_text(encoding="utf-8")
    place = f"{path.parent.name}/{path.name}"
    try:
        node, entries = yaml.compose(text), yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        refuse("E-FORMAT", f"{place}:{line}: not YAML ({error.problem})")
    if node is None or not isinstance(entries, list):
        refuse("E-FORMAT", f"{place}:1: expected a list of claims")
    yield from zip((item.start_mark.line + 1 for item in node.value), entries, strict=True)


def _claim(place: str, paper: str, entry: Any) -> Claim:
    needed = {name for name in FIELDS if name != "exact"}
    given = set(entry) if isinstance(entry, dict) else set()
    if missing := sorted(needed - given):
        refuse("E-FORMAT", f"{place}: a claim needs the field '{missing[0]}'")
    if unknown := sorted(given - set(FIELDS)):
        refuse("E-FORMAT", f"{place}: unknown field '{unknown[0]}'; {nearest(unknown[0], FIELDS)}")
    for problem in _problems(paper, entry):
        refuse("E-FORMAT", f"{place}: {problem}")
    return Claim(**{**entry, "scales": tuple(entry["scales"])})


def _problems(paper: str, entry: dict[str, Any]) -> Iterator[str]:
    for name in TEXTS:
        if not isinstance(entry[name], str) or not entry[name].strip():
            yield f"{name} must be text"
    if not re.fullmatch(rf"{paper}\.[a-z0-9-]+", entry["id"]):
        yield f"id '{entry['id']}': expected {paper}.words-with-hyphens"
    for name, choices in (("kind", KINDS), ("direction", (*DIRECTIONS, None)), ("unit", UNITS)):
        if entry[name] not in choices:
            yield f"{name} '{entry[name]}'; {nearest(str(entry[name]), map(str, choices))}"
    scales = entry["scales"]
    if not isinstance(scales, list) or not scales or not set(scales) <= set(TIERS):
        yield f"scales {scales}: expected a list out of {', '.join(TIERS)}"
    for name in ("claimed", "tolerance"):
        if entry[name] is not None and not _finite(entry[name]):
            yield f"{name} '{entry[name]}': expected a number or null"
    reference = entry["reference"]
    if reference is not None and not isinstance(reference, str) and not _finite(reference):
        yield f"reference '{reference}': expected a value's name, a number or null"
    yield from _disagreements(entry)


def _disagreements(entry: dict[str, Any]) -> Iterator[str]:
    if entry["kind"] == "direction" and entry["direction"] is None:
        yield "a claim of kind direction needs one: greater, less or equal"
    if entry["kind"] == "number" and (entry["claimed"] is None or entry["tolerance"] is None):
        yield "a claim of kind number needs claimed and tolerance"
    if entry["claimed"] is not None and entry["tolerance"] is None:
        yield "a claimed number needs a tolerance"
    if entry["direction"] == "equal" and entry["tolerance"] is None:
        yield "a claim of equality needs a tolerance"
    if not re.fullmatch(r"\d\d_[a-z0-9_]+", entry["notebook"]):
        yield f"notebook '{entry['notebook']}': expected a name such as 01_pesc"


def _finite(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
