"""What the choice of experts and of data would be under other settings, and how it scales."""

from __future__ import annotations

import tracemalloc
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from sklearn.manifold import TSNE

from moebook import runtime
from moebook.methods.rocket import augmentation, selection
from moebook.methods.rocket.config import Config
from moebook.methods.rocket.pipeline import Case

THRESHOLDS = (0.95, 0.9, 0.8, 0.7, 0.6)
SAMPLERS: dict[str, dict[str, Any]] = {
    "cosine": {},
    "convex hull": {"sampler": "hull"},
    "kernel density, 0.1": {"sampler": "kde", "gamma": 0.1},
}
"""Samplers of the map, by title: what each changes."""
BLOCK = 4096
Array = np.ndarray[Any, Any]


def choices(
    case: Case, config: Config, bank: Collection[str], similarities: pd.DataFrame
) -> dict[str, bool]:
    """Say whether normalised ranks would change the experts, and whether a leak would be chosen.

    Args:
        case: The task and its shots; what it scores beyond the bank is what leaked.
        config: Settings of the choice.
        bank: Names of the LoRAs that passed the guard.
        similarities: From `selection.similarity`, of all scored LoRAs.
    """
    scores = case.scores(config.shots)
    clean = scores[scores.index.isin(list(bank))]
    normalised = selection.select(clean, similarities, replace(config, ranking="normalised"))
    usual = selection.select(clean, similarities, config)
    unguarded = selection.select(scores, similarities, config)
    return {
        "changed by normalising": set(usual.experts) != set(normalised.experts),
        "leaked LoRA chosen": not set(unguarded.experts) <= set(bank),
    }


def kept(cases: Mapping[str, Case], vectors: Array, config: Config) -> pd.DataFrame:
    """Return the share of the C nearest rows that is kept, by task and threshold (Figure 9).

    Args:
        cases: By task.
        vectors: Embeddings of the open data ``[S, D]``.
        config: Settings of the choice.
    """
    found: dict[str, list[float]] = {}
    for task, case in cases.items():
        for threshold in THRESHOLDS:
            changed = replace(config, threshold=threshold)
            some = augmentation.choose(case.vectors, [vectors], changed)
            found.setdefault(task, []).append(len(some.index) / len(some.candidates))
    return pd.DataFrame.from_dict(found, orient="index", columns=THRESHOLDS)


def streamed(shots: Array, rows: int, config: Config) -> dict[str, float]:
    """Choose among made-up rows, block by block, and measure time and memory.

    Args:
        shots: Embeddings of the shots ``[K, D]``.
        rows: S, unit vectors drawn at random.
        config: Settings of the choice.

    Returns:
        ``seconds``, and ``bytes at the peak`` beside the ``bytes of all rows`` together, float32.
    """
    rng, width = np.random.default_rng(0), shots.shape[1]
    heights = [min(BLOCK, rows - start) for start in range(0, rows, BLOCK)]
    heap = (rng.standard_normal((height, width), dtype=np.float32) for height in heights)
    tracemalloc.start()
    try:
        with runtime.stopwatch() as lap:
            augmentation.choose(shots, heap, config)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    return {
        "seconds": lap.seconds,
        "bytes at the peak": peak,
        "bytes of all rows": 4 * width * rows,
    }


def maps(shots: Array, vectors: Array, config: Config, *, seed: int) -> dict[str, dict[str, Array]]:
    """Lay shots and open data out in the plane (t-SNE), with what each sampler takes (Figure 10).

    Args:
        shots: Embeddings of the shots ``[K, D]``.
        vectors: Those of the open data ``[S, D]``.
        config: Settings of the choice.
        seed: Of the map and of samplers that draw at random.

    Returns:
        A panel for each of `SAMPLERS`: ``open data``, ``chosen`` and ``shots`` ``[n, 2]``.
    """
    together = np.concatenate([vectors, shots])
    near = min(30, len(together) // 4)
    flat = TSNE(perplexity=near, random_state=seed).fit_transform(together)
    found = {}
    for name, changes in SAMPLERS.items():
        some = augmentation.choose(shots, [vectors], replace(config, **changes), seed=seed)
        clouds = {"open data": flat[: len(vectors)], "chosen": flat[some.index]}
        found[name] = clouds | {"shots": flat[len(vectors) :]}
    return found
