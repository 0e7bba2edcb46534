"""What every op asks of its arguments: numbers that PyTorch computes in, on one device.

Tensors come by the names that a refusal is to call them by.
"""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral

import torch
from torch import Tensor

from moebook.errors import refuse

Named = Mapping[str, Tensor]


def floating(op: str, tensors: Named) -> None:
    """Refuse, with E-DTYPE, what is not floating point, or of 8 bits, which are only stored."""
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            expected = "expected floating point, 16 bits at least"
            refuse("E-DTYPE", f"{op}: {name} is {tensor.dtype}, {expected}: cast it")


def real(op: str, tensors: Named) -> None:
    """Refuse, with E-DTYPE, complex numbers and floating point of 8 bits."""
    for name, tensor in tensors.items():
        if tensor.is_complex() or (tensor.is_floating_point() and tensor.element_size() < 2):
            expected = "expected real numbers, floating point of 16 bits at least"
            refuse("E-DTYPE", f"{op}: {name} is {tensor.dtype}, {expected}: cast it")


def whole(op: str, tensors: Named) -> None:
    """Refuse, with E-DTYPE, what is neither int64 nor int32."""
    for name, tensor in tensors.items():
        if tensor.dtype not in (torch.int64, torch.int32):
            refuse("E-DTYPE", f"{op}: {name} is {tensor.dtype}, expected torch.int64")


def natural(op: str, name: str, value: int, most: int | None = None, what: str = "") -> None:
    """Refuse, with E-TYPE or E-RANGE, what is no whole number from 1 to ``most``, of ``what``."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        refuse("E-TYPE", f"{op}: {name} is {value!r}, expected a whole number")
    if value < 1 or (most is not None and value > most):
        expected = "at least 1" if most is None else f"1 to {most} ({what})"
        refuse("E-RANGE", f"{op}: {name} is {value}, expected {expected}")


def alike(op: str, tensors: Named) -> None:
    """Refuse, with E-DTYPE, tensors of another dtype than the first."""
    (one, first), *_ = tensors.items()
    for name, tensor in tensors.items():
        if tensor.dtype != first.dtype:
            refuse("E-DTYPE", f"{op}: {name} is {tensor.dtype}, {one} is {first.dtype}: cast one")


def together(op: str, tensors: Named) -> None:
    """Refuse, with E-DEVICE, tensors on another device than the first."""
    (one, first), *_ = tensors.items()
    for name, tensor in tensors.items():
        if tensor.device != first.device:
            refuse("E-DEVICE", f"{op}: {name} lies on {tensor.device}, {one} on {first.device}")


def valued(op: str, tensors: Named) -> None:
    """Refuse, with E-DEVICE, tensors on the meta device."""
    for name, tensor in tensors.items():
        if tensor.is_meta:
            refuse("E-DEVICE", f"{op}: {name} lies on meta, which holds no values")
