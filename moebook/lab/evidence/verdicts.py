"""Verdicts: what pools of runs say about the papers' claims, one verdict a scale.

Many pools may measure a claim. At each scale one of them decides it: the one whose protocol names
the claim in its head (``Decides:``), which is written before the pool's first run. All others are
exploratory: they stand beside the verdict and never make one. There is no verdict over scales.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from moebook.errors import refuse
from moebook.intervals import CONFIDENCE, interval, p_value, visible
from moebook.lab import papers, records
from moebook.lab.papers import Claim
from moebook.lab.records import store
from moebook.lab.records.store import COMMITTED, LIVE, MARKED, SEEDS, Pool
from moebook.lab.run import sources

LABELS = {  # as a reader should meet them: what each is called where there is little room
    "direction fails": "fails",
    "reproduced": "reproduced",
    "direction holds": "holds",
    "excludes the paper's size": "excludes the paper's size",
    "too small to see here": "too small to see",
    "inconclusive": "cannot tell",
    "exploratory": "exploratory only",
    "not testable here": "not testable",
    "not run": "not run",
    "withdrawn": "withdrawn",
}
OPEN = ("too small to see here", "inconclusive")
"""Labels of measurements that decided nothing, not even the paper's size."""


@dataclass(frozen=True)
class Measurement:
    """One claim in one pool."""

    claim: Claim
    pool: Pool = field(repr=False)
    # Value minus reference, see `Pool.effects`: [S, I].
    effects: np.ndarray = field(repr=False)

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
        return float(self.effects.mean())

    @cached_property
    def interval(self) -> tuple[float, float] | None:
        """Interval of the effect at 95 %; None for exact claims and single numbers."""
        return None if self.exact else interval(self.effects)

    @property
    def bounded(self) -> tuple[float, float] | None:
        """The interval cut where the unit ends: a share lies in 0 to 1."""
        if self.interval is None:
            return None
        unit = self.claim.unit
        reference = self.claim.reference
        if isinstance(reference, int | float):
            # The effect is the distance from a bound: the unit ends as far from it.
            low, high = self.interval
            value = (low + reference, high + reference)
            low, high = records.within(unit, value)
            return low - reference, high - reference
        compared = reference is not None
        return records.within(unit, self.interval, is_difference=compared)

    @property
    def by_seed(self) -> dict[int, float]:
        """Mean effect of each seed; their mean is the effect."""
        seeds = sorted(self.pool.having(*self.claim.values))
        means = map(float, self.effects.mean(axis=1))
        return dict(zip(seeds, means, strict=True))

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
        """What it would say if it decided, one of `LABELS`.

        "reproduced" asks for all: a run at the paper's scale, the claimed side, and an effect
        within the tolerance of the paper's number. An interval across the border "excludes the
        paper's size" if that lies outside it and anything differed; if it does not, and is smaller
        than what the pool could see, it is "too small to see here". What is computed must agree in
        all seeds and on all tasks.
        """
        if self.claim.untestable and self.pool.tier != "paper":
            return "not testable here"
        if not self.presupposed:
            return "not testable here"
        if not self.enough or self._disagrees:
            return "inconclusive"
        if self.side < 0:
            return "direction fails"
        if self.side > 0:
            return "reproduced" if self._reproduces else "direction holds"
        return self._undecided

    @cached_property
    def presupposed(self) -> bool:
        """Whether the pool shows what the claim presupposes: one value above another."""
        if self.claim.presupposes is None:
            return True
        above, below = self.claim.presupposes
        ends = interval(self.pool.effects(above, below))
        return ends is not None and ends[0] > 0

    @property
    def _disagrees(self) -> bool:
        """Whether what is computed lies on one side in some seeds or tasks, not in others."""
        if not self.exact:
            return False
        means = map(float, self.effects.mean(axis=1))
        by_seed = {side(self.claim, mean, mean) for mean in means}
        return len({*by_seed, *self.by_task.values()}) > 1

    @property
    def _reproduces(self) -> bool:
        """Whether it ran at the paper's scale and lies within the tolerance of its number."""
        claimed = self.claim.claimed
        tolerance = self.claim.tolerance or 0.0
        near = claimed is not None and abs(self.effect - claimed) <= tolerance
        return near and self.pool.tier == "paper" and not self.pool.published

    @property
    def _undecided(self) -> str:
        """The label of an interval that lies across the border."""
        claimed = self.claim.claimed
        compares = self.claim.direction in ("greater", "less")
        if claimed is None or not self.smallest or not compares:
            return "inconclusive"
        low, high = self.ends
        if not low <= claimed <= high:
            return "excludes the paper's size"
        return (
            "too small to see here" if abs(claimed) < self.smallest else "inconclusive"
        )

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
        kept = (part for task, part in self.parts.items() if task != without)
        ends = interval(store.mean(kept))
        return side(self.claim, *(ends or (0.0, 0.0))) == self.side

    @property
    def enough(self) -> bool:
        """Whether there is enough to decide: exact, or a study with `SEEDS` seeds to compare."""
        if self.exact:
            return True
        compared = self.claim.kind == "direction" or self.claim.reference is not None
        return self.pool.tier in COMMITTED and (self.seeds >= SEEDS or not compared)

    @property
    def smallest(self) -> float | None:
        """The smallest effect that this pool could have seen: half the interval's length."""
        return (self.interval[1] - self.interval[0]) / 2 if self.interval else None

    @cached_property
    def visible(self) -> float | None:
        """The true effect that four in five studies like it would decide; None where it cannot."""
        if self.interval is None or self.seeds < SEEDS or not self.smallest:
            return None
        return visible(self.effects)


