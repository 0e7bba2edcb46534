"""Memory for large tensors on a CPU, which is kept from step to step."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

LARGE = 2**20
"""Bytes from which the system, not the process, gets freed memory back."""
KEPT = 2**30
"""Bytes of free blocks that are kept at most."""

Bytes = NDArray[np.uint8]

_free: dict[int, Bytes] = {}
"""Free blocks by their id, the longest free first; each step on it is atomic: no lock."""


def empty(shape: Sequence[int], like: Tensor) -> Tensor:
    """Return an unwritten tensor of the dtype and device of ``like``; a large one in kept memory.

    The first touch of new memory, page by page, costs a CPU seven times what writing it costs, and
    the tensors of a step are new ones in each step. So large blocks are kept, up to `KEPT` bytes.
    Each tensor handed out holds a view of its block; the block is free when that view is gone, and
    with it the last tensor that shares the memory.
    """
    size = math.prod(shape) * like.element_size()
    if like.device.type != "cpu" or size < LARGE:
        return like.new_empty(shape)
    block = _take(size)
    view = block[:size]
    weakref.finalize(view, _give_back, block).atexit = False
    return torch.from_numpy(view).view(like.dtype).view(*shape)


def _take(size: int) -> Bytes:
    """Return the smallest free block that fits and is not twice too large, else a new one."""
    fitting = [block for block in list(_free.values()) if size <= len(block) <= 2 * size]
    for block in sorted(fitting, key=len):
        if _free.pop(id(block), None) is not None:  # else another thread was faster
            return block
    block = np.empty(size + 64, dtype=np.uint8)
    return block[-block.ctypes.data % 64 :][:size]  # where a line of the cache begins


def _give_back(block: Bytes) -> None:
    """Keep a block that became free; of too much, what was free for longest goes to the system."""
    _free[id(block)] = block
    blocks = list(_free.values())
    excess = sum(map(len, blocks)) - KEPT
    for old in blocks:
        if excess <= 0:
            return
        _free.pop(id(old), None)
        excess -= len(old)
