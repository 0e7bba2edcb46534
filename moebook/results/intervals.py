"""The interval of a mean effect over seeds and test items, and its p-value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import optimize, stats

CONFIDENCE = 0.95
DRAWS = 20_000  # of a simulated study: the error of a chance is then below 0.4 points
SMALLEST_P = 1e-15  # what is smaller counts as this


def interval(effects: np.ndarray) -> tuple[float, float] | None:
    """Interval of the mean of effects by seed and test item, ``[S, I]``, at 95 %.

    Every seed is tested on the same items, so the variance of the mean is that of the
    mean over seeds plus that of the mean over items (what belongs to neither counts
    twice, which errs on the wide side). Each is multiplied by the square of its own
    quantile of Student's distribution, and the half width is the root of the sum
    (Banerjee, Sankhya 22, 1960): never narrower than Student's over the seeds alone.
    None for a single number; I is 1 where only means are known.
    """
    if effects.size == 1:
        return None
    mean = float(effects.mean())
    half = half_width(effects, 1 - CONFIDENCE)
    return mean - half, mean + half


def another(values: Sequence[float]) -> tuple[float, float]:
    """Where one more of these values, ``[S]``, would lie in 95 % of cases if normal."""
    count = len(values)
    quantile = stats.t.isf((1 - CONFIDENCE) / 2, count - 1)
    # The mean errs too: one more value has its own variance and that of the mean.
    half = quantile * (np.std(values, ddof=1) * math.sqrt(1 + 1 / count))
    mean = np.mean(values)
    return float(mean - half), float(mean + half)


def half_width(effects: np.ndarray, chance: float) -> float:
    """Half the length of the interval of a mean of `[S, I]` that misses by `chance`."""
    variances = []
    counts = []
    for means in (effects.mean(axis=1), effects.mean(axis=0)):
        if len(means) > 1:  # a single seed or item does not show how these differ
            variances.append(float(means.var(ddof=1)))
            counts.append(len(means))
    return float(combined(variances, counts, chance))


def combined(variances: Sequence[npt.ArrayLike], counts: Sequence[int], chance: float) -> Any:
    """Half an interval's length, from the variances between means and their counts.

    ``sqrt(sum_i t_i^2 v_i / n_i)`` with Student's quantile ``t_i`` of n_i - 1 degrees.
    """
    squared: Any = 0.0
    for variance, count in zip(variances, counts, strict=True):
        quantile = stats.t.isf(chance / 2, count - 1)
        squared = squared + quantile**2 * np.asarray(variance) / count
    return np.sqrt(squared)


def p_value(effects: np.ndarray) -> float:
    """Two-sided p of a mean of zero: 1 less the confidence that just excludes zero."""
    distance = abs(float(effects.mean()))
    if half_width(effects, 0.5) == 0:  # nothing differs
        return float(distance == 0)
    if half_width(effects, 1 - 1e-9) >= distance:
        return 1.0

    def gap(log_p: float) -> float:
        """By how much an interval that misses by p reaches beyond zero."""
        return half_width(effects, math.exp(log_p)) - distance

    # On a log scale, since the p-value of many items is as small as may be.
    lowest = math.log(SMALLEST_P)
    if gap(lowest) <= 0:
        return SMALLEST_P
    return math.exp(optimize.brentq(gap, lowest, -1e-9))


def sees(effects: np.ndarray, size: float, seeds: int, items: int = 0) -> float:
    """Simulate how often a study of so many seeds and items would show a true effect.

    Its spreads are those of the `[S, I]` ``effects`` on record, and so is I if
    ``items`` is 0. What is drawn, alike at every call, are the mean (normal) and the
    two variances (chi-squares).
    """
    recorded_seeds, recorded_items = effects.shape
    items = items or recorded_items
    seed_means = effects.mean(axis=1)  # [S]
    item_means = effects.mean(axis=0)  # [I]

    # Crossed random effects: noise is the variance of neither seeds nor items.
    residuals = effects - seed_means[:, None] - item_means + effects.mean()
    degrees = max((recorded_seeds - 1) * (recorded_items - 1), 1)
    noise = float((residuals**2).sum()) / degrees

    # A mean holds a share of the noise: the record's goes, the new study's comes.
    between_seeds = float(seed_means.var(ddof=1)) - noise / recorded_items
    seed_variance = max(between_seeds, 0) + noise / items
    between_items = float(item_means.var(ddof=min(recorded_items - 1, 1)))
    between_items -= noise / recorded_seeds
    item_variance = max(between_items, 0) + noise / seeds

    variances = [seed_variance]
    counts = [seeds]
    if items > 1:
        variances.append(item_variance)
        counts.append(items)

    # Both variances hold the noise of a cell; the mean has it once.
    variance_of_mean = 0.0
    for variance, count in zip(variances, counts, strict=True):
        variance_of_mean += variance / count
    variance_of_mean -= noise / (seeds * items)

    rng = np.random.default_rng(0)
    means = size + math.sqrt(variance_of_mean) * rng.normal(size=DRAWS)
    estimates = []
    for variance, count in zip(variances, counts, strict=True):
        squares = rng.chisquare(count - 1, DRAWS)
        estimates.append(variance * squares / (count - 1))
    return float(np.mean(means > combined(estimates, counts, 1 - CONFIDENCE)))
