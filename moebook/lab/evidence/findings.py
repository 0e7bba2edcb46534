"""What was found: sentences, tables and forest plots made from pools, never typed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pandas as pd

from moebook import storage
from moebook.errors import nearest, refuse
from moebook.intervals import interval
from moebook.lab import papers, plotting, records
from moebook.lab.evidence import heads, prose
from moebook.lab.evidence.verdicts import (
    LABELS,
    Measurement,
    Row,
    Verdict,
    amount,
    row,
    seeds,
    side,
    span,
)
from moebook.lab.papers import Claim
from moebook.lab.plotting.charts import COLUMNS
from moebook.lab.records import store
from moebook.lab.records.runs import Curve
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
PROMISES = {
    "pesc.sparse-beats-dense": "PESC: adapters over the dense model",
    "router_init.trsu-beats-dense": "routers from tasks over fine-tuning",
    "rocket.beats-source-best-sft": "Rocket: mixture over the best LoRA",
    "esft.gate-beats-attention-lora": "ESFT: experts over LoRA on attention",
}
"""The gain in accuracy that each paper is about, and what it is called in a figure."""
SMALL = "1 M"  # the scale at which all four were measured
ARC = {"arc_easy", "arc_challenge"}  # its parts; a model's card has both as one
PERCENT = {"share": "%", "percent_points": "points"}  # what is told with one decimal
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
# Columns of a table of arms.
ARMS = ["measure", "arm", "value", "low", "high", "seeds", "unit"]


def said(row: Row) -> str:
    """Say what was found about a claim, scale by scale, in Markdown."""
    if row.claim.ended:
        return f"{_strong('withdrawn')}: {row.claim.ended} {_before(row)}".strip()
    if not row.verdicts:
        why = " at a scale that can test it."
        if row.claim.untestable:
            why = f": {row.claim.untestable}"
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
        why = verdict.claim.untestable or "; ".join(notes(verdict.shown))
        return f"{_strong(verdict.label)}: {why}"
    if where is None:
        where = f" at {verdict.scale}" if verdict.scale else ""
    said = [numbers(verdict.shown), *notes(verdict.shown)]
    if verdict.survives:
        said.append("significant after correcting for all claims")
    if verdict.late:
        said.append("the claim was written after these runs")
    return f"{_strong(verdict.label)}{where}: {'; '.join(said)}."


def _strong(label: str) -> str:
    """Write a verdict as the beginning of a sentence, in bold."""
    word = LABELS.get(label, label)
    return f"**{word[0].upper()}{word[1:]}**"


def notes(measured: Measurement) -> list[str]:
    """Say what stands beside the numbers: what could not be seen, tasks, rates at an end."""
    claim = measured.claim
    said = ""
    if claim.presupposes and not measured.presupposed:
        above, below = claim.presupposes
        said = (
            f"it presupposes that {above} lies above {below}, which is not shown here"
        )
    elif not measured.enough:
        said = SO_FAR[side(claim, measured.effect, measured.effect)]
    elif measured.smallest and not measured.side:
        least = amount(claim, measured.smallest).lstrip("+")
        said = f"these runs could have seen {least} or more"
    held = measured.pool.at_end(*_named(claim))
    remarks = [said, _sizes(measured), *_tasks(measured), _untuned(measured), held]
    return [*filter(None, remarks)]


def _named(claim: Claim) -> Sequence[str | float | None]:
    """Return the names in which the arms stand whose rates a claim depends on."""
    return claim.values if claim.arms is None else [claim.arms]


def _untuned(measured: Measurement) -> str:
    """Say which arms had one rate that no study chose, or none."""
    pool = measured.pool
    tried = pool.tried(*_named(measured.claim))
    given = [arm for arm, chose in tried.items() if not chose]
    if not given or pool.tier not in store.COMMITTED or _tuned_by(pool):
        return ""
    return f"{' and '.join(given)} had no choice of rate"


def _tuned_by(pool: Pool) -> list[str]:
    """Name the studies that fixed the rates of a pool before its first run."""
    folder = storage.root()
    if pool.notebook not in sources.paths(folder):
        return []
    return heads.tuned_by(sources.find(folder, pool.notebook), pool.protocol)


def rates(measured: Measurement) -> str:
    """Say how a claim's arms came by their rates: in each run, or by studies before it."""
    tried = measured.pool.tried(*_named(measured.claim))
    told = ["rates chosen in each run"] if any(tried.values()) else []
    if not all(tried.values()):
        studies = _tuned_by(measured.pool)
        if studies:
            told.append(f"rates fixed beforehand by {' and '.join(studies)}")
    return "; ".join(told)


