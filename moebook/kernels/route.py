"""route: logits to chosen experts, their weights, and rows grouped by expert."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from moebook.errors import refuse, refuse_unknown
from moebook.kernels.dispatch import implementation, indices, natural, shapes
from moebook.kernels.matmul import empty, is_compiled
from moebook.settings import SIZE

COMBINE = ("renormalised", "probability")
PART = 2**18  # logits on a CPU of which the largest are found at once
FEW = 2**12  # logits below which a sort is faster
LOW_HALF = 0xFFFFFFFF  # the lower 32 of 64 bits


class _Slots(NamedTuple):
    """The four tensors of a `Routing`, which says what they are."""

    ids: Tensor
    weights: Tensor
    order: Tensor
    counts: Tensor


class Routing(_Slots):
    """Where T tokens go; slot ``t * K + k`` is choice k of token t. Made by `route` or `grouped`.

    An expert that a token names twice counts twice. Of a routing made by hand, or changed by
    ``_replace``, ``order`` and ``counts`` are compared with those of its ``ids``, which waits for a
    GPU; `route` and `grouped` make theirs by `of_ids`, without a look.

    Attributes:
        ids: ``[T, K]`` int64, experts of a token, the largest logit first.
        weights: ``[T, K]`` combine weights in [0, 1], in the logits' dtype.
        order: ``[T * K]`` int64, the slots sorted by expert; within an expert by token.
        counts: ``[E]`` int64, slots of each expert; they sum to T * K.
    """

    __slots__ = ()

    def __new__(
        cls, ids: Tensor, weights: Tensor, order: Tensor, counts: Tensor
    ) -> Self:
        """Check what a user brings."""
        routing = super().__new__(cls, ids, weights, order, counts)
        routing._check()
        return routing

    @classmethod
    def _make(cls, iterable: Iterable[Any]) -> Self:  # type: ignore[override]
        """Check what ``_replace`` makes, too."""
        return cls(*iterable)

    @classmethod
    def of_ids(
        cls, ids: Tensor, weights: Tensor, order: Tensor, counts: Tensor
    ) -> Routing:
        """Make a routing of ``ids [T, K]`` whose order and counts were just taken: unchecked."""
        return tuple.__new__(cls, (ids, weights, order, counts))

    def _check(self) -> None:
        """Refuse tensors that do not fit one another; on meta there are no values to compare."""
        experts = shapes("Routing", self.named())["E"]
        if self.ids.is_meta:
            return
        if self.ids.numel():
            least = int(self.ids.min())
            most = int(self.ids.max())
            if least < 0 or most >= experts:
                have = f"Routing: ids are {least} to {most}"
                refuse("E-RANGE", f"{have}, expected 0 to {experts - 1}")
        right = grouped(self.ids, self.weights, experts)
        same_counts = bool((self.counts == right.counts).all())
        if not (same_counts and torch.equal(self.order, right.order)):
            have = "Routing: order and counts are not those of the ids"
            refuse(
                "E-RANGE", f"{have}; make it by kernels.grouped(ids, weights, experts)"
            )

    def named(self) -> dict[str, tuple[Any, ...]]:
        """Return what `shapes` asks of the four tensors, beside T rows and E experts."""
        return {
            "the routing's ids": (self.ids, "T K", "int"),
            "the routing's weights": (self.weights, "T K"),
            "the routing's order": (self.order, "TK", "int64"),
            "the routing's counts": (self.counts, "E", "int"),
        }


def route(
    logits: Tensor, top_k: int, *, combine: str = "renormalised", impl: str = "auto"
) -> Routing:
    """Choose the K largest logits of each token, weight them, and group the slots by expert.

    ``logits [T, E]``; among equal ones the expert with the lower number wins. Nothing here waits
    for a GPU. ``combine="renormalised"`` is the softmax over the K kept logits (PESC Eq. 9,
    Mixtral): the weights of a token sum to 1. ``"probability"`` is the softmax over all E logits,
    read at the kept ones (Switch, router-initialisation Eq. 2): they sum to less than 1. ``impl``
    is ``"auto"``, ``"torch"`` (K maxima), ``"triton"`` or ``"reference"`` (a stable sort).

    >>> routing = route(torch.tensor([[2.0, 0.0, 2.0], [0.0, 3.0, 1.0]]), top_k=2)
    >>> routing.ids.tolist()
    [[0, 2], [1, 2]]
    >>> routing.weights[0].tolist()
    [0.5, 0.5]
    """
    sizes = shapes("route", {"logits": (logits, "T E")})
    natural("route", "top_k", top_k, sizes["E"], "the experts")
    refuse_unknown(combine, COMBINE, "E-CHOICE", f"route: unknown combine '{combine}';")
    run = implementation("route", impl, _IMPLEMENTATIONS, logits)
    routing: Routing = run(logits, top_k, combine)
    return routing


def grouped(ids: Tensor, weights: Tensor, experts: int) -> Routing:
    """Group the slots of chosen experts, ids and weights ``[T, K]``, also of another's routing."""
    shapes("grouped", {"ids": (ids, "T K", "int"), "weights": (weights, "T K")})
    natural("grouped", "experts", experts, SIZE)
    indices("grouped", "ids", ids, experts)
    slots = ids.flatten()
    counts = slots.new_zeros(experts).scatter_add_(0, slots, torch.ones_like(slots))
    narrow = slots.to(torch.uint8) if experts <= 256 else slots  # sorts faster
    return Routing.of_ids(ids, weights, narrow.argsort(stable=True), counts)


