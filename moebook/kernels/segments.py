"""Rows grouped by expert: where each slot lies, and the way back to the order of the tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from moebook.errors import refuse
from moebook.kernels.products import is_compiled
from moebook.kernels.route import Routing


class Layout(NamedTuple):
    """P rows in segments, one for each expert that has any.

    Attributes:
        segments: (expert, its rows), ascending; together they cover all P rows.
        token: ``[P]`` int64, the token that a row reads.
        place: ``[T, K]`` int64, the row of a slot. Rows of no slot only fill a segment up: at its
            end they repeat the row before them with a gate of 0. So they add nothing to a gradient,
            and where that row is not finite, they spoil none that it does not.
    """

    segments: list[tuple[int, slice]]
    token: Tensor
    place: Tensor

    def spread(self, gates: Tensor) -> Tensor:
        """Return the gates of each row ``[P, G]`` from those of the slots ``[T, K * G]``."""
        slots = gates.reshape(self.place.numel(), gates.shape[1] // self.place.shape[1])
        rows = gates.new_zeros(len(self.token), slots.shape[1])
        rows[self.place.flatten()] = slots
        return rows

    def combine(self, rows: Tensor) -> Tensor:
        """Sum the K rows of each token: ``[P, D]`` to ``[T, D]``."""
        return F.embedding_bag(self.place, rows, mode="sum")


def lay_out(routing: Routing, dtype: torch.dtype, numbers: int) -> Layout:
    """Place the slots of a routing in segments.

    oneDNN compiles a product for its shape, which takes longer than most products of ours, and
    keeps 1,024. Segments are as long as chance has it, so 32 experts made new shapes in every pass
    and the model 1.7 times slower. So those that it will multiply are filled up to a size of four
    significant bits: 8 sizes between a power of 2 and the next, less than an eighth more rows, a
    twenty-fourth on average.

    Args:
        routing: Where the T tokens go.
        dtype: What the products are computed in.
        numbers: How many an expert's largest factor has.

    Raises:
        Refusal: E-DEVICE for a routing on the meta device, which has no counts; E-RANGE for an
            order that does not hold each slot.
    """
    order, device = routing.order, routing.order.device
    if device.type == "meta":
        refuse("E-DEVICE", "a routing on meta has no counts to lay rows out by: impl='reference'")
    counts = routing.counts.tolist()
    sizes = [
        _filled(count) if is_compiled(dtype, device, count * numbers) else count for count in counts
    ]
    segments, start = [], 0
    for expert, size in enumerate(sizes):
        if size:
            segments.append((expert, slice(start, start + size)))
        start += size
    token, row = order // routing.ids.shape[1], torch.arange(len(order), device=device)
    if sizes != counts:
        rows = torch.ones_like(order)  # of each slot: the last of a segment fills it up
        last = (routing.counts.cumsum(0) - 1).clamp(min=0)
        rows.scatter_add_(0, last, torch.tensor(sizes) - routing.counts)
        token, row = token.repeat_interleave(rows), rows.cumsum(0) - rows
    place = torch.full_like(order, -1)
    place[order] = row
    if place.numel() and place.min() < 0:
        twice = int(order.bincount().argmax())
        refuse("E-RANGE", f"the routing's order names slot {twice} twice, and another not at all")
    return Layout(segments, token, place.view(routing.ids.shape))


def _filled(count: int) -> int:
    """Round up to four significant bits."""
    step = 1 << max(count.bit_length() - 4, 0)
    return -(-count // step) * step