def _sizes(measured: Measurement) -> str:
    """Say how much each arm trained, by the recorded values that the claim names for it."""
    said = []
    for name in measured.claim.sizes:
        arm = name.split("/")[-2]
        size = measured.pool.average(name)
        if size is not None:
            said.append(f"{arm} {size:.2%}" if size <= 1 else f"{arm} {size:,.0f}")
    return f"trained weights: {', '.join(said)}" if said else ""


def _tasks(measured: Measurement) -> Iterator[str]:
    """Say on how many tasks the mean effect is as claimed, and without which it would not be so."""
    parts = measured.parts
    kind = "domains" if {*parts} <= store.DOMAINS else "tasks"
    if len(parts) < 2:
        return
    good = sum(one > 0 for one in measured.by_task.values())
    yield f"{good} of {len(parts)} {kind} point the claimed way"
    if not (measured.interval and measured.enough and measured.side):
        return
    if not measured.stands():
        yield f"not so if {kind} weighed alike"
        return
    needed = [task for task in parts if not measured.stands(without=task)]
    names = [task.partition("/")[0].replace("_", " ") for task in needed]
    if len(names) == 1:
        yield f"the result rests on {names[0]}"
    elif names:
        yield f"without any one of {', '.join(names)} the verdict would be another"


def power(measured: Measurement) -> str:
    """Say which effect four in five such studies would decide, and which the paper prints."""
    claim = measured.claim
    if measured.visible is None:
        return ""
    effect = amount(claim, measured.visible).lstrip("+")
    said = f"a study of this size finds a true effect of {effect} four times in five"
    if claim.claimed is None or claim.direction not in ("greater", "less"):
        return said
    return (
        f"{said}; the paper's effect is {amount(claim, abs(claim.claimed)).lstrip('+')}"
    )


def numbers(best: Measurement) -> str:
    """The effect with its interval and seeds; where the paper gives a bound, what was measured."""
    claim = best.claim
    effect = best.effect
    ends = best.bounded
    bound = ""
    if isinstance(claim.reference, (int, float)):
        # The effect is the distance from the bound: what was measured is the sum of the two.
        shift = claim.reference
        effect += shift
        if ends is not None:
            ends = (ends[0] + shift, ends[1] + shift)
        # Without a reference it is written as a value, not as a difference.
        claim = replace(claim, reference=None)
        sides = {"less": "below", "greater": "above"}
        side = sides.get(str(claim.direction), "equal to")
        if shift:
            bound = f", claimed to be {side} {amount(claim, shift)}"
    value = amount(claim, effect)
    if ends is None:
        kind = "a computed value" if best.exact else "one value"
        return f"{value}{bound}, {kind}"
    return f"{value}{bound} (95 % from {span(claim, *ends)}; {seeds(best.seeds)})"


def promises(rows: Iterable[Row]) -> Any:
    """Draw what each paper promises in points and what we measured; None where nothing ran."""
    points = []
    by_name = {row.claim.id: row for row in rows}
    for name, label in PROMISES.items():
        verdict = by_name[name].at(SMALL) if name in by_name else None
        if verdict and verdict.shown.smallest:
            _, _, scale, *numbers, _, printed = _point(verdict, label)
            decided = verdict.shown.side != 0
            points.append(["points", label, scale, *numbers, decided, printed])
    frame = pd.DataFrame(points, columns=[*COLUMNS, "printed"])
    frame = frame.assign(series="here, 95 % interval").astype({"printed": float})
    clear = int((frame.sure & (frame.value > 0)).sum())
    reversed_ = int((frame.sure & (frame.value < 0)).sum())
    verb = "are" if clear > 1 else "is"
    title = f"{clear or 'None'} of {len(frame)} promised gains {verb} clear here"
    if reversed_:
        title += f", {reversed_} {'are' if reversed_ > 1 else 'is'} reversed"
    return plotting.forest(frame, xlabel="gain in correct answers", title=title)


