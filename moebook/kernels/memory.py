"""Memory for large tensors on a CPU, which is kept from step to step."""

from __future__ import annotations

import itertools
import math
import threading
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

LARGE = 2**20
"""Bytes from which the system, not the process, gets freed memory back."""
TAKES = 1000
"""A free block goes back to the system when so many others were taken since it was in use."""

Bytes = NDArray[np.uint8]


class _Block(NamedTuple):
    """Memory, the view of it that was last handed out, and when that was."""

    memory: Bytes
    view: weakref.ref[Bytes]
    taken: int


_blocks: list[_Block] = []
_lock, _takes = threading.Lock(), itertools.count()


def empty(shape: Sequence[int], like: Tensor) -> Tensor:
    """Return an unwritten tensor of the dtype and device of ``like``; a large one in kept memory.

    The first touch of new memory, page by page, costs a CPU seven times what writing it costs, and
    the tensors of a step are new ones in each step. So large blocks are kept. Each tensor handed
    out holds a view of its block; the block is free when that view is gone, and with it the last
    tensor that shares the memory.
    """
    size = math.prod(shape) * like.element_size()
    if like.device.type != "cpu" or size < LARGE:
        return like.new_empty(shape)
    with _lock:
        view = _take(size)
    return torch.from_numpy(view).view(like.dtype).view(*shape)


def _take(size: int) -> Bytes:
    """Return the smallest free block that fits and is not twice too large, else a new one."""
    now = next(_takes)
    _blocks[:] = [b for b in _blocks if b.view() is not None or now - b.taken <= TAKES]
    free = [block for block in _blocks if block.view() is None]
    fitting = [block.memory for block in free if size <= len(block.memory) <= 2 * size]
    if fitting:
        memory = min(fitting, key=len)
        _blocks[:] = [block for block in _blocks if block.memory is not memory]
    else:
        memory = np.empty(size + 64, dtype=np.uint8)
        memory = memory[-memory.ctypes.data % 64 :][:size]  # where a line of the cache begins
    view = memory[:size]
    _blocks.append(_Block(memory, weakref.ref(view), now))
    return view
