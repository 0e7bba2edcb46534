"""experts on a GPU, for SiLU: gated product and activation in one kernel.

The backward pass is grouped products, and one kernel between them that reads each row once for the
activation's derivative, the weighted activation and the gradient of the row's weight.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from moebook.kernels._triton.grouped import (
    Sorted,
    aligned,
    combine,
    fetched,
    gather,
    product,
    programs,
    sort_rows,
    view,
    weight_gradient,
)
from moebook.kernels.experts import Activation, Bank
from moebook.kernels.route import Routing


def run(
    x: Tensor,
    routing: Routing,
    bank: Bank,
    act: Activation,
    frozen: Bank | None = None,
    slots: Tensor | None = None,
) -> Tensor:
    """Run `moebook.kernels.experts`, or `split_experts`: either bank is read by the slots."""
    weights = [aligned(weight) for weight in bank]
    still = [None, None] if frozen is None else [aligned(weight) for weight in frozen]
    slots = None if slots is None else slots.long().contiguous()
    y: Tensor = _GatedFFN.apply(
        x.contiguous(), routing.weights, *weights, *still, slots, routing
    )
    return y


@triton.jit
def _gated_up(
    rows,  # [S, D] sorted, for TMA; else [T, D]
    token,  # [S], of each sorted row
    matrices,  # [E, 2F, D]
    pre,  # [S, 2F]
    hidden,  # [S, F]
    tiles,  # see `tile_table`
    number,
    D: tl.constexpr,
    F: tl.constexpr,
    TMA: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """pre[r] = rows[r] @ gate_up.T of r's expert; hidden[r] = silu(gate) * up.

    By pointers the row of r's token is read.
    """
    columns = tl.cdiv(F, BN)
    for work in tl.range(
        tl.program_id(0), tl.load(number) * columns, PROGRAMS, flatten=True
    ):
        tile = tiles + 3 * (work // columns)
        place = tl.load(tile)
        start = tl.load(tile + 1)
        end = tl.load(tile + 2)
        column = (work % columns * BN).to(tl.int32)
        # BN columns of the gate, then of up.
        total = tl.zeros((BM, 2 * BN), dtype=tl.float32)
        live = start.to(tl.int32) + tl.arange(0, BM) < end
        at = tl.load(token + start + tl.arange(0, BM), mask=live, other=0)
        for first in range(0, D, BK):
            if TMA:
                a = rows.load([start.to(tl.int32), first])
                b = matrices.load([(2 * place).to(tl.int32), column, first])
                b = tl.reshape(b, (2 * BN, BK))
            else:
                row = tl.arange(0, 2 * BN)
                deep = first + tl.arange(0, BK)
                inside = live[:, None] & (deep < D)[None, :]
                a = tl.load(
                    rows + at[:, None] * D + deep[None, :], mask=inside, other=0.0
                )
                inside = (column + row % BN < F)[:, None] & (deep < D)[None, :]
                row = (2 * place + row // BN) * F + column + row % BN
                b = tl.load(
                    matrices + row[:, None] * D + deep[None, :], mask=inside, other=0.0
                )
            total = tl.dot(a, b.T, total, input_precision=PRECISION)
        total = tl.reshape(total.to(pre.dtype.element_ty), (BM, 2, BN))
        gate, up = tl.split(tl.permute(total, (0, 2, 1)))
        row = start + tl.arange(0, BM)
        n = column + tl.arange(0, BN)
        inside = live[:, None] & (n < F)[None, :]
        to = pre + row[:, None] * (2 * F) + n[None, :]
        tl.store(to, gate, mask=inside)
        tl.store(to + F, up, mask=inside)
        wide = gate.to(tl.float32)
        active = wide / (1.0 + tl.exp(-wide)) * up.to(tl.float32)
        to = hidden + row[:, None] * F + n[None, :]
        tl.store(to, active.to(hidden.dtype.element_ty), mask=inside)


@triton.jit
def _gated_back(
    pre, d_hidden, weight, d_pre, d_weight, F: tl.constexpr, BF: tl.constexpr
):
    """One row: from the gradient of its weighted hidden, all that hangs on it.

    The weighted hidden itself takes the place of the gradient that was read.
    """
    row = tl.program_id(0).to(tl.int64)
    factor = tl.load(weight + row)
    total = tl.zeros((BF,), dtype=tl.float32)
    for first in range(0, F, BF):
        column = first + tl.arange(0, BF)
        inside = column < F
        at = row * (2 * F) + column
        gate = tl.load(pre + at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(pre + at + F, mask=inside, other=0.0).to(tl.float32)
        spot = d_hidden + row * F + column
        grad = tl.load(spot, mask=inside, other=0.0).to(tl.float32)
        share = 1.0 / (1.0 + tl.exp(-gate))
        hidden = gate * share * up
        total += grad * hidden
        grad *= factor
        # silu(g) = g s with s = sigmoid(g), so silu'(g) = s (1 + g (1 - s)).
        d_gate = grad * up * share * (1.0 + gate * (1.0 - share))
        tl.store(d_pre + at, d_gate.to(d_pre.dtype.element_ty), mask=inside)
        tl.store(
            d_pre + at + F,
            (grad * gate * share).to(d_pre.dtype.element_ty),
            mask=inside,
        )
        tl.store(spot, (hidden * factor).to(d_hidden.dtype.element_ty), mask=inside)
    tl.store(d_weight + row, tl.sum(total))


class _GatedFFN(torch.autograd.Function):
    """Kept for the backward pass: ``x`` and the pre-activation ``[S, 2F]``, S = T * K.

    The tensor memory accelerator needs rows in their order: they are gathered once for it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,  # [T, D]
        weights: Tensor,  # [T, K]
        gate_up: Tensor,  # [N, 2F, D], trained
        down: Tensor,  # [N, D, F]
        still_gate_up: Tensor | None,  # [E, 2F, D], frozen
        still_down: Tensor | None,  # [E, D, F]
        slots: Tensor | None,  # [E]
        routing: Routing,
    ) -> Tensor:
        by = sort_rows(routing, x.dtype, slots)
        weight = weights.flatten()[routing.order].float()  # [S]
        pre, hidden = _up(x, _both(gate_up, still_gate_up), by)
        out = product(hidden, _both(down, still_down), by, weight)  # [S, F] @ [F, D]
        ctx.save_for_backward(
            x, weight, gate_up, down, still_gate_up, still_down, slots, pre
        )
        ctx.by = by
        ctx.dtype = weights.dtype
        return combine(out, by)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, gate_up, down, still_gate_up, still_down, slots, pre = (
            ctx.saved_tensors
        )
        by = ctx.by
        needed = ctx.needs_input_grad
        d_gate_up = None
        d_down = None
        d_x = None
        d_out = gather(grad.contiguous(), by)  # [S, D]
        weighted = product(d_out, _both(down, still_down), by)  # [S, D] @ [D, F]
        d_pre, d_weight = _back(weighted, weight, pre)
        if needed[3]:  # [D, S] @ [S, F] of each expert
            d_down = weight_gradient(d_out, weighted, by, down, slots=slots)
        del weighted, d_out
        if needed[2]:  # [2F, S] @ [S, D]
            in_order = fetched(x.dtype, x.device, *gate_up.shape[1:])
            rows = gather(x, by) if in_order else x
            by_token = "" if in_order else "right"
            d_gate_up = weight_gradient(
                d_pre, rows, by, gate_up, slots=slots, by_token=by_token
            )
        if needed[0]:  # [S, 2F] @ [2F, D]
            d_x = combine(product(d_pre, _both(gate_up, still_gate_up), by), by)
        d_weights = d_weight[by.place].to(ctx.dtype)
        return d_x, d_weights, d_gate_up, d_down, None, None, None, None


