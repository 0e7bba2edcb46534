"""The interval of a mean effect over seeds and test items, and the p-value that belongs to it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import optimize, stats

CONFIDENCE = 0.95


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