def headline(text: str, pools: Mapping[str, Pool]) -> str:
    """Write what a figure shows: words that depend on numbers follow the pools (see `prose`)."""
    notebook = next(iter(pools.values())).notebook
    evidence = prose.Evidence({notebook: pools}, home=f"{notebook}/")
    return prose.filled(text, evidence, f"a headline of {notebook}")


def alike(readings: Mapping[str, str], pools: Mapping[str, Pool]) -> dict[str, str]:
    """Group names by what a headline says of each: ``{"lead": "8 and 16", "trail": "4"}``.

    ``readings`` gives each name's reading, such as ``{lead | trail | tie with: effect}``.
    """
    names: dict[str, list[str]] = {}
    for name, reading in readings.items():
        names.setdefault(headline(reading, pools), []).append(name)
    return {words: " and ".join(several) for words, several in names.items()}


def intervals(row: Row, several: bool = True) -> list[list[object]]:
    """A claim's lines of a forest plot, one a scale; ``several`` papers need its whole id."""
    if row.claim.ended:
        return []
    line = row.claim.id if several else row.claim.id.partition(".")[2]
    return [_point(verdict, line) for verdict in row.verdicts if verdict.shown.smallest]


def _point(verdict: Verdict, line: str) -> list[object]:
    """One line of a forest plot, turned so that right of zero is as claimed.

    A claim of equality, or about a number, is drawn as the distance from what the paper prints.
    """
    claim = verdict.claim
    measured = verdict.shown
    panel, factor = PANELS.get(claim.unit, (claim.unit, 1.0))
    directed = claim.direction in ("greater", "less")
    shift = 0.0 if directed else claim.claimed or 0.0
    turn = -factor if claim.direction == "less" else factor

    def drawn(value: float) -> float:
        return turn * (value - shift)

    low, high = sorted(map(drawn, measured.bounded or measured.ends))
    printed = None if claim.claimed is None else drawn(claim.claimed)
    sure = verdict.deciding is not None and measured.enough and measured.side != 0
    value = drawn(measured.effect)
    return [panel, line, verdict.spoken, value, low, high, sure, printed]


def differences(
    parts: Iterable[tuple[Pool, Mapping[str, tuple[str, str | float]]]],
    *,
    xlabel: str,
    title: str,
    names: Mapping[str, str] = {},
) -> Any:
    """Draw values less others, paired by seed and item, with intervals at 95 %, pool by pool.

    Each pool comes with its pairs: a line's text to two values' names, or to one and a number.
    Colours are pools, called by their scales, or by protocol as in ``names``. Pairs that a
    pool lacks are left out; None where there is none.
    """
    points = []
    for pool, pairs in parts:
        for line, (name, other) in pairs.items():
            effects = pool.effects(name, other)
            ends = interval(effects) if len(effects) else None
            if not ends:
                continue
            unit = next(iter(pool.values(name).values())).unit
            ends = records.within(unit, ends, is_difference=True)
            panel, factor = PANELS.get(unit, (unit, 1.0))
            value, low, high = (factor * x for x in (effects.mean(), *ends))
            sure = len(effects) >= SEEDS and low * high > 0
            series = names.get(pool.protocol, pool.scale)
            points.append([panel, line, series, value, low, high, sure])
    frame = pd.DataFrame(points, columns=COLUMNS)
    return plotting.forest(frame, xlabel=xlabel, title=title)


