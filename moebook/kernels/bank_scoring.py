"""bank scoring: nats of S answers under N adapters, in blocks, no logits kept."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from moebook.errors import refuse
from moebook.kernels.dispatch import implementation, indices, shapes
from moebook.kernels.matmul import product, wide

LOGITS = {"cpu": 2**19, "cuda": 2**27}  # of one block: they stay in a CPU's cache


class Answers(NamedTuple):
    """Where the answers of S samples stand in a pack of T tokens, one after another; int64.

    Of each of their A tokens there is a reader, the place before it, which predicts it.
    """

    readers: Tensor  # [A] places in [0, T)
    targets: Tensor  # [A] the tokens themselves, in [0, V)
    lengths: Tensor  # [S] tokens of each answer; they sum to A


def bank_scoring(
    hidden: Tensor, head: Tensor, answers: Answers, *, impl: str = "auto"
) -> Tensor:
    """Sum the negative log-likelihoods of each answer's tokens under each adapter, in nats.

    ``-log softmax(W h)[target]``, ``[N, S]`` float64, for the few places that predict an
    answer. The logits exist block by block; what is kept is one number a token. Without a
    gradient.

    ``hidden [N, T, D]`` is what the head reads, of one pack of samples under N adapters,
    ``head [V, D]`` its weight W in the same dtype; the ``answers`` stand alike for all
    adapters. ``impl`` is ``"auto"``, ``"torch"`` (in blocks) or ``"reference"`` (all at
    once).
    """
    readers, targets, lengths = answers
    named = {
        "hidden": (hidden, "N T D"),
        "head": (head, "V D"),
        "lengths": (lengths, "S", "int"),
        "readers": (readers, "A", "int64"),
        "targets": (targets, "A", "int64"),
    }
    sizes = shapes(
        "bank_scoring", named, empty="N T A S", alike=("hidden", "head"), valued=True
    )
    indices("bank_scoring", "readers", readers, sizes["T"])
    indices("bank_scoring", "targets", targets, sizes["V"])
    indices("bank_scoring", "lengths", lengths, sizes["A"] + 1)
    if hidden.device.type == "cpu":
        total = int(lengths.sum())
        if total != sizes["A"]:
            have = f"lengths sum to {total}, answers have {sizes['A']} tokens"
            refuse("E-SHAPE", f"bank_scoring: {have}")
    with torch.no_grad():
        run = implementation("bank_scoring", impl, _IMPLEMENTATIONS, hidden)
        nats: Tensor = run(hidden.detach(), head.detach(), readers, targets)  # [N, A]
        by_token = nats.double().T.contiguous()
        # Rocket Eq. 1's exponent, -sum_i log P(y_i), of each answer: [S, N].
        # In a fixed order, without atomic additions; unsafe, which waits for no GPU.
        sums = torch.segment_reduce(by_token, "sum", lengths=lengths, unsafe=True)
        return sums.T


def token_nats(logits: Tensor, targets: Tensor) -> Tensor:
    """Return ``-log softmax(logits)[target]`` of each token, in float32 or wider.

    ``logits [..., V]``, ``targets [...]``; 0 where a target is below 0 (-100: not asked
    for). It adds a row's exponentials pairwise: a CPU's cross-entropy, which does not, is
    off by 4e-6 nats where logits spread by 4 and V is 49,152, and by 7e-5 with the classes
    not last.
    """
    both = {"logits": (logits, "... V"), "targets": (targets, "...", "int64")}
    known = shapes("token_nats", both, empty="T S ...")["V"]
    asked = targets.clamp(min=0)  # -100 is no place: 0 is read, and left out below
    indices("token_nats", "targets", asked, known)
    logits = wide(logits)
    # -log softmax(z)[t] = logsumexp(z) - z_t.
    chosen = logits.gather(-1, asked.unsqueeze(-1)).squeeze(-1)
    return torch.where(targets < 0, 0.0, logits.logsumexp(-1) - chosen)


def reference(hidden: Tensor, head: Tensor, readers: Tensor, targets: Tensor) -> Tensor:
    """Return each token's nats ``[N, A]`` from all logits at once."""
    logits = F.linear(hidden, head)[:, readers]  # [N, A, V]
    return token_nats(logits, targets.expand(len(hidden), -1))


def _blocked(hidden: Tensor, head: Tensor, readers: Tensor, targets: Tensor) -> Tensor:
    """Return each token's nats ``[N, A]``; the head runs on the answers' rows, by blocks.

    A loss of a row needs its whole row of logits, but no other row: so blocks are of rows.
    """
    rows = hidden[:, readers].flatten(0, 1)  # [N * A, D]
    wanted = targets.repeat(len(hidden))  # [N * A], adapter by adapter as the rows
    nats = wide(rows.new_empty(len(rows)))
    size = max(1, LOGITS[rows.device.type] // len(head))
    for start in range(0, len(rows), size):
        part = slice(start, start + size)
        logits = wide(product(rows[part], head.T))  # [size, V]
        nats[part] = F.cross_entropy(logits, wanted[part], reduction="none")
    return nats.view(len(hidden), len(targets))


_IMPLEMENTATIONS = {"torch": _blocked, "reference": reference}
