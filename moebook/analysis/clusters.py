"""Do representations cluster by domain? Router initialisation's Fig. 1, counted."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from pydantic import Field
from sklearn.cluster import KMeans
from sklearn.decomposition import PCA
from torch import Tensor

from moebook.errors import extra, refuse
from moebook.kernels.dispatch import indices, shapes
from moebook.settings import FINITE, Each, Seed, checked

__all__ = [
    "panels",
    "project",
    "purity",
]

NEIGHBOURS = 15  # umap-learn's own default
Plane = npt.NDArray[np.float32]
Points = npt.NDArray[np.float32]
Method = Literal["umap", "pca"]


@checked
def purity(
    points: Annotated[Tensor, FINITE], labels: Tensor, *, seed: Seed = 0
) -> pd.DataFrame:
    """Cluster each layer's points without labels; count how well clusters are domains.

    Points are ``[L, S, D]``, labels ``[S]`` their domains, of which there are as many
    as clusters: purity grows with their number. One row a layer: ``layer`` (its place
    among the L), ``purity``, the share of points that belong to the most frequent
    domain of their cluster, and ``largest``, the share of the largest domain.
    """
    tensors = {"points": (points, "L S D"), "labels": (labels, "S", "real")}
    shapes("purity", tensors, empty="")
    each_layer = _vectors("purity", points)
    domains = labels.unique(return_inverse=True)[1].numpy()  # [S], from 0 on
    sizes = np.bincount(domains)
    rows = []
    for layer, vectors in enumerate(each_layer):
        kmeans = KMeans(len(sizes), n_init=4, random_state=seed)
        table = pd.crosstab(kmeans.fit_predict(vectors), domains)  # clusters by domains
        # Purity: sum over clusters of the points of their main domain, over S.
        pure = float(table.max(axis=1).sum()) / len(domains)
        rows.append((layer, pure, float(sizes.max()) / len(domains)))
    return pd.DataFrame(rows, columns=["layer", "purity", "largest"])


def _vectors(name: str, points: Tensor) -> Points:
    """Return points as float32, of which squared distances overflow before they do themselves."""
    wide = points.detach().float()
    if not wide.square().sum(-1).isfinite().all():
        far = "points are too far from 0 for their distances: scale them"
        refuse("E-NONFINITE", f"{name}: {far}")
    return wide.numpy()


@checked
def project(
    points: Annotated[Tensor, FINITE], method: Method = "umap", *, seed: Seed = 0
) -> Plane:
    """Lay out each layer's points ``[L, S, D]`` in a plane of its own, ``[L, S, 2]``.

    Each layer is centred and scaled to a largest coordinate of 1. Distances between far
    groups mean nothing in UMAP's plane, and it draws groups even where there is little
    reason for them: it shows what `purity` counts, it does not prove it. (The paper's
    "hyperbolic space" is not in its figure.) PCA spares the 13 seconds (measured) for
    which UMAP compiles in every process.
    """
    fewest = NEIGHBOURS + 1 if method == "umap" else 2  # a point and its neighbours
    sizes = shapes(method, {"points": (points, "L S D")}, empty="")
    if sizes["S"] < fewest or sizes["D"] < 2:
        shape = f"{tuple(points.shape)}, expected [L, S >= {fewest}, D >= 2]"
        refuse("E-SHAPE", f"{method}: points is {shape}")
    fit = _umap(seed) if method == "umap" else PCA(2, random_state=seed).fit_transform
    threads = torch.get_num_threads()
    planes = []
    try:
        for layer in _vectors(method, points):
            plane = fit(layer)  # [S, 2]
            plane = plane - plane.mean(axis=0)
            # One factor for both axes: shapes and angles stay.
            planes.append(plane / max(float(np.abs(plane).max()), 1e-12))
    finally:
        # Numba, started by UMAP, sets OpenMP's threads and so torch's.
        torch.set_num_threads(threads)
    return np.stack(planes).astype(np.float32)


@checked
def panels(
    points: Annotated[Tensor, FINITE],
    labels: Tensor,
    names: Annotated[Each[str], Field(min_length=1)],
    method: Method = "umap",
    *,
    seed: Seed = 0,
) -> dict[str, dict[str, Plane]]:
    """Project first, middle, last layer for `plotting.points`: ``[n, 2]`` by name."""
    names = tuple(names)
    tensors = {"points": (points, "L S D"), "labels": (labels, "S", "int")}
    shapes("panels", tensors, empty="")
    indices("panels", "labels", labels, len(names))
    if len(set(names)) < len(names):
        refuse("E-RANGE", f"panels: two groups have one name: {', '.join(names)}")
    # A set: with one or two layers they coincide.
    layers = sorted({0, len(points) // 2, len(points) - 1})
    planes = project(points[layers], method, seed=seed)
    layouts = {}
    for layer, plane in zip(layers, planes, strict=True):
        groups = {}
        for index, name in enumerate(names):
            groups[name] = plane[labels.numpy() == index]
        layouts[f"layer {layer}"] = groups
    return layouts


def _umap(seed: int) -> Callable[[Plane], Plane]:
    """Import UMAP here and not above: it compiles for seconds, even if PCA is asked."""
    with warnings.catch_warnings(), extra("notebook", "the projection 'umap'"):
        # UMAP warns where TensorFlow, which it can do without, is absent.
        warnings.simplefilter("ignore", ImportWarning)
        from umap import UMAP
    # With a seed it takes one thread, and would warn of that unless it is asked to.
    return UMAP(n_neighbors=NEIGHBOURS, random_state=seed, n_jobs=1).fit_transform
