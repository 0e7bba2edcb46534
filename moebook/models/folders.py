"""Folders of tensors and facts: written whole or not at all, read once and checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from moebook.errors import refuse
from moebook.models import manifest

Form = tuple[Sequence[int], torch.dtype | None]
"""Shape and dtype that a tensor must have; None for any floating-point type of 16 bits or more."""


def write(target: Path, files: Mapping[str, bytes], **facts: Any) -> Path:
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
    with manifest.building(target, **facts) as stage:
        for name, content in files.items():
            (stage / name).write_bytes(content)
    return target


def read(folder: Path, form: str, **kinds: type) -> dict[str, Any]:
    """Return the facts of a folder written by `write`, after all its hashes were checked.

    Args:
        folder: Where.
        form: What the fact ``form`` must be.
        kinds: Further facts that must be there, each of exactly this type.

    Raises:
        Refusal: E-NOFILE, E-MANIFEST, E-HASH, or E-FORMAT for a folder of another form.
    """
    if not folder.is_dir():
        refuse("E-NOFILE", f"{folder} is missing: expected a folder of the form {form}")
    facts = manifest.verify(folder)
    wrong = [name for name, kind in kinds.items() if type(facts.get(name)) is not kind]
    if facts.get("form") != form or wrong:
        refuse("E-FORMAT", f"{folder} is not of the form {form} with {', '.join(kinds)}")
    return facts


def check_base(folder: Path, wanted: str, found: str) -> None:
    """Refuse a base whose fingerprint is not the one that a folder belongs to (E-BASE)."""
    if found != wanted:
        refuse("E-BASE", f"{folder} belongs to base {wanted[:12]}..., this base is {found[:12]}...")


def packed(tensors: Mapping[str, Tensor]) -> bytes:
    """Return the tensors as safetensors.

    Raises:
        Refusal: E-NONFINITE naming a tensor that holds NaN or infinity.
    """
    _check_finite(tensors, "cannot be saved")
    return safetensors.torch.save({n: t.detach().cpu().contiguous() for n, t in tensors.items()})


def tensors(path: Path, expected: Mapping[str, Form]) -> dict[str, Tensor]:
    """Read exactly the expected tensors, from memory and not from a map.

    Raises:
        Refusal: E-NOFILE, E-LIMIT (nothing is read then), E-FORMAT, E-NONFINITE, E-KEYS with counts
            and first names, or E-SHAPE with the first misfit.
    """
    if not path.is_file():
        refuse("E-NOFILE", f"{path} is missing; expected it beside its settings")
    limit = 8 * sum(torch.Size(shape).numel() for shape, _ in expected.values()) + 2**20
    if (size := path.stat().st_size) > limit:
        refuse("E-LIMIT", f"{path} has {size} bytes, expected at most {limit} for this base")
    try:
        found = safetensors.torch.load(path.read_bytes())
    except SafetensorError as error:
        refuse("E-FORMAT", f"{path} is not safetensors ({error}); fetch it again")
    _check_finite(found, str(path))
    _check_fit(expected, found, path)
    return found


def _check_fit(expected: Mapping[str, Form], found: Mapping[str, Tensor], path: Path) -> None:
    missing, surplus = sorted(expected.keys() - found), sorted(found.keys() - expected.keys())
    if missing or surplus:
        refuse(
            "E-KEYS",
            f"{path}: {len(missing)} tensors missing {missing[:3]},"
            f" {len(surplus)} surplus {surplus[:3]}",
        )
    for name, (shape, dtype) in expected.items():
        tensor = found[name]
        fits = tensor.dtype == dtype
        if dtype is None:
            fits = tensor.is_floating_point() and tensor.element_size() >= 2
        if tensor.shape != torch.Size(shape) or not fits:
            got, wanted = f"{tuple(tensor.shape)} {tensor.dtype}", dtype or "16 bits or more"
            refuse("E-SHAPE", f"{path}: {name} is {got}, expected {tuple(shape)} of {wanted}")


def _check_finite(found: Mapping[str, Tensor], where: str) -> None:
    for name, tensor in found.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            refuse("E-NONFINITE", f"{where}: {name} holds NaN or infinity")
