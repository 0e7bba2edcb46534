"""Folders of tensors and JSON: written whole or not at all, read once and checked."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from moebook.errors import refuse
from moebook.models import manifest


def write(target: Path, files: dict[str, bytes], **facts: Any) -> Path:
    """Write files into a new folder with a manifest of their hashes; one rename commits it.

    Args:
        target: Must not exist yet.
        files: Content by name.
        facts: JSON values kept in the manifest.

    Raises:
        Refusal: E-EXISTS when the folder exists.
    """
    if target.exists():
        refuse("E-EXISTS", f"{target} exists already: choose another folder or remove it")
    target.parent.mkdir(parents=True, exist_ok=True)
    stage = target.parent / f".stage-{target.name}-{os.getpid()}"
    shutil.rmtree(stage, ignore_errors=True)
    try:
        stage.mkdir()
        for name, content in files.items():
            (stage / name).write_bytes(content)
        manifest.seal(stage, **facts)
        manifest.commit(stage, target)
    except BaseException:
        shutil.rmtree(stage, ignore_errors=True)
        raise
    return target


def packed(tensors: dict[str, Tensor]) -> bytes:
    """Return the tensors as safetensors.

    Raises:
        Refusal: E-NONFINITE naming a tensor that holds NaN or infinity.
    """
    check_finite(tensors, "cannot be saved")
    return safetensors.torch.save({n: t.detach().cpu().contiguous() for n, t in tensors.items()})


def tensors(path: Path, limit: int) -> dict[str, Tensor]:
    """Read a safetensors file of at most ``limit`` bytes, from memory and not from a map.

    Raises:
        Refusal: E-NOFILE, E-LIMIT, E-FORMAT or E-NONFINITE.
    """
    if not path.is_file():
        refuse("E-NOFILE", f"{path} is missing; expected it beside its settings")
    size = path.stat().st_size
    if size > limit:
        refuse("E-LIMIT", f"{path} has {size} bytes, expected at most {limit} for this base")
    try:
        found = safetensors.torch.load(path.read_bytes())
    except SafetensorError as error:
        refuse("E-FORMAT", f"{path} is not safetensors ({error}); fetch it again")
    check_finite(found, str(path))
    return found


def check_fit(expected: dict[str, tuple[int, ...]], found: dict[str, Tensor], path: Path) -> None:
    """Refuse tensors whose names, shapes or dtypes are not exactly the expected ones.

    Raises:
        Refusal: E-KEYS with counts and first names, or E-SHAPE with the first misfit; tensors must
            be floating-point.
    """
    missing, surplus = sorted(expected.keys() - found), sorted(found.keys() - expected.keys())
    if missing or surplus:
        refuse(
            "E-KEYS",
            f"{path}: {len(missing)} tensors missing {missing[:3]},"
            f" {len(surplus)} surplus {surplus[:3]}",
        )
    for name, shape in expected.items():
        tensor = found[name]
        if tensor.shape != shape or not tensor.is_floating_point() or tensor.element_size() < 2:
            got = f"{tuple(tensor.shape)} {tensor.dtype}"
            refuse("E-SHAPE", f"{path}: {name} is {got}, expected {shape} of 16 bits or more")


def check_finite(found: dict[str, Tensor], where: str) -> None:
    """Refuse NaN and infinity, naming the tensor (E-NONFINITE)."""
    for name, tensor in found.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            refuse("E-NONFINITE", f"{where}: {name} holds NaN or infinity")
