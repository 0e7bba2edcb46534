"""duplicates on a GPU: near pairs marked tile by tile of the triangle, no cosine in memory.

Alg. 2's rule is sequential: whether a row stays depends on the rows before it. So the device finds
the near pairs of a block of rows with all later ones, exactly and in order, and PyTorch settles
them. What is held is a bit for each pair of a block, and the near pairs. Two runs are equal.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moebook.kernels._triton.grouped import precision, roomy
from moebook.kernels.similarity import Pairs, through

# Most pairs of a block, a bit each; a block costs the host some milliseconds.
MARKS = 2**32


def blocks(dtype: torch.dtype, large: bool) -> dict[str, Any]:
    """Choose a program's work: BM rows by BN later ones, BK deep, WORD marks; large if `roomy`."""
    if dtype == torch.float32:
        return {
            "BM": 32,
            "BN": 64,
            "BK": 32,
            "WORD": 32,
            "PRECISION": precision(),
            "num_warps": 4,
            "num_stages": 2,
        }
    return {
        "BM": 128 if large else 64,
        "BN": 256 if large else 64,
        "BK": 64,
        "WORD": 32,
        "PRECISION": "ieee",
        "num_warps": 8,
        "num_stages": 3,
    }


def run(vectors: Tensor, key: Tensor, threshold: float, standing: bool) -> Tensor:
    """Run `moebook.kernels.similarity.duplicates`."""
    size = max(1, MARKS // max(len(vectors), 1))
    return through(vectors.contiguous(), key, threshold, standing, size, near)


def near(rows: Tensor, size: int, threshold: float) -> Pairs:
    """Return the pairs i < j, i among the first ``size`` rows, above the threshold, in order."""
    many, width = rows.shape
    size = min(size, many)
    lengths = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32)
    inverse = torch.where(lengths > 0, 1 / lengths, 0.0)
    chosen = blocks(rows.dtype, roomy(rows.device, 200))
    word = chosen["WORD"]
    wide = triton.cdiv(many, chosen["BN"])
    words = wide * chosen["BN"] // word
    marks = torch.zeros(size, words, dtype=torch.int32, device=rows.device)
    _mark[(triton.cdiv(size, chosen["BM"]) * wide,)](
        rows, inverse, marks, float(threshold), size, many, words, D=width, **chosen
    )
    row, place = marks.nonzero(as_tuple=True)
    bits = torch.arange(word, dtype=torch.int32, device=rows.device)
    part, bit = (marks[row, place, None] >> bits & 1).nonzero(as_tuple=True)
    return row[part], place[part] * word + bit


@triton.jit
def _mark(
    rows,  # [S, D]
    inverse,  # [S], of their lengths
    marks,  # [size, words], a bit a pair
    threshold,
    size,
    many,
    words,
    D: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    WORD: tl.constexpr,
):
    """Set bit j of marks[i] where row i and a later row j are near: a tile of BM by BN pairs."""
    # All programs lie in one row, since a grid's second side is short.
    tops = tl.cdiv(size, BM)
    top = tl.program_id(0) % tops * BM  # the tile's first i
    tile = tl.program_id(0) // tops
    side = tile * BN  # its first j
    if side + BN <= top + 1:
        return  # no j of this tile comes after an i
    i = top + tl.arange(0, BM)
    j = side + tl.arange(0, BN)
    is_row = i < size
    is_later_row = j < many

    # Inner products. Offsets from the tile's first rows fit in 32 bits.
    rows_i = rows + top.to(tl.int64) * D
    rows_j = rows + side.to(tl.int64) * D
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for first in range(0, D, BK):
        deep = first + tl.arange(0, BK)
        in_row = deep < D
        a = tl.load(
            rows_i + tl.arange(0, BM)[:, None] * D + deep[None, :],
            mask=is_row[:, None] & in_row[None, :],
            other=0.0,
        )
        b = tl.load(
            rows_j + tl.arange(0, BN)[None, :] * D + deep[:, None],
            mask=in_row[:, None] & is_later_row[None, :],
            other=0.0,
        )
        total = tl.dot(a, b, total, input_precision=PRECISION)

    # Cosines, and which of them are above the threshold.
    total *= tl.load(inverse + i, mask=is_row, other=0.0)[:, None]
    total *= tl.load(inverse + j, mask=is_later_row, other=0.0)[None, :]
    comes_after = i[:, None] < j[None, :]
    near = (total > threshold) & is_later_row[None, :] & comes_after

    # WORD neighbours are the bits of one word, each its own, so that a sum sets them.
    bits = near.to(tl.int32) << (tl.arange(0, BN) % WORD)[None, :]
    word = tl.sum(tl.reshape(bits, (BM, BN // WORD, WORD)), 2)
    to = marks + i.to(tl.int64)[:, None] * words
    to += tile * (BN // WORD) + tl.arange(0, BN // WORD)[None, :]
    tl.store(to, word, mask=is_row[:, None])
