"""The same quantity printed in two tables, and the same numbers printed under two names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import combinations

from moebook.papers.cells import COUNTED, Cell, Paper, agree, stem
from moebook.papers.relations import Check

Row = dict[str, Cell]
Rows = dict[tuple[str, str], Row]


def repeated(paper: Paper) -> Iterator[Check]:
    """Each quantity that a later table prints again, checked against its first print."""
    order = list(paper.headers)
    for name in order[1:]:
        declared = _declared(paper, name)
        for cell in paper.inside(name):
            if not cell.sound or stem(cell.row) in declared or stem(cell.column) in declared:
                continue
            if first := _earlier(paper, cell, order[: order.index(name)]):
                rule = f"{first.table} and {name}: the same quantity"
                yield Check(
                    cell.place,
                    "same",
                    cell.printed,
                    cell.value,
                    cell.decimals,
                    (first,),
                    rule,
                    cell,
                )


def _earlier(paper: Paper, cell: Cell, tables: list[str]) -> Cell | None:
    row, column = paper.names(cell.table, cell.row, cell.column)
    for name in tables:
        found = [
            twin
            for twin in paper.same(row, column, cell.keys, name)
            if _comparable(paper, cell, twin)
        ]
        if len(found) == 1:
            return found[0]
    return None


def _comparable(paper: Paper, cell: Cell, twin: Cell) -> bool:
    settings = {paper.headers[it.table].get("setting") for it in (cell, twin)} - {None}
    if cell.unit != twin.unit or len(settings) > 1:
        return False
    made = [_made(paper, it) for it in (cell, twin)]
    return None in made or made[0] == made[1]


def _made(paper: Paper, cell: Cell) -> frozenset[str] | None:
    operands = paper.operands(cell.table)
    return operands.get(stem(cell.column), operands.get(stem(cell.row)))


def _declared(paper: Paper, name: str) -> set[str]:
    """Rows and columns that the table's own header already sets equal to another table's."""
    rules = [rule for rule in paper.headers[name].get("derived") or [] if rule["is"] == "same"]
    return {stem(rule.get("row", rule.get("column"))) for rule in rules}


def renamed(paper: Paper) -> Iterator[tuple[Cell, Cell, int]]:
    """Rows of two tables that agree in every number they share but carry rival names.

    Rival names share a part and differ in a part on both sides ("2×1.8B_TRSU", "4×1.8B_CRSU"): they
    say that these are two models of one family. A row called "Ours" elsewhere is only another name.

    Yields:
        The first shared cell of either row, and how many numbers they share (at least two).
    """
    for one, other in combinations(paper.headers, 2):
        declared = _declared(paper, other)
        for (row, _), cells in _rows(paper, one).items():
            for (name, _), twins in _rows(paper, other).items():
                if (
                    name not in declared
                    and _rivals(row, name)
                    and (shared := _shared(cells, twins))
                ):
                    yield cells[shared[0]], twins[shared[0]], len(shared)


def _rows(paper: Paper, table: str) -> Rows:
    made = paper.operands(table)
    rows: Rows = {}
    for cell in paper.inside(table):
        if cell.sound and cell.unit not in COUNTED and stem(cell.column) not in made:
            rows.setdefault((stem(cell.row), str(cell.keys)), {})[stem(cell.column)] = cell
    return rows


def _shared(cells: Row, twins: Row) -> list[str]:
    names = [name for name in cells if name in twins and agree(cells[name].keys, twins[name].keys)]
    equal = len(names) > 1 and all(cells[name].value == twins[name].value for name in names)
    return names if equal else []


def _rivals(one: str, other: str) -> bool:
    ours, theirs = (set(re.findall(r"[a-z]+|\d+(?:\.\d+)?", name)) for name in (one, other))
    return bool(ours & theirs and ours - theirs and theirs - ours)
