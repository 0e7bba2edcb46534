"""Two dimensions out of many, for pictures: UMAP as in router-initialisation Fig. 1, or PCA."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from sklearn.decomposition import PCA
from torch import Tensor

from moebook.errors import nearest, refuse

METHODS = ("umap", "pca")
NEIGHBOURS = 15  # umap-learn's own default

Plane = Callable[[npt.NDArray[np.float32]], npt.NDArray[np.float32]]


def project(points: Tensor, method: str = "umap", *, seed: int = 0) -> npt.NDArray[np.float32]:
    """Lay each layer's points out in the plane, each layer for itself.

    Distances between far groups mean nothing in UMAP's plane, and it draws groups even where there
    are few reasons for them: it shows what `clusters.purity` counts, it does not prove it. The
    paper speaks of "hyperbolic space", which its figure does not show; this is the plane.

    Args:
        points: ``[L, S, D]``, for instance `Representations.points`; S above ``NEIGHBOURS`` for
            UMAP.
        method: ``"umap"``, or ``"pca"``, the two directions of largest variance: linear, and
            without the 13 seconds that the compilation of UMAP takes in every process (measured).
        seed: Of UMAP's layout, which is computed on one thread so that it repeats.

    Returns:
        ``[L, S, 2]``, each layer centred and scaled to a largest coordinate of 1.

    Raises:
        Refusal: E-CHOICE; E-SHAPE for points of another form or too few of them; E-NONFINITE.
    """
    if method not in METHODS:
        refuse("E-CHOICE", f"method is {method!r}; {nearest(method, METHODS)}")
    fewest = NEIGHBOURS + 1 if method == "umap" else 2
    if points.dim() != 3 or points.shape[1] < fewest or points.shape[2] < 2:
        shape = tuple(points.shape)
        refuse(
            "E-SHAPE", f"{method}: expected [L, S, D] with S from {fewest} and D from 2: {shape}"
        )
    if not points.isfinite().all():
        refuse("E-NONFINITE", f"{method}: points hold NaN or infinity")
    threads = torch.get_num_threads()
    fit = _umap(seed) if method == "umap" else PCA(2, random_state=seed).fit_transform
    planes = []
    try:
        for layer in points.float().numpy():
            plane = fit(layer)
            plane = plane - plane.mean(axis=0)
            planes.append(plane / max(float(np.abs(plane).max()), 1e-12))
    finally:
        torch.set_num_threads(threads)  # numba, started by UMAP, sets OpenMP's and so torch's
    return np.stack(planes).astype(np.float32)


def panels(
    points: Tensor, labels: Tensor, names: Sequence[str], method: str = "umap", *, seed: int = 0
) -> dict[str, dict[str, npt.NDArray[np.float32]]]:
    """Arrange a cloud for `plotting.points`: the first, the middle and the last layer.

    Args:
        points: ``[L, S, D]``, see `project`.
        labels: ``[S]`` number of each point's group.
        names: The groups' names.
        method: See `project`, also for what is refused.
        seed: Of the layout.

    Returns:
        ``layer 0`` and so on, each with the points ``[n, 2]`` of each group.
    """
    layers = sorted({0, len(points) // 2, len(points) - 1})
    planes = project(points[layers], method, seed=seed)
    return {
        f"layer {layer}": {
            name: plane[labels.numpy() == number] for number, name in enumerate(names)
        }
        for layer, plane in zip(layers, planes, strict=True)
    }


def _umap(seed: int) -> Plane:
    """Import UMAP here and not above: it compiles for seconds, also for those who want PCA."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ImportWarning)  # that TensorFlow, an option, is absent
        from umap import UMAP
    return UMAP(n_neighbors=NEIGHBOURS, random_state=seed, n_jobs=1).fit_transform
