"""Memory for the gradients of large weights, which is kept from step to step."""

from __future__ import annotations

import weakref

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

LARGE = 2**20
"""Bytes from which the system, not the process, gets freed memory back."""

Block = NDArray[np.uint8]
_kept: WeakIdKeyDictionary = WeakIdKeyDictionary()  # weight -> (block, its view of the last call)


def gradient_like(weight: Tensor) -> Tensor:
    """Return an unwritten tensor for the gradient of a weight, in last step's memory if it is free.

    An optimizer's ``zero_grad`` frees gradients, and on a CPU much of a step's time went into the
    first touch of new memory, page by page: 1.2 times at 64 experts. So a large leaf keeps a block
    as long as it lives. Each tensor handed out holds a view of the block; the block is free when
    that view is gone, and with it the last tensor that shares the memory. Else, as when gradients
    accumulate, the tensor is a new one.
    """
    if weight.device.type != "cpu" or not (weight.is_leaf and weight.requires_grad):
        return torch.empty_like(weight, memory_format=torch.contiguous_format)
    size = weight.numel() * weight.element_size()
    block, last = _kept.get(weight, (None, None))
    if size < LARGE or (last is not None and last() is not None):
        return torch.empty_like(weight, memory_format=torch.contiguous_format)
    if block is None or block.nbytes != size:
        block = torch.empty(size, dtype=torch.uint8).numpy()
    view: Block = block[:]
    _kept[weight] = (block, weakref.ref(view))
    return torch.from_numpy(view).view(weight.dtype).view(weight.shape)
