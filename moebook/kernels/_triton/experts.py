"""experts on a GPU: gather, gated product and activation in one kernel; x and its result are kept.

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

from moebook.errors import refuse
from moebook.kernels._triton.grouped import (
    Banks,
    Sorted,
    combine,
    matrix_of,
    product,
    sort_rows,
    weight_gradient,
)
from moebook.kernels.experts import Activation, Bank
from moebook.kernels.route import Routing

SILU = ("silu", "SiLU", "SiLUActivation")
"""The activation as torch's function, torch's module and transformers' module are called."""


def run(x: Tensor, routing: Routing, bank: Bank, act: Activation) -> Tensor:
    """Run `moebook.kernels.experts`."""
    slots = torch.arange(len(bank.down), device=x.device)
    return gated_ffn("experts", x, routing, bank, bank, slots, act)


def gated_ffn(
    op: str, x: Tensor, routing: Routing, frozen: Bank, trained: Bank, slots: Tensor,
    act: Activation,
) -> Tensor:  # fmt: skip
    """Run experts that lie in two banks, see `moebook.kernels.split_experts`.

    Raises:
        Refusal: E-IMPL for an activation other than SiLU.
    """
    if getattr(act, "__name__", type(act).__name__) not in SILU:
        refuse("E-IMPL", f"{op}: impl='triton' computes SiLU alone, act is {act}; use impl='torch'")
    weights = [weight.contiguous() for bank in (trained, frozen) for weight in bank]
    weights[2:] = [weight.detach() for weight in weights[2:]]
    y: Tensor = _GatedFFN.apply(x.contiguous(), routing.weights, *weights, slots, routing)
    return y


