"""mixture of LoRAs on a GPU: gates, the B of all experts and the sum onto the base in one kernel.

The rest, in both directions, is dense products, best left to the vendor's library: the CPU's
autograd function, with another end.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moebook.kernels._triton.grouped import precision
from moebook.kernels.lora_mixture import mixture


def blocks(dtype: torch.dtype) -> dict[str, Any]:
    """Choose a program's work: BM tokens, BN columns, BK of all experts' ranks at a time."""
    shared = {"BM": 64, "num_warps": 4, "num_stages": 2}
    if dtype == torch.float32:
        return {**shared, "BN": 64, "BK": 32, "PRECISION": precision()}
    return {**shared, "BN": 128, "BK": 64, "PRECISION": "ieee"}


def run(
    x: Tensor, base: Tensor, gates: Tensor, down: Tensor, up: Tensor, scale: float
) -> Tensor:
    """Run `moebook.kernels.lora_mixture`; a base may have another dtype than ``x``."""
    return mixture(x, base, gates, down, up, scale, _finished)


@triton.jit
def _mix(
    base,  # [T, O]
    hidden,  # [T, N * R], A x of all experts
    gates,  # [T, N]
    up,  # [N, O, R]
    out,  # [T, O]
    scale,
    T,
    N: tl.constexpr,
    R: tl.constexpr,
    WIDE: tl.constexpr,  # O
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """out[t] = base[t] + scale * sum over n of gates[t, n] * up[n] hidden[t, n]."""
    row = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    live = (row < T)[:, None]
    within = (column < WIDE)[None, :]
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for first in range(0, N * R, BK):
        deep = first + tl.arange(0, BK)
        inside = deep < N * R
        a = tl.load(
            hidden + row[:, None] * (N * R) + deep[None, :],
            mask=live & inside[None, :],
            other=0.0,
        )
        gate = tl.load(
            gates + row[:, None] * N + (deep // R)[None, :],
            mask=live & inside[None, :],
            other=0.0,
        )
        a = (a.to(tl.float32) * gate.to(tl.float32)).to(hidden.dtype.element_ty)
        at = (deep // R * WIDE * R + deep % R)[:, None] + column[None, :] * R
        b = tl.load(up + at, mask=inside[:, None] & within, other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    at = row[:, None] * WIDE + column[None, :]
    total = total * scale + tl.load(base + at, mask=live & within, other=0.0).to(
        tl.float32
    )
    tl.store(out + at, total.to(out.dtype.element_ty), mask=live & within)


def _finished(
    base: Tensor, hidden: Tensor, gates: Tensor, up: Tensor, scale: float
) -> Tensor:
    tokens, wide = base.shape
    number, _, rank = up.shape
    base = base.contiguous()
    out = torch.empty_like(base)
    if tokens:
        chosen = blocks(hidden.dtype)
        grid = triton.cdiv(tokens, chosen["BM"]), triton.cdiv(wide, chosen["BN"])
        _mix[grid](
            base,
            hidden.contiguous(),
            gates.contiguous(),
            up.contiguous(),
            out,
            float(scale),
            tokens,
            N=number,
            R=rank,
            WIDE=wide,
            **chosen,
        )
    return out
