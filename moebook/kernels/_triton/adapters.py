"""adapters on a GPU, where K is 2: tokens sorted by the PAIR of their experts.

Each token is read once, goes through both adapters, and is written, with neither a buffer of T * K
wide rows nor atomic additions. The R columns between an adapter's two products go through memory.
The backward pass is the same kernels with the two matrices of an adapter exchanged.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from moebook.kernels._triton.grouped import (
    aligned,
    precision,
    sort_rows,
    weight_gradient,
)
from moebook.kernels._triton.route import sort, tile_table
from moebook.kernels.route import Routing


def run(
    h: Tensor, source: Tensor, routing: Routing, down: Tensor, up: Tensor, scale: float
) -> Tensor:
    """Run `moebook.kernels.adapters`."""
    other = None if source is h else source.contiguous()
    gates = routing.weights.float() * scale
    y: Tensor = _Pairs.apply(
        h.contiguous(), other, gates, aligned(down), aligned(up), routing
    )
    return y


def blocks(dtype: torch.dtype, rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Choose a program's work: BM tokens, inward BD columns at a time, outward BN of SPAN."""
    wide = max(16, triton.next_power_of_2(rank))
    shared = {"BM": 64, "BR": wide, "PRECISION": "ieee"}
    if dtype == torch.float32:
        shared["BM"] = 32
        shared["PRECISION"] = precision()
        return (
            {**shared, "BD": 32, "num_warps": 8, "num_stages": 2},
            {**shared, "BN": 32, "SPAN": 128, "num_warps": 8, "num_stages": 2},
        )
    deep = 64 if wide < 64 else 32  # 64 would spill on an A100
    return (
        {**shared, "BD": deep, "num_warps": 4, "num_stages": 4},
        {**shared, "BN": 64, "SPAN": 1024, "num_warps": 4, "num_stages": 3},
    )


@triton.jit
def _gelu(x):
    """gelu, and its derivative."""
    share = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    return x * share, share + x * tl.exp(-0.5 * x * x) * 0.3989422804014327


@triton.jit
def _tile_of(token, ids, tiles, tile, E: tl.constexpr, BM: tl.constexpr):
    """Return a tile's tokens, which of them count, their two experts, and their slots of each.

    A tile holds tokens of one pair of experts: pair, first and end of its tokens, [3].
    """
    told = tiles + 3 * tile
    pair = tl.load(told)  # lower * E + higher
    start = tl.load(told + 1)
    end = tl.load(told + 2)
    live = tl.arange(0, BM) < end - start  # the last tile of a pair is not full
    source = tl.load(token + start + tl.arange(0, BM), mask=live, other=0)
    # Which of a token's two choices is the lower expert.
    second = tl.load(ids + 2 * source, mask=live, other=0) != pair // E
    # A token's slots are 2 t and 2 t + 1, in sum 4 t + 1. As 64 bits they would spill.
    lower = (2 * source + second.to(tl.int64)).to(tl.int32)
    higher = (4 * source + 1).to(tl.int32) - lower
    return source, live, pair // E, pair % E, lower, higher


@triton.jit
def _middle(
    z, slot, r, R, live, pre, weighted, between, gate, d_gate, BACK: tl.constexpr
):
    """Between the products of one adapter: from what the first gave to what the second takes."""
    factor = tl.load(gate + slot, mask=live, other=0.0)
    at = slot[:, None] * R + r[None, :]
    inside = live[:, None] & (r < R)[None, :]
    if BACK:
        active, slope = _gelu(tl.load(pre + at, mask=inside, other=0.0).to(tl.float32))
        tl.store(d_gate + slot, tl.sum(z * active, axis=1), mask=live)
        active *= factor[:, None]
        tl.store(weighted + at, active.to(weighted.dtype.element_ty), mask=inside)
        z = z * slope * factor[:, None]
    else:
        z = z.to(pre.dtype.element_ty)
        tl.store(pre + at, z, mask=inside)
        active, slope = _gelu(z.to(tl.float32))
        z = active * factor[:, None]
    tl.store(between + at, z.to(between.dtype.element_ty), mask=inside)


