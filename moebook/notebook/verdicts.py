"""What pools of runs say about the papers' claims: pure functions from pools to verdicts.

A claim is measured in each pool that its notebook has. Its verdict is the label of the largest
scale that may decide (`Row.best`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from scipy import stats

from moebook import papers, results
from moebook.errors import refuse
from moebook.notebook import sources
from moebook.papers import Claim
from moebook.results import store
from moebook.results.intervals import CONFIDENCE, interval, p_value
from moebook.results.store import COMMITTED, MARKED, SEEDS, Pool

LABELS = {  # as a reader should meet them: what each is called where there is little room
    "direction fails": "fails",
    "reproduced": "reproduced",
    "direction holds": "holds",
    "excludes the paper's size": "excludes the paper's size",
    "too small to see here": "too small to see",
    "inconclusive": "cannot tell",
    "not testable here": "not testable",
    "not run": "not run",
}


@dataclass(frozen=True)
class Measurement:
    """One claim in one pool."""

    claim: Claim
    pool: Pool = field(repr=False)
    effects: np.ndarray = field(repr=False)  # value minus reference, see `Pool.effects`: [S, I]

    @property
    def seeds(self) -> int:
        """Number of seeds."""
        return len(self.effects)

    @property
    def exact(self) -> bool:
        """Whether it is computed, not sampled: so it has no interval and needs no seeds."""
        return self.claim.exact or self.pool.published

    @property
    def effect(self) -> float:
        """Mean effect, in the claim's unit."""
        return float(self.effects[0].mean() if self.exact else self.effects.mean())

    @cached_property
    def interval(self) -> tuple[float, float] | None:
        """Interval of the effect at 95 %; None for exact claims and single numbers."""
        return None if self.exact else interval(self.effects)

    @property
    def ends(self) -> tuple[float, float]:
        """Lower and upper end of what is known: the interval, else the effect alone."""
        return self.interval or (self.effect, self.effect)

    @property
    def side(self) -> int:
        """Where the interval lies: 1 as claimed, -1 on the other side, 0 across the border."""
        return side(self.claim, *self.ends)

    @property
    def label(self) -> str:
        """Its verdict, one of `LABELS`.

        "reproduced" asks for all: a run at the paper's scale, the claimed side, and an effect
        within the tolerance of the paper's number. An interval across the border "excludes the
        paper's size" if that lies outside it and anything differed; if it does not, and is smaller
        than what the pool could see, it is "too small to see here". What is computed must agree on
        all tasks.
        """
        claim, claimed = self.claim, self.claim.claimed
        if claim.untestable and self.pool.tier != "paper":
            return "not testable here"
        if not self.decides or (self.exact and len({*self.by_task.values(), self.side}) > 1):
            return "inconclusive"
        near = claimed is not None and abs(self.effect - claimed) <= (claim.tolerance or 0.0)
        if self.side:
            ran = self.pool.tier == "paper" and not self.pool.published
            wins = "reproduced" if near and ran else "direction holds"
            return wins if self.side > 0 else "direction fails"
        if claimed is None or not self.smallest or claim.direction not in ("greater", "less"):
            return "inconclusive"
        if not self.ends[0] <= claimed <= self.ends[1]:
            return "excludes the paper's size"
        return "too small to see here" if abs(claimed) < self.smallest else "inconclusive"

    @cached_property
    def parts(self) -> dict[str, np.ndarray]:
        """Effects by task or domain; empty where not all of its seeds recorded them alone."""
        parts = self.pool.parts(self.claim.value, self.claim.reference)
        return parts if {*map(len, parts.values())} <= {self.seeds} else {}

    @property
    def by_task(self) -> dict[str, int]:
        """Side of the mean effect by task, as `side`."""
        means = {task: float(effects.mean()) for task, effects in self.parts.items()}
        return {task: side(self.claim, mean, mean) for task, mean in means.items()}

    def stands(self, without: str = "") -> bool:
        """Whether the mean over tasks that weigh alike, but one, lies where the verdict does."""
        ends = interval(store.mean(part for task, part in self.parts.items() if task != without))
        return side(self.claim, *(ends or (0.0, 0.0))) == self.side

    @property
    def decides(self) -> bool:
        """Whether it may decide: exact, or a study or better (with `SEEDS` seeds to compare)."""
        compared = self.claim.kind == "direction" or self.claim.reference is not None
        enough = self.seeds >= SEEDS or not compared
        return self.exact or (self.pool.tier in COMMITTED and enough)

    @property
    def width(self) -> float:
        """Half the interval's length; infinite where there is none, or where nothing differed."""
        return self.smallest or math.inf

    @property
    def sees(self) -> bool:
        """Whether it saw anything, or would have seen the paper's effect."""
        undecided = not self.exact and self.label in ("too small to see here", "inconclusive")
        return not undecided or abs(self.claim.claimed or 0.0) >= self.width

    @property
    def smallest(self) -> float | None:
        """The smallest effect that this pool could have seen: half the interval's length."""
        return (self.interval[1] - self.interval[0]) / 2 if self.interval else None

    @property
    def strength(self) -> float:
        """The mean effect over the smallest that could have been seen: above 1 it is decided."""
        return abs(self.effect) / self.smallest if self.smallest else 0.0


