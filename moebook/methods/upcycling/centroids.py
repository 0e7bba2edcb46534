"""Routers that start at centroids of representations: TRSU (Sec. 4.2) and CRSU (Sec. 4.3).

The router of Cluster-aware Upcycling (arXiv 2604.13508), centroids of the FFN's input activations,
is `crsu` of ``collect(..., tensor="ffn_input")``. Its experts (a truncated SVD within each cluster)
and its self-distillation loss are left out: the abstract gives neither the matrix, nor the rank,
nor the loss.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from scipy.optimize import linear_sum_assignment
from sklearn.cluster import MiniBatchKMeans
from torch import Tensor

from moebook.errors import refuse
from moebook.kernels import clusters
from moebook.methods.settings import chosen, whole
from moebook.methods.upcycling.representations import Chunk, Representations
from moebook.methods.upcycling.starts import Start

SEEDINGS = ("k-means++", "random")
ASSIGNMENTS = ("found", "size", "aligned")
BATCH = 1024  # rows a mini-batch of k-means, scikit-learn's own default
RESTARTS = 3  # seedings tried, the best kept


def trsu(
    representations: Representations,
    *,
    per_task: int = 1,
    seeding: str = "k-means++",
    seed: int = 0,
) -> Start:
    """Start each expert at a centroid of one task's tokens: task-representation upcycling.

    The paper's recipe is the default after ``hardest`` and ``collect``: of each task the 5 % of
    instances with the highest perplexity, all their tokens' attention outputs. It does not say
    whether one mean stands for a task ("E = number of tasks" implies it) or several clusters.

    Args:
        representations: With one task for each group of experts. With two experts the paper gives
            it code and mathematics; text has no expert of its own.
        per_task: Centroids a task: E = tasks x per_task. Expert ``t * per_task + c`` is centroid c
            of task t, the largest cluster first, in every layer.
        seeding: Of k-means, when a task has several: ``"k-means++"`` or ``"random"`` points.
        seed: Of k-means.

    Raises:
        Refusal: E-DATA when a task has fewer distinct points than centroids, naming it and the
            layer; E-NONFINITE for NaN or infinity; E-RANGE, E-CHOICE.
    """
    whole("per_task", per_task, 1)
    chosen("seeding", seeding, SEEDINGS)
    groups = []
    for task, name in enumerate(representations.tasks):
        where = f"task '{name}', "
        points = representations.points[:, representations.labels == task]
        found, labels = _by_layer(points, representations.layers, per_task, seeding, seed, where)
        groups.append(_arranged(found, labels, "size"))
    return Start(torch.cat(groups, dim=1), representations.layers, representations.base)


def crsu(
    representations: Representations,
    experts: int,
    *,
    seeding: str = "k-means++",
    assignment: str = "found",
    seed: int = 0,
) -> Start:
    """Start each expert at a centroid of all tokens: context-representation upcycling.

    The paper's recipe: ``collect(..., share=0.01)`` over the whole training mixture, then k-means
    with E clusters in every layer. Mini-batch k-means finds the clusters; one exact step of Lloyd's
    over all layers (`kernels.clusters`) follows, so that every centroid is the mean of its points.
    Lloyd's to the end took up to 70 times as long on a CPU, for an inertia at most 0.4 % less.

    Args:
        representations: Tasks are ignored.
        experts: E.
        seeding: Of k-means: ``"k-means++"`` or ``"random"`` points; three tries, the best kept.
        assignment: Which expert gets which centroid. ``"found"``: as k-means numbers them, anew in
            every layer; ``"size"``: the largest cluster first; ``"aligned"``: each layer's clusters
            take the numbers of those of the layer before that share most tokens with them. While
            experts are equal copies this cannot change what a layer computes; it decides whether
            "expert 0" means the same through the layers, as averages over layers (Table 7) suppose.
        seed: Of k-means.

    Raises:
        Refusal: E-DATA when E is above the number of distinct points of a layer; E-NONFINITE for
            NaN or infinity; E-RANGE, E-CHOICE.
    """
    whole("experts", experts, 1)
    chosen("seeding", seeding, SEEDINGS)
    chosen("assignment", assignment, ASSIGNMENTS)
    layers = representations.layers
    found, labels = _by_layer(representations.points, layers, experts, seeding, seed)
    return Start(_arranged(found, labels, assignment), layers, representations.base)


def crsu_streamed(
    chunks: Iterable[Chunk], experts: int, *, base: str | None = None, seed: int = 0
) -> Start:
    """CRSU over a stream of any length: every chunk moves the centroids once and is forgotten.

    For samples too large to hold. Held are, for each layer, E centroids and at most ``BATCH`` rows
    (or ``10 * E``) beside the newest chunk: ``L * D * (E + rows)`` numbers. The stream should come
    shuffled over tasks: the first rows seed the centroids.

    Args:
        chunks: From `representations.sampled`, for the paper's recipe with ``share=0.01``.
        experts: E.
        base: Fingerprint of the model, so that `upcycle` can check it.
        seed: Of k-means.

    Raises:
        Refusal: Those of `crsu`.
    """
    whole("experts", experts, 1)
    rows = max(BATCH, 10 * experts)
    held: list[Tensor] = []
    means: list[MiniBatchKMeans] = []
    for chunk in chunks:
        held.append(chunk.points)
        if sum(part.shape[1] for part in held) >= rows:
            means = _moved(means, torch.cat(held, dim=1), experts, seed)
            held = []
    if held and (not means or sum(part.shape[1] for part in held) >= experts):
        means = _moved(means, torch.cat(held, dim=1), experts, seed)
    if not means:
        refuse("E-DATA", "the stream of representations is empty: give it text, or a larger share")
    weights = torch.stack([torch.from_numpy(each.cluster_centers_).float() for each in means])
    return Start(weights, tuple(range(len(means))), base)


def _moved(
    means: list[MiniBatchKMeans], points: Tensor, experts: int, seed: int
) -> list[MiniBatchKMeans]:
    """Move every layer's centroids by one mini-batch, making them first when there are none."""
    if not means:
        _check_points(points, tuple(range(len(points))), experts, "")
        means = [_means(experts, "k-means++", seed, len(points[0])) for _ in points]
    for each, rows in zip(means, points, strict=True):
        each.partial_fit(rows.numpy())
    return means


