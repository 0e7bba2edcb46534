"""Checkpoints of ESFT: the trained experts, the expert configuration, the base's fingerprint.

A sealed folder without pickle: ``trained.safetensors``, ``experts.json`` in the published form, and
``MANIFEST.json``, which holds every file's sha256 and names the base.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn

from moebook import __version__
from moebook.methods.esft.selection import Selection
from moebook.methods.esft.specialising import (
    checked,
    install,
    merge,
    options,
    origin,
    origin_or_none,
    restore,
    trained,
)
from moebook.models import folders
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
    made = origin(model)
    files = {
        TENSORS: folders.packed(trained(model)),
        EXPERTS: json.dumps(made.selection.published()).encode(),
    }
    return folders.write(Path(folder), files, form=FORM, version=__version__, base=made.base)


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
    wanted = folders.read(folder, FORM, base=str)["base"]
    selection, before = Selection.load(folder / EXPERTS), origin_or_none(model)
    found = fingerprint(model) if before is None else before.base
    folders.check_base(folder, wanted, found)
    tensors = folders.tensors(folder / TENSORS, _expected(model, selection))
    if before is not None:
        restore(model)
    install(model, selection, checked(model, selection), found)
    with torch.no_grad():
        for name, parameter in trained(model).items():
            parameter.copy_(tensors[name])
    return model


@torch.no_grad()
def round_trip(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, float]:
    """Take a trained model apart and put it together again: save, restore, load, merge.

    Args:
        model: From `specialise`, trained; in the end it is merged and in evaluation mode.
        batch: ``input_ids`` and ``attention_mask`` ``[B, T]``, to compare logits on.

    Returns:
        ``base unchanged``, 1: restoring brings back the weights that were specialised, bit for bit;
        ``loading`` and ``merging``, the largest differences of any logit from the trained model's;
        ``bytes`` of the saved folder.

    Raises:
        Refusal: E-BASE when restoring brings back anything else; those of `save`.
    """
    base, device = origin(model).base, next(model.parameters()).device
    inputs = {key: part.to(device) for key, part in batch.items()}
    want = model.eval()(**inputs).logits
    with TemporaryDirectory() as scratch:
        folder = save(model, Path(scratch) / "task")
        size = sum(path.stat().st_size for path in folder.iterdir())
        unchanged = fingerprint(restore(model)) == base
        loaded = load(model, folder)(**inputs).logits
    merged = merge(model)(**inputs).logits
    return {
        "base unchanged": float(unchanged),
        "loading": float((loaded - want).abs().max()),
        "merging": float((merged - want).abs().max()),
        "bytes": float(size),
    }


def _expected(model: nn.Module, selection: Selection) -> dict[str, folders.Form]:
    """Return shape and dtype of every tensor that a checkpoint of this selection must hold."""
    layers = checked(model, selection)
    names = {module: name for name, module in model.named_modules()}
    expected: dict[str, folders.Form] = {
        name: (p.shape, p.dtype) for name, p in options(model, selection, layers).items()
    }
    for layer in layers:
        for part in ("gate_up_proj", "down_proj"):
            weight = getattr(layer.experts, part)
            shape = [len(selection.experts[layer.index]), *weight.shape[1:]]
            dtype = torch.promote_types(weight.dtype, torch.float32)
            expected[f"{names[layer.experts]}.{part}"] = (shape, dtype)
    return expected