def runs(pools: dict[str, Pool]) -> pd.DataFrame:
    """Say of each pool which runs it has, when the last ran, and what of its code has changed."""
    lines: list[list[Any]] = []
    for pool in pools.values():
        seeds = ", ".join(map(str, pool.seeds))
        code = records.since(pool.last)
        lines.append([seeds, len(pool.runs), len(pool.arms), code])
    columns = ["seeds", "runs", "arms", "code"]
    return pd.DataFrame(lines, index=list(pools), columns=columns)


def pools(name: str) -> dict[str, Pool]:
    """Return a notebook's pools that decide claims, the smallest scale first; all where none does.

    Among them is the newest pool of what is computed, which no head needs to name. The others
    are exploratory: the ledger shows what they measured.
    """
    every = sources.pools(name, storage.root())
    deciders = sources.deciders(storage.root())
    mine: set[str] = set()
    for claim in papers.claims():
        if claim.run == name:
            judged = row(claim, every.values(), deciders.get(claim.id, {}))
            for verdict in judged.decided:
                mine.add(verdict.shown.pool.protocol)
    return {one: pool for one, pool in every.items() if one in mine} or every


def reached(
    pools: Iterable[Pool], names: Iterable[str], measures: Mapping[str, str]
) -> pd.DataFrame:
    """Put what `arms` measured into one table, protocol by protocol, without the empty ones."""
    several = list(names)
    tables = dict[str, pd.DataFrame]()
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


def benchmarks(pools: Mapping[str, Pool]) -> pd.DataFrame:
    """Put the recorded scores of untuned bases beside chance and their model cards.

    One line per pool and benchmark, as `moebook.evaluation.summary` has it, with the lead over
    chance in standard errors and the loss; pools that recorded no benchmark are left out. A
    group's tasks count equally; it has no loss where one of them has none.
    """
    from moebook import evaluation  # with torch: what renders pages does without

    tables = dict[str, pd.DataFrame]()
    for name, pool in pools.items():
        items = _benchmark_items(pool.last)
        if len(items):
            scores = evaluation.summary(items, pool.last.settings["base"])
            lead = scores.normalised - scores.chance
            scores["SE over chance"] = lead / scores.pop("its standard error")
            losses = items.groupby(["asked", "task"]).nll.mean()
            scores["loss"] = losses.groupby("asked").agg(pd.Series.mean, skipna=False)
            tables[name] = scores
    if not tables:
        return pd.DataFrame()
    every = pd.concat(tables)
    digits = every.select_dtypes("float").map(_said, na_action="ignore")
    # As objects: a column in which every number is missing takes text, too.
    return every.assign(**digits.astype(object)).fillna("")


def _benchmark_items(run: records.Run) -> pd.DataFrame:
    """Return the items of a run's benchmarks as `moebook.evaluation.evaluate` gives them."""
    by_task = dict[tuple[str, str], dict[str, Any]]()
    for value in run.values:
        _, marker, place = value.name.rpartition("/benchmark/")
        if marker:
            # What was asked for, the task where that is a group, the measure.
            asked, *member, measure = place.split("/")
            task = member[0] if member else asked
            by_task.setdefault((asked, task), {})[measure] = value.items
    names = {asked for asked, _ in by_task}
    joined = names >= ARC and "ai2_arc" not in names
    parts = [pd.DataFrame()]
    for (asked, task), measures in by_task.items():
        # A benchmark that generates its answers has no loss.
        rows = pd.DataFrame({"nll": np.nan, **measures}).assign(task=task)
        parts.append(rows.assign(asked=asked))
        if joined and asked in ARC:
            parts.append(rows.assign(asked="ai2_arc"))
    as_answered = {"accuracy": "unnormalised", "normalised": "correct"}
    return pd.concat(parts).rename(columns=as_answered)


