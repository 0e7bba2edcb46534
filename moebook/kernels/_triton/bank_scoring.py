"""bank scoring on a GPU: the head's product and the softmax's sum in one kernel, no logits stored.

Answers are few, so the vocabulary is cut into spans for programs of their own; what a span found of
a row (maximum, sum, target's logit) is put together by PyTorch, in a fixed order.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moebook.kernels._triton.grouped import precision
from moebook.kernels._triton.placing import placed

PROGRAMS = 512
"""Programs to aim at: some for each multiprocessor of a large GPU."""


def blocks(dtype: torch.dtype) -> dict[str, Any]:
    """Choose a program's work: BM rows, BV of the vocabulary at a time, BK of the width."""
    if dtype == torch.float32:
        return {"BM": 32, "BV": 64, "BK": 32, "num_warps": 8, "num_stages": 2}
    return {"BM": 64, "BV": 128, "BK": 64, "num_warps": 4, "num_stages": 3}


@placed
def run(hidden: Tensor, head: Tensor, readers: Tensor, targets: Tensor) -> Tensor:
    """Run `moebook.kernels.bank_scoring`: nats of each token ``[N, tokens]``."""
    (adapters, tokens, width), vocabulary = hidden.shape, len(head)
    rows, chosen = adapters * len(readers), blocks(hidden.dtype)
    if not rows:
        return hidden.new_zeros(adapters, 0, dtype=torch.float32)
    tiles = triton.cdiv(rows, chosen["BM"])
    steps = triton.cdiv(vocabulary, chosen["BV"])
    each = triton.cdiv(steps, max(1, min(steps, PROGRAMS // tiles)))
    spans = triton.cdiv(steps, each)
    found = torch.empty(3, spans, rows, device=hidden.device)
    _scan[(tiles, spans)](
        hidden.contiguous(), head.contiguous(), readers.contiguous(), targets.contiguous(), found,
        rows, len(readers), tokens, vocabulary, each * chosen["BV"], D=width, PRECISION=precision(),
        **chosen,
    )  # fmt: skip
    highest = found[0].amax(0)
    total = (found[1] * (found[0] - highest).exp()).sum(0)
    return (highest + total.log() - found[2].sum(0)).view(adapters, -1)


@triton.jit
def _scan(
    hidden, head, readers, targets, found, n, answers, T, V, SPAN, D: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """found[:, span, r]: over a span of r's logits the maximum, sum of exp, and target's logit."""
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    live = row < n
    reader = tl.load(readers + row % answers, mask=live, other=0)
    target = tl.load(targets + row % answers, mask=live, other=-1)
    h_of = hidden + ((row // answers).to(tl.int64) * T + reader)[:, None] * D
    begin = tl.program_id(1) * SPAN
    highest = tl.full((BM,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BM,), dtype=tl.float32)
    hit = tl.zeros((BM,), dtype=tl.float32)
    for start in range(begin, min(begin + SPAN, V), BV):
        word = start + tl.arange(0, BV)
        w_of = head + word.to(tl.int64)[None, :] * D
        logits = tl.zeros((BM, BV), dtype=tl.float32)
        for k in range(0, D, BK):
            deep = k + tl.arange(0, BK)
            h = tl.load(h_of + deep[None, :], mask=live[:, None] & (deep < D)[None, :], other=0.0)
            w = tl.load(w_of + deep[:, None], mask=(word < V)[None, :] & (deep < D)[:, None],
                        other=0.0)  # fmt: skip
            logits = tl.dot(h, w, logits, input_precision=PRECISION)
        logits = tl.where((word < V)[None, :], logits, float("-inf"))
        above = tl.maximum(highest, tl.max(logits, axis=1))
        shares = tl.exp(logits - above[:, None])
        total = total * tl.exp(highest - above) + tl.sum(shares, axis=1)
        hit += tl.sum(tl.where(word[None, :] == target[:, None], logits, 0.0), axis=1)
        highest = above
    to = found + tl.program_id(1).to(tl.int64) * n + row
    every = tl.num_programs(1).to(tl.int64) * n
    tl.store(to, highest, mask=live)
    tl.store(to + every, total, mask=live)
    tl.store(to + 2 * every, hit, mask=live)
