"""What the papers derive from their own numbers, by a name or in the text, made computable.

A relation in a table's header, under ``derived``, holds for every row (or column) of the table::

    {column: Average, is: mean, of: [GSM8K, MATH]}
    {column: Code, is: mean, of: [HumanEval, MBPP], table: 9}     operands stand in table 9
    {row: Gain, is: difference, of: [Ours, Base]}                 first minus second
    {column: Average, where: {statistic: value}, is: mean, of: [...]}

An entry of ``stated.yaml`` is a number that the running text says (where, sentence, printed, unit),
``of`` selections of cells: ``{table: "1", row: ..., column: ..., <key>: ..., except: [rows]}``,
where what is left out, or a list, stands for all that match.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import yaml

from moebook.errors import nearest, refuse
from moebook.papers.cells import Cell, Paper, agree, stem
from moebook.papers.printed import folder, number

Rule = dict[str, Any]
FUNCTIONS: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": fmean,
    "sum": sum,
    "difference": lambda x: x[0] - x[1],
    "ratio": lambda x: x[0] / x[1],
    "reduction": lambda x: 100 * (1 - x[0] / x[1]),
    "same": lambda x: x[0],
    "max": max,
    "min": min,
    "count": len,
}
ARITY = {"difference": 2, "ratio": 2, "reduction": 2, "same": 1}


@dataclass(frozen=True)
class Check:
    """A printed number with the operands from which the paper derives it.

    Attributes:
        place: Where the printed number stands.
        kind: One of `FUNCTIONS`.
        rule: The relation as the paper's data states it; checks of one rule share it.
        target: The result's own cell; None where the number stands in the running text.
    """

    place: str
    kind: str
    printed: str
    value: float
    decimals: int
    operands: tuple[Cell, ...]
    rule: str
    target: Cell | None = None

    @property
    def computed(self) -> float:
        """The number recomputed from the printed operands."""
        return float(FUNCTIONS[self.kind]([cell.value for cell in self.operands]))

    @property
    def slack(self) -> float:
        """How far the operands' own rounding, half a last digit each, can move the result."""
        values = [cell.value for cell in self.operands]
        total = 0.0
        for i, cell in enumerate(self.operands):
            moved = [*values[:i], cell.value + 0.5 * 10.0**-cell.decimals, *values[i + 1 :]]
            total += abs(float(FUNCTIONS[self.kind](moved)) - self.computed)
        return total


def derived(paper: Paper) -> Iterator[Check]:
    """Checks from the tables' headers: columns and rows that follow from others."""
    for name, header in paper.headers.items():
        for rule in header.get("derived") or []:
            place = f"{paper.name}/{header['path']}"
            _known(place, rule)
            for cell in paper.inside(name):
                if check := _derive(paper, cell, rule):
                    yield check


def _derive(paper: Paper, cell: Cell, rule: Rule) -> Check | None:
    across = "column" in rule
    named = cell.column if across else cell.row
    wanted = {key: str(value) for key, value in rule.get("where", {}).items()}
    if (
        not cell.sound
        or stem(named) != stem(rule["column" if across else "row"])
        or not agree(wanted, cell.keys)
    ):
        return None
    pairs = [(cell.row, name) if across else (name, cell.column) for name in rule["of"]]
    tables = (str(rule["table"]), None) if "table" in rule else (cell.table, None)
    operands = [_first(paper, pair, cell, tables) for pair in pairs]
    if any(operand is None for operand in operands):
        return None
    found = tuple(operand for operand in operands if operand is not None)
    label = f"{cell.table}: {rule}"
    return Check(
        cell.place, rule["is"], cell.printed, cell.value, cell.decimals, found, label, cell
    )


def _first(
    paper: Paper, pair: tuple[str, str], cell: Cell, tables: Sequence[str | None]
) -> Cell | None:
    """The operand in the table named (or the cell's own), else wherever the paper prints it."""
    for name in tables:
        row, column = paper.names(name or cell.table, *pair)
        for found in paper.same(row, column, cell.keys, name):
            if found != cell:
                return found
    return None


def stated(paper: Paper) -> Iterator[Check]:
    """Checks from ``stated.yaml``: numbers that the running text says about the tables."""
    path = folder(paper.name) / "stated.yaml"
    for entry in yaml.safe_load(path.read_text("utf-8")) if path.exists() else []:
        place = f"{paper.name}/stated.yaml ({entry.get('sentence', '?')})"
        _known(place, entry)
        typed = number(str(entry["printed"]))
        if typed is None:
            refuse("E-FORMAT", f"{place}: '{entry['printed']}' is no number")
        found = [cell for selection in entry["of"] for cell in _select(paper, place, selection)]
        if entry["is"] == "count":
            found = list({(cell.row, *cell.keys.values()): cell for cell in found}.values())
        if entry["is"] in ARITY and len(found) != ARITY[entry["is"]]:
            refuse(
                "E-FORMAT",
                f"{place}: {entry['is']} needs {ARITY[entry['is']]} cells, selected {len(found)}",
            )
        where = f"{entry['where']}: {entry['sentence']}"
        yield Check(
            where,
            entry["is"],
            str(entry["printed"]),
            typed.value,
            typed.decimals,
            tuple(found),
            where,
        )


def _select(paper: Paper, place: str, selection: Rule) -> list[Cell]:
    rest = {
        key: str(value)
        for key, value in selection.items()
        if key not in ("table", "row", "column", "except")
    }
    name = str(selection["table"])
    if name not in paper.headers:
        refuse("E-FORMAT", f"{place}: no table '{name}'; {nearest(name, paper.headers)}")

    def chosen(cell: Cell) -> bool:
        rows, columns, without = (_names(selection, key) for key in ("row", "column", "except"))
        inside = (not rows or stem(cell.row) in rows) and (
            not columns or stem(cell.column) in columns
        )
        return inside and stem(cell.row) not in without and agree(rest, cell.keys)

    cells = [cell for cell in paper.inside(name) if chosen(cell)]
    if not cells:
        refuse("E-FORMAT", f"{place}: no cell matches {selection}")
    return cells


def _names(selection: Rule, key: str) -> set[str]:
    given = selection.get(key, [])
    return {stem(str(name)) for name in (given if isinstance(given, list) else [given])}


def _known(place: str, rule: Rule) -> None:
    kind = str(rule.get("is"))
    if kind not in FUNCTIONS:
        refuse("E-FORMAT", f"{place}: unknown relation '{kind}'; {nearest(kind, FUNCTIONS)}")
    if not isinstance(rule.get("of"), list):
        refuse("E-FORMAT", f"{place}: a relation names its operands as a list under 'of'")