def arms(pool: Pool, names: Iterable[str], measures: Mapping[str, str]) -> pd.DataFrame:
    """Measure arms over seeds and items: a line an arm and measure, with its interval at 95 %.

    ``measures`` are what a measure is called to the name of its value, ``pesc/{arm}/accuracy``.
    Arms without a run are left out.
    """
    lines = []
    for measure, arm in product(measures, names):
        name = measures[measure].format(arm=arm)
        effects = pool.effects(name)
        if len(effects):
            unit = next(iter(pool.values(name).values())).unit
            low, high = records.within(unit, interval(effects) or (np.nan, np.nan))
            lines.append([measure, arm, effects.mean(), low, high, len(effects), unit])
    return pd.DataFrame(lines, columns=ARMS)


def changes(
    pool: Pool, names: Iterable[str], measures: Mapping[str, str]
) -> pd.DataFrame:
    """Put `arms` measured in two ways into a table: over seeds that have both, with the change."""
    frames = []
    for arm in names:
        one, two = (name.format(arm=arm) for name in measures.values())
        both = pool.having(one, two)
        if not both:
            continue
        kept = pool.of_seeds(both)
        change = kept.effects(two, one)
        unit = next(iter(kept.values(one).values())).unit
        ends = interval(change) or (np.nan, np.nan)
        within = records.within(unit, ends, is_difference=True)
        cells = np.array([change.mean(), *within])
        if unit == "share":
            cells, unit = 100 * cells, "percent_points"
        line = ["change", arm, *cells, len(both), unit]
        frames += [arms(kept, [arm], measures), pd.DataFrame([line], columns=ARMS)]
    return table(pd.concat(frames)) if frames else pd.DataFrame()


def table(frame: pd.DataFrame) -> pd.DataFrame:
    """Put what `arms` measured into words: a line an arm, a column a measure, and the seeds.

    Shares are told in per cent; the unit of all else stands in its measure's name.
    """
    factors = np.where(frame.unit == "share", 100.0, 1.0)
    numbers = frame[["value", "low", "high"]].mul(factors, axis=0)
    lines = zip(numbers.value, numbers.low, numbers.high, frame.unit, strict=True)
    text = [_words(*line) for line in lines]
    wide = frame.assign(text=text).pivot(index="arm", columns="measure", values="text")
    # As the frame has them: pivoting sorted both.
    arms_there = list(dict.fromkeys(frame.arm))
    measures_there = list(dict.fromkeys(frame.measure))
    # One line of headings: pandas writes that of the first column as the name of the others.
    wide = (
        wide.loc[arms_there, measures_there]
        .fillna("")
        .rename_axis(index=None, columns="arm")
    )
    return wide.assign(seeds=frame.groupby("arm").seeds.min())


def _words(value: float, low: float, high: float, unit: str) -> str:
    """Write a mean with its interval, or alone where its digits show none."""
    if unit in PERCENT:
        mean = f"{value:z.1f} {PERCENT[unit]}"
        ends = [f"{number:z.1f}" for number in (low, high)]
        several = ends[0] != ends[1]
        return records.minus(f"{mean} ({' to '.join(ends)})" if several else mean)
    if _said(low) != _said(high):
        return f"{_said(value)} ({_said(low)} to {_said(high)})"
    # Whole, and the same in each run, as a count is.
    if low == value and float(value).is_integer():
        return f"{value:,.0f}"
    # Three digits would call it none.
    if 0 < abs(value) < 0.0005:
        return _power(value)
    return _said(value)


def _said(number: float) -> str:
    """Write a number; what rounds to zero has no sign."""
    text = f"{number:,.0f}" if abs(number) >= 1000 else f"{number:z.3f}"
    return records.minus(text)


def _power(number: float) -> str:
    """Write a number near zero as a digit times a power of ten: ``2 × 10⁻⁶``."""
    digit, _, exponent = f"{number:.0e}".partition("e")
    power = str(int(exponent)).translate(SUPERSCRIPTS)
    return f"{records.minus(digit)} × 10{power}"


def sizes(pool: Pool, kind: str, default: tuple[int, str]) -> dict[int, str]:
    """Find the arms ``<kind><number>``, such as ``experts4``, by number; others are ``default``."""
    texts = {arm.removeprefix(kind): arm for arm in pool.arms if arm.startswith(kind)}
    numbered = {int(text): arm for text, arm in texts.items() if text.isdecimal()}
    return dict(sorted((numbered | dict([default])).items()))


