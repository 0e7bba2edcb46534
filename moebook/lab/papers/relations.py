"""What the papers derive from their own numbers, in tables or text, made computable.

A relation in a table's header, under ``derived``, holds for every row (or column) of
the table::

    {column: Average, is: mean, of: [GSM8K, MATH]}
    {column: Code, is: mean, of: [HumanEval, MBPP], table: 9}  # operands stand in table 9
    {row: Gain, is: difference, of: [Ours, Base]}  # first minus second
    {column: Average, where: {statistic: value}, is: mean, of: [IFEval, MMLU]}

An entry of ``stated.yaml`` is a number that the running text says (where, sentence,
printed, unit), ``of`` selections of cells: ``{table: "1", row: ..., column: ..., <key>:
..., except: [rows]}``, where what is left out, or a list, stands for all that match.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from statistics import fmean
from typing import Any

from moebook.errors import refuse, refuse_unknown
from moebook.lab.papers.printed import folder, number, table, tables
from moebook.storage import read_yaml

Rule = dict[str, Any]
FUNCTIONS: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": fmean,
    "sum": sum,
    "max": max,
    "min": min,
    "count": len,
    "difference": lambda x: x[0] - x[1],
    "ratio": lambda x: x[0] / x[1],
    "reduction": lambda x: 100 * (1 - x[0] / x[1]),
    "same": lambda x: x[0],
}
ARITY = {"difference": 2, "ratio": 2, "reduction": 2, "same": 1}
SHOWN = ("series", "model", "base", "expert")  # keys that stand in a cell's place
# Of a selection; its other entries are keys.
PLACES = {
    "table",
    "row",
    "column",
    "except",
}


@dataclass(frozen=True)
class Cell:
    """A printed number with its place; value and decimals as in `printed.Number`."""

    table: str
    row: str
    column: str
    printed: str
    value: float
    decimals: int
    unit: str
    keys: dict[str, str] = field(hash=False)

    @property
    def place(self) -> str:
        """Where the number stands, for the reader."""
        parts = [title(self.table)]
        for name, value in self.keys.items():
            if name in SHOWN:
                parts.append(f"{name} {value}" if value.isdigit() else value)
        return ", ".join([*parts, self.row, self.column])


def title(name: str) -> str:
    """Title of a table or figure: "Table 9" for "9", "Figure 5" for "figure_5"."""
    if name.startswith("figure_"):
        return name.replace("figure_", "Figure ")
    return f"Table {name}"


@cache
def stem(name: str) -> str:
    """A name without case, punctuation, parentheses: "ARC-e (Acc.)" is "arce"."""
    plain = re.sub(r"\(.*?\)", "", name).lower().replace("×", "x")
    plain = re.sub(r"[^a-z0-9.+%]", "", plain).strip(".")
    return "average" if plain == "avg" else plain


@cache
def metric(name: str) -> str:
    """What stands in a name's parentheses, as "pass@10", or nothing."""
    inside = re.search(r"\((.*?)\)", name)
    return inside[1].lower().strip(". ") if inside else ""


def agree(ours: dict[str, str], theirs: dict[str, str]) -> bool:
    """Whether two sets of keys say the same wherever both say something."""
    for name, value in ours.items():
        other = theirs.get(name)
        if value and other and value != other:
            return False
    return True