def measure(claim: Claim, pool: Pool) -> Measurement | None:
    """Find a claim's effect in a pool; None without evidence, and another unit is refused.

    No evidence are runs at another tier, or under other parameters, arms never run together, and
    arms that differ on no test item: neither can do the task.
    """
    if pool.tier not in claim.scales or not claim.under.items() <= pool.runs[0].settings.items():
        return None
    for name in (claim.value, claim.reference):
        for value in pool.values(name).values() if isinstance(name, str) else ():
            if value.unit != claim.unit:
                refuse("E-VERDICT", f"{name} is recorded in {value.unit}; {claim.id}: {claim.unit}")
    effects = pool.effects(claim.value, claim.reference)
    apart = claim.direction == "equal" or effects.shape[1] == 1 or effects.any()
    return Measurement(claim, pool, effects) if len(effects) and apart else None


def side(claim: Claim, low: float, high: float) -> int:
    """Where an interval lies, as `Measurement.side` says."""
    if claim.direction == "greater":
        return int(low > 0) - int(high < 0)
    if claim.direction == "less":
        return int(high < 0) - int(low > 0)
    target, tolerance = claim.claimed or 0.0, claim.tolerance or 0.0
    if target - tolerance <= low and high <= target + tolerance:
        return 1
    return -int(high < target - tolerance or low > target + tolerance)


@dataclass(frozen=True)
class Row:
    """One line of the ledger: a claim and its measurements by pool, the smallest scale first."""

    claim: Claim
    measurements: tuple[Measurement, ...]
    survives: bool = False  # Benjamini and Hochberg's correction over all, with `MARKED` seeds

    @property
    def best(self) -> Measurement | None:
        """The measurement that the verdict rests on: of the largest scale that `sees`.

        Of several at a scale it is the one with most seeds, of as many the one that shows least: to
        take the clearest would favour luck. A scale that does not see gives way only to a smaller
        one with a narrower interval.
        """
        order = sorted(self.measurements, key=lambda m: (m.decides, m.seeds, -m.strength))
        scales, chain = {m.pool.rank: m for m in order}.values(), list[Measurement]()
        for one in sorted(scales, key=lambda m: (m.decides, m.pool.rank), reverse=True):
            if not chain or (one.decides and one.width < chain[-1].width):
                chain.append(one)
        return next((one for one in chain if one.sees), chain[-1] if chain else None)

    @property
    def label(self) -> str:
        """The verdict, one of `LABELS`."""
        waiting = "not testable here" if self.claim.untestable else "not run"
        return self.best.label if self.best else waiting

    @property
    def committed(self) -> Row:
        """The same without the runs that this build's pages show."""
        kept = tuple(one for one in self.measurements if one.pool.tier in COMMITTED)
        return replace(self, measurements=kept)


