"""Checkpoints that survive a kill at any instant: staged, hashed, synced, renamed.

A folder holds ``step-N`` folders and a lock. Each is written under another name, sealed with the
hash of every file and renamed at the end, so that what bears the name ``step-N`` is whole. No
pickle: tensors in safetensors, the rest in JSON. No states of random generators either: whatever
is random in a step of training is a function of the seed and the step (see `fit`).
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from moebook.errors import refuse
from moebook.models import checkpoint
from moebook.runtime import versions

KEPT = 2
TENSORS, FACTS = "tensors.safetensors", "facts.json"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder of checkpoints for this process and sweep what killed ones left behind.

    Raises:
        Refusal: ``E-PATH`` when the folder is a file, ``E-LOCKED`` when another process holds it.
    """
    if folder.exists() and not folder.is_dir():
        refuse("E-PATH", f"{folder} is a file; expected a folder for checkpoints")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            refuse("E-LOCKED", f"{folder} is in use by process {lock.read() or '?'}; wait for it")
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        for leftover in (*folder.glob(".stage-*"), *folder.glob(".trash-*")):
            shutil.rmtree(leftover)
        yield


def save(folder: Path, step: int, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    """Commit a checkpoint as ``step-<step>`` and drop all but the newest `KEPT`.

    Args:
        folder: A folder that this process has `locked`.
        step: Steps done.
        tensors: See `capture`.
        facts: JSON values.

    Raises:
        Refusal: ``E-NONFINITE`` for a NaN or an infinity in a tensor, ``E-DISK`` when the disk is
            full; the checkpoints that were there stay as they were.
    """
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            refuse("E-NONFINITE", f"step {step}: {name} is not finite; nothing was saved")
    known = {"step": step, "versions": versions(), "threads": torch.get_num_threads()}
    try:
        with checkpoint.building(folder / f"step-{step}", **known) as stage:
            safetensors.torch.save_file(tensors, stage / TENSORS)
            (stage / FACTS).write_text(json.dumps(facts))
    except (OSError, safetensors.SafetensorError) as error:
        needed = sum(tensor.nbytes for tensor in tensors.values())
        free = shutil.disk_usage(folder).free
        refuse(
            "E-DISK",
            f"{folder}: step {step} not saved ({error}); {needed} bytes needed, {free} free; "
            "earlier checkpoints are untouched",
        )
    for old in _committed(folder)[:-KEPT]:
        trash = old.with_name(f".trash-{old.name}")
        os.rename(old, trash)
        shutil.rmtree(trash)


def newest(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Read the newest checkpoint, or None where there is none.

    Warns when it was written by another version of torch or with another number of threads, since
    the continuation is then no longer equal bit for bit.

    Raises:
        Refusal: ``E-MANIFEST``, ``E-HASH``, ``E-PATH`` or ``E-FORMAT`` when it is damaged: the
            message names the file. Deleting the folder goes back to the one before.
    """
    paths = _committed(folder)
    if not paths:
        return None
    sealed = checkpoint.verify(paths[-1])
    here = (versions()["torch"], torch.get_num_threads())
    there = (sealed["versions"]["torch"], sealed["threads"])
    if here != there:
        warnings.warn(
            f"W-REPRO: {paths[-1]} was written by torch {there[0]} on {there[1]} threads, this is "
            f"{here[0]} on {here[1]}: the continuation will not be equal bit for bit",
            stacklevel=2,
        )
    try:  # from bytes, not a mapped file: a file that shrinks under a map kills the process
        tensors = safetensors.torch.load((paths[-1] / TENSORS).read_bytes())
        return tensors, json.loads((paths[-1] / FACTS).read_text())
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        refuse("E-FORMAT", f"{paths[-1]}: {error}; delete the folder to go on from an earlier one")


def capture(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Collect what training changes: trainable parameters, buffers, and the optimizer's state."""
    return {
        **{f"model.{name}": tensor.detach() for name, tensor in _changing(model).items()},
        **{
            f"optimizer.{name}.{key}": torch.as_tensor(value)  # bitsandbytes counts in an int
            for name, parameter in _order(model, optimizer).items()
            for key, value in optimizer.state.get(parameter, {}).items()
        },
    }


def restore(
    model: nn.Module, tensors: dict[str, Tensor], optimizer: Optimizer | None = None
) -> None:
    """Put back what `capture` collected; all names, shapes and dtypes of the model must fit.

    Raises:
        Refusal: ``E-SHAPE`` with the first misfits; model and optimizer are then untouched.
    """
    changing = {f"model.{name}": tensor for name, tensor in _changing(model).items()}
    saved = {name: tensor for name, tensor in tensors.items() if name.startswith("model.")}
    misfits = sorted(changing.keys() ^ saved.keys()) or [
        f"{name} {tuple(tensor.shape)} {tensor.dtype}"
        for name, tensor in saved.items()
        if (tensor.shape, tensor.dtype) != (changing[name].shape, changing[name].dtype)
    ]
    if misfits:
        refuse("E-SHAPE", f"{len(misfits)} tensors do not fit this model, first {misfits[:3]}")
    with torch.no_grad():
        for name, tensor in changing.items():
            tensor.copy_(saved[name])
    if optimizer is None:
        return
    state: dict[int, dict[str, Tensor | int]] = {}
    for index, name in enumerate(_order(model, optimizer)):
        prefix = f"optimizer.{name}."
        state[index] = {
            key.removeprefix(prefix): int(tensor) if tensor.dtype == torch.int64 else tensor
            for key, tensor in tensors.items()
            if key.startswith(prefix) and "." not in key.removeprefix(prefix)
        }
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


def _committed(folder: Path) -> list[Path]:
    """The committed checkpoints, oldest first."""
    found = [path for path in folder.glob("step-*") if path.name[5:].isdecimal()]
    return sorted(found, key=lambda path: int(path.name[5:]))


def _changing(model: nn.Module) -> dict[str, Tensor]:
    """Trainable parameters, tied ones once, and the buffers that belong to the model's state."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    kept = model.state_dict().keys()
    return trained | {name: buffer for name, buffer in model.named_buffers() if name in kept}


def _order(model: nn.Module, optimizer: Optimizer) -> dict[str, nn.Parameter]:
    """The optimizer's parameters by name, in the order of its own numbering."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(p)]: p for group in optimizer.param_groups for p in group["params"]}
