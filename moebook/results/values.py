"""One measured value, and the record of all values that one executed notebook left."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moebook.errors import nearest, refuse

TIERS = ("smoke", "cpu", "study", "gpu", "paper")

UNITS: dict[str, tuple[float, float]] = {
    "share": (0.0, 1.0),
    "percent_points": (-100.0, 100.0),
    "nats": (-math.inf, math.inf),
    "seconds": (0.0, math.inf),
    "bytes": (0.0, math.inf),
    "count": (0.0, math.inf),
    "ratio": (-math.inf, math.inf),
    "correlation": (-1.0, 1.0),
    "number": (-math.inf, math.inf),
}
"""Unit -> (lowest, highest) value. Differences of shares are percent_points, of nats nats;
"number" is for what has no unit (a gradient's norm, the scale of logits)."""

DIGITS = 4
"""Significant digits of the items that a notebook records: whole, they are most of a record."""

_NAME = re.compile(r"[A-Za-z0-9][\w.=+-]*(/[A-Za-z0-9][\w.=+-]*)*", re.ASCII)


@dataclass(frozen=True)
class Value:
    """A number that a notebook measured; it checks itself.

    Args:
        name: Slash path such as ``pesc/sparse/accuracy``.
        value: A finite number inside its unit's bounds.
        unit: One of `UNITS`.
        seed: The seed that gave it, where a notebook runs several.
        items: Per-item numbers (one per test row) whose mean is ``value``, for intervals. They
            may have been `rounded`: their mean is off by at most 5e-4 of their mean size then, and
            as much is allowed.

    Raises:
        Refusal: ``E-VALUE`` when name, number, unit, seed or items break these rules.
    """

    name: str
    value: float
    unit: str
    seed: int | None = None
    items: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            refuse(
                "E-VALUE", f"value name {self.name!r}: expected a path like pesc/sparse/accuracy"
            )
        if self.unit not in UNITS:
            refuse(
                "E-VALUE", f"{self.name}: unknown unit {self.unit!r}; {nearest(self.unit, UNITS)}"
            )
        low, high = UNITS[self.unit]
        if not _is_number(self.value) or not low <= self.value <= high:
            rule = f"expected a finite number in [{low:g}, {high:g}] {self.unit}"
            refuse("E-VALUE", f"{self.name} = {self.value!r}: {rule}")
        if self.seed is not None and (type(self.seed) is not int or self.seed < 0):
            refuse("E-VALUE", f"{self.name}: seed {self.seed!r} is not a whole number from 0")
        if self.items is not None:
            self._check_items(self.items)

    def _check_items(self, items: tuple[float, ...]) -> None:
        if not items or not all(map(_is_number, items)):
            refuse("E-VALUE", f"{self.name}: items must be finite numbers, at least one")
        mean = math.fsum(items) / len(items)
        size = math.fsum(map(abs, items)) / len(items)
        if abs(mean - self.value) > 10 ** (1 - DIGITS) / 2 * size + 1e-8:
            refuse("E-VALUE", f"{self.name} = {self.value!r} is not the mean {mean!r} of its items")

    @property
    def key(self) -> str:
        """The name, with ``@seed`` where there is one: unique inside a record."""
        return self.name if self.seed is None else f"{self.name}@{self.seed}"

    def to_json(self) -> dict[str, Any]:
        """Return the value as plain JSON; absent fields are left out."""
        data: dict[str, Any] = {"name": self.name, "value": self.value, "unit": self.unit}
        if self.seed is not None:
            data["seed"] = self.seed
        if self.items is not None:
            data["items"] = [int(item) if item == int(item) else item for item in self.items]
        return data

    @classmethod
    def from_json(cls, data: object, where: str) -> Value:
        """Read what `to_json` wrote; ``where`` names the file or cell in a refusal."""
        fields = {"name", "value", "unit", "seed", "items"}
        if not isinstance(data, Mapping) or not {"name", "value", "unit"} <= set(data) <= fields:
            refuse("E-VALUE", f"{where}: expected name, value, unit and perhaps seed, items")
        items = data.get("items")
        if items is not None and not isinstance(items, list):
            refuse("E-VALUE", f"{where}: items of {data['name']} must be a list")
        return cls(**{**data, "items": None if items is None else tuple(items)})


@dataclass(frozen=True)
class Record:
    """All values of one executed notebook, at one scale, with the manifest of the run.

    Args:
        notebook: Short name, such as ``pesc``.
        scale: The tier it ran at, one of `TIERS`; it belongs to the record as a whole.
        values: In the order of the notebook; no `Value.key` twice.
        manifest: What ran, where and when (moebook.notebook.manifest); empty when unknown.
    """

    notebook: str
    scale: str
    values: tuple[Value, ...]
    manifest: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.scale not in TIERS:
            refuse("E-TIER", f"unknown tier {self.scale!r}: {nearest(self.scale, TIERS)}")
        keys = [value.key for value in self.values]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        if twice:
            refuse("E-VALUE", f"{self.notebook} records {twice[0]} twice; give each its own name")

    def to_text(self) -> str:
        """Return the record without its manifest as JSON, one value a line, for readable diffs."""
        head = f'{{\n "notebook": {json.dumps(self.notebook)},\n "scale": {json.dumps(self.scale)},'
        lines = ",\n".join("  " + json.dumps(value.to_json()) for value in self.values)
        return f'{head}\n "values": [\n{lines}\n ]\n}}\n'

    @classmethod
    def from_json(cls, data: object, manifest: Mapping[str, Any], where: str) -> Record:
        """Read what `to_text` wrote; ``where`` names the file in a refusal."""
        if not isinstance(data, Mapping) or set(data) != {"notebook", "scale", "values"}:
            refuse("E-RECORD", f"{where}: expected notebook, scale and values")
        if not isinstance(data["values"], list):
            refuse("E-RECORD", f"{where}: values must be a list")
        values = tuple(Value.from_json(value, where) for value in data["values"])
        return cls(data["notebook"], data["scale"], values, manifest)


def rounded(item: float) -> float:
    """Round an item to `DIGITS` significant digits; whole numbers stay as they are."""
    number = float(item)
    return number if number.is_integer() else float(f"{number:.{DIGITS}g}")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
