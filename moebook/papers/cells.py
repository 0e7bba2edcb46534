"""One printed number and its identity: when do two tables of a paper print the same quantity?"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from moebook.papers.printed import table, tables

SYNONYMS = {"avg": "average"}
COUNTED = ("count", "tokens", "parameters")


@dataclass(frozen=True)
class Cell:
    """A printed number with its place; `value` and `decimals` as in `papers.Number`."""

    table: str
    row: str
    column: str
    printed: str
    value: float
    decimals: int
    unit: str
    mark: str
    keys: dict[str, str] = field(default_factory=dict, hash=False)

    @property
    def place(self) -> str:
        """Where the number stands, for the reader."""
        shown = [
            (name, value)
            for name, value in self.keys.items()
            if name in ("series", "model", "base", "expert")
        ]
        keys = [f"{name} {value}" if value.isdigit() else value for name, value in shown]
        return f"{title(self.table)}, " + ", ".join([*keys, self.row, self.column])

    @property
    def sound(self) -> bool:
        """Whether our text of this number is whole."""
        return self.mark != "damaged"


def title(name: str) -> str:
    """Title of a table or figure: "Table 9" for ``"9"``, "Figure 5" for ``"figure_5"``."""
    return name.replace("figure_", "Figure ") if name.startswith("figure_") else f"Table {name}"


def stem(name: str) -> str:
    """A name without case, punctuation and parentheses, × as x: "ARC-e (Acc.)" is "arce"."""
    plain = re.sub(
        r"[^a-z0-9.+%]", "", re.sub(r"\(.*?\)", "", name).lower().replace("×", "x")
    ).strip(".")
    return SYNONYMS.get(plain, plain)


def metric(name: str) -> str:
    """What stands in a name's parentheses: "pass@10" for "HumanEval (Pass@10)", or nothing."""
    found = re.search(r"\((.*?)\)", name)
    return found[1].lower().strip(". ") if found else ""


@dataclass(frozen=True)
class Paper:
    """All cells of one paper, with the header of each of its tables."""

    name: str
    headers: dict[str, dict[str, Any]]
    cells: tuple[Cell, ...]

    @cached_property
    def _index(self) -> dict[frozenset[str], list[Cell]]:
        index: dict[frozenset[str], list[Cell]] = {}
        for cell in self.cells:
            index.setdefault(self.identity(cell), []).append(cell)
        return index

    def identity(self, cell: Cell) -> frozenset[str]:
        """The unordered pair of the names of row and column, so that transposed tables match."""
        return frozenset(map(stem, self.names(cell.table, cell.row, cell.column)))

    def names(self, table: str, *names: str) -> list[str]:
        """Names of one table as the paper's other tables have them (the header's `names`)."""
        aliases = self.headers[table].get("names", {})
        return [aliases.get(name, name) for name in names]

    def inside(self, name: str) -> list[Cell]:
        """The cells of one table."""
        return [cell for cell in self.cells if cell.table == name]

    def same(
        self, row: str, column: str, keys: dict[str, str], table: str | None = None
    ) -> Iterator[Cell]:
        """Sound cells of these names, whose metric and shared keys do not contradict.

        Cells with the names in the same places come before transposed ones.

        Args:
            row: Name of the row (or of the column, in a transposed table).
            column: Name of the column (or of the row).
            keys: Keys of the cell that asks.
            table: One table; all by default.
        """
        asked = {stem(row): metric(row), stem(column): metric(column)}
        twins = self._index.get(frozenset(asked), [])
        for cell in sorted(twins, key=lambda twin: stem(twin.row) != stem(row)):
            said = {
                stem(name): metric(name) for name in self.names(cell.table, cell.row, cell.column)
            }
            clash = any(
                asked[name] and said.get(name) and asked[name] != said[name] for name in asked
            )
            if cell.sound and not clash and agree(keys, cell.keys) and table in (None, cell.table):
                yield cell

    def operands(self, name: str) -> dict[str, frozenset[str]]:
        """Result columns and rows of a table with the operands that they are made of."""
        relations = self.headers[name].get("derived") or []
        made = [rule for rule in relations if rule["is"] not in ("same",)]
        return {
            stem(rule.get("column", rule.get("row"))): frozenset(map(stem, rule["of"]))
            for rule in made
        }


def agree(ours: dict[str, str], theirs: dict[str, str]) -> bool:
    """Whether two sets of keys say the same wherever both say something."""
    return all(
        not theirs.get(name) or not value or theirs[name] == value for name, value in ours.items()
    )


def load(paper: str) -> Paper:
    """Load all tables of a paper as cells."""
    headers: dict[str, dict[str, Any]] = {}
    cells: list[Cell] = []
    for name in tables(paper):
        frame = table(paper, name)
        headers[name] = frame.attrs
        cells.extend(_cells(name, frame.attrs["keys"], frame.to_dict("records")))
    return Paper(paper, headers, tuple(cells))


def _cells(name: str, keys: list[str], records: Iterable[dict[str, Any]]) -> Iterator[Cell]:
    fields = ("row", "column", "printed", "value", "decimals", "unit", "mark")
    for record in records:
        yield Cell(
            name, **{key: record[key] for key in fields}, keys={key: record[key] for key in keys}
        )
