"""clusters: the nearest centre of each point, and the sums of each centre's points, in one read."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from moebook.errors import refuse
from moebook.kernels.dispatch import implementation, shapes
from moebook.kernels.matmul import empty, product, wide

ROWS = {"cpu": 2**10, "cuda": 2**14}  # points of one block: they stay in a CPU's cache


class Clusters(NamedTuple):
    """Which points belong to which centre; a block is summed in the points' dtype."""

    ids: Tensor  # [L, S] int64, the nearest centre of each point, of equally near ones the first
    sums: Tensor  # [L, E, D] float64, of each centre's points
    counts: Tensor  # [L, E] int64, points of each centre; they sum to S
    inertia: Tensor  # [L] float64, squared distances of all points to their centres, summed

    def means(self, centres: Tensor) -> Tensor:
        """Return the mean of each centre's points; a centre without points stays where it is."""
        means = (self.sums / self.counts.clamp(min=1).unsqueeze(-1)).to(centres.dtype)
        return torch.where((self.counts > 0).unsqueeze(-1), means, centres)


def clusters(points: Tensor, centres: Tensor, *, impl: str = "auto") -> Clusters:
    """Assign every point to its nearest centre and sum each centre's points: a step of Lloyd's.

    For ``points [L, S, D]`` and ``centres [L, E, D]``, each layer by itself. Points are read once,
    block by block; two runs are equal bit for bit. Without a gradient. Squared distances on a CPU
    that are not finite are refused (E-NONFINITE); elsewhere to look would wait for the GPU.
    ``impl`` is ``"auto"``, ``"torch"`` (in blocks) or ``"reference"`` (all distances at once).
    """
    both = {"points": (points, "L S D"), "centres": (centres, "L E D")}
    shapes("clusters", both, alike=("points", "centres"), valued=True)
    with torch.no_grad():
        run = implementation("clusters", impl, _IMPLEMENTATIONS, points)
        found: Clusters = run(points.detach(), centres.detach())
    if points.device.type == "cpu":
        finite = found.inertia.isfinite() & centres.isfinite().flatten(1).all(1)
        if not finite.all():
            where = f"points or centres of layer {int(finite.int().argmin())}"
            refuse("E-NONFINITE", f"clusters: {where} hold NaN, infinity or too large distances")
    return found


def reference(points: Tensor, centres: Tensor) -> Clusters:
    """Take the minimum over all distances, each as a sum of squared differences."""
    points, centres = wide(points), wide(centres)
    nearest = (points.unsqueeze(2) - centres.unsqueeze(1)).square().sum(-1).min(-1)
    chosen = one_hot(nearest.indices, centres.shape[1])
    sums = chosen.double().mT @ points.double()
    return Clusters(nearest.indices, sums, chosen.sum(1), nearest.values.double().sum(1))


def _blocked(points: Tensor, centres: Tensor) -> Clusters:
    """Go through each layer's points block by block: ``argmin |c|^2 / 2 - x c`` is one product."""
    layers, rows, width = points.shape
    ids = torch.empty(layers, rows, dtype=torch.int64, device=points.device)
    sums = torch.zeros_like(centres, dtype=torch.float64)
    inertia = torch.zeros(layers, dtype=torch.float64, device=points.device)
    centres, size = wide(centres), ROWS[points.device.type]
    gaps = empty((min(size, rows), width), centres)
    for layer, mine in enumerate(centres):  # [E, D]
        offset = mine.square().sum(1) / -2
        for start in range(0, rows, size):
            block = wide(points[layer, start : start + size])
            near = product(block, mine.T).add_(offset).argmax(1)
            apart = torch.index_select(mine, 0, near, out=gaps[: len(block)]).sub_(block).flatten()
            ids[layer, start : start + size] = near
            sums[layer] += _summed(block, near, mine)
            inertia[layer] += apart.dot(apart)
    counts = torch.stack([row.bincount(minlength=centres.shape[1]) for row in ids])
    return Clusters(ids, sums, counts, inertia)


def _summed(block: Tensor, near: Tensor, centres: Tensor) -> Tensor:
    """Sum the points of each centre in a fixed order; a GPU's index_add_ has none."""
    if block.device.type == "cpu":
        return torch.zeros_like(centres).index_add_(0, near, block)
    return one_hot(near, len(centres)).to(block).T @ block


_IMPLEMENTATIONS = {"torch": _blocked, "reference": reference}
