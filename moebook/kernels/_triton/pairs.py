"""adapters on a GPU where K is 2: tokens sorted by the PAIR of their experts.

Each token appears once: it is read, goes through both adapters in registers, and is written, with
neither a buffer of T * K rows nor atomic additions. The backward pass is the same kernel with the
two matrices of an adapter exchanged.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from moebook.kernels._triton.grouped import sort_rows, weight_gradient
from moebook.kernels._triton.sorting import sort, tile_table
from moebook.kernels.route import Routing


def fit(routing: Routing, down: Tensor) -> bool:
    """Whether tokens have two experts, of few enough pairs, with factors that registers hold."""
    return routing.ids.shape[1] == 2 and down.shape[0] <= 64 and down.shape[2] <= 128


def blocks(dtype: torch.dtype, rank: int) -> dict[str, Any]:
    """Choose a program's work: BM tokens, BD columns at a time, all R columns within."""
    wide = max(16, triton.next_power_of_2(rank))
    if dtype == torch.float32:
        precision = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
        return {"BM": 32 if wide <= 64 else 16, "BD": 32, "BR": wide, "PRECISION": precision,
                "num_warps": 8, "num_stages": 2}  # fmt: skip
    return {"BM": 64, "BD": 64, "BR": wide, "PRECISION": "ieee",
            "num_warps": 4 if wide <= 32 else 8, "num_stages": 3}  # fmt: skip


@triton.jit
def _gelu(x):
    """gelu, and its derivative."""
    share = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    return x * share, share + x * tl.exp(-0.5 * x * x) * 0.3989422804014327


@triton.jit
def _middle(z, slot, r, R, live, pre, weighted, d_pre, gate, d_gate, BACK: tl.constexpr):
    """Between the products of one adapter: z becomes what the second one multiplies."""
    factor = tl.load(gate + slot, mask=live, other=0.0)
    at = slot[:, None] * R + r[None, :]
    inside = live[:, None] & (r < R)[None, :]
    if BACK:
        active, slope = _gelu(tl.load(pre + at, mask=inside, other=0.0).to(tl.float32))
        tl.store(d_gate + slot, tl.sum(z * active, axis=1), mask=live)
        active *= factor[:, None]
        tl.store(weighted + at, active.to(weighted.dtype.element_ty), mask=inside)
        z = (z * slope * factor[:, None]).to(d_pre.dtype.element_ty)
        tl.store(d_pre + at, z, mask=inside)
    else:
        z = z.to(pre.dtype.element_ty)
        tl.store(pre + at, z, mask=inside)
        active, slope = _gelu(z.to(tl.float32))
        z = (active * factor[:, None]).to(pre.dtype.element_ty)
    return z


@triton.jit
def _pairs(
    rows, base, token, ids, gate, one, two, pre, weighted, d_pre, d_gate, out, tiles, number,
    E: tl.constexpr, D: tl.constexpr, R: tl.constexpr, BACK: tl.constexpr, ADD: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """out[t] = base[t] + both adapters of rows[t]; BACK: of a gradient, by their transposes."""
    if tl.program_id(0) >= tl.load(number):
        return
    tile = tiles + 3 * tl.program_id(0)
    pair, start, end = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    live = tl.arange(0, BM) < end - start
    source = tl.load(token + start + tl.arange(0, BM), mask=live, other=0)
    low, high = pair // E, pair % E
    # Which of a token's two choices is the lower expert.
    slot = 2 * source + (tl.load(ids + 2 * source, mask=live, other=0) != low).to(tl.int64)
    low, high = low * (D * R), high * (D * R)
    r = tl.arange(0, BR)
    a = tl.zeros((BM, BR), dtype=tl.float32)
    b = tl.zeros((BM, BR), dtype=tl.float32)
    for first in range(0, D, BD):
        d = first + tl.arange(0, BD)
        x = tl.load(rows + source[:, None] * D + d[None, :],
                    mask=live[:, None] & (d < D)[None, :], other=0.0)  # fmt: skip
        at = r[None, :] * D + d[:, None] if BACK else d[:, None] * R + r[None, :]
        inside = (d < D)[:, None] & (r < R)[None, :]
        w = tl.load(one + low + at, mask=inside, other=0.0)
        a = tl.dot(x, w, a, input_precision=PRECISION)
        w = tl.load(one + high + at, mask=inside, other=0.0)
        b = tl.dot(x, w, b, input_precision=PRECISION)
    a = _middle(a, slot, r, R, live, pre, weighted, d_pre, gate, d_gate, BACK)
    slot = 4 * source + 1 - slot  # the other choice
    b = _middle(b, slot, r, R, live, pre, weighted, d_pre, gate, d_gate, BACK)
    for first in range(0, D, BD):
        d = first + tl.arange(0, BD)
        spot = d[None, :] * R + r[:, None] if BACK else r[:, None] * D + d[None, :]
        within = (r < R)[:, None] & (d < D)[None, :]
        w = tl.load(two + low + spot, mask=within, other=0.0)
        y = tl.dot(a, w, input_precision=PRECISION)
        w = tl.load(two + high + spot, mask=within, other=0.0)
        y = tl.dot(b, w, y, input_precision=PRECISION)
        to = source[:, None] * D + d[None, :]
        mask = live[:, None] & (d < D)[None, :]
        if ADD:
            y += tl.load(base + to, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + to, y.to(out.dtype.element_ty), mask=mask)


class Pairs(torch.autograd.Function):
    """Kept for the backward pass: the inputs and the pre-activation ``[T, 2, R]``."""

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, other: Tensor | None, gates: Tensor, down: Tensor, up: Tensor,
        routing: Routing,
    ) -> Tensor:  # fmt: skip
        source, (experts, width, rank) = h if other is None else other, down.shape
        chosen, ids, gate = blocks(h.dtype, rank), routing.ids.contiguous(), gates.contiguous()
        token, counts = sort(ids, experts * experts, pairs=experts)
        by = tile_table(counts, len(h), chosen["BM"])
        pre, out = h.new_empty(len(h), 2, rank), torch.empty_like(h)
        _pairs[(len(by[0]),)](
            source, h, token, ids, gate, down, up, pre, pre, pre, gate, out, *by, E=experts,
            D=width, R=rank, BACK=False, ADD=True, **chosen,
        )  # fmt: skip
        ctx.save_for_backward(source, gate, down, up, pre)
        ctx.by, ctx.token, ctx.routing, ctx.apart = by, token, routing, other is not None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        source, gate, down, up, pre = ctx.saved_tensors
        routing, grad, (experts, width, rank) = ctx.routing, grad.contiguous(), down.shape
        weighted, d_pre, d_gate = (torch.empty_like(t) for t in (pre, pre, gate))
        d_source = torch.empty_like(grad)
        _pairs[(len(ctx.by[0]),)](
            grad, grad, ctx.token, routing.ids.contiguous(), gate, up, down, pre, weighted, d_pre,
            d_gate, d_source, *ctx.by, E=experts, D=width, R=rank, BACK=True, ADD=not ctx.apart,
            **blocks(grad.dtype, rank),
        )  # fmt: skip
        by = sort_rows(routing, grad.dtype)
        weighted, d_pre = (t.view(-1, rank)[routing.order] for t in (weighted, d_pre))
        d_up = weight_gradient(weighted, grad, by, up, by_token="right")
        d_down = weight_gradient(source, d_pre, by, down, by_token="left")
        d_inputs = (grad, d_source) if ctx.apart else (d_source, None)
        return *d_inputs, d_gate, d_down, d_up, None
