"""The effect that a claim has in one record: by seed and test item, with an interval."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from moebook.errors import refuse
from moebook.notebook.intervals import interval
from moebook.papers import Claim
from moebook.results import COMMITTED, Record, Value

SEEDS = 3
"""How many seeds a comparison needs to be decided."""

SO_FAR = {1: "as claimed so far", 0: "no difference so far", -1: "against the claim so far"}
"""What the effect itself says, whatever its interval, by its side."""

Seeded = Mapping[int | None, Value]


@dataclass(frozen=True)
class Measurement:
    """One claim in one record.

    Attributes:
        claim: The claim.
        record: Where the values come from.
        effects: Value minus reference by seed and test item, [S][I], in the claim's unit; I is 1
            where the values carry no items.
    """

    claim: Claim
    record: Record = field(repr=False)
    effects: tuple[tuple[float, ...], ...]

    @property
    def scale(self) -> str:
        """Tier of the record."""
        return self.record.scale

    @property
    def seeds(self) -> int:
        """Number of seeds."""
        return len(self.effects)

    @property
    def effect(self) -> float:
        """Mean effect, in the claim's unit."""
        return float(np.mean(self.effects))

    @property
    def size(self) -> float | None:
        """Effect size: mean effect over its standard deviation between seeds, None if undefined."""
        means = np.mean(self.effects, axis=1)
        spread = float(np.std(means, ddof=1)) if self.seeds > 1 else 0.0
        return self.effect / spread if spread > 0 else None

    @cached_property
    def interval(self) -> tuple[float, float] | None:
        """Interval of the effect at 95 %; None for exact claims and single numbers."""
        return None if self.claim.exact else interval(np.array(self.effects))

    @property
    def decides(self) -> bool:
        """Whether it may decide: exact, or a study or better (with `SEEDS` seeds to compare)."""
        compared = self.claim.kind == "direction" or self.claim.reference is not None
        enough = self.seeds >= SEEDS or not compared
        return self.claim.exact or (self.scale in COMMITTED and enough)


def measure(claim: Claim, record: Record) -> Measurement | None:
    """Find a claim's effect in a record; None when the record does not hold what it needs.

    A run at a scale that the claim does not name, by another model say, is no evidence for it.

    Raises:
        Refusal: E-VERDICT for a value in another unit than the claim's, and for arms that have no
            seed in common.
    """
    if record.scale not in claim.scales:
        return None
    values, other = _values(claim, record, claim.value), claim.reference
    base = _values(claim, record, other) if values and isinstance(other, str) else {}
    if not values or (isinstance(other, str) and not base):
        return None
    if not base:
        rows = [_items(value, float(other or 0)) for value in values.values()]
    else:
        rows = [_minus(*pair) for pair in _pairs(claim, values, base)]
    if len({len(row) for row in rows}) > 1:
        rows = [(float(np.mean(row)),) for row in rows]
    return Measurement(claim, record, tuple(rows))


def _values(claim: Claim, record: Record, name: str) -> Seeded:
    found = {value.seed: value for value in record.values if value.name == name}
    for value in found.values():
        if value.unit != claim.unit:
            refuse("E-VERDICT", f"{name} is recorded in {value.unit}; {claim.id}: {claim.unit}")
    return found


def _pairs(claim: Claim, values: Seeded, base: Seeded) -> list[tuple[Value, Value]]:
    """Pair two arms by seed; an arm that has one value without a seed serves every seed."""
    if set(base) == {None}:
        return [(value, base[None]) for value in values.values()]
    if set(values) == {None}:
        return [(values[None], other) for other in base.values()]
    common = [seed for seed in values if seed in base]
    if not common:
        refuse("E-VERDICT", f"{claim.value} and {claim.reference} have no seed in common")
    return [(values[seed], base[seed]) for seed in common]


def _minus(value: Value, other: Value) -> tuple[float, ...]:
    """Subtract item by item where both arms carry the same items, else the means."""
    if value.items and other.items and len(value.items) == len(other.items):
        return tuple(_gap(a, b) for a, b in zip(value.items, other.items, strict=True))
    return (_gap(value.value, other.value),)


def _items(value: Value, reference: float) -> tuple[float, ...]:
    return tuple(_gap(item, reference) for item in value.items or (value.value,))


def _gap(number: float, other: float) -> float:
    """Subtract; numbers that differ by rounding alone are equal."""
    return 0.0 if math.isclose(number, other, rel_tol=1e-12, abs_tol=1e-12) else number - other


def side(claim: Claim, low: float, high: float) -> int:
    """Where an interval lies: 1 where the claim says, -1 on the other side, 0 across the border."""
    if claim.direction == "greater":
        return int(low > 0) - int(high < 0)
    if claim.direction == "less":
        return int(high < 0) - int(low > 0)
    target, tolerance = claim.claimed or 0.0, claim.tolerance or 0.0
    if target - tolerance <= low and high <= target + tolerance:
        return 1
    return -int(high < target - tolerance or low > target + tolerance)


def describe(measurement: Measurement) -> str:
    """Say a measurement in words: scale, seeds, effect, interval and, with several seeds, size."""
    claim = measurement.claim
    several = f"{measurement.seeds} seed" + "s" * (measurement.seeds > 1)
    seeds = "one value" if claim.exact else several
    parts = [f"{measurement.scale}, {seeds}: {amount(claim, measurement.effect)}"]
    if measurement.interval:
        low, high = (amount(claim, end) for end in measurement.interval)
        parts.append(f"95 % from {low} to {high}")
    if measurement.size is not None and not claim.exact:
        parts.append(f"effect size {measurement.size:.1f}")
    if not measurement.decides:
        parts.append(SO_FAR[side(claim, measurement.effect, measurement.effect)])
    return ", ".join(parts)


def amount(claim: Claim, effect: float) -> str:
    """Format an effect for a reader: shares as points or per cent, counts with commas."""
    compared = claim.reference is not None
    if claim.unit == "share":
        return f"{100 * effect:+.1f} points" if compared else f"{100 * effect:.1f} %"
    if claim.unit == "percent_points":
        return f"{effect:+.1f} points"
    if claim.unit == "count":
        return f"{effect:+,.0f}" if compared else f"{effect:,.0f}"
    unit = "" if claim.unit in ("ratio", "number", "correlation") else f" {claim.unit}"
    return (f"{effect:+.3g}" if compared else f"{effect:.3g}") + unit
