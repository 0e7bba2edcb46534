"""Cases of choosing among many: nearest rows, duplicates, groups of LoRAs, clusters."""

from __future__ import annotations

import math
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
import torch

from moebook import kernels
from moebook.bench import peers
from moebook.bench.case import Axis, Case, Op, Run, number_format, size_of
from moebook.bench.floors import Product

Array = np.ndarray[Any, Any]
LOOPED = 10_000
"""Most rows of which the paper's loops are asked to compare all pairs."""
LISTED = 1_000_000
"""Most groups that the peer is asked to list."""


def _unit(rows: Array) -> Array:
    """Bring rows to length 1, as encoders give them."""
    return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True))


def _drawn(rng: np.random.Generator, rows: int, width: int) -> Array:
    return _unit(rng.standard_normal((rows, width), dtype=np.float32))


def _nearest(device: torch.device, S: int, K: int, D: int, C: int, bits: int = 0) -> Case:
    """The C rows of a pool that are nearest to any of K shots (Rocket Eq. 11 to 13)."""
    rng = np.random.default_rng(0)
    pool, shots = _drawn(rng, S, D), _drawn(rng, K, D)
    dtype = number_format(device, bits)
    held, asked = (torch.from_numpy(part).to(device, dtype) for part in (pool, shots))

    def at_once() -> Any:
        near = (pool / np.linalg.norm(pool, axis=1, keepdims=True) @ shots.T).max(axis=1)
        first = np.argpartition(-near, C - 1)[:C]
        return first[np.argsort(-near[first], kind="stable")]

    def by_sklearn() -> Run:
        cosine = peers.module("sklearn.metrics.pairwise").cosine_similarity
        return lambda: np.argsort(-cosine(pool, shots).max(axis=1), kind="stable")[:C]

    def by_sentences() -> Run:
        search = peers.module("sentence_transformers.util").semantic_search
        return partial(search, asked, held, top_k=C)

    case = Case(size_of(held))
    case.add("ours", lambda: kernels.nearest_rows(held, asked, C))
    case.floor([Product(S, D, K)], device, dtype)
    case.add("numpy, all at once", at_once, host=True)
    case.invite("scikit-learn", by_sklearn, host=True)
    case.invite("semantic_search", by_sentences)
    return case


def _duplicates(device: torch.device, S: int, E: int, D: int, bits: int = 0) -> Case:
    """Alg. 2's near-duplicates among S rows, each near to one of E texts, against its two loops."""
    rng = np.random.default_rng(0)
    centres = _drawn(rng, E, D)
    vectors = _unit(centres[rng.integers(E, size=S)] + 0.3 * _drawn(rng, S, D))
    vectors, near = vectors.astype(np.float32), rng.random(S).astype(np.float32)
    dtype = number_format(device, bits)
    held, key = torch.from_numpy(vectors).to(device, dtype), torch.from_numpy(near).to(device)
    case = Case(size_of(held, key))
    case.add("ours", lambda: kernels.duplicates(held, key, 0.9))
    case.floor([Product(S, D, S)], device, dtype)
    if S <= LOOPED:
        case.add("the paper's loops", lambda: literal_duplicates(vectors, near, 0.9), host=True)
    else:
        case.absent["the paper's loops"] = f"would compare {S * S:,} pairs one by one"
    return case


def literal_duplicates(vectors: Array, near: Array, threshold: float) -> Array:
    """Run Alg. 2, lines 5 to 13, as two loops over the rows that are still there."""
    unit = _unit(vectors)
    alive = [True] * len(unit)
    for i in range(len(unit)):
        for j in range(len(unit)):
            if i == j or not (alive[i] and alive[j]):
                continue
            if unit[i] @ unit[j] > threshold:
                alive[j if near[i] > near[j] else i] = False
    return np.flatnonzero(alive)


def _groups(device: torch.device, M: int, N: int, G: int = 1000) -> Case:
    """The G best groups of N among M candidates (Rocket Alg. 1), against itertools."""
    rng = np.random.default_rng(0)
    noise = rng.standard_normal((M, M)) / 20
    pairs, worth = noise @ noise.T, np.stack([rng.permutation(M) + 1 for _ in range(2)])
    alike, summed = (torch.from_numpy(part).to(device) for part in (pairs, worth.sum(axis=0)))
    case = Case(pairs.nbytes)
    case.add("ours", lambda: kernels.groups(alike, summed, N, best=G))
    if (number := math.comb(M, N)) <= LISTED:
        case.add("itertools", lambda: [t for t, _ in literal_groups(pairs, worth, N)], host=True)
    else:
        case.absent["itertools"] = f"would hold {number:,} groups in memory, one by one"
    return case