@triton.jit
def _inward(
    rows,  # [T, D], what the adapters read; backward the gradient
    token,  # [T], sorted by pair
    ids,  # [T, 2]
    gate,  # [T, 2]
    matrices,  # [E, D, R]; backward [E, R, D]
    pre,  # [T, 2, R], before gelu
    weighted,  # [T, 2, R], gated gelu, backward alone
    between,  # [T, 2, R], what the second product takes
    d_gate,  # [T, 2], backward alone
    tiles,  # see `tile_table`
    number,
    E: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    BACK: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BR: tl.constexpr,
    BD: tl.constexpr,
):
    """between[slot] = rows[t] through the first matrix of its adapter and what follows that."""
    if tl.program_id(0) >= tl.load(number):
        return
    source, live, low, high, slot, other = _tile_of(
        token, ids, tiles, tl.program_id(0), E, BM
    )
    r = tl.arange(0, BR)
    a = tl.zeros((BM, BR), dtype=tl.float32)
    b = tl.zeros((BM, BR), dtype=tl.float32)
    for first in range(0, D, BD):
        d = first + tl.arange(0, BD)
        x = tl.load(
            rows + source[:, None] * D + d[None, :],
            mask=live[:, None] & (d < D)[None, :],
            other=0.0,
        )
        at = r[None, :] * D + d[:, None] if BACK else d[:, None] * R + r[None, :]
        inside = (d < D)[:, None] & (r < R)[None, :]
        w = tl.load(matrices + low * (D * R) + at, mask=inside, other=0.0)
        a = tl.dot(x, w, a, input_precision=PRECISION)
        w = tl.load(matrices + high * (D * R) + at, mask=inside, other=0.0)
        b = tl.dot(x, w, b, input_precision=PRECISION)
    _middle(a, slot, r, R, live, pre, weighted, between, gate, d_gate, BACK)
    _middle(b, other, r, R, live, pre, weighted, between, gate, d_gate, BACK)


@triton.jit
def _outward(
    between,  # [T, 2, R]
    base,  # [T, D], what is added to
    token,  # [T], sorted by pair
    ids,  # [T, 2]
    matrices,  # [E, R, D]; backward [E, D, R]
    out,  # [T, D]
    tiles,  # see `tile_table`
    number,
    E: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    BACK: tl.constexpr,
    ADD: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BR: tl.constexpr,
    BN: tl.constexpr,
    SPAN: tl.constexpr,
):
    """out[t] = base[t] + both slots of t through the second matrix of their adapters."""
    spans = tl.cdiv(D, SPAN)  # the programs in one row: a grid's second side is short
    tile = tl.program_id(0) // spans
    span = tl.program_id(0) % spans
    if tile >= tl.load(number):
        return
    source, live, low, high, slot, other = _tile_of(token, ids, tiles, tile, E, BM)
    r = tl.arange(0, BR)
    inside = live[:, None] & (r < R)[None, :]
    a = tl.load(between + slot[:, None] * R + r[None, :], mask=inside, other=0.0)
    b = tl.load(between + other[:, None] * R + r[None, :], mask=inside, other=0.0)
    for first in range(0, SPAN, BN):
        d = span * SPAN + first + tl.arange(0, BN)
        spot = d[None, :] * R + r[:, None] if BACK else r[:, None] * D + d[None, :]
        within = (r < R)[:, None] & (d < D)[None, :]
        w = tl.load(matrices + low * (D * R) + spot, mask=within, other=0.0)
        y = tl.dot(a, w, input_precision=PRECISION)
        w = tl.load(matrices + high * (D * R) + spot, mask=within, other=0.0)
        y = tl.dot(b, w, y, input_precision=PRECISION)
        to = source[:, None] * D + d[None, :]
        mask = live[:, None] & (d < D)[None, :]
        if ADD:
            y += tl.load(base + to, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + to, y.to(out.dtype.element_ty), mask=mask)


