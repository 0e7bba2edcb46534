"""route on a GPU: the K largest logits of each row in one kernel, then a sort by counting."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moebook.kernels._triton.placing import placed
from moebook.kernels._triton.sorting import sort
from moebook.kernels.route import Routing, weights_of

ROWS = 32
"""Tokens of one program."""
FIRST = tl.constexpr(2**31 - 1)
LAST = tl.constexpr(-(2**31))
"""The largest and the smallest number of 32 bits; no logit has the bits of either."""


@placed
def run(logits: Tensor, top_k: int, combine: str) -> Routing:
    """Run `moebook.kernels.route`."""
    ids = torch.empty(len(logits), top_k, dtype=torch.int64, device=logits.device)
    if len(logits):
        experts = logits.shape[1]
        _choose[(triton.cdiv(len(logits), ROWS),)](
            logits.detach().contiguous(), ids, len(logits), E=experts, K=top_k, BT=ROWS,
            BE=triton.next_power_of_2(experts),
        )  # fmt: skip
    return Routing(ids, weights_of(logits, ids, combine), *sort(ids.view(-1), logits.shape[1]))


@triton.jit
def _choose(
    logits, ids, T, E: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BE: tl.constexpr
):  # fmt: skip
    """ids[t] = the experts of the K largest logits of t, of equal ones the lower number first."""
    row = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64)
    expert = tl.arange(0, BE)[None, :]
    inside = (row < T)[:, None] & (expert < E)
    logit = tl.load(logits + row[:, None] * E + expert, mask=inside, other=0).to(tl.float32)
    # Whole numbers in the order of the logits, NaN first as in a sort; what was taken comes last.
    bits = tl.where(logit == 0, 0.0, logit).to(tl.int32, bitcast=True)
    rank = tl.where(logit != logit, FIRST, bits ^ ((bits >> 31) & FIRST))
    rank = tl.where(inside, rank, LAST)
    for k in tl.static_range(K):
        best = tl.argmax(rank, axis=1)
        tl.store(ids + row * K + k, best.to(tl.int64), mask=row < T)
        rank = tl.where(expert == best[:, None], LAST, rank)