def reference(logits: Tensor, top_k: int, combine: str = "renormalised") -> Routing:
    """Take the K largest of each row as a stable sort orders them."""
    ids = _sorted(logits.detach(), top_k)
    if combine == "renormalised":
        # PESC Eq. 9: the softmax over the K kept logits, the others at minus infinity.
        weights = logits.gather(1, ids).softmax(-1)
    else:
        # Router initialisation, Eq. 2: p_i of all E, read where it was chosen.
        weights = logits.softmax(-1).gather(1, ids)
    return grouped(ids, weights, logits.shape[1])


def _sorted(logits: Tensor, top_k: int) -> Tensor:
    return logits.sort(dim=1, descending=True, stable=True).indices[:, :top_k]


def _by_maxima(logits: Tensor, top_k: int, combine: str) -> Routing:
    """Take the maximum K times, in blocks that stay in the cache."""
    rows = max(PART // logits.shape[1], 1)
    ids = torch.cat([_largest(block, top_k) for block in logits.detach().split(rows)])
    return grouped(ids, weights_of(logits, ids, combine), logits.shape[1])


def _largest(logits: Tensor, top_k: int) -> Tensor:
    """Return the K largest, by maxima of whole numbers that hold a logit and its expert.

    A CPU finds where the largest is far more slowly than what it is: the bits of a logit, in the
    order of its value, stand over its expert's number (64-bit logits leave no room).
    """
    if logits.dtype == torch.float64 or logits.numel() < FEW:
        return _sorted(logits, top_k)
    # One NaN, above all, and one zero: -0.0 + 0.0 is 0.0.
    plain = torch.where(logits.isnan(), torch.nan, logits.float() + 0.0)
    # Of two negative numbers the smaller has the larger bits: turn all but the sign's.
    bits = plain.view(torch.int32)
    bits ^= (bits >> 31) & torch.iinfo(torch.int32).max
    # Of equal logits the first expert is to win, so it gets the largest number.
    last = logits.shape[1] - 1
    backwards = torch.arange(last, -1, -1, device=logits.device)
    keys = bits.long() << 32 | backwards  # [T, E]
    ids = []
    for _ in range(top_k):
        largest = keys.amax(1, keepdim=True)
        chosen = last - (largest & LOW_HALF)  # [T, 1]
        ids.append(chosen)
        keys.scatter_(1, chosen, torch.iinfo(torch.int64).min)  # not again
    return torch.cat(ids, 1)


def weights_of(logits: Tensor, ids: Tensor, combine: str) -> Tensor:
    """Return the combine weights ``[T, K]`` of chosen experts, in one step of autograd."""
    weights: Tensor = _Weights.apply(logits, ids, combine)
    return weights


class _Weights(torch.autograd.Function):
    """A softmax, over what was kept or over all; kept for the backward pass: its result."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, combine: str) -> Tensor:
        ctx.renormalised = combine == "renormalised"
        ctx.shape = logits.shape
        if ctx.renormalised:
            share = logits.gather(1, ids).softmax(-1)  # [T, K]
            weights = share
        else:
            share = empty(logits.shape, logits)  # [T, E]
            torch.softmax(logits, -1, out=share)
            weights = share.gather(1, ids)
        ctx.save_for_backward(ids, share)
        return weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ids, share = ctx.saved_tensors
        d_logits = empty(ctx.shape, grad).zero_()  # [T, E]
        if ctx.renormalised:
            # [T, K].
            d_kept = torch._softmax_backward_data(grad, share, -1, share.dtype)
            d_logits.scatter_(1, ids, d_kept)
        else:
            # In place: the gradient of the softmax over all E, then that of its logits.
            d_logits.scatter_(1, ids, grad)
            torch._softmax_backward_data(
                d_logits, share, -1, share.dtype, grad_input=d_logits
            )
        return d_logits, None, None


_IMPLEMENTATIONS = {"torch": _by_maxima, "reference": reference, "triton": "route.run"}


class Part(NamedTuple):
    """Neighbouring rows of a `Layout`."""

    rows: slice
    segments: list[tuple[int, slice]]  # (expert, its rows within the part)


class Layout(NamedTuple):
    """P rows in segments, one for each expert that has any.

    Rows of no slot only fill a segment up: at its end they repeat the row before them with a gate
    of 0. So they add nothing to a gradient, and spoil none that the row itself does not.
    """

    # (expert, its rows), ascending, which cover all P rows.
    segments: list[tuple[int, slice]]
    token: Tensor  # [P] int64, the token that a row reads
    place: Tensor  # [T, K] int64, the row of a slot

    def spread(self, gates: Tensor) -> Tensor:
        """Return the gates of each row ``[P, G]`` from those of the slots ``[T, K * G]``."""
        members = gates.shape[1] // self.place.shape[1]  # G
        rows = gates.new_zeros(len(self.token), members)
        rows[self.place.flatten()] = gates.reshape(-1, members)
        return rows

    def combine(self, rows: Tensor) -> Tensor:
        """Sum the K rows of each token: ``[P, D]`` to ``[T, D]``."""
        # It adds while it reads: no [T, K, D] is made.
        return F.embedding_bag(self.place, rows, mode="sum")

    def parts(self, most: int) -> list[Part]:
        """Join neighbouring segments up to so many rows: then calls cost less than their work.

        On meta, where nothing costs, all of them are one part.
        """
        parts: list[Part] = []
        for expert, rows in self.segments:
            start = parts[-1].rows.start if parts else 0
            too_long = rows.stop - start > most and not self.token.is_meta
            if not parts or too_long:
                start = rows.start
                parts.append(Part(rows, []))
            segments = parts[-1].segments
            segments.append((expert, slice(rows.start - start, rows.stop - start)))
            parts[-1] = Part(slice(start, rows.stop), segments)
        return parts


def lay_out(routing: Routing, dtype: torch.dtype, numbers: int) -> Layout:
    """Place the slots of a routing in segments.

    oneDNN compiles a product for its shape, which takes longer than most products of ours (1.7
    times slower). So segments that it will multiply, in ``dtype`` by a factor of so many
    ``numbers``, are filled up to four significant bits: a twenty-fourth more rows on average.
    A routing on meta has no counts: there each expert gets as many slots, to within one.
    """
    order = routing.order
    device = order.device
    counts = _even(routing) if device.type == "meta" else routing.counts.tolist()
    sizes = []
    for count in counts:
        compiled = is_compiled(dtype, device, count * numbers)
        sizes.append(_filled(count) if compiled else count)

    segments = []
    start = 0
    for expert, size in enumerate(sizes):
        if size:
            segments.append((expert, slice(start, start + size)))
        start += size

    token = order // routing.ids.shape[1]  # of each slot in order, [T * K]
    row = torch.arange(len(order), device=device)
    if sizes != counts:
        # Each slot has a row, and the last one of a segment those that fill it up.
        rows = torch.ones_like(order)
        # An expert without slots points at a neighbour's slot, and adds 0 to it.
        last = (routing.counts.cumsum(0) - 1).clamp(min=0)  # [E]
        rows.scatter_add_(0, last, torch.tensor(sizes) - routing.counts)
        token = token.repeat_interleave(rows)  # [P]
        row = rows.cumsum(0) - rows  # where a slot's rows begin, [T * K]
    place = torch.empty_like(order)
    place[order] = row
    return Layout(segments, token, place.view(routing.ids.shape))


def _even(routing: Routing) -> list[int]:
    """Return counts of the experts that are equal to within one."""
    least, more = divmod(len(routing.order), len(routing.counts))
    return [least + (expert < more) for expert in range(len(routing.counts))]


def _filled(count: int) -> int:
    """Round up to four significant bits."""
    step = 1 << max(count.bit_length() - 4, 0)
    return -(-count // step) * step
