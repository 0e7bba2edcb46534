"""The interval of a mean effect: Student's, over seeds and test items."""

from __future__ import annotations

import math

import numpy as np
from scipy import stats

CONFIDENCE = 0.95


def interval(effects: np.ndarray) -> tuple[float, float] | None:
    """Interval of the mean at 95 %.

    Every seed is tested on the same items, so seeds and items are crossed, and the variance of the
    mean is that of the mean over seeds plus that of the mean over items (what is of neither is
    counted twice, which errs on the wide side). Its degrees of freedom are Satterthwaite's: few
    where seeds differ more than items, when three of them say little. A bootstrap would know no
    more than the range of three seeds and call 75 % of that 95.

    Args:
        effects: Effects by seed and test item, [S, I]; I is 1 where only means are known.

    Returns:
        Lower and upper end; None for a single number, about which nothing can be said.
    """
    if effects.size == 1:
        return None
    middle, variance, parts = float(effects.mean()), 0.0, 0.0
    for means in (effects.mean(axis=1), effects.mean(axis=0)):
        if len(means) > 1:
            share = float(means.var(ddof=1)) / len(means)
            variance, parts = variance + share, parts + share**2 / (len(means) - 1)
    if not parts:
        return middle, middle
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, variance**2 / parts)) * math.sqrt(variance)
    return middle - half, middle + half
