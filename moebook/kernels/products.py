"""Products of float32 matrices on a CPU, by the library that takes all of its vector units.

PyTorch multiplies float32 by MKL, which on an AMD processor leaves half of AVX-512 unused; oneDNN,
which PyTorch brings too and multiplies bfloat16 by, uses all of it everywhere: there it is twice as
fast. Both add in float32.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

ENOUGH = 2**22
"""FLOPs from which a call of oneDNN, some 10 microseconds more than one of MKL, pays."""
LARGEST = 2**22
"""Numbers of a result that oneDNN may write: larger ones would be new memory in every call."""


def product(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """Return ``left @ right``, without a gradient.

    Args:
        left: ``[N, K]``.
        right: ``[K, M]``, of the same dtype and device.
        out: ``[N, M]``, where to write it; new memory by default.
    """
    rows, inner, columns = *left.shape, right.shape[1]
    large = 2 * rows * inner * columns >= ENOUGH and rows * columns <= LARGEST
    if not (large and left.dtype == torch.float32 and left.device.type == "cpu" and is_wider()):
        return torch.mm(left, right) if out is None else torch.mm(left, right, out=out)
    found: Tensor = torch.ops.mkldnn._linear_pointwise(left, right.T, None, "none", [], "")
    return found if out is None else out.copy_(found)


def is_compiled(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether products of a dtype are compiled by oneDNN, each for its shape, when it is new."""
    if device.type != "cpu":
        return False
    return dtype == torch.bfloat16 or (dtype == torch.float32 and is_wider())


@cache
def is_wider() -> bool:
    """Whether oneDNN multiplies float32 in wider registers here than MKL does."""
    info = Path("/proc/cpuinfo")
    amd = info.exists() and "AuthenticAMD" in info.read_text()
    wide: bool = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return amd and wide and torch.backends.mkldnn.is_available()
