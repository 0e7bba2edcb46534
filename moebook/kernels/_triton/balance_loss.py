"""balance loss on a GPU: f and p in one reading of the logits, and the gradient in another."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from moebook.kernels._triton.placing import placed
from moebook.kernels.balance_loss import reference

ROWS = 32
"""Tokens of one program."""


@placed
def run(logits: Tensor, ids: Tensor, keep: Tensor, form: str) -> Tensor:
    """Run `moebook.kernels.balance_loss`; the constant form has no work that is worth a kernel."""
    if form == "constant":
        return reference(logits, ids, keep, form)
    value: Tensor = _Balance.apply(logits.contiguous(), ids.contiguous(), keep.contiguous())
    return value


@triton.jit
def _softmax(logits, row, T, E: tl.constexpr, BE: tl.constexpr):
    """Rows of the softmax, in float32; 0 outside."""
    expert = tl.arange(0, BE)[None, :]
    inside = (row < T)[:, None] & (expert < E)
    values = tl.load(logits + row[:, None] * E + expert, mask=inside, other=float("-inf"))
    values = tl.where((row < T)[:, None], values.to(tl.float32), 0.0)
    powers = tl.exp(values - tl.max(values, axis=1)[:, None])
    return powers / tl.sum(powers, axis=1)[:, None]


@triton.jit
def _sums(
    logits, ids, keep, load, mass, T, E: tl.constexpr, K: tl.constexpr, BT: tl.constexpr,
    BE: tl.constexpr,
):  # fmt: skip
    """Of one block of tokens: kept slots by expert, and the kept softmax summed."""
    row = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64)
    expert = tl.arange(0, BE)
    kept = tl.load(keep + row, mask=row < T, other=0.0).to(tl.float32)
    share = _softmax(logits, row, T, E, BE)
    count = tl.zeros((BE,), dtype=tl.float32)
    for k in tl.static_range(K):
        chosen = tl.load(ids + row * K + k, mask=row < T, other=-1)
        count += tl.sum(tl.where(chosen[:, None] == expert[None, :], kept[:, None], 0.0), axis=0)
    to = tl.program_id(0) * E + expert
    tl.store(load + to, count, mask=expert < E)
    tl.store(mass + to, tl.sum(share * kept[:, None], axis=0), mask=expert < E)


@triton.jit
def _gradient(
    logits, keep, factor, d_logits, T, E: tl.constexpr, BT: tl.constexpr, BE: tl.constexpr
):  # fmt: skip
    """d_logits[t] = keep[t] * share * (factor - factor . share)."""
    row = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64)
    expert = tl.arange(0, BE)
    kept = tl.load(keep + row, mask=row < T, other=0.0).to(tl.float32)
    weight = tl.load(factor + expert, mask=expert < E, other=0.0)[None, :]
    share = _softmax(logits, row, T, E, BE)
    grad = kept[:, None] * share * (weight - tl.sum(weight * share, axis=1)[:, None])
    inside = (row < T)[:, None] & (expert < E)[None, :]
    to = d_logits + row[:, None] * E + expert[None, :]
    tl.store(to, grad.to(d_logits.dtype.element_ty), mask=inside)


class _Balance(torch.autograd.Function):
    """Blocks of tokens are summed one by one, and their sums by PyTorch, in a fixed order."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
        (tokens, experts), top_k = logits.shape, ids.shape[1]
        blocks = triton.cdiv(tokens, ROWS)
        sums = torch.zeros(2, blocks, experts, device=logits.device)
        wide = triton.next_power_of_2(experts)
        if tokens:
            _sums[(blocks,)](
                logits, ids, keep, sums[0], sums[1], tokens, E=experts, K=top_k, BT=ROWS, BE=wide
            )
        slots, mass = sums.sum(1)
        kept = keep.float().sum()
        load = slots / (kept * top_k).clamp(min=1)
        factor = experts * load / kept.clamp(min=1)
        ctx.save_for_backward(logits, keep, factor)
        return (factor * mass).sum().to(logits.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, keep, factor = ctx.saved_tensors
        tokens, experts = logits.shape
        d_logits = torch.empty_like(logits)
        if tokens:
            _gradient[(triton.cdiv(tokens, ROWS),)](
                logits, keep, factor * grad.float(), d_logits, tokens, E=experts, BT=ROWS,
                BE=triton.next_power_of_2(experts),
            )  # fmt: skip
        return d_logits, None, None
