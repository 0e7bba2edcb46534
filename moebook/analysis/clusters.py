"""Do representations form clusters by domain? Router-initialisation Fig. 1: counted, and drawn."""

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

from moebook.errors import refuse
from moebook.kernels.dispatch import indices, shapes
from moebook.settings import FINITE, Each, Seed, checked

NEIGHBOURS = 15  # umap-learn's own default
Plane = npt.NDArray[np.float32]
Method = Literal["umap", "pca"]


@checked
def purity(points: Annotated[Tensor, FINITE], labels: Tensor, *, seed: Seed = 0) -> pd.DataFrame:
    """Cluster each layer's points without their labels and count how well the clusters are domains.

    Points are ``[L, S, D]``, labels ``[S]`` their domains, of which there are as many as clusters:
    purity grows with their number. One row a layer: ``layer`` (its place among the L), ``purity``,
    the share of points that belong to the most frequent domain of their cluster, and ``largest``,
    the share of the largest domain.
    """
    shapes("purity", {"points": (points, "L S D"), "labels": (labels, "S", "real")}, empty="")
    if not points.float().square().sum(-1).isfinite().all():
        refuse("E-NONFINITE", "purity: points are too far from 0 for their distances: scale them")
    domains = labels.unique(return_inverse=True)[1]
    largest, rows = float(domains.bincount().max()) / len(labels), []
    for layer, part in enumerate(points.float().numpy()):
        assigned = KMeans(int(domains.max()) + 1, n_init=4, random_state=seed).fit_predict(part)
        table = pd.crosstab(assigned, domains.numpy())
        rows.append((layer, float(table.max(axis=1).sum()) / len(labels), largest))
    return pd.DataFrame(rows, columns=["layer", "purity", "largest"])


@checked
def project(points: Annotated[Tensor, FINITE], method: Method = "umap", *, seed: Seed = 0) -> Plane:
    """Lay out each layer's points ``[L, S, D]`` in the plane, ``[L, S, 2]``, separately by layer.

    Each layer is centred and scaled to a largest coordinate of 1. Distances between far groups mean
    nothing in UMAP's plane, and it draws groups even where there is little reason for them: it
    shows what `purity` counts, it does not prove it. (The paper's "hyperbolic space" is not in its
    figure.) PCA spares the 13 seconds (measured) for which UMAP compiles in every process.
    """
    fewest = NEIGHBOURS + 1 if method == "umap" else 2
    sizes = shapes(method, {"points": (points, "L S D")}, empty="")
    if sizes["S"] < fewest or sizes["D"] < 2:
        shape = tuple(points.shape)
        refuse("E-SHAPE", f"{method}: points is {shape}, expected [L, S >= {fewest}, D >= 2]")
    layers, threads = points.float().numpy(), torch.get_num_threads()
    fit = _umap(seed) if method == "umap" else PCA(2, random_state=seed).fit_transform
    try:
        planes = [fit(layer) for layer in layers]
    finally:
        torch.set_num_threads(threads)  # numba, started by UMAP, sets OpenMP's and so torch's
    planes = [plane - plane.mean(axis=0) for plane in planes]
    scaled = [plane / max(float(np.abs(plane).max()), 1e-12) for plane in planes]
    return np.stack(scaled).astype(np.float32)


@checked
def panels(
    points: Annotated[Tensor, FINITE],
    labels: Tensor,
    names: Annotated[Each[str], Field(min_length=1)],
    method: Method = "umap",
    *,
    seed: Seed = 0,
) -> dict[str, dict[str, Plane]]:
    """Project the first, middle and last layer for `plotting.points`: ``[n, 2]`` by named group."""
    names = tuple(names)
    shapes("panels", {"points": (points, "L S D"), "labels": (labels, "S", "int")}, empty="")
    indices("panels", "labels", labels, len(names))
    if len(set(names)) < len(names):
        refuse("E-RANGE", f"panels: two groups have one name: {', '.join(names)}")
    layers = sorted({0, len(points) // 2, len(points) - 1})
    planes = project(points[layers], method, seed=seed)
    return {
        f"layer {layer}": {name: plane[labels.numpy() == i] for i, name in enumerate(names)}
        for layer, plane in zip(layers, planes, strict=True)
    }


def _umap(seed: int) -> Callable[[Plane], Plane]:
    """Import UMAP here and not above: it compiles for seconds, also for those who want PCA."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ImportWarning)  # that TensorFlow, an option, is absent
        from umap import UMAP
    return UMAP(n_neighbors=NEIGHBOURS, random_state=seed, n_jobs=1).fit_transform