class _Order(NamedTuple):
    """Tokens sorted by pair."""

    token: Tensor  # [T]
    ids: Tensor  # [T, 2], as they were routed
    tiles: tuple[Tensor, Tensor]
    experts: int


def _through(
    rows: Tensor,  # [T, D]
    base: Tensor | None,  # [T, D]
    by: _Order,
    gate: Tensor,  # [T, 2]
    matrices: tuple[Tensor, Tensor],  # the first and the second of an adapter
    pre: Tensor,  # [T, 2, R]
    *,
    back: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return both adapters' sum on the base, what lay between; for backward weighted, d_gate."""
    width = rows.shape[1]
    rank = pre.shape[2]
    sizes = {"E": by.experts, "D": width, "R": rank, "BACK": back}
    inward, outward = blocks(rows.dtype, rank)
    between = torch.empty_like(pre)
    out = torch.empty_like(rows)
    weighted = torch.empty_like(pre) if back else pre  # forward they are not written
    d_gate = torch.empty_like(gate) if back else gate
    tiles, number = by.tiles
    _inward[(len(tiles),)](
        rows,
        by.token,
        by.ids,
        gate,
        matrices[0],
        pre,
        weighted,
        between,
        d_gate,
        tiles,
        number,
        **sizes,
        **inward,
    )
    _outward[(triton.cdiv(width, outward["SPAN"]) * len(tiles),)](
        between,
        rows if base is None else base,
        by.token,
        by.ids,
        matrices[1],
        out,
        tiles,
        number,
        ADD=base is not None,
        **sizes,
        **outward,
    )
    return out, between, weighted, d_gate


class _Pairs(torch.autograd.Function):
    """`run` as one step of autograd, its gradients by the kernels above, matrices exchanged.

    Kept for the backward pass: what the adapters read, gates, matrices, the pre-activation
    ``[T, 2, R]`` and the order of the tokens.
    """

    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,  # [T, D]
        other: Tensor | None,  # [T, D], the source if apart
        gates: Tensor,  # [T, 2]
        down: Tensor,  # [E, D, R]
        up: Tensor,  # [E, R, D]
        routing: Routing,
    ) -> Tensor:
        source = h if other is None else other
        experts, _, rank = down.shape
        ids = routing.ids.contiguous()
        gate = gates.contiguous()
        token, counts = sort(ids, experts * experts, pairs=experts)
        tiles = tile_table(counts, len(h), blocks(h.dtype, rank)[0]["BM"])
        by = _Order(token, ids, tiles, experts)
        pre = h.new_empty(len(h), 2, rank)
        out, *_ = _through(source, h, by, gate, (down, up), pre, back=False)
        ctx.save_for_backward(source, gate, down, up, pre)
        ctx.by = by
        ctx.routing = routing
        ctx.apart = other is not None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        source, gate, down, up, pre = ctx.saved_tensors
        routing = ctx.routing
        *_, of_down, of_up, _ = ctx.needs_input_grad
        grad = grad.contiguous()
        base = None if ctx.apart else grad
        d_source, d_pre, weighted, d_gate = _through(
            grad, base, ctx.by, gate, (up, down), pre, back=True
        )
        d_down = None
        d_up = None
        if of_down or of_up:  # [T, 2, R] to [S, R]
            by = sort_rows(routing, grad.dtype)
            weighted = weighted.view(-1, pre.shape[2])[routing.order]
            d_pre = d_pre.view(-1, pre.shape[2])[routing.order]
        if of_down:  # [D, S] @ [S, R] of each expert
            d_down = weight_gradient(source, d_pre, by, down, by_token="left")
        if of_up:  # [R, S] @ [S, D]
            d_up = weight_gradient(weighted, grad, by, up, by_token="right")
        d_inputs = (grad, d_source) if ctx.apart else (d_source, None)
        return *d_inputs, d_gate, d_down, d_up, None
