"""The interval of a mean effect over seeds and test items, and the p-value that belongs to it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import optimize, stats

CONFIDENCE = 0.95
DRAWS = 20_000  # of a simulated study: the error of a chance is then below 0.4 points


def interval(effects: np.ndarray) -> tuple[float, float] | None:
    """Interval of the mean of effects by seed and test item, ``[S, I]``, at 95 %.

    Every seed is tested on the same items, so the variance of the mean is that of the mean over
    seeds plus that of the mean over items (what belongs to neither counts twice, which errs on the
    wide side). Each is multiplied by the square of its own quantile of Student's distribution, and
    the half width is the root of the sum (Banerjee, Sankhya 22, 1960): never narrower than
    Student's over the seeds alone. None for a single number; I is 1 where only means are known.
    """
    if effects.size == 1:
        return None
    middle, half = float(effects.mean()), half_width(effects, 1 - CONFIDENCE)
    return middle - half, middle + half


def another(values: Sequence[float]) -> tuple[float, float]:
    """Where one more of these values, ``[S]``, would lie in 95 of 100 cases if they are normal."""
    middle, half = np.mean(values), stats.t.isf((1 - CONFIDENCE) / 2, len(values) - 1)
    half *= np.std(values, ddof=1) * math.sqrt(1 + 1 / len(values))
    return float(middle - half), float(middle + half)


def half_width(effects: np.ndarray, chance: float) -> float:
    """Half the length of the interval of the mean of `[S, I]` effects that misses by `chance`."""
    means = [each for each in (effects.mean(axis=1), effects.mean(axis=0)) if len(each) > 1]
    variances = [float(each.var(ddof=1)) for each in means]
    return float(combined(variances, [len(each) for each in means], chance))


def combined(variances: Sequence[npt.ArrayLike], sizes: Sequence[int], chance: float) -> Any:
    """Half an interval's length from the variances between means, and how many means each is of."""
    quantiles = stats.t.isf(chance / 2, np.array(sizes) - 1)
    parts = zip(quantiles, variances, sizes, strict=True)
    return np.sqrt(sum(t**2 * np.asarray(v) / size for t, v, size in parts))


def p_value(effects: np.ndarray) -> float:
    """Two-sided p-value of a mean effect of zero: 1 less the confidence that just excludes zero."""
    middle = abs(float(effects.mean()))
    if half_width(effects, 0.5) == 0:
        return float(middle == 0)
    if half_width(effects, 1 - 1e-9) >= middle:
        return 1.0
    # Found on a log scale: the p-value of many items is as small as may be.
    gap = lambda log: half_width(effects, math.exp(log)) - middle  # noqa: E731
    lowest = math.log(1e-15)
    return 1e-15 if gap(lowest) <= 0 else math.exp(optimize.brentq(gap, lowest, -1e-9))


def sees(effects: np.ndarray, size: float, seeds: int, items: int = 0) -> float:
    """Simulate how often a study of so many seeds and test items would show a true effect.

    Its spreads are those of the `[S, I]` ``effects`` on record, and so is I if ``items`` is 0. What
    is drawn, alike at every call, are the mean (normal) and the two variances (chi-squares).
    """
    (count, before), of_seeds, of_items = effects.shape, effects.mean(axis=1), effects.mean(axis=0)
    rest = effects - of_seeds[:, None] - of_items + effects.mean()
    noise = float((rest**2).sum()) / max((count - 1) * (before - 1), 1)  # of neither seed nor item
    items = items or before
    rows = max(float(of_seeds.var(ddof=1)) - noise / before, 0) + noise / items
    columns = max(float(of_items.var(ddof=min(before - 1, 1))) - noise / count, 0) + noise / seeds
    parts = [(rows, seeds), (columns, items)][: 1 + (items > 1)]
    draw, sizes = np.random.default_rng(0), [number for _, number in parts]
    spread = math.sqrt(sum(v / n for v, n in parts) - noise / (seeds * items))
    means = size + spread * draw.normal(size=DRAWS)
    variances = [v * draw.chisquare(n - 1, DRAWS) / (n - 1) for v, n in parts]
    return float(np.mean(means > combined(variances, sizes, 1 - CONFIDENCE)))