def series(pool: Pool, names: Sequence[str]) -> np.ndarray:
    """Return values of several names by seed, ``[S, T]``, over the seeds that have them all."""
    every = [pool.values(name) for name in names]
    seeds = sorted(pool.having(*names))
    rows = [values[seed].value for seed in seeds for values in every]
    return np.array(rows).reshape(len(seeds), len(names))


def beside(
    pool: Pool, names: Sequence[str], printed: Iterable[float]
) -> dict[str, np.ndarray]:
    """Return our shares and the paper's per cent as points above the first, ``[S, T]``, ``[T]``."""
    ours = 100 * series(pool, names)
    theirs = np.array([*printed])
    return {"here": ours - ours[:, :1], "in the paper": theirs - theirs[:1]}


def bands(
    pool: Pool, names: dict[str, str], less: str | None = None
) -> tuple[dict[str, np.ndarray], tuple[float, ...]]:
    """Return curves ``[S, T]`` by label, less the seed's curve ``less``, and their positions."""
    below = pool.curves(less) if less else {}
    curves: dict[str, dict[int, Curve]] = {}
    every = [*below.items()]
    for label, name in names.items():
        of_name = pool.curves(name)
        shown = of_name.keys() & below.keys() if less else of_name.keys()
        curves[label] = {seed: of_name[seed] for seed in of_name if seed in shown}
        every += curves[label].items()

    positions = every[0][1].x if every else ()
    for seed, curve in every:
        if curve.x != positions:
            where = f"{curve.name}, seed {seed}, has {len(curve.x)} positions"
            wanted = f"expected the {len(positions)} of the first curve"
            refuse("E-SHAPE", f"{where}; {wanted}")

    lines: dict[str, np.ndarray] = {}
    for label, by_seed in curves.items():
        rows: list[np.ndarray] = []
        for seed, curve in by_seed.items():
            row = np.array(curve.y)
            rows.append(row - below[seed].y if less else row)
        if rows:
            lines[label] = np.array(rows)
    return lines, positions


def tenths(pool: Pool, pairs: Mapping[str, tuple[str, str]]) -> dict[str, np.ndarray]:
    """Return how far curves are above others in each tenth of the steps, ``[S, 10]``, by line.

    ``pairs`` are a line's text to two curves' names.
    """
    lines = {}
    for line, (name, less) in pairs.items():
        for rows in bands(pool, {line: name}, less)[0].values():
            parts = [part.mean(axis=1) for part in np.array_split(rows, 10, axis=1)]
            lines[line] = np.stack(parts, axis=1)
    return lines


def choices(pool: Pool, kind: str) -> pd.DataFrame:
    """Say which LoRAs of banks of a kind each arm took over all seeds, and what came of it.

    The table is that of `experiments.banks.shares`, over seeds, targets and draws.
    """
    from moebook.experiments import banks  # with torch: what renders pages does without

    name = re.compile(rf"banks/{kind}/\w+/\d+/chosen/(\w+)")
    taken: dict[str, list[tuple[float, ...]]] = {}
    for run in pool.runs:
        for curve in run.curves:
            match = name.fullmatch(curve.name)
            if match:
                taken.setdefault(match[1], []).append(curve.y)
    reached: dict[str, float] = {}
    for arm in taken:
        reached[arm] = float(pool.effects(f"banks/{kind}/{arm}/accuracy").mean())
    members = banks.members(pool.last.settings)
    return banks.shares(taken, reached, members)


def of(pools: dict[str, Pool], protocol: str) -> Pool:
    """Return the pool of a protocol, or refuse with those that there are."""
    if protocol not in pools:
        hint = "there is none yet: see moebook study --help"
        if pools:
            hint = nearest(protocol, pools)
        refuse("E-PROTOCOL", f"no pool of protocol '{protocol}'; {hint}")
    return pools[protocol]
