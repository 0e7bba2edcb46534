"""Checkpoints of a training that survive a kill at any instant (see `models.checkpoint`).

A folder holds ``step-N`` folders and a lock. No states of random generators are kept: what is
random in a step of training is a function of the seed and the step.
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
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from moebook.errors import refuse
from moebook.models import checkpoint
from moebook.runtime import versions
from moebook.settings import settings

KEPT = 2
TENSORS, FACTS = "tensors.safetensors", "facts.json"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder of checkpoints for this process and sweep what killed ones left behind."""
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


@settings
class Store:
    """The checkpoints of one run, told from others by JSON values, in a `locked` folder."""

    folder: Path
    run: dict[str, Any]
    every: Annotated[int, Field(ge=1)]

    def save(
        self, model: nn.Module, optimizer: Optimizer, rates: LRScheduler, history: dict[str, Any]
    ) -> None:
        """Commit ``step-<steps done>`` and drop all but the newest `KEPT`.

        A tensor that is not finite (E-NONFINITE) or a full disk leaves the earlier ones untouched.
        """
        facts = {"settings": self.run, "scheduler": rates.state_dict(), "history": history}
        content = checkpoint.packed(capture(model, optimizer))
        files = {TENSORS: content, FACTS: json.dumps(facts).encode()}
        machine = {"versions": versions(), "threads": torch.get_num_threads()}
        step = len(history["step"])
        try:
            checkpoint.write(self.folder / f"step-{step}", files, step=step, **machine)
        except OSError as error:
            sizes = f"{len(content)} bytes needed, {shutil.disk_usage(self.folder).free} free"
            refuse(
                "E-DISK", f"step {step} not saved ({error}): {sizes}; earlier ones are untouched"
            )
        for old in self.committed()[:-KEPT]:
            shutil.rmtree(old.rename(old.with_name(f".trash-{old.name}")))

    def restore(
        self, model: nn.Module, optimizer: Optimizer, rates: LRScheduler
    ) -> dict[str, list[Any]]:
        """Go back to the newest checkpoint and return its history; nothing where there is none.

        A damaged one is refused (delete it to go back further), and so is another run's.
        """
        if not (paths := self.committed()):
            return {}
        newest = paths[-1]
        sealed = checkpoint.verify(newest)
        there = f"torch {sealed['versions']['torch']} on {sealed['threads']} threads"
        here = f"torch {versions()['torch']} on {torch.get_num_threads()} threads"
        if here != there:  # a checkpoint from elsewhere: the run goes on, with other rounding
            warnings.warn(f"W-REPRO: {newest} is from {there}, this is {here}", stacklevel=2)
        tensors = checkpoint.unpacked(newest / TENSORS)
        facts = json.loads((newest / FACTS).read_text())
        old = facts["settings"]
        if changed := sorted(key for key, value in self.run.items() if old.get(key) != value):
            shown = ", ".join(f"{key} {old.get(key)} -> {self.run[key]}" for key in changed)
            refuse(
                "E-CONFIGDIFF", f"{self.folder} holds another run ({shown}); name another folder"
            )
        restore(model, optimizer, tensors)
        rates.load_state_dict(facts["scheduler"])
        for group, rate in zip(optimizer.param_groups, rates.get_last_lr(), strict=True):
            group["lr"] = rate
        return facts["history"]

    def committed(self) -> list[Path]:
        """The committed checkpoints, oldest first."""
        paths = [path for path in self.folder.glob("step-*") if path.name[5:].isdecimal()]
        return sorted(paths, key=lambda path: int(path.name[5:]))


def capture(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Collect what training changes: trainable parameters, buffers, and the optimizer's state."""
    tensors = {name: tensor.detach() for name, tensor in _changing(model).items()}
    for name, parameter in _order(model, optimizer).items():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer.{name}.{key}"] = torch.as_tensor(value)  # bitsandbytes has an int
    return tensors


def restore(model: nn.Module, optimizer: Optimizer, tensors: dict[str, Tensor]) -> None:
    """Put back what `capture` collected; refuse names, shapes or dtypes that do not fit."""
    changing = _changing(model)
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
    state: dict[int, dict[str, Tensor | int]] = {}
    for index, name in enumerate(_order(model, optimizer)):
        prefix = f"optimizer.{name}."
        state[index] = {
            key.removeprefix(prefix): int(tensor) if tensor.dtype == torch.int64 else tensor
            for key, tensor in tensors.items()
            if key.startswith(prefix) and "." not in key.removeprefix(prefix)
        }
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


def _changing(model: nn.Module) -> dict[str, Tensor]:
    """Trainable parameters, tied ones once, and persistent buffers, as ``model.<name>``."""
    persistent = model.state_dict().keys()
    changing = {name: p for name, p in model.named_parameters() if p.requires_grad}
    changing |= {name: part for name, part in model.named_buffers() if name in persistent}
    return {f"model.{name}": tensor for name, tensor in changing.items()}


def _order(model: nn.Module, optimizer: Optimizer) -> dict[str, nn.Parameter]:
    """The optimizer's parameters by name, in the order of its own numbering."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(p)]: p for group in optimizer.param_groups for p in group["params"]}
