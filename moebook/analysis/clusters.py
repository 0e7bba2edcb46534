"""Do representations form clusters by domain? Router-initialisation Fig. 1, in numbers."""

from __future__ import annotations

import pandas as pd
from sklearn.cluster import KMeans
from torch import Tensor

from moebook.errors import refuse


def purity(
    points: Tensor, labels: Tensor, *, clusters: int | None = None, seed: int = 0
) -> pd.DataFrame:
    """Cluster each layer's points without their labels and count how well the clusters are domains.

    Args:
        points: ``[L, S, D]`` representations of tokens or texts (`Representations.points`).
        labels: ``[S]`` number of each point's domain.
        clusters: Clusters of k-means; by default as many as there are domains.
        seed: Of k-means (best of 4 starts).

    Returns:
        One row a layer: ``layer`` (its place among the L), ``purity``, the share of points that
        belong to the most frequent domain of their cluster, and ``largest``, the share of the
        largest domain, which is what a single cluster would score. Purity grows with the number of
        clusters: compare at equal numbers.

    Raises:
        Refusal: E-SHAPE when points and labels do not fit; E-DATA when there are fewer points than
            clusters or none; E-NONFINITE for NaN or infinity.
    """
    if points.dim() != 3 or labels.shape != points.shape[1:2] or not len(labels):
        shapes = f"{tuple(points.shape)} and {tuple(labels.shape)}"
        refuse("E-SHAPE", f"purity: expected points [L, S, D] and labels [S], got {shapes}")
    if not points.isfinite().all():
        refuse("E-NONFINITE", "purity: points hold NaN or infinity")
    domains = labels.unique(return_inverse=True)[1]
    wanted = int(domains.max()) + 1 if clusters is None else clusters
    if not 1 <= wanted <= len(labels):
        refuse("E-DATA", f"purity: {wanted} clusters of {len(labels)} points, expected 1 to that")
    largest = float(domains.bincount().max()) / len(labels)
    rows = []
    for layer, part in enumerate(points.float().numpy()):
        found = KMeans(wanted, n_init=4, random_state=seed).fit_predict(part)
        table = pd.crosstab(found, domains.numpy())
        rows.append((layer, float(table.max(axis=1).sum()) / len(labels), largest))
    return pd.DataFrame(rows, columns=["layer", "purity", "largest"])
