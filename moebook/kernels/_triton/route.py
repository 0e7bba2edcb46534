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
    left = tl.load(logits + row[:, None] * E + expert, mask=inside, other=float("-inf"))
    # Logits of minus infinity come after all others, but before what was taken.
    left = tl.where(inside, tl.maximum(left.to(tl.float32), -3.4e38), float("-inf"))
    for k in tl.static_range(K):
        best = tl.argmax(left, axis=1)
        tl.store(ids + row * K + k, best.to(tl.int64), mask=row < T)
        left = tl.where(expert == best[:, None], float("-inf"), left)
