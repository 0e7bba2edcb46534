"""One measured value, and one curve: what a run records."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

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
"""Significant digits of the items and of the points of curves: whole, they are most of a run."""

_NAME = re.compile(r"[A-Za-z0-9][\w.=+-]*(/[A-Za-z0-9][\w.=+-]*)*", re.ASCII)


@dataclass(frozen=True)
class Value:
    """A number that a notebook measured; it checks itself.

    Args:
        name: Slash path such as ``pesc/sparse/accuracy``.
        value: A finite number inside its unit's bounds.
        unit: One of `UNITS`.
        items: Per-item numbers (one per test row) whose mean is ``value``, for intervals. They
            may have been `rounded`: their mean is off by at most 5e-4 of their mean size then, and
            as much is allowed.

    Raises:
        Refusal: ``E-VALUE`` when name, number, unit or items break these rules.
    """

    name: str
    value: float
    unit: str
    items: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        _check_name(self.name, self.unit)
        low, high = UNITS[self.unit]
        if not _is_number(self.value) or not low <= self.value <= high:
            rule = f"expected a finite number in [{low:g}, {high:g}] {self.unit}"
            refuse("E-VALUE", f"{self.name} = {self.value!r}: {rule}")
        if self.items is not None:
            self._check_items(self.items)

    def _check_items(self, items: tuple[float, ...]) -> None:
        if not items or not all(map(_is_number, items)):
            refuse("E-VALUE", f"{self.name}: items must be finite numbers, at least one")
        mean = math.fsum(items) / len(items)
        size = math.fsum(map(abs, items)) / len(items)
        if abs(mean - self.value) > 10 ** (1 - DIGITS) / 2 * size + 1e-8:
            refuse("E-VALUE", f"{self.name} = {self.value!r} is not the mean {mean!r} of its items")


@dataclass(frozen=True)
class Curve:
    """A line that a figure needs: a loss over training steps, a share over ranks.

    Args:
        name: Slash path such as ``pesc/sparse/loss``.
        unit: One of `UNITS`, of the heights.
        x: Positions, such as optimizer steps.
        y: Heights, as many.

    Raises:
        Refusal: ``E-VALUE`` for a malformed name, an unknown unit, or unequal or empty sides.
    """

    name: str
    unit: str
    x: tuple[float, ...]
    y: tuple[float, ...]

    def __post_init__(self) -> None:
        _check_name(self.name, self.unit)
        if not self.y or len(self.x) != len(self.y) or not all(map(_is_number, self.x + self.y)):
            sizes = f"{len(self.x)} positions, {len(self.y)} heights"
            refuse("E-VALUE", f"curve {self.name}: {sizes}; expected as many finite numbers, > 0")


def rounded(numbers: Iterable[float]) -> tuple[float, ...]:
    """Round to `DIGITS` significant digits; whole numbers stay as they are."""
    every = map(float, numbers)
    return tuple(x if x.is_integer() else float(f"{x:.{DIGITS}g}") for x in every)


def _check_name(name: object, unit: str) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        refuse("E-VALUE", f"value name {name!r}: expected a path like pesc/sparse/accuracy")
    if unit not in UNITS:
        refuse("E-VALUE", f"{name}: unknown unit {unit!r}; {nearest(str(unit), UNITS)}")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
