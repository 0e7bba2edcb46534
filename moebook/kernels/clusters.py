"""clusters: the nearest centre of each point, and the sums of each centre's points, in one read."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moebook.errors import refuse
from moebook.kernels.arguments import alike, floating, together, valued
from moebook.kernels.dispatch import implementation
from moebook.kernels.memory import empty
from moebook.kernels.products import product

ROWS = 1024
"""Points of one block: they stay in the cache from their distances to their sums."""


class Clusters(NamedTuple):
    """Which points belong to which centre.

    Attributes:
        ids: ``[L, S]`` int64, the nearest centre of each point, of equally near ones the first.
        sums: ``[L, E, D]`` float64, sums of each centre's points: of blocks in float32, or float64
            as the points are, and then of the blocks' sums.
        counts: ``[L, E]`` int64, points of each centre; they sum to S.
        inertia: ``[L]`` float64, squared distances of all points to their centres, summed.
    """

    ids: Tensor
    sums: Tensor
    counts: Tensor
    inertia: Tensor

    def means(self, centres: Tensor) -> Tensor:
        """Return the mean of each centre's points; a centre without points stays where it is."""
        means = (self.sums / self.counts.clamp(min=1).unsqueeze(-1)).to(centres.dtype)
        return torch.where((self.counts > 0).unsqueeze(-1), means, centres)


def clusters(points: Tensor, centres: Tensor, *, impl: str = "auto") -> Clusters:
    """Assign every point to its nearest centre and sum each centre's points: a step of Lloyd's.

    All layers side by side, each with centres of its own; points are read once, block by block (on
    a GPU once more, from its cache), and the distances of a block alone are held. Two runs are
    equal bit for bit. Without a gradient.

    Args:
        points: ``[L, S, D]``.
        centres: ``[L, E, D]``, in the dtype of the points.
        impl: ``"auto"``, ``"torch"`` (in blocks), ``"triton"`` or ``"reference"`` (all distances
            at once).

    Raises:
        Refusal: E-SHAPE, E-DTYPE or E-DEVICE when the two do not fit, E-NONFINITE for squared
            distances on a CPU that are not finite (elsewhere to look would wait for the GPU),
            E-IMPL for an ``impl`` that is unknown or cannot run.
    """
    fits = points.dim() == centres.dim() == 3 and points.shape[::2] == centres.shape[::2]
    if not fits or not centres.shape[1] or not centres.shape[2]:
        got = f"{tuple(points.shape)} and {tuple(centres.shape)}"
        refuse(
            "E-SHAPE",
            f"clusters: expected points [L, S, D] and centres [L, E >= 1, D >= 1], got {got}",
        )
    if not len(points):
        refuse("E-SHAPE", f"clusters: points is {tuple(points.shape)}, expected a layer at least")
    named = {"points": points, "centres": centres}
    floating("clusters", named)
    alike("clusters", named)
    together("clusters", named)
    valued("clusters", named)
    with torch.no_grad():
        run = implementation("clusters", impl, _IMPLEMENTATIONS, points)
        found: Clusters = run(points.detach(), centres.detach())
    if points.device.type == "cpu":
        finite = found.inertia.isfinite() & centres.isfinite().flatten(1).all(1)
        if not finite.all():
            refuse(
                "E-NONFINITE", f"clusters: points or centres of layer {int(finite.int().argmin())}"
                " hold NaN or infinity, or distances too large to be squared",
            )  # fmt: skip
    return found


def reference(points: Tensor, centres: Tensor) -> Clusters:
    """Take the minimum over all distances, each as a sum of squared differences."""
    wide = torch.promote_types(points.dtype, torch.float32)
    points, centres = points.to(wide), centres.to(wide)
    nearest = (points.unsqueeze(2) - centres.unsqueeze(1)).square().sum(-1).min(-1)
    chosen = torch.nn.functional.one_hot(nearest.indices, centres.shape[1])
    sums = chosen.double().mT @ points.double()
    return Clusters(nearest.indices, sums, chosen.sum(1), nearest.values.double().sum(1))


def _blocked(points: Tensor, centres: Tensor) -> Clusters:
    """Go through each layer's points block by block: ``argmin |c|^2 / 2 - x c`` is one product."""
    wide = torch.promote_types(points.dtype, torch.float32)
    layers, rows, width = points.shape
    ids = torch.empty(layers, rows, dtype=torch.int64, device=points.device)
    sums = torch.zeros_like(centres, dtype=torch.float64)
    inertia = torch.zeros(layers, dtype=torch.float64, device=points.device)
    centres = centres.to(wide)
    gaps = empty((min(ROWS, rows), width), centres)
    for layer, own in enumerate(centres):
        offset = own.square().sum(1) / -2
        for start in range(0, rows, ROWS):
            block = points[layer, start : start + ROWS].to(wide)
            near = product(block, own.T).add_(offset).argmax(1)
            apart = torch.index_select(own, 0, near, out=gaps[: len(block)]).sub_(block).flatten()
            ids[layer, start : start + ROWS] = near
            sums[layer] += torch.zeros_like(own).index_add_(0, near, block)
            inertia[layer] += apart.dot(apart)
    counts = torch.stack([row.bincount(minlength=centres.shape[1]) for row in ids])
    return Clusters(ids, sums, counts, inertia)


_IMPLEMENTATIONS = {"torch": _blocked, "reference": reference}
