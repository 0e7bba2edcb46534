"""What was found: sentences, tables and forest plots made from pools, never typed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, product
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from moebook import experiments, storage
from moebook.errors import nearest, refuse
from moebook.intervals import interval, p_value
from moebook.lab import papers, plotting, records
from moebook.lab.evidence.verdicts import (
    LABELS,
    Measurement,
    Row,
    Verdict,
    amount,
    seeds,
    side,
    span,
)
from moebook.lab.plotting.charts import COLUMNS
from moebook.lab.records import store
from moebook.lab.records.store import SEEDS, Pool
from moebook.lab.run import sources

PANELS = {
    "share": ("points", 100.0),
    "percent_points": ("points", 1.0),
    "nats": ("nats", 1.0),
}
"""Unit to the panel of a forest plot and the factor that brings it there; others have their own."""
SO_FAR = {
    1: "as claimed so far",
    0: "no difference so far",
    -1: "against the claim so far",
}
ARMS = ["measure", "arm", "value", "low", "high", "seeds"]  # columns of a table of arms


def mains(rows: Iterable[Row]) -> list[Row]:
    """The main claim of each paper: the first in its file that has not ended."""
    standing = [row for row in rows if not row.claim.ended]
    return [next(of) for _, of in groupby(standing, key=lambda row: row.claim.paper)]


def ordered(rows: Iterable[Row]) -> list[Row]:
    """Sort rows for a reader: surprises first, of each kind the strongest first."""
    order = [*LABELS]

    def place(row: Row) -> tuple[int, float]:
        strengths = [verdict.shown.strength for verdict in row.verdicts]
        return min(map(order.index, row.labels)), -max(strengths, default=0.0)

    return sorted(rows, key=place)


def sentence(row: Row) -> str:
    """Say what a claim is and what was found about it, scale by scale, in Markdown."""
    return f"{row.claim.sentence} {said(row)}"


def said(row: Row) -> str:
    """Say what was found about a claim, scale by scale, in Markdown."""
    if row.claim.ended:
        return f"{_strong('withdrawn')}: {row.claim.ended} {_before(row)}".strip()
    if not row.verdicts:
        why = (
            f": {row.claim.untestable}"
            if row.claim.untestable
            else " at a scale that can test it."
        )
        return _strong(row.labels[0]) + why
    if len({*row.labels}) == 1 and all(verdict.shown.exact for verdict in row.verdicts):
        return told(row.verdicts[-1], where="")  # computed, and alike at all scales
    return " ".join(told(verdict) for verdict in row.verdicts)


def _before(row: Row) -> str:
    """Say which verdicts a claim had that has ended, and what stands in its place."""
    had = [
        f"{LABELS[one.label]} at {one.scale}" for one in row.verdicts if one.deciding
    ]
    before = f"It had been: {', '.join(had)}." if had else ""
    names = ", ".join(row.claim.instead)
    return f"{before} In its place: {names}." if names else before


def told(verdict: Verdict, where: str | None = None) -> str:
    """Say what was found at one scale, and the numbers and notes that it rests on."""
    if verdict.label == "not testable here":
        return f"{_strong(verdict.label)}: {verdict.claim.untestable}"
    if where is None:
        where = f" at {verdict.scale}" if verdict.scale else ""
    said = [numbers(verdict.shown), *notes(verdict.shown)]
    if verdict.survives:
        said.append("it survives correction")
    if verdict.late:
        said.append("the claim was written after these runs")
    return f"{_strong(verdict.label)}{where}: {'; '.join(said)}."


def _strong(label: str) -> str:
    """Write a verdict as the beginning of a sentence, in bold."""
    word = LABELS.get(label, label)
    return f"**{word[0].upper()}{word[1:]}**"


def notes(measured: Measurement) -> list[str]:
    """Say what stands beside the numbers: what could not be seen, tasks, rates at an end."""
    claim, said = measured.claim, ""
    if not measured.enough:
        said = SO_FAR[side(claim, measured.effect, measured.effect)]
    elif measured.smallest and not measured.side:
        said = f"less than {amount(claim, measured.smallest).lstrip('+')} was not detectable"
    names = claim.values if claim.arms is None else [claim.arms]
    held = measured.pool.at_end(*names)
    return [*filter(None, [said, _sizes(measured), *_tasks(measured), held])]


def _sizes(measured: Measurement) -> str:
    """Say how much each arm trained, by the recorded values that the claim names for it."""
    said = []
    for name in measured.claim.sizes:
        arm, size = name.split("/")[-2], measured.pool.average(name)
        if size is not None:
            said.append(f"{arm} {size:.2%}" if size <= 1 else f"{arm} {size:,.0f}")
    return f"trained weights: {', '.join(said)}" if said else ""


def _tasks(measured: Measurement) -> Iterator[str]:
    """Say on how many tasks the mean effect is as claimed, and without which it would not be so."""
    parts, kind = (
        measured.parts,
        "domains" if {*measured.parts} <= store.DOMAINS else "tasks",
    )
    if len(parts) < 2:
        return
    good = sum(one > 0 for one in measured.by_task.values())
    yield f"as claimed on {good} of {len(parts)} {kind}"
    if not (measured.interval and measured.enough and measured.side):
        return
    if not measured.stands():
        yield f"no longer so if {kind} weigh alike"
    elif needed := [
        task.partition("/")[0] for task in parts if not measured.stands(task)
    ]:
        yield f"no longer so if {' or '.join(needed)} is left out"


def scatter(measured: Measurement) -> str:
    """Say how the mean compares with the standard deviation between seeds, if they differ."""
    means = measured.effects.mean(axis=1)
    spread = means.std(ddof=1) if measured.interval and len(means) > 1 else 0.0
    over = spread > 1e-9 * abs(measured.effect)
    return f"mean over spread of seeds {measured.effect / spread:.1f}" if over else ""


def power(measured: Measurement) -> str:
    """Say which effect four in five such studies would decide, and which the paper prints."""
    claim = measured.claim
    if measured.visible is None:
        return ""
    said = (
        f"four in five such studies see {amount(claim, measured.visible).lstrip('+')}"
    )
    if claim.claimed is None or claim.direction not in ("greater", "less"):
        return said
    return (
        f"{said}; the paper's effect is {amount(claim, abs(claim.claimed)).lstrip('+')}"
    )


def numbers(best: Measurement) -> str:
    """The effect with its interval and seeds; where the paper gives a bound, what was measured."""
    claim, effect, ends, bound = best.claim, best.effect, best.interval, ""
    if isinstance(claim.reference, (int, float)):
        shift, claim = claim.reference, replace(claim, reference=None)
        effect, ends = effect + shift, ends and (ends[0] + shift, ends[1] + shift)
        side = {"less": "below", "greater": "above"}.get(
            str(claim.direction), "equal to"
        )
        bound = f", claimed to be {side} {amount(claim, shift)}" if shift else ""
    value = amount(claim, effect)
    if ends is None:
        return f"{value}{bound}, " + ("a computed value" if best.exact else "one value")
    return f"{value}{bound} (95 % from {span(claim, *ends)}; {seeds(best.seeds)})"


def summary(rows: Iterable[Row]) -> pd.DataFrame:
    """Put sampled claims into a table, a line a scale; a star: it survives the correction."""
    names, lines = [], []
    sampled = [row for row in ordered(rows) if not (row.claim.exact or row.claim.ended)]
    for verdict in (verdict for row in sampled for verdict in row.verdicts):
        shown, claim = verdict.shown, verdict.claim
        names.append(claim.id.partition(".")[2])
        lines.append(
            {
                "scale": verdict.scale,
                "seeds": shown.seeds,
                "effect": amount(claim, shown.effect),
                "95 %": span(claim, *shown.interval) if shown.interval else "",
                "could see": amount(claim, shown.smallest).lstrip("+")
                if shown.smallest
                else "",
                "the paper's": ""
                if claim.claimed is None
                else amount(claim, claim.claimed),
                "verdict": LABELS[verdict.label] + " *" * verdict.survives,
            }
        )
    columns = [
        "scale",
        "seeds",
        "effect",
        "95 %",
        "could see",
        "the paper's",
        "verdict",
    ]
    return pd.DataFrame(lines, index=names, columns=columns)


def forest(rows: Iterable[Row], title: str) -> Any:
    """Draw every claim with an interval, scale by scale; None where nothing was measured."""
    every = ordered(rows)
    several = len({row.claim.paper for row in every}) > 1
    points = [point for row in every for point in intervals(row, several)]
    frame = pd.DataFrame(points, columns=[*COLUMNS, "printed"]).astype(
        {"printed": float}
    )
    order = list(dict.fromkeys(["points", "nats", *frame.panel]))
    frame = frame.sort_values("panel", key=lambda p: p.map(order.index), kind="stable")
    return plotting.forest(frame, xlabel="effect, as claimed to the right", title=title)


def intervals(row: Row, several: bool = True) -> list[list[object]]:
    """A claim's lines of a forest plot, one a scale; with ``several`` papers its id names its."""
    if row.claim.ended:
        return []
    line = row.claim.id if several else row.claim.id.partition(".")[2]
    return [_point(verdict, line) for verdict in row.verdicts if verdict.shown.smallest]


