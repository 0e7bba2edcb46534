"""The papers' tables, settings and claims as data, checked when they are read.

A table is a CSV file and becomes a typed pandas frame, a claim an entry of
``claims.yaml``. A CSV file starts with a YAML header, each line behind ``# ``: table,
caption, unit, source and, where they apply, damaged (what is wrong with our text),
setting (what sets its numbers apart from equally named ones), names (this table's name
-> the other tables') and derived (see `papers.relations`). CSV follows, a line a
printed number: ``row, column, <keys>, printed, unit, mark``.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Mapping
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, NoReturn

from pydantic import Field

from moebook.errors import located, refuse, refuse_unknown
from moebook.lab.records import UNITS
from moebook.settings import settings, tuples
from moebook.storage import formed, read_json, read_places, read_yaml, text_digest
from moebook.storage.files import own

if TYPE_CHECKING:  # who asks for claims alone, as `moebook list` does, needs no frames
    import pandas as pd

FOLDER = Path(__file__).parent
PAPERS = ("pesc", "router_init", "rocket", "esft")
OURS = ("together", "causes")  # what we claim ourselves, judged by the same rules
MARKS = ("", "damaged", "restored")
FIXED = ("row", "column", "printed", "unit", "mark")
NEEDED = {"table", "caption", "unit", "source"}
HEADER = NEEDED | {"damaged", "setting", "names", "derived"}
POWERS = {"": 0, "%": 0, "K": 3, "M": 6, "B": 9, "T": 12}
FROZEN = (
    "value",
    "reference",
    "kind",
    "direction",
    "claimed",
    "tolerance",
    "unit",
    "scales",
    "under",
    "exact",
    "arms",
    "untestable",
)
"""Fields of a claim that its verdict depends on."""
SIZED = ("sizes", "times")
"""Such fields of a claim on how many times another arm's weights one trains."""
PRESUPPOSES = "presupposes"
"""Such a field of a claim that says nothing where another value does not lie above a third."""
WRITTEN = "written.json"
"""Record of when each claim was written, by `recipes.claims` from git's history."""
NUMBER = re.compile(
    r"(?P<sign>[-+−]?)(?P<whole>\d[\d,]*)(?:\.(?P<fraction>\d+))?"
    r"(?:(?:e|×10\^)\{?(?P<power>[-+]?\d+)\}?)?(?P<suffix>[%KMBT]?)"
)


Text = Annotated[str, Field(pattern=r"\S")]
Scale = Literal["smoke", "cpu", "study", "gpu", "paper"]  # as `results.TIERS`


class Number(NamedTuple):
    """A printed number."""

    value: float  # K, M, B and T multiplied out; 75.7% is 75.7
    decimals: int  # position of the last digit: 1 for 75.7, 0 for 8, -3 for 300K


def number(printed: str) -> Number | None:
    """Read a printed number such as 75.7%, +1.9, 300K or 5e-5; None if it is none."""
    match = NUMBER.fullmatch(printed.strip())
    if match is None:
        return None
    fraction = match["fraction"] or ""
    power = POWERS[match["suffix"]] + int(match["power"] or 0)
    sign = -1 if match["sign"] in ("-", "−") else 1
    value = sign * float(f"{match['whole'].replace(',', '')}.{fraction or '0'}e{power}")
    return Number(value, len(fraction) - power) if math.isfinite(value) else None


def folder(paper: str) -> Path:
    """Folder of a paper's data; E-NAME with the nearest name for an unknown paper."""
    refuse_unknown(paper, (*PAPERS, *OURS), "E-NAME", f"unknown paper '{paper}';")
    return FOLDER / paper


def tables(paper: str) -> list[str]:
    """Names of a paper's tables in order, for `table`: "1", ..., "figure_4"."""
    names = [path.stem.removeprefix("table_") for path in own(folder(paper), "*.csv")]
    return sorted(names, key=lambda name: (int(name) if name.isdigit() else 1000, name))


