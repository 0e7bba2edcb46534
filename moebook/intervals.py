"""The interval of a mean effect over seeds and test items, and its p-value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import optimize, special

CONFIDENCE = 0.95
POWER = 0.8  # of studies that are to show an effect
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


def place(effects: np.ndarray) -> int:
    """Say where the interval of a mean lies: 0 above zero, 1 below it, 2 across it.

    The effects are ``[S, I]``, as in `interval`; a lone number lies by its sign.
    """
    mean = float(effects.mean())
    low, high = interval(effects) or (mean, mean)
    if low > 0:
        return 0
    return 1 if high < 0 else 2


def another(values: Sequence[float]) -> tuple[float, float]:
    """Where one more of these values, ``[S]``, would lie in 95 % of cases if normal."""
    count = len(values)
    quantile = _student(count - 1, (1 - CONFIDENCE) / 2)
    # The mean errs too: one more value has its own variance and that of the mean.
    half = quantile * (np.std(values, ddof=1) * math.sqrt(1 + 1 / count))
    mean = np.mean(values)
    return float(mean - half), float(mean + half)


def half_width(effects: np.ndarray, chance: float) -> float:
    """Half the length of the interval of a mean of `[S, I]` that misses by `chance`."""
    return float(combined(*_spreads(effects), chance))


def _spreads(effects: np.ndarray) -> tuple[list[float], list[int]]:
    """The variances of the means over seeds and over items, and how many means there are."""
    variances = []
    counts = []
    for means in (effects.mean(axis=1), effects.mean(axis=0)):
        if len(means) > 1:  # a single seed or item does not show how these differ
            variances.append(float(means.var(ddof=1)))
            counts.append(len(means))
    return variances, counts


def combined(
    variances: Sequence[npt.ArrayLike], counts: Sequence[int], chance: float
) -> Any:
    """Half an interval's length, from the variances between means and their counts.

    ``sqrt(sum_i t_i^2 v_i / n_i)`` with Student's quantile ``t_i`` of n_i - 1 degrees.
    """
    squared: Any = 0.0
    for variance, count in zip(variances, counts, strict=True):
        quantile = _student(count - 1, chance / 2)
        squared = squared + quantile**2 * np.asarray(variance) / count
    return np.sqrt(squared)


def _student(degrees: int, chance: float) -> float:
    """What Student's t of so many degrees exceeds with a chance."""
    return -float(special.stdtrit(degrees, chance))


def p_value(effects: np.ndarray) -> float:
    """Two-sided p of a mean of zero: 1 less the confidence that just excludes zero."""
    distance = abs(float(effects.mean()))
    spreads = _spreads(effects)
    if combined(*spreads, 0.5) == 0:  # nothing differs
        return float(distance == 0)
    if combined(*spreads, 1 - 1e-9) >= distance:
        return 1.0

    def gap(log_p: float) -> float:
        """By how much an interval that misses by p reaches beyond zero."""
        return float(combined(*spreads, math.exp(log_p))) - distance

    # On a log scale, since the p-value of many items is as small as may be.
    lowest = math.log(SMALLEST_P)
    if gap(lowest) <= 0:
        return SMALLEST_P
    return math.exp(optimize.brentq(gap, lowest, -1e-9))


def sees(effects: np.ndarray, size: float, seeds: int, items: int = 0) -> float:
    """Simulate how often a study of so many seeds and test items would show a true effect.

    How far seeds and items differ is taken from the ``effects`` ``[S, I]`` on record, and I too if
    ``items`` is 0. The record and the study need two seeds or more, since one alone has no spread.
    """
    return float(np.mean(size > _needed(effects, seeds, items)))


def visible(effects: np.ndarray) -> float:
    """The true effect that such a study, of as many seeds and items, shows in `POWER` of cases."""
    return float(np.quantile(_needed(effects, len(effects)), POWER))


def _needed(effects: np.ndarray, seeds: int, items: int = 0) -> np.ndarray:
    """How large an effect must be to be shown, in each of `DRAWS` simulated studies.

    What is drawn, alike at every call, are the mean (normal) and the two variances (chi-squares).
    """
    seeds_before, items_before = effects.shape
    of_seeds = effects.mean(axis=1)
    of_items = effects.mean(axis=0)

    # What belongs to neither seed nor item, and what it leaves in the means over items and seeds.
    rest = effects - of_seeds[:, None] - of_items + effects.mean()
    degrees = max((seeds_before - 1) * (items_before - 1), 1)
    noise = float((rest**2).sum()) / degrees
    between_seeds = float(of_seeds.var(ddof=1)) - noise / items_before
    between_items = float(of_items.var(ddof=min(items_before - 1, 1)))
    between_items -= noise / seeds_before

    # The same spreads in a study of other sizes; a single item has no variance to be drawn.
    items = items or items_before
    variances = [max(between_seeds, 0) + noise / items]
    sizes = [seeds]
    if items > 1:
        variances.append(max(between_items, 0) + noise / seeds)
        sizes.append(items)
    of_mean = sum(v / n for v, n in zip(variances, sizes, strict=True))
    of_mean -= noise / (seeds * items)  # which both of them count

    errors, ratios = _draws(*sizes)
    drawn = [
        variance * ratio for variance, ratio in zip(variances, ratios, strict=True)
    ]
    half_widths: np.ndarray = combined(drawn, sizes, 1 - CONFIDENCE)
    # It is shown where effect and error exceed the half width.
    return half_widths - math.sqrt(of_mean) * errors


@cache
def _draws(*sizes: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """Draw errors of a mean, in its deviations, and variances of samples over the true ones."""
    draw = np.random.default_rng(0)
    errors = draw.normal(size=DRAWS)
    ratios = [draw.chisquare(size - 1, DRAWS) / (size - 1) for size in sizes]
    return errors, ratios
