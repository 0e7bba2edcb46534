"""route: logits to chosen experts, their weights, and the order that groups rows by expert."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moebook.errors import nearest, refuse
from moebook.kernels.arguments import floating, natural, together, whole
from moebook.kernels.dispatch import implementation
from moebook.kernels.memory import empty

COMBINE = ("renormalised", "probability")
PART = 2**18
"""Logits on a CPU of which the largest are found at once."""
FEW = 2**12
"""Logits below which a sort is faster."""


class Routing(NamedTuple):
    """Where T tokens go; slot ``t * K + k`` is choice k of token t.

    Attributes:
        ids: ``[T, K]`` int64, experts of a token, the largest logit first. One that is named twice
            counts twice.
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
        impl: ``"auto"``, ``"torch"`` (K maxima), ``"triton"`` or ``"reference"`` (a stable sort).

    Raises:
        Refusal: E-SHAPE, E-DTYPE, E-TYPE, E-RANGE, E-CHOICE or E-IMPL for an argument that cannot
            be used.
    """
    if logits.dim() != 2:
        refuse("E-SHAPE", f"route: logits must be [T, E], got {tuple(logits.shape)}")
    floating("route", {"logits": logits})
    natural("route", "top_k", top_k, logits.shape[1], "the experts")
    if combine not in COMBINE:
        refuse("E-CHOICE", f"route: unknown combine '{combine}'; {nearest(combine, COMBINE)}")
    return implementation("route", impl, _IMPLEMENTATIONS, logits)(logits, top_k, combine)


def grouped(ids: Tensor, weights: Tensor, experts: int) -> Routing:
    """Group the slots of chosen experts, also of a routing that was decided elsewhere.

    Args:
        ids: ``[T, K]`` chosen experts.
        weights: ``[T, K]`` combine weights.
        experts: E.

    Raises:
        Refusal: E-SHAPE when ids and weights are not of one shape ``[T, K]`` with K >= 1, E-DTYPE
            for ids that are no whole numbers, E-DEVICE when the two lie on different devices,
            E-TYPE for an E that is no whole number, E-RANGE for one below 1 and for ids on a CPU
            that are not in [0, E): elsewhere to look would wait for the GPU.
    """
    if ids.dim() != 2 or weights.shape != ids.shape or not ids.shape[1]:
        shapes = f"{tuple(ids.shape)} and {tuple(weights.shape)}"
        refuse("E-SHAPE", f"grouped: expected ids and weights [T, K >= 1], got {shapes}")
    whole("grouped", {"ids": ids})
    together("grouped", {"ids": ids, "weights": weights})
    natural("grouped", "experts", experts)
    if ids.device.type == "cpu" and ids.numel() and not 0 <= ids.min() <= ids.max() < experts:
        got = f"{int(ids.min())} to {int(ids.max())}"
        refuse("E-RANGE", f"grouped: ids are {got}, expected 0 to {experts - 1} (the experts)")
    slots = ids.flatten()
    counts = slots.new_zeros(experts).scatter_add_(0, slots, torch.ones_like(slots))
    narrow = slots.to(torch.uint8) if experts <= 256 else slots  # sorts faster
    return Routing(ids, weights, narrow.argsort(stable=True), counts)


def check_routing(op: str, routing: Routing, rows: Tensor, experts: int) -> None:
    """Refuse a routing that does not fit an op's rows ``[T, D]`` and its E experts.

    Values are read only where they lie on a CPU: elsewhere that would wait for the GPU.

    Raises:
        Refusal: E-SHAPE for shapes or counts, E-DTYPE for ids, order or counts that are no whole
            numbers or weights that are, E-DEVICE for tensors on different devices, E-RANGE for ids
            not in [0, E), places not in [0, T * K) or counts below 0.
    """
    tokens, slots = len(rows), routing.ids.numel()
    fits = routing.ids.dim() == 2 and routing.weights.shape == routing.ids.shape
    fits = fits and len(routing.ids) == tokens and routing.order.shape == (slots,)
    fits = fits and routing.ids.shape[1] > 0
    if not fits or routing.counts.shape != (experts,):
        got = ", ".join(str(tuple(part.shape)) for part in routing)
        refuse(
            "E-SHAPE",
            f"{op}: expected a routing of {tokens} tokens to {experts} experts: ids and weights"
            f" [T, K >= 1], order [T * K], counts [E]; got {got}",
        )
    named = {f"the routing's {name}": part for name, part in routing._asdict().items()}
    ids, weights, order, counts = named
    whole(op, {ids: routing.ids, counts: routing.counts})
    floating(op, {weights: routing.weights})
    if routing.order.dtype != torch.int64:
        refuse("E-DTYPE", f"{op}: {order} is {routing.order.dtype}, expected torch.int64")
    together(op, {"the input": rows, **named})
    if routing.counts.device.type == "cpu" and int(routing.counts.sum()) != slots:
        total = int(routing.counts.sum())
        refuse("E-SHAPE", f"{op}: the routing's counts sum to {total}, its rows are {slots}")
    for name, end in ((ids, experts), (order, slots), (counts, slots + 1)):
        part = named[name]
        if part.device.type == "cpu" and part.numel() and not 0 <= part.min() <= part.max() < end:
            got = f"{int(part.min())} to {int(part.max())}, expected 0 to {end - 1}"
            refuse("E-RANGE", f"{op}: {name} are {got}")
    if rows.device.type == "cpu" and not _is_grouped(routing):
        refuse("E-RANGE", f"{op}: {order} does not group the slots by expert as {counts} tells")


def _is_grouped(routing: Routing) -> bool:
    by_expert = routing.ids.flatten()[routing.order]
    experts = torch.arange(len(routing.counts)).repeat_interleave(routing.counts)
    return torch.equal(by_expert.long(), experts)


def reference(logits: Tensor, top_k: int, combine: str = "renormalised") -> Routing:
    """Take the K largest of each row as a stable sort orders them."""
    ids = _sorted(logits.detach(), top_k)
    if combine == "renormalised":
        return grouped(ids, logits.gather(1, ids).softmax(-1), logits.shape[1])
    return grouped(ids, logits.softmax(-1).gather(1, ids), logits.shape[1])


def _sorted(logits: Tensor, top_k: int) -> Tensor:
    return logits.sort(dim=1, descending=True, stable=True).indices[:, :top_k]


def _by_maxima(logits: Tensor, top_k: int, combine: str) -> Routing:
    """Take the maximum K times, in blocks that stay in the cache."""
    rows = max(PART // logits.shape[1], 1)
    ids = torch.cat([_largest(block, top_k) for block in logits.detach().split(rows)])
    return grouped(ids, weights_of(logits, ids, combine), logits.shape[1])


def _largest(logits: Tensor, top_k: int) -> Tensor:
    """Return the K largest, by maxima of whole numbers that hold a logit and its expert.

    Where the largest is a CPU finds far more slowly than what it is. So the bits of a logit,
    ordered as its value is, stand over the number of its expert, counted down; a logit of 64 bits
    leaves no room for it.
    """
    if logits.dtype == torch.float64 or logits.numel() < FEW:
        return _sorted(logits, top_k)
    experts = torch.arange(logits.shape[1] - 1, -1, -1, device=logits.device)
    positive = torch.where(logits.isnan(), torch.nan, logits.float() + 0.0)  # both, NaN and zero
    bits = positive.view(torch.int32)
    bits ^= (bits >> 31) & torch.iinfo(torch.int32).max  # of two negative ones the smaller is more
    keys, ids = bits.long() << 32 | experts, []
    for _ in range(top_k):
        ids.append(experts[0] - (keys.amax(1, keepdim=True) & 0xFFFFFFFF))
        keys.scatter_(1, ids[-1], torch.iinfo(torch.int64).min)
    return torch.cat(ids, 1)


def weights_of(logits: Tensor, ids: Tensor, combine: str) -> Tensor:
    """Return the combine weights ``[T, K]`` of chosen experts, in one step of autograd."""
    weights: Tensor = _Weights.apply(logits, ids, combine)
    return weights


class _Weights(torch.autograd.Function):
    """A softmax, over what was kept or over all; kept for the backward pass: its result."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, combine: str) -> Tensor:
        ctx.renormalised, ctx.shape = combine == "renormalised", logits.shape
        if ctx.renormalised:
            share = weights = logits.gather(1, ids).softmax(-1)
        else:
            share = torch.softmax(logits, -1, out=empty(logits.shape, logits))
            weights = share.gather(1, ids)
        ctx.save_for_backward(ids, share)
        return weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ids, share = ctx.saved_tensors
        d = empty(ctx.shape, grad).zero_()
        if ctx.renormalised:
            d.scatter_(1, ids, torch._softmax_backward_data(grad, share, -1, share.dtype))
        else:
            d.scatter_(1, ids, grad)
            torch._softmax_backward_data(d, share, -1, share.dtype, grad_input=d)
        return d, None, None


_IMPLEMENTATIONS = {"torch": _by_maxima, "reference": reference}
