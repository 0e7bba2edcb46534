"""The interval of a mean effect: a bootstrap over seeds and test items, scipy's."""

from __future__ import annotations

import numpy as np
from scipy import stats

CONFIDENCE = 0.95
RESAMPLES = 2000
BATCH = 200_000
"""Numbers drawn at a time: bounds the memory to a few megabytes."""


def interval(effects: np.ndarray) -> tuple[float, float] | None:
    """Percentile interval of the mean at 95 %.

    Every seed is tested on the same items, so seeds and items are crossed: each is resampled for
    itself. With one seed only items are resampled, with one column only seeds.

    Args:
        effects: Effects by seed and test item, [S, I]; I is 1 where only means are known.

    Returns:
        Lower and upper end; None for a single number, about which nothing can be said.
    """
    if effects.size == 1:
        return None
    crossed = min(effects.shape) > 1

    def mean(seeds: np.ndarray, items: np.ndarray, axis: int = -1) -> np.ndarray:
        means = effects[seeds.astype(int)].mean(axis=-2)
        return np.take_along_axis(means, items.astype(int), axis=-1).mean(axis=axis)

    found = stats.bootstrap(
        tuple(map(np.arange, effects.shape)) if crossed else (effects.ravel(),),
        mean if crossed else np.mean,
        n_resamples=RESAMPLES,
        confidence_level=CONFIDENCE,
        method="percentile",
        vectorized=True,
        batch=max(1, BATCH // effects.size),
        rng=np.random.default_rng(0),
    ).confidence_interval
    return float(found.low), float(found.high)
