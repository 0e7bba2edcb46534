"""How open rows are drawn by K shots: each has a key, and the C largest of a stream are kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor

from moebook import kernels
from moebook.methods.rocket.config import Config

Array = np.ndarray[Any, Any]
INSIDE = 1e-6  # largest distance at which a point still counts as inside the hull


def draw(
    shots: Array, blocks: Iterable[Array], config: Config, budget: int, *, seed: int
) -> kernels.Largest:
    """Draw ``budget`` rows of a stream by ``config.sampler``: those with the largest keys."""
    stream = map(torch.from_numpy, blocks)
    if config.sampler == "maximum":
        return kernels.nearest_rows(stream, torch.from_numpy(shots), budget)
    key = keys(shots, config, seed)

    def keys_of(rows: Tensor, _: float) -> tuple[Tensor, Tensor]:
        return torch.arange(len(rows)), torch.from_numpy(key(rows.numpy()).astype(np.float64))

    return kernels.largest(stream, keys_of, budget)


def keys(shots: Array, config: Config, seed: int) -> Callable[[Array], Array]:
    """Return the key of ``config.sampler`` other than ``maximum`` for shots ``[K, D]``.

    Random draws are largest-key draws too: uniform keys for ``random`` and ``hull``, and for
    ``kde`` the logarithm of Eq. 17 plus Gumbel noise, which draws without replacement in
    proportion to p. They are repeatable and do not depend on the blocks.
    """
    rng = np.random.default_rng(seed)
    table: dict[str, Callable[[Array], Array]] = {
        "centroid": lambda block: -np.linalg.norm(block - shots.mean(axis=0), axis=1),
        "random": lambda block: rng.random(len(block)),
        "hull": lambda block: np.where(
            inside_hull(shots, block, config.components), rng.random(len(block)), -np.inf
        ),
        "kde": lambda block: (
            log_density(shots, block, config.gamma) - np.log(-np.log(rng.random(len(block))))
        ),
    }
    return table[config.sampler]


def nearness(shots: Array, block: Array) -> Array:
    """Return each row's largest cosine over the shots (Eq. 11 to 13), ``[b]``."""
    return np.asarray((unit(block) @ unit(shots).T).max(axis=1))


def log_density(shots: Array, block: Array, gamma: float) -> Array:
    """Return the logarithm of Eq. 17 with a Gaussian kernel of bandwidth gamma, ``[b]``.

    Warning:
        Unit vectors are at most 2 apart: from gamma = 2 upwards p varies by less than a factor of
        1.65, and the draw is close to uniform.
    """
    squares = (block**2).sum(1)[:, None] + (shots**2).sum(1)[None] - 2.0 * block @ shots.T
    exponents = -np.maximum(squares, 0).astype(np.float64) / (2 * gamma**2)
    constant = math.log(len(shots) * gamma) + math.log(2 * math.pi) / 2
    return np.asarray(np.logaddexp.reduce(exponents, axis=1) - constant)


def inside_hull(shots: Array, block: Array, components: int) -> Array:
    """Say which rows lie in the convex hull of the shots (Eq. 16), ``[b]`` booleans.

    A row is inside when non-negative weights that sum to 1 rebuild it: non-negative least squares.
    Taken on the first principal axes of the shots, since K points in the encoder's own space of
    hundreds of dimensions enclose nothing.
    """
    centre = shots.mean(axis=0)
    axes = np.linalg.svd(shots - centre, full_matrices=False)[2][:components]
    corners, points = (shots - centre) @ axes.T, (block - centre) @ axes.T
    low, high = corners.min(axis=0) - INSIDE, corners.max(axis=0) + INSIDE
    found = ((points >= low) & (points <= high)).all(axis=1)
    system = np.vstack([corners.T, np.ones(len(corners))]).astype(np.float64)
    for row in np.flatnonzero(found):
        found[row] = nnls(system, np.append(points[row], 1.0))[1] <= INSIDE
    return found


def unit(vectors: Array) -> Array:
    """Scale rows to length 1; a zero row stays zero (cosine 0 with everything)."""
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(vectors / np.where(norms > 0, norms, 1))
