"""Rows grouped by expert: where each slot lies, and the way back to the order of the tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from moebook.kernels.products import is_compiled
from moebook.kernels.route import Routing


class Layout(NamedTuple):
    """P rows in segments, one for each expert that has any.

    Attributes:
        segments: (expert, its rows), ascending; together they cover all P rows.
        token: ``[P]`` int64, the token that a row reads.
        place: ``[T, K]`` int64, the row of a slot. Rows of no slot only fill a segment up: they
            read token 0, and their gate is 0, so they add nothing to any gradient.
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


def lay_out(routing: Routing, dtype: torch.dtype) -> Layout:
    """Place the slots of a routing in segments.

    On a CPU a product in bfloat16 is compiled for its shape, and 1,024 shapes are kept. Segments
    are as long as chance has it, so 32 experts made new shapes in every pass and the model 1.7
    times slower. There they are filled up to a size of four significant bits: 8 sizes between a
    power of 2 and the next, less than an eighth more rows, a twenty-fourth on average.

    Args:
        routing: Where the T tokens go.
        dtype: What the products are computed in.
    """
    order, counts = routing.order, routing.counts.tolist()
    fills = is_compiled(dtype, order.device)
    sizes = [_filled(count) for count in counts] if fills else counts
    segments, start = [], 0
    for expert, size in enumerate(sizes):
        if size:
            segments.append((expert, slice(start, start + size)))
        start += size
    row = torch.arange(len(order), device=order.device)
    if fills:
        gaps = torch.tensor(sizes) - routing.counts
        row += (gaps.cumsum(0) - gaps).repeat_interleave(routing.counts)
    token = order.new_zeros(start)
    token[row] = order // routing.ids.shape[1]
    place = torch.empty_like(order)
    place[order] = row
    return Layout(segments, token, place.view(routing.ids.shape))


def _filled(count: int) -> int:
    """Round up to four significant bits."""
    step = 1 << max(count.bit_length() - 4, 0)
    return -(-count // step) * step