def table(paper: str, n: int | str) -> pd.DataFrame:
    """Load one table by its number or its name in `tables`: one row a printed number.

    Columns are row, column, the table's own keys, printed, value (float), decimals
    (int), unit and mark; ``.attrs`` holds the header (caption, source, derived, ...),
    path and keys.
    """
    refuse_unknown(str(n), tables(paper), "E-NAME", f"{paper} has no table '{n}';")
    file = f"{n}.csv" if str(n).startswith("figure_") else f"table_{n}.csv"
    return _read(folder(paper) / file).copy()


def wide(paper: str, n: int | str) -> pd.DataFrame:
    """The table as printed, rows by columns, keys in the index; damaged cells NaN."""
    frame = table(paper, n)
    index = [*frame.attrs["keys"], "row"]
    sound = frame[frame["mark"] != "damaged"]
    form = sound.pivot(index=index, columns="column", values="value")
    order = frame.set_index(index).index.unique()
    return form.reindex(index=order, columns=frame["column"].unique())


def hyperparameters(
    paper: str, settings: str | None = None
) -> dict[str, dict[str, Any]]:
    """A paper's settings, ``{"paper": {"lr": {"value": ...}}}``, or a group."""
    groups: dict[str, dict[str, Any]] = read_yaml(
        folder(paper) / "hyperparameters.yaml"
    )
    if settings is None:
        return groups
    refuse_unknown(settings, groups, "E-NAME", f"{paper} has no settings '{settings}';")
    return groups[settings]


@cache
def _read(path: Path) -> pd.DataFrame:
    with formed(path):
        return _frame(path)


def _frame(path: Path) -> pd.DataFrame:
    import pandas as pd

    lines = path.read_text(encoding="utf-8").splitlines()
    head = list(takewhile(lambda line: line.startswith("#"), lines))
    start = len(head)
    text = "\n".join(line[1:].removeprefix(" ") for line in head)
    header = read_yaml(path, text)
    if not isinstance(header, dict) or not set(header) >= NEEDED:
        _malformed(path, 1, "a header with table, caption, unit and source")
    unknown = sorted(set(header) - HEADER)
    if unknown:
        _malformed(path, 1, f"header fields among {sorted(HEADER)}; found {unknown}")
    reader = csv.reader(lines[start:])
    names = next(reader, [])
    keys = [name for name in names if name not in FIXED]
    if not set(FIXED) <= set(names) or tuple(names[-3:]) != FIXED[2:]:
        expected = "columns row, column, [keys], printed, unit, mark"
        _malformed(path, start + 1, f"{expected}; found {names}")
    if len(set(names)) < len(names):
        _malformed(path, start + 1, f"each column once; found {names}")
    cells = []
    for fields in reader:
        line = start + reader.line_num
        cells.append(_cell(path, line, names, fields, header["unit"]))
    columns = ["row", "column", *keys, "printed", "value", "decimals", "unit", "mark"]
    frame = pd.DataFrame(cells, columns=columns)
    frame.attrs = {**header, "keys": keys, "path": path.name}
    twice = frame.duplicated(["row", "column", *keys])
    if twice.any():
        place = int(twice.to_numpy().argmax())
        cell = ", ".join(frame.loc[place, ["row", "column", *keys]].astype(str))
        _malformed(path, start + 2 + place, f"each cell once, found a second ({cell})")
    return frame


def _cell(
    path: Path, line: int, names: list[str], fields: list[str], unit: str
) -> dict[str, Any]:
    """Read a line; the table's unit stands in for one of its own."""
    if len(fields) != len(names):
        _malformed(path, line, f"{len(names)} fields, found {len(fields)}")
    cell: dict[str, Any] = dict(zip(names, fields, strict=True))
    typed = number(cell["printed"])
    if typed is None:
        example = "a number such as 75.7%, 300K or +1.9"
        _malformed(path, line, f"{example}, found '{cell['printed']}'")
    if cell["mark"] not in MARKS:
        marks = "a mark among empty, damaged, restored"
        _malformed(path, line, f"{marks}, found '{cell['mark']}'")
    return {**cell, **typed._asdict(), "unit": cell["unit"] or unit}