class Paper:
    """All cells of one paper of which our text is whole, and its tables' headers."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.cells: list[Cell] = []
        self.headers: dict[str, dict[str, Any]] = {}
        for sheet in tables(name):
            frame = table(name, sheet)
            self.headers[sheet] = frame.attrs
            sound = frame[frame["mark"] != "damaged"].drop(columns="mark")
            for record in sound.to_dict("records"):
                keys = {key: record.pop(key) for key in frame.attrs["keys"]}
                self.cells.append(Cell(table=sheet, keys=keys, **record))
        # By an unordered pair of names, so that transposed tables match.
        self._by_names: dict[frozenset[str], list[Cell]] = defaultdict(list)
        for cell in self.cells:
            names = self.names(cell.table, cell.row, cell.column)
            self._by_names[frozenset(map(stem, names))].append(cell)

    def names(self, table: str, *names: str) -> list[str]:
        """Names of one table as the paper's other tables have them."""
        others = self.headers[table].get("names", {})
        return [others.get(name, name) for name in names]

    def inside(self, table: str) -> list[Cell]:
        """The cells of one table."""
        return [cell for cell in self.cells if cell.table == table]

    def same(
        self, names: Sequence[str], keys: dict[str, str], table: str | None = None
    ) -> Iterator[Cell]:
        """Cells of a row and column whose metric and keys agree, transposed last."""
        asked = {stem(name): metric(name) for name in names}
        twins = self._by_names.get(frozenset(asked), [])
        for cell in sorted(twins, key=lambda twin: stem(twin.row) != stem(names[0])):
            theirs = self.names(cell.table, cell.row, cell.column)
            metrics = {stem(name): metric(name) for name in theirs}
            alike = agree(asked, metrics) and agree(keys, cell.keys)
            if alike and table in (None, cell.table):
                yield cell

    def rules(self, table: str, *, same: bool) -> dict[str, frozenset[str]]:
        """Derived rows and columns of a table with operands; or those set ``same``."""
        operands = {}
        for rule in self.headers[table].get("derived") or []:
            if (rule["is"] == "same") is same:
                name = stem(rule.get("column", rule.get("row")))
                operands[name] = frozenset(map(stem, rule["of"]))
        return operands


@dataclass(frozen=True)
class Check:
    """A printed number at its `place` and the operands that it is derived from."""

    place: str
    kind: str
    printed: str
    value: float
    decimals: int
    operands: tuple[Cell, ...]
    rule: str  # the relation; checks of one column share it
    target: Cell | None = None  # the result's own cell; None in the running text

    @property
    def values(self) -> list[float]:
        """The operands' values."""
        return [cell.value for cell in self.operands]

    @property
    def computed(self) -> float:
        """The number recomputed from the printed operands."""
        return float(FUNCTIONS[self.kind](self.values))

    def changed(self, place: int, value: float) -> float:
        """The number recomputed with another value of one operand."""
        values = self.values
        values[place] = value
        return float(FUNCTIONS[self.kind](values))

    @property
    def slack(self) -> float:
        """How far the operands' rounding, half a last digit, can move the result."""
        ends = []
        for cell in self.operands:
            half = 0.5 * 10.0**-cell.decimals
            ends.append((cell.value - half, cell.value + half))
        # Each operand of a kind that takes many raises it: all are low, or all high.
        few = self.kind in ARITY
        corners = product(*ends) if few else zip(*ends, strict=True)
        function = FUNCTIONS[self.kind]
        return max(abs(function(corner) - self.computed) for corner in corners)


def checks(paper: Paper) -> list[Check]:
    """Every number that the paper derives: in tables, in its text, or twice."""
    return [*_derived(paper), *_stated(paper), *_repeated(paper)]


def _of_cell(cell: Cell, kind: str, operands: Sequence[Cell], rule: str) -> Check:
    number = (cell.printed, cell.value, cell.decimals)
    return Check(cell.place, kind, *number, tuple(operands), rule, cell)


def _derived(paper: Paper) -> Iterator[Check]:
    for name, header in paper.headers.items():
        for rule in header.get("derived") or []:
            _check_rule(f"{paper.name}/{header['path']}", rule)
            for cell in paper.inside(name):
                operands = _operands(paper, cell, rule)
                if operands and None not in operands:
                    yield _of_cell(cell, rule["is"], operands, f"{name}: {rule}")


def _operands(paper: Paper, cell: Cell, rule: Rule) -> list[Any]:
    """Operands of a cell in the table named (or its own), else wherever they stand."""
    across = "column" in rule
    if across:
        mine = cell.column
        derived = rule["column"]
    else:
        mine = cell.row
        derived = rule["row"]
    wanted = {key: str(value) for key, value in rule.get("where", {}).items()}
    if stem(mine) != stem(derived) or not agree(wanted, cell.keys):
        return []
    operands = []
    for name in rule["of"]:
        place = (cell.row, name) if across else (name, cell.column)
        here = str(rule.get("table", cell.table))
        there = paper.same(paper.names(here, *place), cell.keys, here)
        elsewhere = paper.same(paper.names(cell.table, *place), cell.keys)
        twins = [twin for twin in (*there, *elsewhere) if twin != cell]
        operands.append(twins[0] if twins else None)
    return operands


