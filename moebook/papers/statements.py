"""What a paper claims, one entry a claim, in ``<paper>/claims.yaml``: checked when it is read."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from moebook.errors import Refusal, refuse, refuse_unknown
from moebook.papers.printed import PAPERS, folder
from moebook.results import UNITS, read_places
from moebook.settings import settings

Text = Annotated[str, Field(pattern=r"\S")]
Scale = Literal["smoke", "cpu", "study", "gpu", "paper"]  # as `results.TIERS`


@settings
class Claim:
    """One claim of a paper, and the recorded value that tests it.

    The *effect* is the recorded value minus the reference (or the value itself without one). All
    numbers are in ``unit``, one of `results.UNITS`; None stands where the paper prints none.
    """

    id: Text  # <paper>.<name>, unique
    sentence: Text  # in our words
    where: Text  # it stands in the paper
    quantity: Text
    kind: Literal["direction", "number"]  # the sign of the effect, or its size
    direction: Literal["greater", "less", "equal"] | None  # of the effect, to 0
    reference: str | int | float | None  # another recorded value's name, or a number
    claimed: int | float | None  # effect that the paper prints
    unit: str
    printed: Text  # as the paper has it
    tolerance: int | float | None  # of a reproduction; for `equal` at smaller scales too
    why: Text  # this tolerance
    scales: Annotated[tuple[Scale, ...], Field(min_length=1)]  # at which it may be recorded
    notebook: Annotated[str, Field(pattern=r"^\d\d_[a-z0-9_]+$")]  # such as 01_pesc
    value: Text
    function: Text  # dotted path of the code that implements what is claimed
    exact: bool = False  # computed, not sampled: needs no seeds and has no interval
    untestable: Text | None = None  # why our runs below the paper's scale cannot decide it

    def __post_init__(self) -> None:
        """Refuse what disagrees between the fields."""
        refuse_unknown(self.unit, UNITS, "E-CHOICE", f"unit is {self.unit!r};")
        if self.kind == "direction" and self.direction is None:
            refuse("E-CHOICE", "a claim of kind direction needs one: greater, less or equal")
        if self.kind == "number" and self.claimed is None:
            refuse("E-CHOICE", "a claim of kind number needs a claimed number")
        if self.tolerance is None and (self.claimed is not None or self.direction == "equal"):
            refuse("E-CHOICE", "a claimed number, or a claim of equality, needs a tolerance")

    @property
    def paper(self) -> str:
        """Short name of the paper."""
        return self.id.split(".")[0]

    @property
    def run(self) -> str:
        """Short name of the notebook, as ``moebook run`` takes it."""
        return self.notebook[3:]


def claims(paper: str | None = None) -> list[Claim]:
    """The claims of one paper, or of all four, in the order of their files."""
    names = [paper] if paper else PAPERS
    return [claim for name in names for claim in _read(folder(name) / "claims.yaml", name)]


def claim(name: str) -> Claim:
    """One claim by its id; an unknown one is refused with the nearest (E-NAME)."""
    known = {claim.id: claim for claim in claims()}
    refuse_unknown(name, known, "E-NAME", f"unknown claim '{name}';")
    return known[name]


@cache
def _read(path: Path, paper: str) -> tuple[Claim, ...]:
    """Read a file's claims; a bad entry is refused with the line on which it starts (E-FORMAT)."""
    entries, places = read_places(path)
    if not isinstance(entries, list):
        refuse("E-FORMAT", f"{paper}/{path.name}:1: expected a list of claims")
    by_id: dict[str, Claim] = {}
    for place, entry in zip(places, entries, strict=True):
        try:
            one = Claim(**{**entry, "scales": tuple(entry.get("scales", ()))})
        except Refusal as refusal:
            refuse("E-FORMAT", f"{place}: {refusal.message}")
        except TypeError:
            refuse("E-FORMAT", f"{place}: expected a claim, found {entry!r}")
        named = re.fullmatch(rf"{paper}\.[a-z0-9-]+", one.id)
        if not named or one.id in by_id:
            odd = "stands twice" if named else f"expected {paper}.words-with-hyphens"
            refuse("E-FORMAT", f"{place}: claim '{one.id}': {odd}")
        by_id[one.id] = one
    return tuple(by_id.values())