def measure(claim: Claim, pool: Pool) -> Measurement | None:
    """Find a claim's effect in a pool; None without evidence, and another unit is refused.

    No evidence are runs at another tier, or under other parameters, arms never run together, arms
    of other sizes than the claim's, and arms that differ on no test item, of which most often
    neither can do the task.
    """
    if (
        pool.tier not in claim.scales
        or not claim.under.items() <= pool.runs[0].settings.items()
    ):
        return None
    for name in claim.values:
        for value in pool.values(name).values():
            if value.unit != claim.unit:
                refuse(
                    "E-VERDICT",
                    f"{name} is recorded in {value.unit}; {claim.id}: {claim.unit}",
                )
    if claim.times and not _sized(claim, pool):
        return None
    effects = pool.effects(claim.value, claim.reference)
    by_item = (
        effects.shape[1] > 1
    )  # else what is alike may be a number that was counted
    if claim.direction != "equal" and by_item and not effects.any():
        return None
    return Measurement(claim, pool, effects) if len(effects) else None


def _sized(claim: Claim, pool: Pool) -> bool:
    """Whether one arm trained as many times the weights of the other as the claim is about."""
    one, other = map(pool.average, claim.sizes)
    low, high = claim.times or (0.0, 0.0)
    return bool(one and other and low <= one / other <= high)


def side(claim: Claim, low: float, high: float) -> int:
    """Where an interval lies, as `Measurement.side` says."""
    if claim.direction == "greater":
        return int(low > 0) - int(high < 0)
    if claim.direction == "less":
        return int(high < 0) - int(low > 0)
    target = claim.claimed or 0.0
    tolerance = claim.tolerance or 0.0
    if target - tolerance <= low and high <= target + tolerance:
        return 1
    return -int(high < target - tolerance or low > target + tolerance)


def _precedes(manifest: Mapping[str, Any], claim: Claim) -> bool:
    """Whether a run began before a claim said what it says.

    Runs name the claims of their day. Older ones do not: what stands in their place is the time
    since which the claim says it, and when the run began, as its date is that of its end.
    """
    if "claims" in manifest:
        return claim.id not in manifest["claims"]
    if "date" not in manifest or claim.since is None:
        return False
    ended = datetime.fromisoformat(manifest["date"])
    began = ended - timedelta(seconds=manifest.get("seconds", 0))
    return began < datetime.fromisoformat(claim.since)


@dataclass(frozen=True)
class Verdict:
    """What is known of a claim at one scale: the measurement that decides it, and the others."""

    claim: Claim
    scale: str
    deciding: Measurement | None
    exploratory: tuple[Measurement, ...] = ()
    # Benjamini and Hochberg's correction over all, with `MARKED` seeds.
    survives: bool = False

    @property
    def shown(self) -> Measurement:
        """The measurement that a reader sees first: the deciding one, else that of most seeds."""
        return self.deciding or max(self.exploratory, key=lambda one: one.seeds)

    @property
    def spoken(self) -> str:
        """The scale as readers meet it: by all weights of the base that is shown."""
        base = str(self.shown.pool.runs[0].settings.get("base"))
        return store.SPOKEN.get(base, self.scale)

    @property
    def late(self) -> bool:
        """Whether the claim came to say what it says after the first run that decides it."""
        measured = self.deciding
        if measured is None:
            return False
        seeds = measured.pool.having(*self.claim.values)
        runs = [run.manifest for run in measured.pool.runs if run.seed in seeds]
        return any(_precedes(run, self.claim) for run in runs)

    @property
    def label(self) -> str:
        """The verdict, one of `LABELS`."""
        if self.deciding is None:
            return "exploratory"
        if self.deciding.exact and len({one.side for one in self._computed}) > 1:
            return "inconclusive"
        return self.deciding.label

    @property
    def _computed(self) -> list[Measurement]:
        every = [self.deciding, *self.exploratory]
        exact = [one for one in every if one is not None and one.exact]
        return [one for one in exact if one.pool.protocol != LIVE] or exact

    @cached_property
    def together(self) -> Measurement | None:
        """All seeds of all committed pools at this scale, whose designs differ: exploratory.

        None where there is one pool alone. The test items are those of the pool that is shown.
        A pool that asked another number of them counts by its seeds' means, as if these varied
        over the items as that pool's do: without, the interval would leave the items out.
        """
        every = [self.deciding, *self.exploratory]
        several = [
            one for one in every if one and one.pool.tier in COMMITTED and not one.exact
        ]
        if len(several) < 2:
            return None
        shown = self.shown.effects
        by_item = shown.mean(axis=0, keepdims=True) - shown.mean()
        effects = []
        for one in several:
            part = one.effects
            if part.shape[1] != shown.shape[1]:
                part = part.mean(axis=1, keepdims=True) + by_item
            effects.append(part)
        return replace(self.shown, effects=np.concatenate(effects))