def _point(verdict: Verdict, line: str) -> list[object]:
    """One line of a forest plot, turned so that right of zero is as claimed.

    A claim of equality, or about a number, is drawn as the distance from what the paper prints.
    """
    claim, measured = verdict.claim, verdict.shown
    panel, factor = PANELS.get(claim.unit, (claim.unit, 1.0))
    shift = 0.0 if claim.direction in ("greater", "less") else claim.claimed or 0.0
    turn = -factor if claim.direction == "less" else factor
    value, *ends = (turn * (x - shift) for x in (measured.effect, *measured.ends))
    printed = None if claim.claimed is None else turn * (claim.claimed - shift)
    sure = verdict.deciding is not None and measured.enough and measured.side != 0
    return [panel, line, verdict.scale, value, *sorted(ends), sure, printed]


def differences(
    pools: Iterable[Pool],
    pairs: Mapping[str, tuple[str, str | float]],
    *,
    xlabel: str,
    title: str,
) -> Any:
    """Draw values less others, paired by seed and item, with intervals at 95 %, pool by pool.

    ``pairs`` are a line's text to two values' names, or to one and a number. Pairs that no pool has
    are left out; None where there is none.
    """
    points = []
    for pool, (line, (name, other)) in product(pools, pairs.items()):
        effects = pool.effects(name, other)
        if len(effects) and (ends := interval(effects)):
            unit = next(iter(pool.values(name).values())).unit
            panel, factor = PANELS.get(unit, (unit, 1.0))
            value, low, high = (factor * x for x in (effects.mean(), *ends))
            sure = len(effects) >= SEEDS and low * high > 0
            points.append([panel, line, pool.protocol, value, low, high, sure])
    frame = pd.DataFrame(points, columns=COLUMNS)
    if frame.series.nunique() == 1:  # the figure then has no legend
        title = f"{title} ({frame.series[0]})"
    return plotting.forest(frame, xlabel=xlabel, title=title)


