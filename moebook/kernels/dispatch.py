"""Choice among the implementations of one op: obeyed or refused, never swapped silently."""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Callable, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moebook.errors import nearest, refuse

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""What the Triton kernels compute in."""
CAPABILITY = (8, 0)
"""The oldest GPUs that the kernels are compiled for in the tests: Ampere's, of 2020."""


def implementation(
    op: str,
    impl: str,
    table: Mapping[str, Callable[..., Any]],
    on: Tensor | None = None,
) -> Callable[..., Any]:
    """Return the function that ``impl`` names for this op.

    ``"auto"`` is the op's Triton kernel where its tensors lie on a GPU that can run it, else the
    first of ``table``. A kernel is the function ``run`` of `moebook.kernels._triton`'s module of
    the op's name; it is imported here, when it is about to run, and at no other time.

    Args:
        op: Name of the op.
        impl: ``"auto"``, ``"triton"`` or a key of ``table``.
        table: The op's implementations in PyTorch by name, the fastest first.
        on: A tensor of the call: where, and in which dtype, the op is to compute.

    Raises:
        Refusal: E-IMPL when the op has no such implementation, or it cannot run on these tensors.
    """
    if impl == "auto":
        compiled = on is not None and on.is_cuda and not _interpreted()
        impl = "triton" if compiled and not obstacle(op, on) else next(iter(table))
    if impl in table:
        return _untouched(table[impl], on)
    if impl != "triton":
        names = ["auto", *table, *(["triton"] if _path(op).is_file() else [])]
        refuse("E-IMPL", f"{op}: no implementation impl='{impl}'; {nearest(impl, names)}")
    if problem := obstacle(op, on):
        refuse("E-IMPL", f"{op}: impl='triton' cannot run here: {problem}; use impl='auto'")
    run: Callable[..., Any] = importlib.import_module(f"moebook.kernels._triton.{op}").run
    return _untouched(run, on)


def _untouched(run: Callable[..., Any], on: Tensor | None) -> Callable[..., Any]:
    """Keep autocast out of an op: it would change the dtype of some products and of others not."""
    kind = "cpu" if on is None else on.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return run
    return torch.autocast(kind, enabled=False)(run)


def obstacle(op: str, on: Tensor | None) -> str | None:
    """Say why the op's Triton kernel cannot run on this tensor; None where it can."""
    if on is None or not _path(op).is_file():
        return "the op has no Triton kernel"
    if find_spec("triton") is None:
        return "triton is not installed"
    if on.dtype not in DTYPES:
        return f"it computes in {', '.join(map(str, DTYPES))}, the input is {on.dtype}"
    if _interpreted() and not on.is_meta:
        if on.dtype == torch.bfloat16:
            return "Triton's interpreter computes bfloat16 wrongly"
        return None
    if not on.is_cuda:
        return f"the input is on {on.device}, expected an NVIDIA GPU"
    return _lacking(on.device)


@cache
def _lacking(gpu: torch.device) -> str | None:
    """Say what a GPU, or the system around it, lacks for kernels that are compiled for it."""
    if (capability := torch.cuda.get_device_capability(gpu)) < CAPABILITY:
        got, expected = (".".join(map(str, each)) for each in (capability, CAPABILITY))
        return f"{gpu} has compute capability {got}, expected at least {expected}"
    if not os.environ.get("CC") and not any(map(shutil.which, ("gcc", "clang"))):
        return "Triton finds no C compiler: install gcc or clang, or name one in CC"
    return None


def _interpreted() -> bool:
    """Whether Triton interprets its kernels in Python, on any device, instead of compiling them."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "on", "true", "y", "yes")


def _path(op: str) -> Path:
    return Path(__file__).parent / "_triton" / f"{op}.py"