@dataclass(frozen=True)
class Row:
    """One line of the ledger: a claim and its verdicts, the smallest scale first."""

    claim: Claim
    verdicts: tuple[Verdict, ...] = ()

    @property
    def measurements(self) -> tuple[Measurement, ...]:
        """All its measurements, scale by scale, those that decide first."""
        every: list[Measurement] = []
        for verdict in self.verdicts:
            if verdict.deciding is not None:
                every.append(verdict.deciding)
            every += verdict.exploratory
        return tuple(every)

    @property
    def labels(self) -> tuple[str, ...]:
        """Its verdicts, a scale each; one that says why not where it has none.

        A claim that has ended is withdrawn, whatever it measured: that stands in `verdicts`.
        """
        if self.claim.ended:
            return ("withdrawn",)
        if self.verdicts:
            return tuple(verdict.label for verdict in self.verdicts)
        return ("not testable here" if self.claim.untestable else "not run",)

    @property
    def decided(self) -> tuple[Verdict, ...]:
        """Its verdicts at scales that a pool decides; none where it has ended."""
        if self.claim.ended:
            return ()
        return tuple(verdict for verdict in self.verdicts if verdict.deciding)

    def at(self, scale: str) -> Verdict | None:
        """Its verdict at a scale; None where nothing measured it there."""
        return next((one for one in self.verdicts if one.scale == scale), None)


def row(
    claim: Claim,
    pools: Iterable[Pool],
    deciders: Mapping[str, Collection[int]] | None = None,
    plans: Mapping[str, Collection[int]] | None = None,
) -> Row:
    """Measure a claim in pools; those of the protocols ``deciders`` decide, one a scale.

    ``deciders`` holds for each the seeds that its head plans; it decides once all have measured
    the claim, and by these alone, so that nobody stops an arm, or adds to it, where the result
    looks good. ``plans`` are such seeds of all protocols: nothing is measured of arms that have
    still to run with some of them. What is computed needs no decider: the newest pool is taken, and
    the others must agree. The run that a page shows is taken where there is no other.
    """
    if deciders is None:
        deciders = {}
    if plans is None:
        plans = {}
    scales: dict[str, list[Measurement]] = {}
    for pool in sorted(pools, key=lambda pool: pool.rank):
        if pool.unfinished(claim.values, plans.get(pool.protocol, ())):
            continue
        planned = deciders.get(pool.protocol)
        if planned and pool.having(*claim.values).issuperset(planned):
            pool = pool.of_seeds(planned)
        measured = measure(claim, pool)
        if measured:
            scales.setdefault(pool.scale, []).append(measured)
    verdicts = []
    for scale, every in sorted(scales.items(), key=lambda pair: store.size(pair[0])):
        deciding = [one for one in every if _may_decide(one, deciders)]
        if not deciding and all(one.exact for one in every):
            committed = [one for one in every if one.pool.protocol != LIVE]
            deciding = [max(committed or every, key=_day)]
        if len(deciding) > 1:
            names = " and ".join(one.pool.protocol for one in deciding)
            refuse(
                "E-CONFIG", f"{claim.id}: {names} both decide it at {scale}; one may"
            )
        first = deciding[0] if deciding else None
        others = tuple(one for one in every if one is not first)
        verdicts.append(Verdict(claim, scale, first, others))
    return Row(claim, tuple(verdicts))


def _may_decide(measured: Measurement, deciders: Mapping[str, Collection[int]]) -> bool:
    """Whether its pool decides the claim, and all seeds that its head plans measured it."""
    planned = deciders.get(measured.pool.protocol)
    if planned is None:
        return False
    return measured.pool.having(*measured.claim.values).issuperset(planned)


def _day(measured: Measurement) -> str:
    return str(measured.pool.last.manifest.get("date", ""))


