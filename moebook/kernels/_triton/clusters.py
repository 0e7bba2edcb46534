"""clusters on a GPU: each block of points is assigned, then summed at once by its centres.

A block's sums are stored apart and added by PyTorch in a fixed order: no atomic additions, two runs
are equal bit for bit. Its points are read a second time for the sums, from the L2 cache as long as
the blocks in flight fit there.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moebook.kernels._triton.grouped import precision
from moebook.kernels._triton.placing import placed
from moebook.kernels.clusters import Clusters

PARTS = 2**26
"""Most numbers of the blocks' own sums that are held at a time."""


def blocks(dtype: torch.dtype, experts: int) -> dict[str, Any]:
    """Choose a program's work: BM points, BE centres at a time, BK of the width."""
    most, deep, warps = (32, 32, 8) if dtype == torch.float32 else (64, 64, 4)
    return {"BM": deep, "BE": min(most, max(16, triton.next_power_of_2(experts))), "BK": deep,
            "num_warps": warps, "num_stages": 3}  # fmt: skip


@placed
def run(points: Tensor, centres: Tensor) -> Clusters:
    """Run `moebook.kernels.clusters`."""
    (layers, rows, width), experts = points.shape, centres.shape[1]
    points, centres = points.contiguous(), centres.contiguous()
    chosen = blocks(points.dtype, experts)
    count = triton.cdiv(rows, chosen["BM"])
    at_once = max(1, PARTS // (layers * experts * width))
    offset = centres.float().square().sum(-1) / 2
    ids = torch.empty(layers, rows, dtype=torch.int64, device=points.device)
    gaps = torch.zeros(layers, count, device=points.device)
    sums = torch.zeros_like(centres, dtype=torch.float64)
    for first in range(0, count, at_once):
        number = min(at_once, count - first)
        parts = torch.empty(layers, number, experts, width, device=points.device)
        _step[(number, layers)](
            points, centres, offset, ids, parts, gaps, rows, first, count, E=experts, D=width,
            PRECISION=precision(), **chosen,
        )  # fmt: skip
        sums += parts.sum(1, dtype=torch.float64)
    counts = ids.new_zeros(layers, experts).scatter_add_(1, ids, torch.ones_like(ids))
    return Clusters(ids, sums, counts, gaps.sum(1, dtype=torch.float64))


@triton.jit
def _step(
    points, centres, offset, ids, parts, gaps, S, first, count, E: tl.constexpr, D: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """ids[s] = argmin over e of |c[e]|^2 / 2 - x[s] c[e]; parts[e] = sum of the block's x there."""
    layer = tl.program_id(1).to(tl.int64)
    block = first + tl.program_id(0)
    row = block * BM + tl.arange(0, BM)
    live = row < S
    x_of = points + (layer * S + row.to(tl.int64))[:, None] * D
    centres += layer * E * D
    best = tl.full((BM,), float("inf"), dtype=tl.float32)
    near = tl.zeros((BM,), dtype=tl.int32)
    for start in range(0, E, BE):
        expert = start + tl.arange(0, BE)
        total = tl.zeros((BM, BE), dtype=tl.float32)
        for k in range(0, D, BK):
            deep = k + tl.arange(0, BK)
            x = tl.load(x_of + deep[None, :], mask=live[:, None] & (deep < D)[None, :], other=0.0)
            c = tl.load(centres + expert[None, :] * D + deep[:, None],
                        mask=(expert < E)[None, :] & (deep < D)[:, None], other=0.0)  # fmt: skip
            total = tl.dot(x, c, total, input_precision=PRECISION)
        own = tl.load(offset + layer * E + expert, mask=expert < E, other=float("inf"))
        far = own[None, :] - total
        lowest = tl.min(far, axis=1)
        place = start + tl.argmin(far, axis=1)  # of equal ones the first
        place = tl.minimum(place, E - 1)  # whatever NaN does to the minimum
        near = tl.where(lowest < best, place, near)
        best = tl.minimum(lowest, best)
    tl.store(ids + layer * S + row, near.to(tl.int64), mask=live)
    gap = tl.zeros((BM,), dtype=tl.float32)
    parts += (layer * tl.num_programs(0) + tl.program_id(0)) * E * D
    for k in range(0, D, BK):
        deep = k + tl.arange(0, BK)
        inside = live[:, None] & (deep < D)[None, :]
        x = tl.load(x_of + deep[None, :], mask=inside, other=0.0)
        c = tl.load(centres + near[:, None] * D + deep[None, :], mask=inside, other=0.0)
        apart = x.to(tl.float32) - c.to(tl.float32)
        gap += tl.sum(apart * apart, axis=1)
        for start in range(0, E, BE):
            expert = start + tl.arange(0, BE)
            chosen = (near[None, :] == expert[:, None]).to(x.dtype)  # ones: the product is exact
            part = tl.dot(chosen, x, input_precision="ieee")
            tl.store(parts + expert[:, None] * D + deep[None, :], part,
                     mask=(expert < E)[:, None] & (deep < D)[None, :])  # fmt: skip
    tl.store(gaps + layer * count + block, tl.sum(gap))
