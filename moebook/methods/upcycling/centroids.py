"""Routers that start at centroids of representations: TRSU (Sec. 4.2) and CRSU (Sec. 4.3).

The router of Cluster-aware Upcycling (arXiv 2604.13508), centroids of the FFN's input activations,
is `crsu` of ``collect(..., tensor="ffn_input")``. Its experts (a truncated SVD within each cluster)
and its self-distillation loss are left out: the abstract gives neither the matrix, nor the rank,
nor the loss.
"""

from __future__ import annotations

from functools import partial

import torch
from sklearn.cluster import MiniBatchKMeans
from torch import Tensor

from moebook.errors import refuse
from moebook.kernels import clusters
from moebook.methods.settings import whole
from moebook.methods.upcycling.representations import Representations
from moebook.methods.upcycling.starts import Start

BATCH = 1024  # rows a mini-batch of k-means, scikit-learn's own default
RESTARTS = 3  # seedings tried, the best kept
SEEDS = 2**32 - 1  # the largest seed that scikit-learn takes


def trsu(representations: Representations, experts: int | None = None, *, seed: int = 0) -> Start:
    """Start each expert at a centroid of one task's tokens: task-representation upcycling.

    The paper's recipe is the default after ``hardest`` and ``collect``: of each task the 5 % of
    instances with the highest perplexity, all their tokens' attention outputs. It does not say
    whether one mean stands for a task ("E = number of tasks" implies it) or several clusters.

    Args:
        representations: With one task for each group of experts. With two experts the paper gives
            it code and mathematics; text has no expert of its own.
        experts: E, a multiple of the number of tasks; as many as there are tasks by default. With
            C centroids a task, expert ``t * C + c`` is centroid c of task t, the largest cluster
            first, in every layer.
        seed: Of k-means++, when a task has several; from 0 to 2^32 - 1.

    Raises:
        Refusal: E-DATA when a task has fewer distinct points than centroids, naming it and the
            layer; E-NONFINITE for NaN or infinity; E-RANGE, E-TYPE.
    """
    tasks = len(representations.tasks)
    experts = tasks if experts is None else experts
    whole("experts", experts, 1)
    whole("seed", seed, 0, SEEDS)
    if experts % tasks:
        refuse("E-RANGE", f"experts is {experts}, expected a multiple of the {tasks} tasks")
    groups = []
    for task, name in enumerate(representations.tasks):
        where = f"task '{name}', "
        points = representations.points[:, representations.labels == task]
        found, labels = _by_layer(points, representations.layers, experts // tasks, seed, where)
        groups.append(_by_size(found, labels))
    return Start(torch.cat(groups, dim=1), representations.layers, representations.base)


def crsu(representations: Representations, experts: int, *, seed: int = 0) -> Start:
    """Start each expert at a centroid of all tokens: context-representation upcycling.

    The paper's recipe: ``collect(..., share=0.01)`` over the whole training mixture, then k-means
    with E clusters in every layer. Mini-batch k-means finds the clusters; one exact step of Lloyd's
    over all layers (`kernels.clusters`) follows, so that every centroid is the mean of its points.
    Lloyd's to the end took up to 70 times as long on a CPU, for an inertia at most 0.4 % less.

    Args:
        representations: Tasks are ignored.
        experts: E. Expert e gets centroid e, as k-means numbers them anew in every layer: "expert
            0" has no common meaning through the layers.
        seed: Of k-means++, of which three tries are made and the best kept; from 0 to 2^32 - 1.

    Raises:
        Refusal: E-DATA when E is above the number of distinct points of a layer; E-NONFINITE for
            NaN or infinity; E-RANGE, E-TYPE.
    """
    whole("experts", experts, 1)
    whole("seed", seed, 0, SEEDS)
    layers = representations.layers
    found, _ = _by_layer(representations.points, layers, experts, seed)
    return Start(found, layers, representations.base)


def _by_layer(
    points: Tensor, layers: tuple[int, ...], wanted: int, seed: int, where: str = ""
) -> tuple[Tensor, Tensor]:
    """Cluster each layer's points: centroids ``[L, wanted, D]`` and labels ``[L, S]``."""
    _check_points(points, layers, wanted, where)
    centroids = points[:, :1]
    if wanted > 1:
        size = min(BATCH, points.shape[1])
        make = partial(MiniBatchKMeans, wanted, n_init=RESTARTS, batch_size=size, random_state=seed)
        fitted = [make().fit(rows.numpy()) for rows in points]
        centroids = torch.stack([torch.from_numpy(each.cluster_centers_) for each in fitted])
    found = clusters(points, centroids)
    return found.means(centroids), found.ids


def _by_size(centroids: Tensor, labels: Tensor) -> Tensor:
    """Put each layer's centroids ``[L, E, D]`` in order, that of the largest cluster first."""
    experts = centroids.shape[1]
    sizes = torch.stack([torch.bincount(row, minlength=experts) for row in labels])
    order = sizes.argsort(dim=1, descending=True, stable=True)
    return centroids.gather(1, order.unsqueeze(-1).expand_as(centroids))


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