def literal_groups(pairs: Array, worth: Array, N: int) -> list[tuple[int, tuple[int, ...]]]:
    """Rank all groups by Alg. 1 in plain Python: (sum of the three ranks, group), best first.

    Args:
        pairs: ``[M, M]`` similarities.
        worth: ``[2, M]``, each candidate's R_P and R_A.
        N: Members of a group.
    """
    means, sums, groups = [], [], list(combinations(range(len(pairs)), N))
    for group in groups:
        means.append(sum(pairs[i, j] for i, j in combinations(group, 2)))
        sums.append(sum(int(worth[0, i] + worth[1, i]) for i in group))
    order = sorted(range(len(groups)), key=means.__getitem__)
    ranks = {place: rank for rank, place in enumerate(order, start=1)}
    totals = [total + ranks[place] for place, total in enumerate(sums)]
    return sorted(zip(totals, groups, strict=True))


def _clusters(device: torch.device, S: int, D: int, E: int, L: int) -> Case:
    """One step of Lloyd's in all layers (the end of CRSU), from the same centres for everyone.

    scikit-learn's KMeans cannot be asked for the step alone: it centres the points before it, and
    assigns them once more behind it. Its MiniBatchKMeans can: its one batch are all points.
    """
    torch.manual_seed(0)
    centres = torch.randn(L, E, D)
    points = centres[:, torch.arange(S) % E] + torch.randn(L, S, D)
    dtype = number_format(device)
    held, asked = points.to(device, dtype), centres.to(device, dtype)
    layers = [(rows.numpy(), own.numpy()) for rows, own in zip(points, centres, strict=True)]

    def by_kmeans() -> Run:
        make = partial(peers.module("sklearn.cluster").KMeans, E, n_init=1, max_iter=1)
        return lambda: [make(init=own).fit(rows) for rows, own in layers]

    def by_batches() -> Run:
        kind = peers.module("sklearn.cluster").MiniBatchKMeans
        make = partial(kind, E, n_init=1, compute_labels=False)  # behind the step, once more
        return lambda: [make(init=own).partial_fit(rows) for rows, own in layers]

    case = Case(size_of(held))
    case.add("ours", lambda: kernels.clusters(held, asked))
    case.floor([Product(S, D, E, L)], device, dtype)
    case.invite("KMeans, one step and labels", by_kmeans, host=True)
    case.invite("MiniBatchKMeans", by_batches, host=True)
    return case


NEAREST = Op(
    _nearest,
    tiny={"pool": {"S": 64, "K": 3, "D": 8, "C": 5}},
    small={"pool": {"S": 16384, "K": 50, "D": 384, "C": 1000}},
    full={"pool": {"S": 143000, "K": 50, "D": 384, "C": 1000}},
    model={"pool": {"S": 143000, "K": 50, "D": 1024, "C": 5000}},
    T=Axis("S", "rows of the pool", (4096, 8192, 16384, 32768)),
    E=Axis("K", "shots", (12, 25, 50, 100)),
    N=Axis("C", "rows chosen", (250, 500, 1000, 2000)),
)
DUPLICATES = Op(
    _duplicates,
    tiny={"candidates": {"S": 20, "E": 6, "D": 8}},
    small={"candidates": {"S": 600, "E": 200, "D": 384}},
    full={"candidates": {"S": 1500, "E": 500, "D": 384}},
    model={
        "candidates": {"S": 5000, "E": 1666, "D": 1024},
        "pool": {"S": 143000, "E": 47666, "D": 1024},
    },
    T=Axis("S", "rows", (150, 300, 600, 1200)),
    E=Axis("E", "texts that rows are near to", (50, 100, 200, 400)),
    N=Axis("D", "numbers in a row", (96, 192, 384, 768)),
)
_GROUPS = {"groups": {"M": 20, "N": 5}, "eight_of_38": {"M": 38, "N": 8}}
GROUPS = Op(
    _groups,
    tiny={"groups": {"M": 6, "N": 3}},
    small={"groups": {"M": 14, "N": 5, "G": 1000}},
    full=_GROUPS,
    model=_GROUPS,
    T=Axis("G", "groups listed", (10, 100, 1000)),
    E=Axis("M", "LoRAs to choose from", (7, 10, 14, 18)),
    N=Axis("N", "LoRAs in a group", (3, 4, 5, 6)),
)
CLUSTERS = Op(
    _clusters,
    tiny={"layers": {"S": 64, "D": 8, "E": 2, "L": 2}},
    small={"layers": {"S": 4096, "D": 128, "E": 8, "L": 2}},
    full={"layers": {"S": 16384, "D": 512, "E": 8, "L": 4}},
    model={"layers": {"S": 65536, "D": 4096, "E": 8, "L": 4}},
    T=Axis("S", "points", (1024, 2048, 4096, 8192)),
    E=Axis("E", "centres", (4, 8, 16, 32)),
    N=Axis("L", "layers side by side", (1, 2, 4)),
)
