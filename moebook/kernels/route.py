"""route: logits to chosen experts, their weights, and the order that groups rows by expert."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moebook.errors import nearest, refuse
from moebook.kernels.dispatch import implementation

COMBINE = ("renormalised", "probability")


class Routing(NamedTuple):
    """Where T tokens go; slot ``t * K + k`` is choice k of token t.

    Attributes:
        ids: ``[T, K]`` int64, experts of a token, the largest logit first.
        weights: ``[T, K]`` combine weights in [0, 1], in the logits' dtype.
        order: ``[T * K]`` int64, the slots sorted by expert; within an expert by token.
        counts: ``[E]`` int64, slots of each expert; they sum to ``T * K``.
    """

    ids: Tensor
    weights: Tensor
    order: Tensor
    counts: Tensor


def route(
    logits: Tensor, top_k: int, *, combine: str = "renormalised", impl: str = "auto"
) -> Routing:
    """Choose the K largest logits of each token, weight them, and group the slots by expert.

    Among equal logits the expert with the lower number wins. Nothing here waits for a GPU.

    Args:
        logits: ``[T, E]`` router logits, one row a token.
        top_k: K, experts per token, 1 to E.
        combine: ``"renormalised"`` is the softmax over the K kept logits (PESC Eq. 9, Mixtral): the
            weights of a token sum to 1. ``"probability"`` is the softmax over all E logits, read at
            the kept ones (Switch, router-initialisation Eq. 2): they sum to less than 1.
        impl: ``"auto"``, ``"torch"`` or ``"reference"``.

    Raises:
        Refusal: E-SHAPE, E-RANGE, E-CHOICE or E-IMPL for an argument that cannot be used.
    """
    if logits.dim() != 2:
        refuse("E-SHAPE", f"route: logits must be [T, E], got {tuple(logits.shape)}")
    if not 1 <= top_k <= logits.shape[1]:
        refuse("E-RANGE", f"route: top_k is {top_k}, expected 1 to {logits.shape[1]} (the experts)")
    if combine not in COMBINE:
        refuse("E-CHOICE", f"route: unknown combine '{combine}'; {nearest(combine, COMBINE)}")
    ids = implementation("route", impl, _CHOOSE)(logits.detach(), top_k)
    if combine == "renormalised":
        weights = logits.gather(1, ids).softmax(-1)
    else:
        weights = logits.softmax(-1).gather(1, ids)
    slots = ids.flatten()
    counts = slots.new_zeros(logits.shape[1]).scatter_add_(0, slots, torch.ones_like(slots))
    return Routing(ids, weights, slots.argsort(stable=True), counts)


def reference(logits: Tensor, top_k: int) -> Tensor:
    """Return the K largest of each row as a stable sort orders them: ids ``[T, K]``."""
    return logits.sort(dim=1, descending=True, stable=True).indices[:, :top_k]


def _by_maxima(logits: Tensor, top_k: int) -> Tensor:
    """Take the maximum K times, the first of equal ones each time: no sort for a small K."""
    left = logits.clone()
    ids = []
    for _ in range(top_k):
        ids.append(left.argmax(1, keepdim=True))
        left.scatter_(1, ids[-1], -torch.inf)
    return torch.cat(ids, 1)


_CHOOSE = {"torch": _by_maxima, "reference": reference}
