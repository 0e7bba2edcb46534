"""Dropout whose masks cost little on a CPU: 16 random bits decide about a number, not 64.

PyTorch draws a number of 64 bits for each element, which takes longer than the two products of the
LoRA behind it. Here a random word of 64 bits decides about four elements.
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

    On a CPU the share is rounded to a whole number of 1/65,536, and so is the divisor, so that the
    mean stays. What is drawn depends on torch's generator alone. Elsewhere it is torch's dropout.
    """
    if x.device.type != "cpu":
        return F.dropout(x, share)
    dropped = min(round(share * STEPS), STEPS - 1)
    words = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(LEAST_WORD, None)
    numbers = words.view(torch.int16)[: x.numel()].view(x.shape)
    kept = torch.ge(numbers, LEAST + dropped, out=torch.empty(x.shape, dtype=x.dtype))
    return x * kept.mul_(STEPS / (STEPS - dropped))


class Dropout(nn.Dropout):
    """torch's module with `dropout` in training; for PEFT's layers, which hold one each."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the input, in training with a share ``p`` of its elements dropped."""
        if not self.training or self.p in (0.0, 1.0) or self.inplace:
            return super().forward(input)
        return dropout(input, self.p)