def _means(experts: int, seeding: str, seed: int, rows: int) -> MiniBatchKMeans:
    return MiniBatchKMeans(
        experts, init=seeding, n_init=RESTARTS, batch_size=min(BATCH, rows), random_state=seed
    )


def _by_layer(
    points: Tensor, layers: tuple[int, ...], wanted: int, seeding: str, seed: int, where: str = ""
) -> tuple[Tensor, Tensor]:
    """Cluster each layer's points: centroids ``[L, wanted, D]`` and labels ``[L, S]``."""
    _check_points(points, layers, wanted, where)
    centroids = points[:, :1]
    if wanted > 1:
        fitted = [_means(wanted, seeding, seed, len(rows)).fit(rows.numpy()) for rows in points]
        centroids = torch.stack([torch.from_numpy(each.cluster_centers_) for each in fitted])
    found = clusters(points, centroids)
    return found.means(centroids), found.ids


def _arranged(centroids: Tensor, labels: Tensor, assignment: str) -> Tensor:
    """Reorder each layer's centroids ``[L, E, D]`` by the assignment."""
    experts = centroids.shape[1]
    if assignment == "found" or experts == 1:
        return centroids
    if assignment == "size":
        sizes = torch.stack([torch.bincount(row, minlength=experts) for row in labels])
        order = sizes.argsort(dim=1, descending=True, stable=True)
        return centroids.gather(1, order.unsqueeze(-1).expand_as(centroids))
    arranged, before = [centroids[0]], labels[0]
    for layer in range(1, len(centroids)):
        shared = torch.bincount(before * experts + labels[layer], minlength=experts**2)
        _, order = linear_sum_assignment(shared.view(experts, experts).numpy(), maximize=True)
        rank = torch.from_numpy(order).argsort()  # cluster -> the expert it becomes
        arranged.append(centroids[layer][torch.from_numpy(order)])
        before = rank[labels[layer]]
    return torch.stack(arranged)


def _check_points(points: Tensor, layers: tuple[int, ...], wanted: int, where: str) -> None:
    """Refuse NaN and infinity, and fewer distinct points than clusters."""
    for layer, rows in zip(layers, points, strict=True):
        if not rows.isfinite().all():
            refuse("E-NONFINITE", f"{where}layer {layer}: representations hold NaN or infinity")
        distinct: set[bytes] = set()
        for row in rows.numpy():
            distinct.add(row.tobytes())
            if len(distinct) >= wanted:
                break
        else:
            refuse(
                "E-DATA",
                f"{where}layer {layer}: {wanted} centroids asked for, but there are only"
                f" {len(distinct)} distinct points: fewer experts, or more text",
            )
