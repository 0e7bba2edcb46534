"""Checkpoints of a mixture: experts, gates, settings and the fingerprint of the base; no pickle."""

from __future__ import annotations

import os
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from moebook import __version__
from moebook.errors import nearest, refuse
from moebook.methods.rocket import folders, loras, mixture
from moebook.methods.rocket.config import Config
from moebook.models import manifest
from moebook.models.fingerprint import fingerprint

TENSORS, FORM = "trained.safetensors", "rocket/1"
TEXTS = {"form": str, "version": str, "base": str, "rank": int, "config": dict}
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
        Refusal: E-MANIFEST, E-HASH, E-FORMAT, E-BASE, E-KEYS, E-SHAPE or E-NONFINITE, or E-MODEL
            for a model that holds a mixture; the model is untouched then.
    """
    folder = Path(folder)
    if model.__dict__.get("rocket") is not None:
        refuse("E-MODEL", "the model holds a mixture already: mixture.remove takes it off")
    made = _origin(manifest.verify(folder) if folder.is_dir() else {}, folder)
    found = fingerprint(model)
    if found != made.base:
        refuse(
            "E-BASE", f"{folder} belongs to base {made.base[:12]}..., this base is {found[:12]}..."
        )
    expected = _shapes(model, made)
    elements = sum(torch.Size(shape).numel() for shape in expected.values())
    tensors = folders.tensors(folder / TENSORS, 8 * elements + 2**20)
    folders.check_fit(expected, tensors, folder / TENSORS)
    parts = [{p: tensors[f"{p}.{name}"] for p in made.paths} for name in ("down", "up")]
    mixture.install(model, made, *parts)
    with torch.no_grad():
        for path in made.paths:
            model.get_submodule(path).router.weight.copy_(tensors[f"{path}.router"])
    return model


def _shapes(model: nn.Module, made: mixture.Origin) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor that a checkpoint on this base must hold."""
    linears = loras.linears(model, list(made.paths))
    experts = len(made.experts)
    shapes: dict[str, tuple[int, ...]] = {}
    for path in made.paths:
        linear = linears[path]
        width, out = linear.in_features, linear.out_features
        reads = width if made.config.gate_input == "layer" else out
        shapes[f"{path}.down"] = (experts, made.rank, width)
        shapes[f"{path}.up"] = (experts, out, made.rank)
        shapes[f"{path}.router"] = (experts, reads)
    return shapes


def _origin(facts: dict[str, Any], folder: Path) -> mixture.Origin:
    """Read what `save` kept about the mixture, refusing anything of another form."""
    good = facts.get("form") == FORM
    good = good and all(type(facts.get(key)) is kind for key, kind in TEXTS.items())
    for key, kind in LISTS.items():
        values = facts.get(key)
        good = good and isinstance(values, list) and all(type(value) is kind for value in values)
    if not good or not facts["paths"] or len(facts["experts"]) != len(facts["scales"]):
        refuse("E-FORMAT", f"{folder} is not of the form {FORM}: expected a folder of rocket.save")
    known = {field.name for field in fields(Config)}
    odd = sorted(facts["config"].keys() ^ known)
    if odd:
        refuse("E-FORMAT", f"{folder}: setting '{odd[0]}' is missing or unknown; "
               f"{nearest(odd[0], known)}")  # fmt: skip
    config = Config(**facts["config"])
    if config.experts != len(facts["experts"]):
        refuse("E-FORMAT", f"{folder}: {len(facts['experts'])} experts, settings say "
               f"{config.experts}")  # fmt: skip
    lists = {key: tuple(facts[key]) for key in LISTS}
    return mixture.Origin(config, base=facts["base"], rank=facts["rank"], **lists)
