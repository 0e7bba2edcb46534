"""duplicates on a GPU: near pairs marked tile by tile of the triangle, no cosine in memory.

Alg. 2's rule is sequential: whether a row stays depends on the rows before it. So the device finds
the near pairs of a block of rows with all later ones, exactly and in order, and PyTorch settles
them, side by side where their order does not matter. What is held is a byte for each pair of a
block, and the near pairs; a mark is read only in those rows of a tile that have a near pair. Two
runs are equal.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moebook.kernels._triton import nearest
from moebook.kernels._triton.grouped import roomy
from moebook.kernels._triton.placing import placed
from moebook.kernels.duplicates import Pairs, through

MARKS = 2**32
"""Most pairs of a block: a byte each. Each block costs the host some milliseconds."""


def blocks(dtype: torch.dtype, large: bool) -> dict[str, Any]:
    """Choose a program's work as `nearest.blocks` does, but for wider large tiles."""
    chosen = nearest.blocks(dtype, large)
    return {**chosen, "BN": 256, "num_stages": 3} if chosen["BM"] == 128 else chosen


@placed
def run(vectors: Tensor, key: Tensor, threshold: float, standing: bool) -> Tensor:
    """Run `moebook.kernels.duplicates`."""
    size = max(1, MARKS // max(len(vectors), 1))
    return through(vectors.contiguous(), key, threshold, standing, size, near)


def near(rows: Tensor, size: int, threshold: float) -> Pairs:
    """Return the pairs i < j, i among the first ``size`` rows, above the threshold, in order.

    Where a tile's row has no near pair its marks are not read, nor written below the diagonal.
    """
    many, width = rows.shape
    size = min(size, many)
    lengths = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32)
    inverse = torch.where(lengths > 0, 1 / lengths, 0.0)
    chosen = blocks(rows.dtype, roomy(rows.device, 200))
    wide = triton.cdiv(many, chosen["BN"])
    marks = torch.empty(size, wide, chosen["BN"], dtype=torch.int8, device=rows.device)
    some = torch.zeros(size, wide, dtype=torch.int32, device=rows.device)
    _mark[(triton.cdiv(size, chosen["BM"]), wide)](
        rows, inverse, marks, some, threshold, size, many, wide, D=width, **chosen
    )
    row, tile = some.nonzero(as_tuple=True)
    part, place = marks[row, tile].nonzero(as_tuple=True)
    return row[part], tile[part] * chosen["BN"] + place


@triton.jit
def _mark(
    rows, inverse, marks, some, threshold, size, many, wide,
    D: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """marks[i, j] = whether row i and a later row j are near; some = whether any is, by tile."""
    top, tile = tl.program_id(0) * BM, tl.program_id(1)
    if (tile + 1) * BN <= top + 1:
        return
    row, column = top + tl.arange(0, BM), tile * BN + tl.arange(0, BN)
    upper = rows + top.to(tl.int64) * D  # offsets from here on fit in 32 bits
    lower = rows + (tile * BN).to(tl.int64) * D
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for first in range(0, D, BK):
        deep = first + tl.arange(0, BK)
        left = upper + tl.arange(0, BM)[:, None] * D + deep[None, :]
        a = tl.load(left, mask=(row < size)[:, None] & (deep < D)[None, :], other=0.0)
        right = lower + tl.arange(0, BN)[None, :] * D + deep[:, None]
        b = tl.load(right, mask=(deep < D)[:, None] & (column < many)[None, :], other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    total *= tl.load(inverse + row, mask=row < size, other=0.0)[:, None]
    total *= tl.load(inverse + column, mask=column < many, other=0.0)[None, :]
    near = (total > threshold) & (column < many)[None, :] & (row[:, None] < column[None, :])
    to = marks + (top.to(tl.int64) * wide + tile) * BN
    to += tl.arange(0, BM).to(tl.int64)[:, None] * wide * BN + tl.arange(0, BN)[None, :]
    tl.store(to, near.to(tl.int8), mask=(row < size)[:, None])
    some += top.to(tl.int64) * wide + tile
    to = some + tl.arange(0, BM).to(tl.int64) * wide
    tl.store(to, tl.max(near.to(tl.int32), 1), mask=row < size)