def between_scales(rows: Iterable[Row]) -> pd.DataFrame:
    """Put effects of claims at several scales side by side; a trend exceeds both half widths."""
    lines: dict[str, dict[str, str]] = {}
    for row in rows:
        if len(row.verdicts) < 2 or row.claim.exact or row.claim.ended:
            continue
        effects = {
            one.scale: amount(row.claim, one.shown.effect) for one in row.verdicts
        }
        trend = _trend(row.verdicts[0].shown, row.verdicts[-1].shown)
        lines[row.claim.id.partition(".")[2]] = {"with scale": trend} | effects
    return pd.DataFrame.from_dict(lines, orient="index").fillna("")


def _trend(small: Measurement, large: Measurement) -> str:
    """Say how an effect changes from the smallest to the largest scale, if that can be seen."""
    if small.smallest is None or large.smallest is None:
        return "no clear change"
    if abs(large.effect - small.effect) <= small.smallest + large.smallest:
        return "no clear change"
    if small.effect * large.effect < 0:
        return "turns round"
    return "grows" if abs(large.effect) > abs(small.effect) else "shrinks"


def runs(pools: dict[str, Pool]) -> pd.DataFrame:
    """Say of each pool which runs it has, of which day, and what of the code has changed since."""
    lines = [
        [", ".join(map(str, p.seeds)), len(p.runs), len(p.arms), records.since(p.last)]
        for p in pools.values()
    ]
    return pd.DataFrame(
        lines, index=list(pools), columns=["seeds", "runs", "arms", "code"]
    )


def pools(name: str) -> dict[str, Pool]:
    """Return a notebook's pools that decide claims, the smallest scale first; all where none does.

    The others are exploratory: the ledger shows what they measured.
    """
    every, deciders = store.pools(name), sources.deciders(storage.root())
    mine = {
        protocol
        for claim in papers.claims()
        if claim.run == name and not claim.ended
        for protocol in deciders.get(claim.id, ())
    }
    return {one: pool for one, pool in every.items() if one in mine} or every


def reached(
    pools: Iterable[Pool], names: Iterable[str], measures: Mapping[str, str]
) -> pd.DataFrame:
    """Put what `arms` measured into one table, protocol by protocol, without the empty ones."""
    several, tables = list(names), dict[str, pd.DataFrame]()
    for pool in pools:
        frame = arms(pool, several, measures)
        if len(frame):
            tables[pool.protocol] = table(frame)
    if not tables:
        return pd.DataFrame()
    whole = pd.concat(tables)
    return whole[
        [*(measure for measure in measures if measure in whole), "seeds"]
    ].fillna("")


