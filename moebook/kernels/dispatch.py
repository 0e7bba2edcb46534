"""What every op does first: check its arguments' shapes, and obey ``impl=`` or refuse it."""

from __future__ import annotations

import importlib
import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from importlib.util import find_spec
from numbers import Integral, Real
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import AfterValidator
from pydantic_core import PydanticCustomError
from torch import Tensor

from moebook.errors import refuse, refuse_unknown, shown

DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # the Triton kernels compute in
# The oldest GPUs that the kernels are compiled for in tests: Ampere's, of 2020.
CAPABILITY = (8, 0)


def implementation(
    op: str,
    impl: str,
    table: Mapping[str, Any],
    on: Tensor | None = None,
    *,
    unless: str = "",
) -> Callable[..., Any]:
    """Return the function that ``impl`` names for this op: ``"auto"`` or a key of ``table``.

    ``"auto"`` is ``"triton"`` where the tensor ``on`` of the call lies on a GPU that can run it,
    else the first of the table. A Triton kernel is named by module and function, ``"experts.run"``,
    and imported when it is about to run. ``unless`` is why it cannot compute this call, if so.
    """
    if impl == "auto":
        compiled = on is not None and on.is_cuda and not _interpreted()
        runs = compiled and "triton" in table and not (unless or obstacle(on))
        impl = "triton" if runs else next(iter(table))
    refuse_unknown(
        impl, ["auto", *table], "E-IMPL", f"{op}: no implementation impl='{impl}';"
    )
    run = table[impl]
    if isinstance(run, str):
        problem = unless or obstacle(on)
        if problem:
            refuse(
                "E-IMPL",
                f"{op}: impl='triton' cannot run here: {problem}; use impl='auto'",
            )
        file, name = run.split(".")
        module = importlib.import_module(f"{__package__}._triton.{file}")
        run = _launched(getattr(module, name))
    return _untouched(run, on)


def _launched(run: Callable[..., Any]) -> Callable[..., Any]:
    """Launch kernels on the GPU of an op's first tensor; backward passes are there already."""

    @wraps(run)
    def launch(*args: Any) -> Any:
        with torch.cuda.device_of(args[0]):
            return run(*args)

    return launch


def _untouched(run: Callable[..., Any], on: Tensor | None) -> Callable[..., Any]:
    """Keep autocast out of an op: it would change the dtype of some products alone."""
    kind = "cpu" if on is None else on.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return run
    return torch.autocast(kind, enabled=False)(run)


def lowered(factor: Tensor) -> Tensor:
    """Return a factor as products read it: under autocast in its dtype, else as it is.

    So `torch.nn.Linear` reads it, float64 too, which autocast leaves alone. On meta, which
    knows no autocast, that of the CPU counts.
    """
    kind = "cpu" if factor.is_meta else factor.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return factor
    if factor.dtype == torch.float64:
        return factor
    return factor.to(torch.get_autocast_dtype(kind))


def obstacle(on: Tensor | None) -> str | None:
    """Say why Triton kernels cannot run on this tensor; None where they can."""
    if on is None:
        return "the op has no tensors"
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
    capability = torch.cuda.get_device_capability(gpu)
    if capability < CAPABILITY:
        got = ".".join(map(str, capability))
        expected = ".".join(map(str, CAPABILITY))
        return f"{gpu} has compute capability {got}, expected at least {expected}"
    named = bool(os.environ.get("CC"))
    if not (named or shutil.which("gcc") or shutil.which("clang")):
        return "Triton finds no C compiler: install gcc or clang, or name one in CC"
    return None


