"""bank scoring: nats of S answers under N adapters, the vocabulary in blocks, no logits kept."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from moebook.errors import refuse
from moebook.kernels.arguments import alike, floating, together, valued, whole
from moebook.kernels.dispatch import implementation
from moebook.kernels.products import product

LOGITS = 2**19
"""Logits of one block: with those few that are worked on, they stay in the cache."""


class Answers(NamedTuple):
    """Where the answers of S samples stand in a pack of T tokens, sample after sample.

    Attributes:
        readers: For each token of an answer, int64, the place in [0, T) that predicts it: that of
            the token before it. Samples may share places.
        targets: For each, int64, the token itself, in [0, V).
        lengths: ``[S]`` int64, tokens of each answer; they sum to the length of the other two.
    """

    readers: Tensor
    targets: Tensor
    lengths: Tensor


def bank_scoring(hidden: Tensor, head: Tensor, answers: Answers, *, impl: str = "auto") -> Tensor:
    """Sum the negative log-likelihoods of each answer's tokens under each adapter, in nats.

    ``-log softmax(W h)[target]`` for the places that predict an answer alone: of a pack, these are
    few. The logits exist block by block; what is kept is one number a token. Without a gradient:
    adapters are ranked by it, none is trained.

    Args:
        hidden: ``[N, T, D]``, what the head reads, of one pack of samples under N adapters.
        head: ``[V, D]``, the head's weight W, in the dtype of ``hidden``.
        answers: Where the answers stand, the same for all adapters.
        impl: ``"auto"``, ``"torch"`` (in blocks), ``"triton"`` or ``"reference"`` (all at once).

    Returns:
        ``[N, S]`` float64; the mean over an answer's tokens is this over ``answers.lengths``.

    Raises:
        Refusal: E-SHAPE, E-RANGE, E-DTYPE or E-DEVICE when the arguments do not fit one another,
            E-IMPL for an ``impl`` that is unknown or cannot run.
    """
    _check(hidden, head, answers)
    with torch.no_grad():
        run = implementation("bank_scoring", impl, _IMPLEMENTATIONS, hidden)
        nats: Tensor = run(hidden.detach(), head.detach(), answers.readers, answers.targets)
        rows = nats.double().T.contiguous()
        # In a fixed order, without atomic additions; unsafe is what does not wait for a GPU.
        return torch.segment_reduce(rows, "sum", lengths=answers.lengths, unsafe=True).T


def reference(hidden: Tensor, head: Tensor, readers: Tensor, targets: Tensor) -> Tensor:
    """Return each token's nats ``[N, tokens]`` from all logits at once."""
    logits = F.linear(hidden, head)
    shares = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    return -shares[:, readers, targets]


def _blocked(hidden: Tensor, head: Tensor, readers: Tensor, targets: Tensor) -> Tensor:
    """Return each token's nats ``[N, tokens]``; the head runs on the answers' rows, block by block.

    A loss of a row needs its whole row of logits, but no other row: so blocks are of rows.
    """
    rows = hidden[:, readers].flatten(0, 1)
    wanted = targets.repeat(len(hidden))
    wide = torch.promote_types(hidden.dtype, torch.float32)
    nats = torch.empty(len(rows), dtype=wide, device=rows.device)
    size = max(1, LOGITS // len(head))
    for start in range(0, len(rows), size):
        part = slice(start, start + size)
        logits = product(rows[part], head.T).to(wide)
        nats[part] = F.cross_entropy(logits, wanted[part], reduction="none")
    return nats.view(len(hidden), len(targets))


def _check(hidden: Tensor, head: Tensor, answers: Answers) -> None:
    fits = hidden.dim() == 3 and head.dim() == 2 and hidden.shape[2] == head.shape[1]
    fits = fits and answers.readers.dim() == answers.lengths.dim() == 1
    if not fits or answers.targets.shape != answers.readers.shape:
        got = ", ".join(str(tuple(part.shape)) for part in (hidden, head, *answers))
        refuse(
            "E-SHAPE",
            "bank_scoring: expected hidden [N, T, D], head [V, D], as many readers as targets, and"
            f" lengths [S]; got {got}",
        )
    if not len(head):
        refuse("E-SHAPE", f"bank_scoring: head is {tuple(head.shape)}, expected V >= 1 words")
    floating("bank_scoring", {"hidden": hidden, "head": head})
    alike("bank_scoring", {"hidden": hidden, "head": head})
    for name in ("readers", "targets"):
        if (got := getattr(answers, name).dtype) != torch.int64:
            refuse("E-DTYPE", f"bank_scoring: {name} is {got}, expected torch.int64")
    whole("bank_scoring", {"lengths": answers.lengths})
    together("bank_scoring", {"hidden": hidden, "head": head, **answers._asdict()})
    valued("bank_scoring", {"hidden": hidden})
    if hidden.device.type == "cpu":  # elsewhere this would wait for the GPU
        _check_places(hidden, head, answers)


def _check_places(hidden: Tensor, head: Tensor, answers: Answers) -> None:
    for name, places, end in (
        ("readers", answers.readers, hidden.shape[1]),
        ("targets", answers.targets, len(head)),
    ):
        if len(places) and not 0 <= int(places.min()) <= int(places.max()) < end:
            got = f"{int(places.min())} to {int(places.max())}"
            refuse("E-RANGE", f"bank_scoring: {name} run from {got}, expected 0 to {end - 1}")
    if len(answers.lengths) and answers.lengths.min() < 0:
        refuse("E-RANGE", f"bank_scoring: lengths hold {int(answers.lengths.min())}")
    if int(answers.lengths.sum()) != len(answers.targets):
        total = f"{int(answers.lengths.sum())}, the answers have {len(answers.targets)} tokens"
        refuse("E-SHAPE", f"bank_scoring: lengths sum to {total}")


_IMPLEMENTATIONS = {"torch": _blocked, "reference": reference}
