"""Products of float32 matrices on a CPU, by the library that takes all of its vector units.

PyTorch multiplies float32 by MKL, which on an AMD processor leaves half of AVX-512 unused; oneDNN,
which PyTorch brings too and multiplies bfloat16 by, uses all of it everywhere. Both add in float32.
`moebook bench` takes the faster of the two for its floors.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

ENOUGH = 2**21
"""Multiplications from which a call of oneDNN, which itself costs more than one of MKL, pays."""
INFO = Path("/proc/cpuinfo")
"""Where Linux tells the processor's maker."""
PIECE = 2**20
"""Numbers of a result that oneDNN writes at once: more would be new memory in every call."""


def product(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """Return ``left @ right``, to be called where no gradient is recorded.

    oneDNN writes to memory of its own, which is copied into ``out`` from the cache, in pieces of a
    few rows.

    Args:
        left: ``[N, K]``.
        right: ``[K, M]``, of the same dtype and device.
        out: ``[N, M]``, where to write it; it shares no memory with the factors. New memory by
            default.
    """
    (rows, inner), columns = left.shape, right.shape[1]
    compiled = is_compiled(left.dtype, left.device, rows * inner * columns)
    if left.dtype != torch.float32 or not compiled:
        return torch.mm(left, right) if out is None else torch.mm(left, right, out=out)
    if out is None:
        return _wide(left, right)
    step = max(PIECE // columns, 128)
    for start in range(0, rows, step):
        out[start : start + step].copy_(_wide(left[start : start + step], right))
    return out


def _wide(left: Tensor, right: Tensor) -> Tensor:
    """Multiply by the op that PyTorch's compiler calls oneDNN by; it has no gradient."""
    found: Tensor = torch.ops.mkldnn._linear_pointwise(left, right.T, None, "none", [], "")
    return found


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