@triton.jit
def _gated_up(
    x, token, trained, frozen, slots, pre, hidden, tiles,
    D: tl.constexpr, F: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """pre[r] = x[token[r]] @ gate_up.T of r's expert; hidden[r] = silu(gate) * up."""
    tile = tiles + 3 * tl.program_id(1)
    expert, start, end = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    if start >= end:
        return
    row = tl.arange(0, BM)
    live = row < end - start
    source = tl.load(token + start + row, mask=live, other=0)
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    matrix = matrix_of(trained, frozen, slots, expert, 2 * F * D)
    gate = tl.zeros((BM, BN), dtype=tl.float32)
    up = tl.zeros((BM, BN), dtype=tl.float32)
    for first in range(0, D, BK):
        deep = first + tl.arange(0, BK)
        left = x + source[:, None] * D + deep[None, :]
        a = tl.load(left, mask=live[:, None] & (deep < D)[None, :], other=0.0)
        right = matrix + column[None, :] * D + deep[:, None]
        inside = (deep < D)[:, None] & (column < F)[None, :]
        gate = tl.dot(a, tl.load(right, mask=inside, other=0.0), gate, input_precision=PRECISION)
        right += F * D
        up = tl.dot(a, tl.load(right, mask=inside, other=0.0), up, input_precision=PRECISION)
    inside = live[:, None] & (column < F)[None, :]
    to = pre + start * (2 * F) + row[:, None] * (2 * F) + column[None, :]
    gate, up = gate.to(pre.dtype.element_ty), up.to(pre.dtype.element_ty)
    tl.store(to, gate, mask=inside)
    tl.store(to + F, up, mask=inside)
    wide = gate.to(tl.float32)
    active = wide / (1.0 + tl.exp(-wide)) * up.to(tl.float32)
    to = hidden + start * F + row[:, None] * F + column[None, :]
    tl.store(to, active.to(hidden.dtype.element_ty), mask=inside)


@triton.jit
def _gated_back(
    pre, d_hidden, weight, d_pre, weighted, d_weight, F: tl.constexpr, BF: tl.constexpr
):  # fmt: skip
    """One row: from the gradient of its weighted hidden, all that hangs on it."""
    row = tl.program_id(0).to(tl.int64)
    factor = tl.load(weight + row)
    total = tl.zeros((BF,), dtype=tl.float32)
    for first in range(0, F, BF):
        column = first + tl.arange(0, BF)
        inside = column < F
        at = row * (2 * F) + column
        gate = tl.load(pre + at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(pre + at + F, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(d_hidden + row * F + column, mask=inside, other=0.0).to(tl.float32)
        share = 1.0 / (1.0 + tl.exp(-gate))
        hidden = gate * share * up
        total += grad * hidden
        grad *= factor
        d_gate = grad * up * share * (1.0 + gate * (1.0 - share))
        tl.store(d_pre + at, d_gate.to(d_pre.dtype.element_ty), mask=inside)
        tl.store(d_pre + at + F, (grad * gate * share).to(d_pre.dtype.element_ty), mask=inside)
        to = weighted + row * F + column
        tl.store(to, (hidden * factor).to(weighted.dtype.element_ty), mask=inside)
    tl.store(d_weight + row, tl.sum(total))


class _GatedFFN(torch.autograd.Function):
    """Kept for the backward pass: ``x`` and the pre-activation ``[T * K, 2F]``."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, still_gate_up: Tensor,
        still_down: Tensor, slots: Tensor, routing: Routing,
    ) -> Tensor:  # fmt: skip
        by = sort_rows(routing, x.dtype)
        weight = weights.flatten()[routing.order].float()
        pre, hidden = _up(x, Banks(gate_up, still_gate_up, slots), by)
        banks = Banks(down, still_down, slots)
        out = product(hidden, banks, by, transposed=True, gather=False, gate=weight)
        ctx.save_for_backward(x, weight, gate_up, down, still_gate_up, still_down, slots, pre)
        ctx.by, ctx.dtype = by, weights.dtype
        return combine(out, by)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, gate_up, down, still_gate_up, still_down, slots, pre = ctx.saved_tensors
        by, needed, grad = ctx.by, ctx.needs_input_grad, grad.contiguous()
        banks = Banks(down, still_down, slots)
        d_hidden = product(grad, banks, by, transposed=False, gather=True, gate=None)
        d_pre, weighted, d_weight = _back(d_hidden, weight, pre)
        d_gate_up = d_down = d_x = None
        if needed[3]:
            d_down = weight_gradient(grad, weighted, by, slots, down, gather_left=True)
        del weighted, d_hidden
        if needed[2]:
            d_gate_up = weight_gradient(d_pre, x, by, slots, gate_up, gather_left=False)
        if needed[0]:
            banks = Banks(gate_up, still_gate_up, slots)
            d_x = combine(product(d_pre, banks, by, transposed=False, gather=False, gate=None), by)
        d_weights = d_weight[by.place].to(ctx.dtype)
        return d_x, d_weights, d_gate_up, d_down, None, None, None, None


def _up(x: Tensor, banks: Banks, by: Sorted) -> tuple[Tensor, Tensor]:
    """Return the pre-activation ``[S, 2F]`` and ``silu(gate) * up``, ``[S, F]``."""
    width, rows = banks.frozen.shape[1] // 2, len(by.token)
    pre, hidden = x.new_empty(rows, 2 * width), x.new_empty(rows, width)
    # Two products a program: half the columns of each.
    chosen = {**by.blocks, "BN": by.blocks["BN"] // 2}
    _gated_up[(triton.cdiv(width, chosen["BN"]), len(by.tiles))](
        x, by.token, *banks, pre, hidden, by.tiles, D=x.shape[1], F=width, **chosen
    )
    return pre, hidden


def _back(d_hidden: Tensor, weight: Tensor, pre: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient of the pre-activation, ``weight * hidden``, and that of the weights."""
    rows, width = d_hidden.shape
    d_pre, weighted = torch.empty_like(pre), torch.empty_like(d_hidden)
    d_weight = torch.empty_like(weight)
    if rows:
        wide = min(1024, triton.next_power_of_2(width))
        _gated_back[(rows,)](pre, d_hidden, weight, d_pre, weighted, d_weight, F=width, BF=wide)
    return d_pre, weighted, d_weight
