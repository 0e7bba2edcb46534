"""Checkpoints of PESC: what was trained, the settings, and the fingerprint of the base; no pickle.

A folder holds ``trained.safetensors`` and ``config.json``, which names the tensors' file by its
sha256. It is written beside its final place and renamed there as the last step.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as read_tensors
from safetensors.torch import save as write_tensors
from torch import Tensor, nn

from moebook import __version__
from moebook.errors import nearest, refuse
from moebook.methods.pesc.config import Config
from moebook.methods.pesc.crafting import checked, origin
from moebook.methods.pesc.tuning import assemble, prepare, trained
from moebook.models.fingerprint import fingerprint

TENSORS, SETTINGS, FORM = "trained.safetensors", "config.json", "pesc/1"
KEYS = {"form", "version", "config", "sparse", "base", "sha256"}


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
    target, made = Path(folder), origin(model)
    if target.exists():
        refuse("E-EXISTS", f"{target} exists already: choose another folder or remove it")
    tensors = {n: p.detach().cpu().contiguous() for n, p in trained(model, made.config).items()}
    _check_finite(tensors)
    payload = write_tensors(tensors)
    settings = {
        "form": FORM,
        "version": __version__,
        "config": asdict(made.config),
        "sparse": made.sparse,
        "base": made.base,
        "sha256": hashlib.sha256(payload).hexdigest(),
    }
    files = {TENSORS: payload, SETTINGS: json.dumps(settings, indent=1).encode()}
    _commit(target, files)
    return target


def load(model: nn.Module, folder: str | os.PathLike[str]) -> nn.Module:
    """Restore a checkpoint onto its dense base, in place and bit for bit, after all checks.

    Args:
        model: The dense base, as it was before `craft` or `prepare`.
        folder: Written by `save`.

    Returns:
        The same model, prepared as it was when it was saved.

    Raises:
        Refusal: E-NOFILE, E-FORMAT, E-HASH, E-BASE, E-KEYS, E-SHAPE or E-NONFINITE; the model is
            untouched then.
    """
    folder = Path(folder)
    settings = _settings(folder / SETTINGS)
    config = _config(settings["config"], folder / SETTINGS)
    tensors = _tensors(folder / TENSORS, settings["sha256"])
    found = fingerprint(model)
    if found != settings["base"]:
        want = settings["base"]
        refuse("E-BASE", f"{folder} belongs to base {want[:12]}..., this base is {found[:12]}...")
    _check_keys(_expected(model, config, settings["sparse"]), tensors, folder / TENSORS)
    prepare(model, config, sparse=settings["sparse"])
    with torch.no_grad():
        for name, parameter in trained(model, config).items():
            parameter.copy_(tensors[name])
    return model


def _commit(target: Path, files: dict[str, bytes]) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    stage = target.parent / f".stage-{target.name}-{os.getpid()}"
    shutil.rmtree(stage, ignore_errors=True)
    try:
        stage.mkdir()
        for name, content in files.items():
            with open(stage / name, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        _sync(stage)
        stage.rename(target)
    except BaseException:
        shutil.rmtree(stage, ignore_errors=True)
        raise
    _sync(target.parent)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def _settings(path: Path) -> dict[str, Any]:
    if not path.is_file():
        refuse("E-NOFILE", f"{path} is missing: expected a folder written by pesc.save")
    try:
        settings = json.loads(path.read_bytes())
    except ValueError as error:
        refuse("E-FORMAT", f"{path} is not JSON: {error}")
    if not isinstance(settings, dict) or set(settings) != KEYS or settings["form"] != FORM:
        refuse(
            "E-FORMAT", f"{path} is not of the form {FORM} with the keys {', '.join(sorted(KEYS))}"
        )
    strings = all(isinstance(settings[key], str) for key in ("base", "sha256"))
    if not (
        strings and isinstance(settings["sparse"], bool) and isinstance(settings["config"], dict)
    ):
        refuse(
            "E-FORMAT", f"{path}: expected strings base and sha256, a boolean sparse, a map config"
        )
    return settings


def _config(values: dict[str, Any], path: Path) -> Config:
    known = {field.name for field in fields(Config)}
    if set(values) != known:
        odd = sorted(set(values) ^ known)[0]
        refuse("E-FORMAT", f"{path}: setting '{odd}' is missing or unknown; {nearest(odd, known)}")
    lists = {key: tuple(value) for key, value in values.items() if isinstance(value, list)}
    return Config(**{**values, **lists})


def _tensors(path: Path, sha256: str) -> dict[str, Tensor]:
    if not path.is_file():
        refuse("E-NOFILE", f"{path} is missing: expected a folder written by pesc.save")
    payload = path.read_bytes()
    found = hashlib.sha256(payload).hexdigest()
    if found != sha256:
        refuse("E-HASH", f"{path} has sha256 {found[:12]}..., {SETTINGS} says {sha256[:12]}...")
    try:
        tensors = read_tensors(payload)
    except SafetensorError as error:
        refuse("E-FORMAT", f"{path} is not safetensors: {error}")
    _check_finite(tensors)
    return tensors


def _expected(model: nn.Module, config: Config, sparse: bool) -> dict[str, nn.Parameter]:
    """Return what a checkpoint of this base must hold, from a copy on the meta device."""
    with torch.device("meta"):
        hollow = type(model)(model.config).to(model.dtype)
        assemble(hollow, config, checked(hollow, config), sparse=sparse)
    return trained(hollow, config)


def _check_keys(expected: dict[str, nn.Parameter], tensors: dict[str, Tensor], path: Path) -> None:
    missing, surplus = (
        sorted(expected.keys() - tensors.keys()),
        sorted(tensors.keys() - expected.keys()),
    )
    if missing or surplus:
        refuse(
            "E-KEYS",
            f"{path}: {len(missing)} tensors missing {missing[:3]},"
            f" {len(surplus)} surplus {surplus[:3]}",
        )
    for name, parameter in expected.items():
        tensor = tensors[name]
        if tensor.shape != parameter.shape or tensor.dtype != parameter.dtype:
            want = f"{tuple(parameter.shape)} {parameter.dtype}"
            refuse(
                "E-SHAPE",
                f"{path}: {name} is {tuple(tensor.shape)} {tensor.dtype}, expected {want}",
            )


def _check_finite(tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            refuse("E-NONFINITE", f"{name} holds NaN or infinity")
