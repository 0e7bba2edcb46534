"""nearest on a GPU: the largest cosine of each row of a pool, its K products never in memory."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moebook.kernels._triton.grouped import precision, roomy
from moebook.kernels._triton.placing import placed


def blocks(dtype: torch.dtype, large: bool) -> dict[str, Any]:
    """Choose a program's work: BM rows against BN shots at a time, BK deep.

    Large tiles are for a `roomy` device.
    """
    if dtype == torch.float32:
        return {"BM": 32, "BN": 64, "BK": 32, "PRECISION": precision(), "num_warps": 4,
                "num_stages": 2}  # fmt: skip
    if not large:
        return {"BM": 64, "BN": 64, "BK": 64, "PRECISION": "ieee", "num_warps": 8,
                "num_stages": 3}  # fmt: skip
    return {"BM": 128, "BN": 64, "BK": 64, "PRECISION": "ieee", "num_warps": 8,
            "num_stages": 4}  # fmt: skip


@placed
def run(rows: Tensor, targets: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    """Score a block for `moebook.kernels.nearest`; the scores are float32."""
    scores = torch.empty(len(rows), dtype=torch.float32, device=rows.device)
    if len(rows):
        chosen = blocks(rows.dtype, roomy(rows.device, 200))
        _closest[(triton.cdiv(len(rows), chosen["BM"]),)](
            rows.contiguous(), targets.contiguous(), scores, len(rows), len(targets),
            D=rows.shape[1], **chosen,
        )  # fmt: skip
    return torch.arange(len(rows), device=rows.device), scores


@triton.jit
def _closest(
    rows, shots, scores, S, many,
    D: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """scores[r] = the largest product of row r with a shot, divided by the row's length."""
    row = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    best = tl.full((BM,), float("-inf"), dtype=tl.float32)
    squares = tl.zeros((BM,), dtype=tl.float32)
    for start in range(0, many, BN):
        shot = start + tl.arange(0, BN)
        total = tl.zeros((BM, BN), dtype=tl.float32)
        squares = tl.zeros((BM,), dtype=tl.float32)
        for first in range(0, D, BK):
            deep = first + tl.arange(0, BK)
            left = rows + row[:, None] * D + deep[None, :]
            a = tl.load(left, mask=(row < S)[:, None] & (deep < D)[None, :], other=0.0)
            right = shots + shot[None, :] * D + deep[:, None]
            b = tl.load(right, mask=(deep < D)[:, None] & (shot < many)[None, :], other=0.0)
            total = tl.dot(a, b, total, input_precision=PRECISION)
            wide = a.to(tl.float32)
            squares += tl.sum(wide * wide, 1)
        total = tl.where((shot < many)[None, :], total, float("-inf"))
        best = tl.maximum(best, tl.max(total, 1))
    # A row that is not finite, or too large to be squared, has no length: its score is NaN.
    length = tl.where(squares == 0, 1.0, tl.sqrt(squares))
    length = tl.where(squares == float("inf"), float("nan"), length)
    tl.store(scores + row, best / length, mask=row < S)
