"""Dropout whose masks cost little on a CPU: 16 random bits a number, where torch draws 64.

PyTorch draws a number of 64 bits for each element, which takes longer than the two
products of the LoRA behind it. Here a random word of 64 bits decides about four elements.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

STEPS = 2**16  # values of 16 bits, from `LEAST` on
LEAST = -(2**15)
LEAST_WORD = -(2**63)  # from here without an end torch draws all 64 bits


def dropout(x: Tensor, share: float) -> Tensor:
    """Drop a share of the elements of ``x``, in [0, 1), and divide the others by what is left.

    On a CPU the share is rounded to a whole number of 1/65,536, and so is the divisor, so
    that the mean stays. What is drawn depends on torch's generator alone. Elsewhere it is
    torch's dropout.
    """
    if x.device.type != "cpu":
        return F.dropout(x, share)
    mask, factor = draw_mask(x, share)
    return x * mask.mul_(factor)


def draw_mask(x: Tensor, share: float) -> tuple[Tensor, float]:
    """Draw which elements of ``x`` stay, 1 or 0 in its shape and dtype.

    Returns the factor of those that stay too, 1 over their share.
    """
    # Not all of them: the factor would be 1 / 0.
    dropped = min(round(share * STEPS), STEPS - 1)  # of the 65,536 values
    count = -(-x.numel() // 4)  # words of 64 bits, rounded up
    words = torch.empty(count, dtype=torch.int64, device=x.device)
    words.random_(LEAST_WORD, None)
    numbers = words.view(torch.int16)[: x.numel()].view(x.shape)
    mask = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    # The least ``dropped`` of the values drop their element.
    torch.ge(numbers, LEAST + dropped, out=mask)  # written as 1 and 0 at once
    return mask, STEPS / (STEPS - dropped)


class Dropout(nn.Dropout):
    """torch's module with `dropout` in training; for PEFT's layers, which hold one each."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the input ``[...]``, in training with a share ``p`` of its elements dropped."""
        if not self.training or self.p in (0.0, 1.0) or self.inplace:
            return super().forward(input)
        return dropout(input, self.p)
