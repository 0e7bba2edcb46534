"""Checkpoints of a mixture: experts, gates, settings and the fingerprint of the base; no pickle."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from moebook import __version__
from moebook.errors import refuse
from moebook.methods import settings
from moebook.methods.rocket import loras, mixture
from moebook.methods.rocket.config import Config
from moebook.models import folders
from moebook.models.fingerprint import fingerprint

TENSORS, FORM = "trained.safetensors", "rocket/1"
LISTS = {"experts": str, "scales": float, "paths": str}


def save(model: nn.Module, folder: str | os.PathLike[str]) -> Path:
    """Write a mixture's experts and gates to a new folder, or nothing.

    Args:
        model: From `mixture.build`.
        folder: Must not exist yet.

    Raises:
        Refusal: E-MODEL, E-EXISTS, or E-NONFINITE when a tensor holds NaN or infinity.
    """
    made = mixture.origin(model)
    content = folders.packed({name: p.data for name, p in mixture.trained(model).items()})
    facts = {"form": FORM, "version": __version__, **asdict(made)}
    return folders.write(Path(folder), {TENSORS: content}, **facts)


def load(model: nn.Module, folder: str | os.PathLike[str]) -> nn.Module:
    """Restore a mixture onto its base, in place and bit for bit, after all checks.

    Args:
        model: The base, unaltered.
        folder: Written by `save`.

    Returns:
        The same model.

    Raises:
        Refusal: E-NOFILE, E-MANIFEST, E-HASH, E-FORMAT, E-BASE, E-KEYS, E-SHAPE or
            E-NONFINITE, or E-MODEL for a model that holds a mixture; the model is untouched then.
    """
    folder = Path(folder)
    if model.__dict__.get("rocket") is not None:
        refuse("E-MODEL", "the model holds a mixture already: mixture.remove takes it off")
    made = _origin(folders.read(folder, FORM, base=str, rank=int, config=dict), folder)
    folders.check_base(folder, made.base, fingerprint(model))
    tensors = folders.tensors(folder / TENSORS, _forms(model, made))
    parts = [{p: tensors[f"{p}.{name}"] for p in made.paths} for name in ("down", "up")]
    mixture.install(model, made, *parts)
    with torch.no_grad():
        for path in made.paths:
            model.get_submodule(path).router.weight.copy_(tensors[f"{path}.router"])
    return model


def _forms(model: nn.Module, made: mixture.Origin) -> dict[str, folders.Form]:
    """Return the shape of each tensor that a checkpoint on this base must hold."""
    linears = loras.linears(model, list(made.paths))
    experts = len(made.experts)
    forms: dict[str, folders.Form] = {}
    for path in made.paths:
        linear = linears[path]
        width, out = linear.in_features, linear.out_features
        reads = width if made.config.gate_input == "layer" else out
        forms[f"{path}.down"] = ((experts, made.rank, width), None)
        forms[f"{path}.up"] = ((experts, out, made.rank), None)
        forms[f"{path}.router"] = ((experts, reads), None)
    return forms


def _origin(facts: dict[str, Any], folder: Path) -> mixture.Origin:
    """Make what `save` kept about the mixture, refusing lists that cannot be right."""
    good = True
    for key, kind in LISTS.items():
        values = facts.get(key)
        good = good and isinstance(values, list) and all(type(value) is kind for value in values)
    if not good or not facts["paths"] or len(facts["experts"]) != len(facts["scales"]):
        refuse("E-FORMAT", f"{folder} is not of the form {FORM}: expected a folder of rocket.save")
    config = settings.restored(Config, facts["config"], folder)
    if config.experts != len(facts["experts"]):
        refuse("E-FORMAT", f"{folder}: {len(facts['experts'])} experts, settings say "
               f"{config.experts}")  # fmt: skip
    lists = {key: tuple(facts[key]) for key in LISTS}
    return mixture.Origin(config, base=facts["base"], rank=facts["rank"], **lists)