def ledger(folder: Path, *, live: bool = True) -> list[Row]:
    """Judge all claims, from a project's runs; if ``live``, its pages' too.

    Studies that are still running are left out: nobody looks before all of their seeds are there.
    A claim that says something else than when a run that decides it began is refused (E-CLAIM).
    """
    claims = papers.claims()
    names = {claim.run for claim in claims}
    pools = {name: sources.pools(name, folder, shown=live) for name in names}
    deciders = sources.deciders(folder)
    plans = sources.plans(folder)
    rows = []
    for claim in claims:
        of_claim = deciders.get(claim.id, {})
        of_notebook = plans.get(claim.run, {})
        rows.append(row(claim, pools[claim.run].values(), of_claim, of_notebook))
    for one in rows:
        for verdict in one.decided:
            _frozen(verdict)
    sure = set(chance(rows).hochberg)
    return [_marked(one, sure) for one in rows]


def _marked(row: Row, sure: Collection[Decision]) -> Row:
    """Mark the verdicts that survive the correction and rest on `MARKED` seeds."""
    marked = []
    for verdict in row.verdicts:
        is_sure = Decision(row.claim.id, verdict.scale) in sure
        survives = is_sure and verdict.shown.seeds >= MARKED
        marked.append(replace(verdict, survives=survives))
    return replace(row, verdicts=tuple(marked))


def _frozen(verdict: Verdict) -> None:
    """Refuse a claim that was changed after a run of the pool that decides it (E-CLAIM)."""
    measured = verdict.deciding
    claim = verdict.claim
    if measured is None:
        return
    for run in measured.pool.runs:
        then: Mapping[str, str] = run.manifest.get("claims", {})
        if then.get(claim.id, claim.frozen) != claim.frozen:
            refuse(
                "E-CLAIM",
                f"{claim.id} was changed after seed {run.seed} of {run.notebook}/{run.protocol} "
                "ran, which decides it; give what it says now a new id, and bring the old one back",
            )


def repeated(pool: Pool, other: Collection[int]) -> list[tuple[Verdict, Verdict]]:
    """Judge each sampled claim twice: by a pool without its ``other`` seeds, and by these alone."""
    first = pool.of_seeds({*pool.seeds}.difference(other))
    second = pool.of_seeds(other)
    if not first.runs or not second.runs:
        return []
    pairs = []
    for claim in papers.claims():
        if claim.run != pool.notebook or claim.exact or claim.ended:
            continue
        before = measure(claim, first)
        after = measure(claim, second)
        if before and after and before.enough and after.enough:
            once = Verdict(claim, pool.scale, before)
            again = Verdict(claim, pool.scale, after)
            pairs.append((once, again))
    return pairs


class Decision(NamedTuple):
    """One claim at one scale."""

    claim: str
    scale: str


@dataclass(frozen=True)
class Chance:
    """What chance alone would do to the verdicts of a ledger."""

    # Claims of a direction that seeds of pools that decide have tested.
    tested: tuple[Decision, ...]
    decided: tuple[Decision, ...]  # those with a verdict (holds or fails)
    # Survive Benjamini and Hochberg's: 5 % of them false on average.
    hochberg: tuple[Decision, ...]


def chance(rows: Sequence[Row]) -> Chance:
    """Ask how many verdicts chance would give, and which survive a correction for their number."""
    p: dict[Decision, float] = {}
    for row in rows:
        for verdict in row.decided:
            if verdict.deciding and _tests_a_direction(verdict.deciding):
                test = Decision(row.claim.id, verdict.scale)
                p[test] = p_value(verdict.deciding.effects)
    adjusted = stats.false_discovery_control(list(p.values())) if p else []
    chances = dict(zip(p, adjusted, strict=True))
    return Chance(
        tested=tuple(p),
        decided=tuple(test for test in p if p[test] < 1 - CONFIDENCE),
        hochberg=tuple(test for test in p if chances[test] <= 1 - CONFIDENCE),
    )


def _tests_a_direction(measured: Measurement) -> bool:
    claim = measured.claim
    sampled = measured.interval is not None and measured.effects.size > 1
    directed = claim.direction in ("greater", "less")
    testable = not claim.untestable and measured.presupposed
    return measured.enough and sampled and directed and testable


def seeds(number: int) -> str:
    """Write a number of seeds."""
    return "1 seed" if number == 1 else f"{number} seeds"


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
        text = f"{100 * number:{sign}.1f} {'points' if compared else '%'}"
    elif unit == "percent_points":
        text = f"{number:+.1f} points"
    elif unit == "count":
        text = f"{number:{sign},.0f}"
    elif unit in ("ratio", "number", "correlation"):
        text = f"{number:{sign}.3g}"
    else:
        text = f"{number:{sign}.3g} {unit}"
    return records.minus(text)