def _both(first: Tensor, second: Tensor | None) -> list[Tensor]:
    return [first] if second is None else [first, second]


def _up(x: Tensor, banks: list[Tensor], by: Sorted) -> tuple[Tensor, Tensor]:
    """Return the pre-activation ``[S, 2F]`` and ``silu(gate) * up``, ``[S, F]``."""
    count = len(by.token)
    width = x.shape[1]
    F = banks[0].shape[1] // 2
    pre = x.new_empty(count, 2 * F)
    hidden = x.new_empty(count, F)
    chosen = {**by.blocks, "BN": by.blocks["BN"] // 2}  # of the gate, and as many of up
    tma = fetched(x.dtype, x.device, width)
    rows = gather(x, by) if tma else x
    block = (2, chosen["BN"], chosen["BK"])
    most = programs(x.device)
    for bank, share in zip(banks, by.shares, strict=True):
        if count and len(bank):
            work = len(share[0]) * triton.cdiv(F, chosen["BN"])
            _gated_up[(min(most, work),)](
                view(rows, (chosen["BM"], chosen["BK"]), tma),
                by.token,
                view(bank.view(-1, F, width), block, tma),
                pre,
                hidden,
                *share,
                D=width,
                F=F,
                TMA=tma,
                PROGRAMS=most,
                **chosen,
            )
    return pre, hidden


def _back(d_hidden: Tensor, weight: Tensor, pre: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of pre-activation and weights; d_hidden becomes weight * hidden."""
    rows, width = d_hidden.shape
    d_pre = torch.empty_like(pre)
    d_weight = torch.empty_like(weight)
    if rows:
        wide = min(1024, triton.next_power_of_2(width))
        _gated_back[(rows,)](pre, d_hidden, weight, d_pre, d_weight, F=width, BF=wide)
    return d_pre, d_weight