def row(claim: Claim, pools: Iterable[Pool], old: sources.Replaced | None = None) -> Row:
    """Measure a claim in pools, without those that others of them replace (``old``)."""
    found = [m for p in pools if (m := measure(claim, p))]
    kept = sources.standing([m.pool for m in found], old or {}, claim.value, claim.reference)
    found.sort(key=lambda measured: measured.pool.rank)
    return Row(claim, tuple(m for m in found if m.pool in kept))


def ledger(folder: Path | None = None, paper: str | None = None, *, live: bool = True) -> list[Row]:
    """Judge the claims of a paper or of all, from a project's runs; if ``live``, its pages' too."""
    claims, pools = papers.claims(), dict[str, tuple[Iterable[Pool], sources.Replaced]]()
    for name in {claim.run for claim in claims}:
        every = store.pools(name, folder, shown=live)
        pools[name] = every.values(), sources.replaced(folder or results.root(), name, every)
    rows = [row(claim, *pools[claim.run]) for claim in claims]
    sure = chance(rows).hochberg
    wanted = [one for one in rows if paper in (None, one.claim.paper)]
    return [replace(one, survives=one.best is not None and one.claim.id in sure
                    and one.best.seeds >= MARKED) for one in wanted]  # fmt: skip


def repeated(pool: Pool, other: Collection[int]) -> list[tuple[Row, Row]]:
    """Judge each sampled claim twice: by a pool without its ``other`` seeds, and by these alone."""
    halves = [[run for run in pool.runs if (run.seed in other) is late] for late in (False, True)]
    parts = [[replace(pool, runs=tuple(half))] if half else [] for half in halves]
    claims = [claim for claim in papers.claims() if claim.run == pool.notebook and not claim.exact]
    pairs = [(row(claim, parts[0]), row(claim, parts[1])) for claim in claims]
    return [pair for pair in pairs if all(one.best and one.best.decides for one in pair)]


@dataclass(frozen=True)
class Chance:
    """What chance alone would do to the verdicts of a ledger; claims by their ids."""

    tested: tuple[str, ...]  # claims of a direction that seeds of runs that decide have tested
    decided: tuple[str, ...]  # those with a verdict (holds or fails)
    hochberg: tuple[str, ...]  # survive Benjamini and Hochberg's: 5 % of them false on average


def chance(rows: Sequence[Row]) -> Chance:
    """Ask how many verdicts chance would give, and which survive a correction for their number."""
    p = {
        one.claim.id: p_value(one.best.effects)
        for one in rows
        if one.best and one.best.decides and one.best.interval and not one.claim.untestable
        and one.claim.direction in ("greater", "less") and one.best.effects.size > 1
    }  # fmt: skip
    adjusted = stats.false_discovery_control(list(p.values())) if p else []
    return Chance(
        tested=tuple(p),
        decided=tuple(name for name in p if p[name] < 1 - CONFIDENCE),
        hochberg=tuple(name for name, q in zip(p, adjusted, strict=True) if q <= 1 - CONFIDENCE),
    )


def seeds(number: int) -> str:
    """Write a number of seeds."""
    return f"{number} seed" + "s" * (number != 1)


def span(claim: Claim, low: float, high: float) -> str:
    """Format the ends of an interval, the unit once."""
    return f"{amount(claim, low).partition(' ')[0]} to {amount(claim, high)}"


def amount(claim: Claim, effect: float) -> str:
    """Format a claim's effect for a reader."""
    return quantity(effect, claim.unit, compared=claim.reference is not None)


def quantity(number: float, unit: str, *, compared: bool) -> str:
    """Format a number of a unit: shares as points or per cent, counts with commas."""
    sign = "+" * compared
    if unit == "share":
        return f"{100 * number:{sign}.1f} {'points' if compared else '%'}"
    if unit == "percent_points":
        return f"{number:+.1f} points"
    if unit == "count":
        return f"{number:{sign},.0f}"
    return f"{number:{sign}.3g}" + f" {unit}" * (unit not in ("ratio", "number", "correlation"))