def _interpreted() -> bool:
    """Whether Triton interprets its kernels in Python, on any device, and compiles none."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in (
        "1",
        "on",
        "true",
        "y",
        "yes",
    )


def _floating(dtype: torch.dtype) -> torch.dtype:
    if dtype in FLOATS:
        return dtype
    raise PydanticCustomError(
        "dtype", "expected a floating-point dtype of 16 bits at least"
    )


Floating = Annotated[torch.dtype, AfterValidator(_floating)]
"""What parameters can be made in, for `settings.checked`."""
FLOATS = frozenset({torch.float64, *DTYPES})
WHOLE = frozenset(
    {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
)
KINDS = {
    "float": (FLOATS, "floating point, 16 bits at least: cast it"),
    "real": (
        FLOATS | WHOLE,
        "real numbers, floating point of 16 bits at least: cast it",
    ),
    "int": (frozenset({torch.int64, torch.int32}), "torch.int64"),
    "bool": (frozenset({torch.bool}), "torch.bool"),
    "int64": (frozenset({torch.int64}), "torch.int64"),
}
"""Kinds of dtypes: what belongs to each, and how a refusal words it."""


def shapes(
    op: str,
    tensors: Mapping[str, tuple[Any, ...]],
    *,
    empty: str = "T S",
    alike: Sequence[str] = (),
    valued: bool = False,
) -> dict[str, int]:
    """Refuse tensors that do not fit one another; return the size of each letter.

    ``shapes("adapters", {"h": (h, "T D"), "ids": (ids, "T K", "int")})`` binds T, D and K: a
    letter has one size wherever it stands. ``2F`` is an even size, ``TK`` the product of
    letters bound before, a leading ``...`` any dimensions, the same in all tensors. All lie
    on one device, and each is of one of `KINDS`, ``"float"`` by default. NumPy's arrays
    count as tensors on the CPU.

    Letters in ``empty`` may be 0. Those in ``alike`` have one dtype. ``valued`` ops refuse meta.
    """
    held = {}
    dims = {}
    kinds = {}
    for name, (tensor, letters, *kind) in tensors.items():
        held[name] = _seen(tensor)
        dims[name] = letters
        kinds[name] = kind[0] if kind else "float"

    sizes: dict[str, Any] = {}
    fits = all(_bind(tensor.shape, dims[name], sizes) for name, tensor in held.items())
    zeros = [
        letter for letter, size in sizes.items() if size == 0 and letter not in empty
    ]
    if not fits or zeros:
        refuse("E-SHAPE", f"{op}: {_misfit(held, dims, empty)}")

    first = next(iter(held))
    device = held[first].device
    for name, tensor in held.items():
        dtypes, wanted = KINDS[kinds[name]]
        if tensor.dtype not in dtypes:
            refuse("E-DTYPE", f"{op}: {name} is {tensor.dtype}, expected {wanted}")
        if tensor.device != device:
            refuse(
                "E-DEVICE", f"{op}: {name} lies on {tensor.device}, {first} on {device}"
            )
    for name in alike:
        model = alike[0]
        dtype = held[name].dtype
        wanted_dtype = held[model].dtype
        if dtype != wanted_dtype:
            refuse(
                "E-DTYPE",
                f"{op}: {name} is {dtype}, {model} is {wanted_dtype}: cast one",
            )
    if valued and held[first].is_meta:
        refuse("E-DEVICE", f"{op}: {first} lies on meta, which holds no values")
    return sizes


def _misfit(held: Mapping[str, Any], dims: Mapping[str, str], empty: str) -> str:
    """Say what shapes were expected, and which there are."""
    expected = []
    for name, letters in dims.items():
        expected.append(f"{name} [{', '.join(letters.split())}]")
    got = ", ".join(str(tuple(tensor.shape)) for tensor in held.values())
    zero = "(none of them 0)"
    if empty:
        zero = f"(only {', '.join(empty.split())} may be 0)"
    return f"expected {', '.join(expected)} {zero}; got {got}"


class _Array(NamedTuple):
    """What `shapes` asks of an array of NumPy."""

    shape: tuple[int, ...]
    dtype: Any  # torch's, or NumPy's where torch has none such
    device: torch.device = torch.device("cpu")
    is_meta: bool = False


def _seen(tensor: Any) -> Any:
    """Return a tensor, or what stands for an array."""
    if isinstance(tensor, Tensor):
        return tensor
    return _Array(tensor.shape, getattr(torch, tensor.dtype.name, tensor.dtype))


@cache
def _layout(dims: str) -> tuple[bool, tuple[tuple[int, str], ...]]:
    """Parse dimensions: whether others lead; of each its factor and letters, (2, "F") of 2F."""
    parsed = []
    for name in dims.removeprefix("...").split():
        letters = name.lstrip("0123456789")
        digits = name.removesuffix(letters)
        parsed.append((int(digits or 1), letters))
    return dims.startswith("..."), tuple(parsed)


def _bind(shape: torch.Size, dims: str, sizes: dict[str, Any]) -> bool:
    """Bind the letters of one tensor, if its shape agrees with those that are bound."""
    leads, layout = _layout(dims)
    if leads:
        # Whatever stands before the named dimensions is bound as one.
        lead = max(len(shape) - len(layout), 0)
        if sizes.setdefault("...", shape[:lead]) != shape[:lead]:
            return False
        shape = shape[lead:]
    if len(shape) != len(layout):
        return False
    # Of 2F the factor is 2 and F what is left of the size; of TK both are bound.
    for size, (factor, letters) in zip(shape, layout, strict=True):
        known = factor * math.prod(sizes[one] for one in letters if one in sizes)
        unbound = [letter for letter in letters if letter not in sizes]
        if not unbound:
            if size != known:
                return False
            continue
        if not known or size % known:
            return False
        sizes[unbound[-1]] = size // known
    return True


def factor(op: str, name: str, value: float | Tensor) -> None:
    """Refuse what is no finite number and no ``[]`` tensor.

    Whether a tensor is finite is not looked at, which on a GPU would wait for it. By E-TYPE,
    E-SHAPE or E-NONFINITE.
    """
    if isinstance(value, Tensor):
        if value.dim() or value.dtype not in FLOATS:
            got = f"a tensor {tuple(value.shape)} of {value.dtype}"
            refuse(
                "E-SHAPE",
                f"{op}: {name} is {got}, expected a number or a tensor () of floats",
            )
    elif not isinstance(value, Real) or isinstance(value, bool):
        refuse("E-TYPE", f"{op}: {name} is {shown(value)}, expected a number")
    elif not _is_finite(value):
        refuse(
            "E-NONFINITE", f"{op}: {name} is {shown(value)}, expected a finite number"
        )


def _is_finite(value: Real) -> bool:
    """Whether a number is one that a float can hold."""
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False


def natural(
    op: str, name: str, value: int, most: int | None = None, what: str = ""
) -> None:
    """Refuse what is no whole number from 1 to ``most``, of ``what`` (E-TYPE, E-RANGE)."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        refuse("E-TYPE", f"{op}: {name} is {shown(value)}, expected a whole number")
    if value < 1 or (most is not None and value > most):
        expected = "at least 1" if most is None else f"1 to {most}"
        if most is not None and what:
            expected += f" ({what})"
        refuse("E-RANGE", f"{op}: {name} is {shown(value)}, expected {expected}")


def indices(op: str, name: str, places: Tensor, end: int) -> None:
    """Refuse numbers outside [0, end) (E-RANGE); on a GPU a look would wait for it."""
    if places.device.type != "cpu" or not places.numel():
        return
    least = int(places.min())
    most = int(places.max())
    if least < 0 or most >= end:
        refuse(
            "E-RANGE", f"{op}: {name} are {least} to {most}, expected 0 to {end - 1}"
        )