def arms(pool: Pool, names: Iterable[str], measures: Mapping[str, str]) -> pd.DataFrame:
    """Measure arms over seeds and items: a line an arm and measure, with its interval at 95 %.

    ``measures`` are what a measure is called to the name of its value, ``pesc/{arm}/accuracy``.
    Arms without a run are left out.
    """
    lines = []
    for measure, arm in product(measures, names):
        if len(effects := pool.effects(measures[measure].format(arm=arm))):
            low, high = interval(effects) or (np.nan, np.nan)
            lines.append([measure, arm, effects.mean(), low, high, len(effects)])
    return pd.DataFrame(lines, columns=ARMS)


def changes(
    pool: Pool, names: Iterable[str], measures: Mapping[str, str]
) -> pd.DataFrame:
    """Put `arms` measured in two ways into a table: over seeds that have both, with the change."""
    frames = []
    for arm in names:
        one, two = (name.format(arm=arm) for name in measures.values())
        both = pool.having(one, two)
        kept = replace(pool, runs=tuple(run for run in pool.runs if run.seed in both))
        change = kept.effects(two, one)
        line = [
            "change",
            arm,
            change.mean(),
            *(interval(change) or (np.nan, np.nan)),
            len(both),
        ]
        frames += [arms(kept, [arm], measures), pd.DataFrame([line], columns=ARMS)]
    return table(pd.concat(frames))


def table(frame: pd.DataFrame) -> pd.DataFrame:
    """Put what `arms` measured into words: a line an arm, a column a measure, and the seeds."""
    ends = [
        (_said(low), _said(high))
        for low, high in zip(frame.low, frame.high, strict=True)
    ]
    text = [
        _said(value) + f" ({low} to {high})" * (low != high)
        for value, (low, high) in zip(frame.value, ends, strict=True)
    ]
    wide = frame.assign(text=text).pivot(index="arm", columns="measure", values="text")
    order = list(dict.fromkeys(frame.arm)), list(dict.fromkeys(frame.measure))
    wide = wide.loc[order].fillna("").rename_axis(columns=None)
    return wide.assign(seeds=frame.groupby("arm").seeds.min())


class Answer(NamedTuple):
    """Which arm has the least of a measure, and which cannot be told from it."""

    question: str
    pool: Pool
    base: str  # dense or sparse
    best: str
    value: str  # with its unit
    alike: list[str]  # whose paired difference from the best includes zero
    seen: str  # the least difference that all of these comparisons could have shown
    worst: str  # of those that can be told from the best
    arms: int  # that were compared


def answer(pool: Pool, question: str, measure: str) -> Answer | None:
    """Find the arm with the least of a measure, if three seeds or more have it.

    The best of many is chosen and judged on the same runs, so that its lead flatters: an arm counts
    as alike unless its interval, at 95 % over all comparisons together, excludes zero.
    """
    base = "sparse" if pool.values("together/sparse/base/nll") else "dense"
    names = {arm: f"together/{base}/{arm}/{measure}" for arm in pool.arms}
    means = {
        arm: pool.effects(name).mean()
        for arm, name in names.items()
        if len(pool.values(name)) >= SEEDS
    }
    if len(means) < 2:
        return None
    order = sorted(means, key=means.__getitem__)
    gaps = {arm: pool.effects(names[arm], names[order[0]]) for arm in order[1:]}
    alike = [arm for arm, gap in gaps.items() if p_value(gap) * len(gaps) > 0.05]
    unit = next(iter(pool.values(names[order[0]]).values())).unit
    unit = "of full fine-tuning" if unit == "ratio" else unit
    apart = [arm for arm in gaps if arm not in alike]
    ends = [interval(gaps[arm]) or (0.0, 0.0) for arm in alike]
    half = max((high - low for low, high in ends), default=0.0) / 2
    seen = f"{_said(half)} {unit}" if half else ""
    best, *last = (f"{_said(means[arm])} {unit}" for arm in [order[0], *apart[-1:]])
    worst = f"{apart[-1]}, {last[0]}" if apart else ""
    return Answer(question, pool, base, order[0], best, alike, seen, worst, len(order))


def _said(number: float) -> str:
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.3f}"