def _stated(paper: Paper) -> Iterator[Check]:
    """Check what sentences of a paper say of its tables, by its ``stated.yaml``."""
    path = folder(paper.name) / "stated.yaml"
    if not path.exists():
        return
    for entry in read_yaml(path):
        place = f"{paper.name}/stated.yaml ({entry.get('sentence', '?')})"
        kind = entry.get("is")
        printed = str(entry["printed"])
        _check_rule(place, entry)
        typed = number(printed)
        if typed is None:
            refuse("E-FORMAT", f"{place}: '{printed}' is no number")
        cells = []
        for selection in entry["of"]:
            cells += _select(paper, place, selection)
        if kind == "count":  # rows, each once
            by_row = {(cell.row, *cell.keys.values()): cell for cell in cells}
            cells = list(by_row.values())
        needed = ARITY.get(kind, len(cells))
        if needed != len(cells):
            counts = f"{kind} needs {needed} cells, selected {len(cells)}"
            refuse("E-FORMAT", f"{place}: {counts}")
        sentence = entry["sentence"].removesuffix(".")
        where = f"{entry['where']}: {sentence}"
        yield Check(where, kind, printed, *typed, tuple(cells), where)


def _select(paper: Paper, place: str, selection: Rule) -> list[Cell]:
    """The cells that an entry's selection names."""
    name = str(selection["table"])
    refuse_unknown(name, paper.headers, "E-FORMAT", f"{place}: no table '{name}';")
    keys = {key: str(selection[key]) for key in selection.keys() - PLACES}
    rows = _stems(selection, "row")
    columns = _stems(selection, "column")
    without = _stems(selection, "except")
    cells = []
    for cell in paper.inside(name):
        row = stem(cell.row)
        column = stem(cell.column)
        if (rows and row not in rows) or row in without:
            continue
        if columns and column not in columns:
            continue
        if agree(keys, cell.keys):
            cells.append(cell)
    if not cells:
        refuse("E-FORMAT", f"{place}: no cell matches {selection}")
    return cells


def _stems(selection: Rule, name: str) -> set[str]:
    """Names of a selection, one or several, by their stems."""
    names = selection.get(name, [])
    if not isinstance(names, list):
        names = [names]
    return {stem(str(each)) for each in names}


def _check_rule(place: str, rule: Rule) -> None:
    kind = str(rule.get("is"))
    refuse_unknown(kind, FUNCTIONS, "E-FORMAT", f"{place}: unknown relation '{kind}';")
    if not isinstance(rule.get("of"), list):
        expected = "a relation names its operands as a list under 'of'"
        refuse("E-FORMAT", f"{place}: {expected}")


def _repeated(paper: Paper) -> Iterator[Check]:
    """Each quantity that a later table prints again, against its first print."""
    order = list(paper.headers)
    for cell in paper.cells:
        names = paper.names(cell.table, cell.row, cell.column)
        set_equal = paper.rules(cell.table, same=True)
        if stem(cell.row) in set_equal or stem(cell.column) in set_equal:
            continue
        for earlier in order[: order.index(cell.table)]:
            twins = []
            for twin in paper.same(names, cell.keys, earlier):
                if _comparable(paper, cell, twin):
                    twins.append(twin)
            if len(twins) == 1:
                rule = f"{earlier} and {cell.table}: same quantity"
                yield _of_cell(cell, "same", twins, rule)
                break


def _comparable(paper: Paper, cell: Cell, twin: Cell) -> bool:
    """Same unit and setting, and, where both are derived, from the same operands."""
    settings = set()
    operands = set()
    for side in (cell, twin):
        settings.add(paper.headers[side.table].get("setting"))
        derived = paper.rules(side.table, same=False)
        by_row = derived.get(stem(side.row))
        operands.add(derived.get(stem(side.column), by_row))
    one_setting = len(settings - {None}) < 2
    one_source = len(operands - {None}) < 2
    return cell.unit == twin.unit and one_setting and one_source