def _malformed(path: Path, line: int, expected: str) -> NoReturn:
    refuse("E-FORMAT", f"{path.parent.name}/{path.name}:{line}: expected {expected}")


@settings
class Claim:
    """One claim of a paper, and the recorded value that tests it.

    The *effect* is the recorded value minus the reference (or the value itself without
    one). All numbers are in ``unit``, one of `results.UNITS`; None stands where the
    paper prints none.
    """

    id: Text  # <paper>.<name>, unique
    sentence: Text  # in our words
    where: Text  # it stands in the paper
    quantity: Text
    kind: Literal["direction", "number"]  # the sign of the effect, or its size
    direction: Literal["greater", "less", "equal"] | None  # of the effect, to 0
    reference: str | int | float | tuple[Text, ...] | None
    # another recorded value's name, several whose mean is meant, or a number
    claimed: int | float | None  # effect that the paper prints
    unit: str
    printed: Text  # as the paper has it
    # Of a reproduction; for `equal` at smaller scales too.
    tolerance: int | float | None
    why: Text  # this tolerance
    # At which it may be recorded.
    scales: Annotated[tuple[Scale, ...], Field(min_length=1)]
    notebook: Annotated[str, Field(pattern=r"^\d\d_[a-z0-9_]+$")]  # such as 01_pesc
    value: Text
    function: Text  # dotted path of the code that implements what is claimed
    # That trained, as ``a/b``, where the values' names do not tell.
    arms: str | None = None
    under: dict[str, str | int | float] = Field(default_factory=dict)
    # parameters that its runs must have
    exact: bool = False  # computed, not sampled: needs no seeds and has no interval
    # Why our runs below the paper's scale cannot decide it.
    untestable: Text | None = None
    sizes: tuple[
        Text, ...
    ] = ()  # recorded values that stand beside it: how much each arm trained
    times: tuple[float, float] | None = None
    # limits of the first of these sizes over the second: other runs are no evidence
    trivial: Text | int | float | None = None
    # a recorded value of an arm for which a bound must fail, in the place of `value`,
    # or a number
    presupposes: tuple[Text, Text] | None = None
    # recorded values: where the first does not lie above the second it says nothing
    # Why it decides nothing any more; its words and its verdict stay.
    ended: Text | None = None
    instead: tuple[Text, ...] = ()  # ids of the claims that stand in its place

    def __post_init__(self) -> None:
        """Refuse what disagrees between the fields."""
        refuse_unknown(self.unit, UNITS, "E-CHOICE", f"unit is {self.unit!r};")
        if self.kind == "direction" and self.direction is None:
            refuse(
                "E-CHOICE",
                "a claim of kind direction needs one: greater, less or equal",
            )
        if self.kind == "number" and self.claimed is None:
            refuse("E-CHOICE", "a claim of kind number needs a claimed number")
        compared = self.claimed is not None or self.direction == "equal"
        if compared and self.tolerance is None:
            needs = "a claimed number, or a claim of equality, needs a tolerance"
            refuse("E-CHOICE", needs)
        if self.instead and not self.ended:
            refuse("E-CHOICE", "only a claim that has ended has others in its place")
        if self.times and len(self.sizes) != 2:
            refuse(
                "E-CHOICE", "times are limits of one size over another; give two sizes"
            )

    @property
    def bounded(self) -> bool:
        """Whether a bound that somebody chose decides it: a number, a mean, or a nearness."""
        if self.kind == "number":  # the paper's own
            return False
        mean_of_several = isinstance(self.reference, tuple)
        chosen = isinstance(self.reference, int | float) and self.reference != 0
        return self.direction == "equal" or mean_of_several or chosen

    @property
    def values(self) -> tuple[str, ...]:
        """Names of the recorded values that it compares, its own first."""
        reference = self.reference
        if isinstance(reference, tuple):
            return self.value, *reference
        if isinstance(reference, str):
            return self.value, reference
        return (self.value,)

    @property
    def frozen(self) -> str:
        """Hash of all that decides its verdict; runs keep it (`verdicts.ledger`)."""
        names = (*FROZEN, *SIZED, PRESUPPOSES)
        return frozen_hash({name: getattr(self, name) for name in names})

    @property
    def since(self) -> str | None:
        """Time since which it says what it says (UTC); None if not known (`WRITTEN`).

        Runs that are newer than the record keep the hashes of their claims themselves.
        """
        then = _written().get(self.id, {})
        return then["since"] if then.get("frozen") == self.frozen else None

    @property
    def paper(self) -> str:
        """Short name of the paper."""
        return self.id.split(".")[0]

    @property
    def run(self) -> str:
        """Short name of the notebook, as ``moebook run`` takes it."""
        return self.notebook[3:]


