"""mixture of LoRAs on a GPU: gates, the B of all experts and the sum onto the base in one kernel.

The rest, in both directions, is dense products, which the vendor's library does best.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from moebook.kernels._triton.placing import placed
from moebook.kernels.lora_mixture import Projection


def blocks(dtype: torch.dtype) -> dict[str, Any]:
    """Choose a program's work: BM tokens, BN columns, BK of all experts' ranks at a time."""
    if dtype == torch.float32:
        precision = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
        return {"BM": 64, "BN": 64, "BK": 32, "PRECISION": precision, "num_warps": 4,
                "num_stages": 2}  # fmt: skip
    return {"BM": 64, "BN": 128, "BK": 64, "PRECISION": "ieee", "num_warps": 4,
            "num_stages": 2}  # fmt: skip


@placed
def run(x: Tensor, projections: Sequence[Projection]) -> list[Tensor]:
    """Run `moebook.kernels.lora_mixture`."""
    factors = [projection.down.flatten(0, 1) for projection in projections]
    joined = F.linear(x, torch.cat(factors))
    hiddens = joined.split([len(factor) for factor in factors], dim=-1)
    return [
        _Mixed.apply(
            p.base.reshape(-1, p.base.shape[-1]).contiguous(),
            hidden.reshape(-1, hidden.shape[-1]).contiguous(),
            p.gates.reshape(-1, p.gates.shape[-1]).contiguous(),
            p.up.contiguous(),
            p.scale,
        ).view_as(p.base)
        for hidden, p in zip(hiddens, projections, strict=True)
    ]


@triton.jit
def _mix(
    base, hidden, gates, up, out, scale, T, N: tl.constexpr, R: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out[t] = base[t] + scale * sum over n of gates[t, n] * up[n] hidden[t, n]."""
    row = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    live, within = (row < T)[:, None], (column < WIDE)[None, :]
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for first in range(0, N * R, BK):
        deep = first + tl.arange(0, BK)
        inside = deep < N * R
        a = tl.load(hidden + row[:, None] * (N * R) + deep[None, :],
                    mask=live & inside[None, :], other=0.0)  # fmt: skip
        gate = tl.load(gates + row[:, None] * N + (deep // R)[None, :],
                       mask=live & inside[None, :], other=0.0)  # fmt: skip
        a = (a.to(tl.float32) * gate.to(tl.float32)).to(hidden.dtype.element_ty)
        at = (deep // R * WIDE * R + deep % R)[:, None] + column[None, :] * R
        b = tl.load(up + at, mask=inside[:, None] & within, other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    at = row[:, None] * WIDE + column[None, :]
    total = total * scale + tl.load(base + at, mask=live & within, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=live & within)


class _Mixed(torch.autograd.Function):
    """One projection: base ``[T, O]``, hidden ``[T, N * R]``, gates ``[T, N]``, up."""

    @staticmethod
    def forward(
        ctx: Any, base: Tensor, hidden: Tensor, gates: Tensor, up: Tensor, scale: float
    ) -> Tensor:
        tokens, wide = base.shape
        number, _, rank = up.shape
        out = torch.empty_like(base)
        if tokens:
            chosen = blocks(hidden.dtype)
            _mix[(triton.cdiv(tokens, chosen["BM"]), triton.cdiv(wide, chosen["BN"]))](
                base, hidden, gates, up, out, scale, tokens, N=number, R=rank, WIDE=wide, **chosen
            )  # fmt: skip
        ctx.save_for_backward(hidden, gates, up)
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, gates, up = ctx.saved_tensors
        columns = up.transpose(0, 1).flatten(1)  # [O, N * R]
        split = hidden.unflatten(1, (len(up), -1))
        # The scale goes into the small factors: the gradient [T, O] is read, not copied.
        factors = (gates * ctx.scale).unsqueeze(-1)
        weighted = (split * factors).to(hidden.dtype).flatten(1)
        narrow = grad.to(hidden.dtype)
        d_up = (narrow.T @ weighted).unflatten(1, (len(up), -1)).transpose(0, 1)
        d_weighted = (narrow @ columns).view_as(split)
        d_gates = (d_weighted.float() * split.float()).sum(-1).mul(ctx.scale).to(gates.dtype)
        d_hidden = (d_weighted * factors).to(hidden.dtype).flatten(1)
        return grad, d_hidden, d_gates, d_up, None
