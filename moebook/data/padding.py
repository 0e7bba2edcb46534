"""Rows of different lengths as one tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def padded(
    rows: Sequence[Sequence[int]], fill: int, *, left: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the rows ``[B, T]``, filled up on the right (or left), and the mask of what is real.

    Both are int64; the mask holds 1 and 0.
    """
    lengths = torch.tensor([len(row) for row in rows])[:, None]
    places = torch.arange(int(lengths.max()))
    mask = places >= len(places) - lengths if left else places < lengths
    filled = torch.full(mask.shape, fill)
    filled[mask] = torch.tensor([each for row in rows for each in row])
    return filled, mask.long()