def claims(paper: str | None = None) -> list[Claim]:
    """The claims of one paper, or of all four and our own, in their files' order."""
    names = [paper] if paper else [*PAPERS, *OURS]
    known: list[Claim] = []
    for name in names:
        known += _read_claims(folder(name) / "claims.yaml", name)
    return known


def frozen_hash(parts: Mapping[str, Any]) -> str:
    """Hash the `FROZEN` fields of a claim; `SIZED` and `PRESUPPOSES` where they are given."""
    deciding = {name: parts[name] for name in FROZEN}
    if parts["times"]:
        deciding |= {name: parts[name] for name in SIZED}
    if parts[PRESUPPOSES]:
        deciding[PRESUPPOSES] = parts[PRESUPPOSES]
    text = json.dumps(deciding, sort_keys=True)
    return text_digest(text)[:16]


@cache
def _written() -> dict[str, dict[str, str]]:
    path = FOLDER / WRITTEN
    with formed(path):
        record: dict[str, dict[str, str]] = read_json(path)
        return record


def frozen(notebook: str) -> dict[str, str]:
    """Hashes of the claims that a notebook's runs may decide, by id."""
    mine = [claim for claim in claims() if claim.run == notebook and not claim.ended]
    return {claim.id: claim.frozen for claim in mine}


def claim(name: str) -> Claim:
    """One claim by its id; an unknown one is refused with the nearest (E-NAME)."""
    known = {claim.id: claim for claim in claims()}
    refuse_unknown(name, known, "E-NAME", f"unknown claim '{name}';")
    return known[name]


@cache
def _read_claims(path: Path, paper: str) -> tuple[Claim, ...]:
    """Read a file's claims; a bad entry is refused with its line (E-FORMAT)."""
    entries, places = read_places(path)
    if not isinstance(entries, list):
        refuse("E-FORMAT", f"{paper}/{path.name}:1: expected a list of claims")
    by_id: dict[str, Claim] = {}
    for place, entry in zip(places, entries, strict=True):
        try:
            with located(place, "E-FORMAT"):
                claim = Claim(**tuples(entry))
        except TypeError:
            refuse("E-FORMAT", f"{place}: expected a claim, found {entry!r}")
        named = re.fullmatch(rf"{paper}\.[a-z0-9-]+", claim.id)
        if not named:
            expected = f"expected {paper}.words-with-hyphens"
            refuse("E-FORMAT", f"{place}: claim '{claim.id}': {expected}")
        if claim.id in by_id:
            refuse("E-FORMAT", f"{place}: claim '{claim.id}': stands twice")
        if claim.bounded and claim.trivial is None and not claim.ended:
            needs = "a bound needs a trivial arm for which it fails (trivial)"
            refuse("E-FORMAT", f"{place}: {needs}")
        by_id[claim.id] = claim
    for claim in by_id.values():
        for other in claim.instead:
            message = f"{paper}/{path.name}: {claim.id} names '{other}';"
            refuse_unknown(other, by_id, "E-FORMAT", message)
    return tuple(by_id.values())