def sizes(pool: Pool, kind: str, default: tuple[int, str]) -> dict[int, str]:
    """Find the arms ``<kind><number>``, such as ``experts4``, by number; others are ``default``."""
    texts = {arm.removeprefix(kind): arm for arm in pool.arms if arm.startswith(kind)}
    numbered = {int(text): arm for text, arm in texts.items() if text.isdigit()}
    return dict(sorted((numbered | dict([default])).items()))


def series(pool: Pool, names: Sequence[str]) -> np.ndarray:
    """Return values of several names by seed, ``[S, T]``, over the seeds that have them all."""
    every = [pool.values(name) for name in names]
    seeds = sorted(pool.having(*names))
    rows = [values[seed].value for seed in seeds for values in every]
    return np.array(rows).reshape(len(seeds), len(names))


def rated(pool: Pool, reached: str) -> dict[str, list[tuple[float, float]]]:
    """Return by arm, a point a seed, the rate of least loss among those tried and what it reached.

    ``reached`` is the name of the result, such as ``pesc/{arm}/accuracy``.
    """
    points: dict[str, list[tuple[float, float]]] = {}
    for arm, grids in pool.rates.items():
        ends = pool.values(reached.format(arm=arm))
        pairs = [
            (min(grid, key=grid.__getitem__), ends[seed].value)
            for seed, grid in grids.items()
            if seed in ends
        ]
        points |= {arm: pairs} if pairs else {}
    return points


def beside(
    pool: Pool, names: Sequence[str], printed: Iterable[float]
) -> dict[str, np.ndarray]:
    """Return our shares and the paper's per cent as points above the first, ``[S, T]``, ``[T]``."""
    ours, theirs = 100 * series(pool, names), np.array([*printed])
    return {"here": ours - ours[:, :1], "in the paper": theirs - theirs[:1]}


def bands(
    pool: Pool, names: dict[str, str], less: str | None = None
) -> tuple[dict[str, np.ndarray], tuple[float, ...]]:
    """Return curves ``[S, T]`` by label, less the seed's curve ``less``, and their positions."""
    zero = pool.curves(less) if less else {}
    curves = {
        label: [
            pair for pair in pool.curves(name).items() if pair[0] in zero or not less
        ]
        for label, name in names.items()
    }
    every = [pair for pairs in [zero.items(), *curves.values()] for pair in pairs]
    positions = every[0][1].x if every else ()
    for seed, curve in every:
        if curve.x != positions:
            where = f"{curve.name}, seed {seed}, has {len(curve.x)} positions"
            refuse(
                "E-SHAPE", f"{where}; expected the {len(positions)} of the first curve"
            )
    rows = {
        k: [np.array(c.y) - (zero[seed].y if less else 0) for seed, c in pairs]
        for k, pairs in curves.items()
    }
    lines = {label: np.array(several) for label, several in rows.items() if several}
    return lines, positions


def tenths(
    pools: Iterable[Pool], pairs: Mapping[str, tuple[str, str]]
) -> dict[str, np.ndarray]:
    """Return how far curves are above others in each tenth of the steps, ``[S, 10]``, by line.

    ``pairs`` are a line's text to two curves' names; a line is one of them in one pool.
    """
    lines = {}
    for pool, (line, (name, less)) in product(pools, pairs.items()):
        found, _ = bands(pool, {f"{line} ({pool.protocol})": name}, less)
        for label, rows in found.items():
            parts = [part.mean(axis=1) for part in np.array_split(rows, 10, axis=1)]
            lines[label] = np.stack(parts, axis=1)
    return lines


def choices(pool: Pool, kind: str) -> pd.DataFrame:
    """Say which LoRAs of banks of a kind each arm took over all seeds, and what came of it.

    The table is that of `experiments.banks.shares`, over seeds, targets and draws.
    """
    name = re.compile(rf"banks/{kind}/\w+/\d+/chosen/(\w+)")
    taken: dict[str, list[tuple[float, ...]]] = {}
    for run in pool.runs:
        for curve in run.curves:
            if match := name.fullmatch(curve.name):
                taken.setdefault(match[1], []).append(curve.y)
    reached = {
        arm: float(pool.effects(f"banks/{kind}/{arm}/accuracy").mean()) for arm in taken
    }
    members = experiments.banks.members(pool.last.settings)
    return experiments.banks.shares(taken, reached, members)


def of(pools: dict[str, Pool], protocol: str) -> Pool:
    """Return the pool of a protocol, or refuse with those that there are."""
    if protocol not in pools:
        hint = (
            nearest(protocol, pools)
            if pools
            else "there is none yet: see moebook study --help"
        )
        refuse("E-PROTOCOL", f"no pool of protocol '{protocol}'; {hint}")
    return pools[protocol]
