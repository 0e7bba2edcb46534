"""Products on a CPU: by the library that takes all of its vector units, into memory that is kept.

PyTorch multiplies float32 by MKL, which on an AMD processor leaves half of AVX-512 unused; oneDNN,
which PyTorch brings too, uses all of it. Both add in float32. `moebook bench` takes the faster.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

INFO = Path("/proc/cpuinfo")  # where Linux tells the processor's maker
# Multiplications from which oneDNN pays, whose call costs more than one of MKL.
ENOUGH = 2**21
# Numbers that oneDNN writes at once: more would be new memory in every call.
PIECE = 2**20
LARGE = 2**20  # bytes from which the system, not the process, gets freed memory back
FREE = 2**30  # bytes of free blocks that are held at most
CACHE_LINE = 64  # bytes

Bytes = NDArray[np.uint8]
_free: dict[
    int, Bytes
] = {}  # by id, the longest free first; each step on it is atomic: no lock


def product(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """Return ``left [N, K] @ right [K, M]``, to be called where no gradient is recorded.

    ``out [N, M]`` is where to write it, new memory by default; it shares none with the factors.
    oneDNN writes to memory of its own, which is copied in pieces that the cache holds.
    """
    rows, inner = left.shape
    columns = right.shape[1]
    compiled = is_compiled(left.dtype, left.device, rows * inner * columns)
    if left.dtype != torch.float32 or not compiled:
        if out is None:
            out = left.new_empty(rows, columns)
        # With ``out`` autocast leaves the factors' dtype alone, in a backward pass, too.
        return torch.mm(left, right, out=out)
    if out is None:
        return _by_onednn(left, right)
    step = max(PIECE // columns, 128)
    for start in range(0, rows, step):
        out[start : start + step].copy_(_by_onednn(left[start : start + step], right))
    return out


def _by_onednn(left: Tensor, right: Tensor) -> Tensor:
    """Multiply by the op that PyTorch's compiler calls oneDNN by; it has no gradient."""
    result: Tensor = torch.ops.mkldnn._linear_pointwise(
        left, right.T, None, "none", [], ""
    )
    return result


def is_compiled(dtype: torch.dtype, device: torch.device, multiplications: int) -> bool:
    """Whether oneDNN makes a product of this size, by code that it compiles for each new shape."""
    if device.type != "cpu":
        return False
    if dtype == torch.float32:
        return multiplications >= ENOUGH and is_wider()
    return dtype == torch.bfloat16


@cache
def is_wider() -> bool:
    """Whether oneDNN multiplies float32 in wider registers here than PyTorch's own product does.

    Known for MKL on AMD under Linux; wherever it is not, or PyTorch lacks the op, it is not taken.
    """
    amd = INFO.exists() and "AuthenticAMD" in INFO.read_text()
    wide: bool = torch.backends.cpu.get_cpu_capability() == "AVX512"
    mkl: bool = torch.backends.mkl.is_available()
    return amd and wide and mkl and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def wide(tensor: Tensor) -> Tensor:
    """Return a tensor in float32 at least."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def empty(shape: Sequence[int], like: Tensor) -> Tensor:
    """Return an unwritten tensor of the dtype and device of ``like``; a large one in kept memory.

    The first touch of new memory, page by page, costs a CPU seven times what writing it costs. So
    large blocks are kept, up to `FREE` bytes. Each tensor handed out holds a view of its block,
    which is free when that view is gone, with the last tensor that shares the memory.
    """
    size = math.prod(shape) * like.element_size()
    if like.device.type != "cpu" or size < LARGE:
        return like.new_empty(shape)
    block = _take(size)
    view = block[:size]
    # When the process ends nobody needs the block any more.
    weakref.finalize(view, _give_back, block).atexit = False
    return torch.from_numpy(view).view(like.dtype).view(*shape)


def _take(size: int) -> Bytes:
    """Return the smallest free block that fits and is not twice too large, else a new one."""
    fitting = [
        block for block in list(_free.values()) if size <= len(block) <= 2 * size
    ]
    for block in sorted(fitting, key=len):
        if _free.pop(id(block), None) is not None:  # else another thread was faster
            return block
    block = np.empty(size + CACHE_LINE, dtype=np.uint8)
    start = -block.ctypes.data % CACHE_LINE  # where a line of the cache begins
    return block[start : start + size]


def _give_back(block: Bytes) -> None:
    """Keep a block that became free; of too much, what was free for longest goes to the system."""
    _free[id(block)] = block
    excess = sum(map(len, list(_free.values()))) - FREE
    for old in list(_free.values()):
        if excess > 0:
            _free.pop(id(old), None)
            excess -= len(old)
