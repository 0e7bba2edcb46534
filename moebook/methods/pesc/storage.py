"""Checkpoints of PESC: what was trained, the settings, and the fingerprint of the base; no pickle.

A sealed folder: ``trained.safetensors``, and ``MANIFEST.json`` with its hash and the settings.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn

from moebook import __version__, settings
from moebook.methods.pesc.config import Config
from moebook.methods.pesc.crafting import craftable, origin
from moebook.methods.pesc.tuning import assemble, prepare, trained
from moebook.models import folders
from moebook.models.fingerprint import fingerprint

TENSORS, FORM = "trained.safetensors", "pesc/1"


def save(model: nn.Module, folder: str | os.PathLike[str]) -> Path:
    """Write what was trained, the settings and the base's fingerprint to a new folder, or nothing.

    Args:
        model: From `craft` or `prepare`.
        folder: Must not exist yet.

    Returns:
        The folder.

    Raises:
        Refusal: E-EXISTS when the folder exists, E-NONFINITE when a tensor holds NaN or infinity,
            E-MODEL for a model that PESC did not make.
    """
    made = origin(model)
    content = folders.packed(trained(model, made.config))
    facts = {"form": FORM, "version": __version__, **asdict(made)}
    return folders.write(Path(folder), {TENSORS: content}, **facts)


def load(model: nn.Module, folder: str | os.PathLike[str]) -> nn.Module:
    """Restore a checkpoint onto its dense base, in place and bit for bit, after all checks.

    Args:
        model: The dense base, as it was before `craft` or `prepare`.
        folder: Written by `save`.

    Returns:
        The same model, prepared as it was when it was saved.

    Raises:
        Refusal: E-NOFILE, E-MANIFEST, E-HASH, E-FORMAT, E-BASE, E-KEYS, E-SHAPE or E-NONFINITE;
            the model is untouched then.
    """
    folder = Path(folder)
    facts = folders.read(folder, FORM, base=str, sparse=bool, config=dict)
    config, sparse = settings.restored(Config, facts["config"], folder), facts["sparse"]
    folders.check_base(folder, facts["base"], fingerprint(model))
    tensors = folders.tensors(folder / TENSORS, _expected(model, config, sparse))
    prepare(model, config, sparse=sparse)
    with torch.no_grad():
        for name, parameter in trained(model, config).items():
            parameter.copy_(tensors[name])
    return model


def _expected(model: nn.Module, config: Config, sparse: bool) -> dict[str, folders.Form]:
    """Return what a checkpoint of this base must hold, from a copy on the meta device."""
    with torch.device("meta"):
        hollow = type(model)(model.config).to(model.dtype)
        assemble(hollow, config, craftable(hollow, config), sparse=sparse)
    return {name: (p.shape, p.dtype) for name, p in trained(hollow, config).items()}
