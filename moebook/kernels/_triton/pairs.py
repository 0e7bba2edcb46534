"""adapters on a GPU where K is 2: tokens sorted by the PAIR of their experts.

Each token appears once: it is read, goes through both adapters in registers, and is written, with
neither a buffer of T * K rows nor atomic additions. The backward pass is the same kernel with the
two matrices of an adapter exchanged.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from moebook.kernels._triton.grouped import sort_rows, tile_table, weight_gradient
from moebook.kernels.route import Routing, grouped


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
def _middle(z, at, inside, source, live, pre, weighted, d_pre, gate, d_gate, BACK: tl.constexpr):
    """Between the products of one adapter: z becomes what the second one multiplies."""
    factor = tl.load(gate + 2 * source, mask=live, other=0.0)
    if BACK:
        active, slope = _gelu(tl.load(pre + at, mask=inside, other=0.0).to(tl.float32))
        tl.store(d_gate + 2 * source, tl.sum(z * active, axis=1), mask=live)
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
    rows, base, token, gate, one, two, pre, weighted, d_pre, d_gate, out, tiles,
    E: tl.constexpr, D: tl.constexpr, R: tl.constexpr, BACK: tl.constexpr, ADD: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """out[t] = base[t] + both adapters of rows[t]; BACK: of a gradient, by their transposes."""
    tile = tiles + 3 * tl.program_id(0)
    pair, start, end = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    if start >= end:
        return
    live = tl.arange(0, BM) < end - start
    source = tl.load(token + start + tl.arange(0, BM), mask=live, other=0)
    low, high = pair // E * (D * R), pair % E * (D * R)
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
    at = source[:, None] * (2 * R) + r[None, :]
    inside = live[:, None] & (r < R)[None, :]
    a = _middle(a, at, inside, source, live, pre, weighted, d_pre, gate, d_gate, BACK)
    b = _middle(b, at + R, inside, source, live, pre, weighted, d_pre, gate + 1, d_gate + 1, BACK)
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


class _Order(NamedTuple):
    """Tokens sorted by pair; a token's two slots in the order of their experts' numbers."""

    token: Tensor  # [T]
    tiles: Tensor
    ids: Tensor  # [T, 2], ascending
    swap: Tensor  # [T, 2], which choice of the token an entry of ids was


def _order(routing: Routing, experts: int, rows: int) -> _Order:
    ids, swap = routing.ids.sort(dim=1, stable=True)
    pair = ids[:, 0] * experts + ids[:, 1]
    counts = pair.new_zeros(experts * experts).scatter_add_(0, pair, torch.ones_like(pair))
    tiles = tile_table(counts, counts.cumsum(0), len(pair), rows)
    return _Order(pair.argsort(stable=True), tiles, ids, swap)


class Pairs(torch.autograd.Function):
    """Kept for the backward pass: the inputs and the pre-activation ``[T, 2, R]``."""

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, other: Tensor | None, gates: Tensor, down: Tensor, up: Tensor,
        routing: Routing,
    ) -> Tensor:  # fmt: skip
        source, (experts, width, rank) = h if other is None else other, down.shape
        chosen = blocks(h.dtype, rank)
        by = _order(routing, experts, chosen["BM"])
        gate = gates.gather(1, by.swap).contiguous()
        pre, out = h.new_empty(len(h), 2, rank), torch.empty_like(h)
        _pairs[(len(by.tiles),)](
            source, h, by.token, gate, down, up, pre, pre, pre, gate, out, by.tiles, E=experts,
            D=width, R=rank, BACK=False, ADD=True, **chosen,
        )  # fmt: skip
        ctx.save_for_backward(source, gate, down, up, pre)
        ctx.by, ctx.apart = by, other is not None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        source, gate, down, up, pre = ctx.saved_tensors
        by, grad, (experts, width, rank) = ctx.by, grad.contiguous(), down.shape
        weighted, d_pre, d_gate = (torch.empty_like(t) for t in (pre, pre, gate))
        d_source = torch.empty_like(grad)
        _pairs[(len(by.tiles),)](
            grad, grad, by.token, gate, up, down, pre, weighted, d_pre, d_gate, d_source, by.tiles,
            E=experts, D=width, R=rank, BACK=True, ADD=not ctx.apart,
            **blocks(grad.dtype, rank),
        )  # fmt: skip
        slots = torch.arange(experts, device=grad.device)
        routing = grouped(by.ids, gate, experts)
        rows = sort_rows(routing, grad.dtype)
        weighted, d_pre = (t.view(-1, rank)[routing.order] for t in (weighted, d_pre))
        d_up = weight_gradient(weighted, grad, rows, slots, up, gather_left=False)
        d_down = weight_gradient(source, d_pre, rows, slots, down, gather_left=True)
        d_gates = torch.empty_like(d_gate).scatter_(1, by.swap, d_gate)
        d_inputs = (grad, d_source) if ctx.apart else (d_source, None)
        return *d_inputs, d_gates, d_down, d_up, None
