"""Checkpoints of ESFT: the trained experts, the expert configuration, the base's fingerprint.

A sealed folder without pickle: ``trained.safetensors``, ``experts.json`` in the published form, and
``MANIFEST.json``, which holds every file's sha256 and names the base.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load as read_tensors
from safetensors.torch import save_file
from torch import Tensor, nn

from moebook import __version__
from moebook.errors import refuse
from moebook.methods.esft.selection import Selection
from moebook.methods.esft.specialising import (
    checked,
    install,
    options,
    origin,
    origin_or_none,
    restore,
    trained,
)
from moebook.models import manifest
from moebook.models.fingerprint import fingerprint

TENSORS, EXPERTS, FORM = "trained.safetensors", "experts.json", "esft/1"


def save(model: nn.Module, folder: str | os.PathLike[str]) -> Path:
    """Write what was trained, the expert configuration and the base's fingerprint, or nothing.

    Args:
        model: From `specialise`.
        folder: Must not exist yet.

    Returns:
        The folder.

    Raises:
        Refusal: E-EXISTS when the folder exists, E-NONFINITE when a tensor holds NaN or infinity,
            E-MODEL for a model that is not specialised.
    """
    target, made = Path(folder), origin(model)
    if target.exists():
        refuse("E-EXISTS", f"{target} exists already: choose another folder or remove it")
    tensors = {name: p.detach().cpu().contiguous() for name, p in trained(model).items()}
    _check_finite(tensors)
    target.parent.mkdir(parents=True, exist_ok=True)
    stage = target.with_name(f".stage-{target.name}-{os.getpid()}")
    try:
        stage.mkdir()
        save_file(tensors, stage / TENSORS)
        made.selection.save(stage / EXPERTS)
        manifest.seal(stage, form=FORM, version=__version__, base=made.base)
        manifest.commit(stage, target)
    finally:
        shutil.rmtree(stage, ignore_errors=True)
    return target


def load(model: nn.Module, folder: str | os.PathLike[str]) -> nn.Module:
    """Put a task's trained experts on their base, in place and bit for bit, after all checks.

    A specialised model is swapped to the new task: what it had trained is dropped (`save` it first)
    and its base, whose fingerprint is known, is used again.

    Args:
        model: The base, or a specialised model on it.
        folder: Written by `save`.

    Returns:
        The same model, specialised as it was when it was saved.

    Raises:
        Refusal: E-NOFILE, E-MANIFEST, E-HASH, E-FORMAT, E-BASE, E-KEYS, E-SHAPE, E-NONFINITE or
            those of `specialise`; the model is untouched then.
    """
    folder = Path(folder)
    if not folder.is_dir():
        refuse("E-NOFILE", f"{folder} is missing: expected a folder written by esft.save")
    sealed = manifest.verify(folder)
    if sealed.get("form") != FORM or not isinstance(wanted := sealed.get("base"), str):
        refuse("E-FORMAT", f"{folder} is not of the form {FORM}, as written by esft.save")
    selection = Selection.load(folder / EXPERTS)
    tensors = _tensors(folder / TENSORS)
    before = origin_or_none(model)
    found = fingerprint(model) if before is None else before.base
    if found != wanted:
        refuse("E-BASE", f"{folder} belongs to base {wanted[:12]}..., this base is {found[:12]}...")
    _check_fit(_expected(model, selection), tensors, folder / TENSORS)
    if before is not None:
        restore(model)
    install(model, selection, checked(model, selection), found)
    with torch.no_grad():
        for name, parameter in trained(model).items():
            parameter.copy_(tensors[name])
    return model


def _expected(model: nn.Module, selection: Selection) -> dict[str, tuple[list[int], torch.dtype]]:
    """Return shape and dtype of every tensor that a checkpoint of this selection must hold."""
    layers = checked(model, selection)
    names = {module: name for name, module in model.named_modules()}
    expected = {
        name: (list(p.shape), p.dtype) for name, p in options(model, selection, layers).items()
    }
    for layer in layers:
        for part in ("gate_up_proj", "down_proj"):
            weight = getattr(layer.experts, part)
            shape = [len(selection.experts[layer.index]), *weight.shape[1:]]
            dtype = torch.promote_types(weight.dtype, torch.float32)
            expected[f"{names[layer.experts]}.{part}"] = (shape, dtype)
    return expected


def _tensors(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        refuse("E-NOFILE", f"{path} is missing: expected a folder written by esft.save")
    try:
        tensors = read_tensors(path.read_bytes())
    except SafetensorError as error:
        refuse("E-FORMAT", f"{path} is not safetensors: {error}")
    _check_finite(tensors)
    return tensors


def _check_fit(
    expected: dict[str, tuple[list[int], torch.dtype]], tensors: dict[str, Tensor], path: Path
) -> None:
    missing, surplus = sorted(expected.keys() - tensors), sorted(tensors.keys() - expected)
    if missing or surplus:
        refuse(
            "E-KEYS",
            f"{path}: {len(missing)} tensors missing {missing[:3]},"
            f" {len(surplus)} surplus {surplus[:3]}",
        )
    for name, (shape, dtype) in expected.items():
        tensor = tensors[name]
        if list(tensor.shape) != shape or tensor.dtype != dtype:
            refuse(
                "E-SHAPE",
                f"{path}: {name} is {list(tensor.shape)} {tensor.dtype}, expected {shape} {dtype}",
            )


def _check_finite(tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            refuse("E-NONFINITE", f"{name} holds NaN or infinity")
