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
    """Bit j of marks[i] = whether row i and a later row j are near."""
    tops = tl.cdiv(size, BM)  # the programs in one row: a grid's second side is short
    top = tl.program_id(0) % tops * BM
    tile = tl.program_id(0) // tops
    if (tile + 1) * BN <= top + 1:
        return
    row = top + tl.arange(0, BM)
    column = tile * BN + tl.arange(0, BN)
    upper = rows + top.to(tl.int64) * D  # offsets from here on fit in 32 bits
    lower = rows + (tile * BN).to(tl.int64) * D
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for first in range(0, D, BK):
        deep = first + tl.arange(0, BK)
        left = upper + tl.arange(0, BM)[:, None] * D + deep[None, :]
        a = tl.load(left, mask=(row < size)[:, None] & (deep < D)[None, :], other=0.0)
        right = lower + tl.arange(0, BN)[None, :] * D + deep[:, None]
        b = tl.load(
            right, mask=(deep < D)[:, None] & (column < many)[None, :], other=0.0
        )
        total = tl.dot(a, b, total, input_precision=PRECISION)
    total *= tl.load(inverse + row, mask=row < size, other=0.0)[:, None]
    total *= tl.load(inverse + column, mask=column < many, other=0.0)[None, :]
    near = (
        (total > threshold)
        & (column < many)[None, :]
        & (row[:, None] < column[None, :])
    )
    bits = near.to(tl.int32) << (tl.arange(0, BN) % WORD)[None, :]
    word = tl.sum(tl.reshape(bits, (BM, BN // WORD, WORD)), 2)
    to = marks + row.to(tl.int64)[:, None] * words
    to += tile * (BN // WORD) + tl.arange(0, BN // WORD)[None, :]
    tl.store(to, word, mask=(row < size)[:, None])
