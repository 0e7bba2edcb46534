"""Checkpoints of a training that survive a kill at any instant (see `models.checkpoint`).

A folder holds ``step-N`` folders and a lock. What is random in a step is a function of the seed and
the step: no states of generators are kept. Under `moebook run` the folder `runtime.RESUME`, which
the runner names and removes, holds one for each training of the run, told by its number and by what
decides it, the machine included: a run that was killed goes on with the same bits.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from accelerate.utils import broadcast_object_list
from pydantic import Field
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from moebook import storage
from moebook.errors import Refusal, located, refuse, told
from moebook.models import checkpoint, fingerprint
from moebook.runtime import FOUND, RESUME, environment, processes, versions
from moebook.settings import Place, checked, record, settings

KEPT = 2
# Seconds between two checkpoints, and bytes a second that one may cost.
PAUSE = 300.0
RATE = 2**24
TENSORS = "tensors.safetensors"
FACTS = "facts.json"
_numbers = itertools.count(1)  # of this process's trainings


def place(model: nn.Module, run: Any) -> Path | None:
    """Name the folder of the next training in a notebook's run; None where memory is short."""
    machine = environment()
    number = next(_numbers)
    name = storage.text_digest(json.dumps([run, machine], sort_keys=True))[:12]
    small = 6 * size(model) <= machine["memory"]
    return Path(os.environ[RESUME], f"{number:03d}-{name}") if small else None


def size(model: nn.Module) -> int:
    """Bytes of a checkpoint, about: what trains, and AdamW's two moments of it."""
    return 3 * sum(p.nbytes for p in model.parameters() if p.requires_grad)


@record
class History:
    """What happened at each step, one entry a step, and what was measured at milestones."""

    #: Number of the step, from 1.
    step: list[int] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)  #: of the labels, nats a token
    #: What was added to the loss.
    penalty: list[float] = field(default_factory=list)
    #: Of the gradient before it was clipped.
    norm: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  #: since training began
    #: Since training began, without padding.
    tokens: list[int] = field(default_factory=list)
    #: Each one's, by steps done.
    milestones: list[dict[int, Any]] = field(default_factory=list)

    def add(self, **line: float) -> None:
        """Add what happened at a step: a number a column."""
        for name, column in self.columns().items():
            column.append(line[name])

    def columns(self) -> dict[str, list[Any]]:
        """Return what has one entry a step, by name."""
        return {
            name: column for name, column in vars(self).items() if name != "milestones"
        }


@record
class _Kept:
    """What a checkpoint keeps beside its tensors."""

    settings: dict[str, Any]
    history: dict[str, Any]
    versions: dict[str, str]
    threads: int
    processes: int = 1


@settings
class Store:
    """The checkpoints of one training, told from others by JSON values.

    ``marks`` are steps whose checkpoints stay. Those of a notebook's run nobody ``asked`` for.
    """

    folder: Path
    run: dict[str, Any]
    every: Annotated[int, Field(ge=1)]
    marks: frozenset[int] = frozenset()
    asked: bool = True
    # `training.sharding`, where each process has a part of what trains.
    shards: Any = None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder for this process and sweep what killed ones left behind."""
        with ExitStack() as held:
            try:
                held.enter_context(self._lock())
                self._sweep()
            except OSError as error:
                raise told(error, f"{self.folder} cannot be used") from None
            yield

    @contextmanager
    def _lock(self) -> Iterator[None]:
        folder = self.folder
        if folder.exists() and not folder.is_dir():
            refuse("E-PATH", f"{folder} is a file; expected a folder for checkpoints")
        # In a run nobody is there but the kernel of a killed one, about to end.
        with storage.locked(folder / ".lock", wait=not self.asked):
            yield

    def _sweep(self) -> None:
        storage.sweep(self.folder)
        # Its own alone: others may write into the folder at the same time.
        for kind in (".stage-step-*", ".trash-step-*"):
            for leftover in self.folder.glob(kind):
                shutil.rmtree(leftover)

    def due(self, seconds: list[float], total: int, model: nn.Module) -> bool:
        """Whether to save now, at a step that ended after the last of so many ``seconds``.

        At marks, at the end, after ``every`` steps, and after a long time; but never where a mark
        before it is missing, without which training could not go on from it, nor unasked where
        the whole training takes less time than a checkpoint may.
        """
        step = len(seconds)
        there = self.steps()
        price = size(model) / RATE  # seconds that a checkpoint may take
        whole = seconds[-1] / step * total  # by the mean of the steps so far
        if not self.asked and whole < min(PAUSE, price):
            return False
        missing = {mark for mark in self.marks if 0 < mark < step} - {*there}
        if missing:
            return False
        if step % self.every == 0 or step in {total, *self.marks}:
            return True
        # Since the last one, or the beginning; a large checkpoint waits longer.
        waited = seconds[-1] - (seconds[there[-1] - 1] if there else 0.0)
        return waited > PAUSE + price

    def resume(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        schedule: LambdaLR,
        history: History,
        measure: Callable[[int, History], None],
        total: int,
    ) -> History:
        """Go to the newest checkpoint, and return its history.

        What was measured before it, at marks, is measured anew from their own checkpoints.
        """
        steps = self.steps()
        newest = max(steps, default=0)
        if newest:
            # First: the steps of another run say nothing about our marks.
            place = self.folder / f"step-{newest}" / FACTS
            with storage.formed(place):
                kept = dict(storage.read_json(place)["settings"])
            self._refuse_other(kept)
        check_marks(self.marks - {*steps}, newest, total)
        for mark in sorted(self.marks):
            if mark < newest:
                if mark:  # at 0 the model is as it was handed in
                    self.restore(model, optimizer, schedule, mark)
                measure(mark, history)
        if not newest:
            return history
        # Last: for its marks the training went back to earlier steps.
        restored = self.restore(model, optimizer, schedule, newest)
        if not self.asked:  # what the run's time counts in
            storage.write(self.folder / FOUND, str(restored.seconds[-1]))
        return replace(restored, milestones=history.milestones)

    def save_if_due(
        self, model: nn.Module, optimizer: Optimizer, history: History, total: int
    ) -> None:
        """Save if the first process says so: it alone, or with FSDP2 all of them."""
        number, _ = processes()
        due = number == 0 and self.due(history.seconds, total, model)
        if self.shards:
            (due,) = broadcast_object_list([due])
        if not due:
            return
        try:
            self.save(model, optimizer, history)
        except Refusal:
            # A disk may be full: that ends no training that was not asked to save.
            if self.asked:
                raise

    def save(self, model: nn.Module, optimizer: Optimizer, history: History) -> None:
        """Commit ``step-N``, drop all but marks and the newest `KEPT`; refused, drop nothing."""
        facts = {"settings": self.run, "history": history.columns()}
        machine = {"versions": versions(), "threads": torch.get_num_threads()}
        machine |= {"processes": processes()[1]}
        step = len(history.step)
        tensors = capture(model, optimizer)
        files = {FACTS: json.dumps(facts).encode()}
        target = self.folder / f"step-{step}"
        try:
            if self.shards:
                self.shards.write(target, tensors, files, step=step, **machine)
            else:
                files[TENSORS] = checkpoint.packed(tensors)
                checkpoint.write(target, files, step=step, **machine)
        except OSError as error:
            needed = sum(tensor.nbytes for tensor in tensors.values())
            sizes = f"{needed} bytes needed, {shutil.disk_usage(self.folder).free} free"
            kept = f"step {step} not saved, {sizes}; earlier ones are untouched"
            raise told(error, kept) from None
        if processes()[0] == 0:
            self._drop_old()

    def _drop_old(self) -> None:
        """Drop all but marks and the newest `KEPT`."""
        for old in self.steps()[:-KEPT]:
            if old not in self.marks:
                path = self.folder / f"step-{old}"
                # Renamed first: what a kill leaves half removed is no checkpoint.
                trash = path.rename(path.with_name(f".trash-{path.name}"))
                shutil.rmtree(trash)

    def restore(
        self, model: nn.Module, optimizer: Optimizer, schedule: LambdaLR, step: int
    ) -> History:
        """Go back to a step's checkpoint and return its history; refuse damage and others'."""
        path = self.folder / f"step-{step}"
        facts = checkpoint.verify(path) | storage.read_json(path / FACTS)
        with located(path):
            names = facts.keys() & _Kept.__annotations__.keys()
            kept = _Kept(**{name: facts[name] for name in names})
            history = History(**kept.history)
        if {*map(len, history.columns().values())} != {step}:
            refuse(
                "E-FORMAT",
                f"{path}: the history has not one entry for each of {step} steps",
            )
        there = _place(kept.versions.get("torch"), kept.threads, kept.processes)
        here = _place(versions()["torch"], torch.get_num_threads(), processes()[1])
        if here != there:
            # A checkpoint from elsewhere: the run goes on, with other rounding.
            warnings.warn(
                f"W-REPRO: {path} is from {there}, this is {here}", stacklevel=2
            )
        self._refuse_other(kept.settings)

        whole = path / TENSORS
        if whole.is_file() and not self.shards:
            tensors = checkpoint.unpacked(whole)
        else:
            tensors = _read(path, _changing(model) | _moments(_order(model, optimizer)))
        restore(model, optimizer, tensors)
        # A rate is a function of the step alone, so that it is computed, not kept.
        schedule.last_epoch = step
        factors = schedule.lr_lambdas
        for group, factor in zip(optimizer.param_groups, factors, strict=True):
            group["lr"] = group["initial_lr"] * factor(step)
        return history

    def _refuse_other(self, run: dict[str, Any]) -> None:
        """Refuse a checkpoint of another run than this one (E-CONFIGDIFF)."""
        changes = []
        for key, value in sorted(self.run.items()):
            if run.get(key) != value:
                changes.append(f"{key} {run.get(key)} -> {value}")
        if changes:
            listed = ", ".join(changes)
            refuse(
                "E-CONFIGDIFF",
                f"{self.folder} holds another run ({listed}); name a new folder",
            )

    def steps(self) -> list[int]:
        """The steps after which there is a checkpoint, in order."""
        names = (path.name[5:] for path in self.folder.glob("step-*"))
        return sorted(int(name) for name in names if name.isdecimal())


@checked
def own_folder(output: Place | None, name: str) -> Place | None:
    """Return the folder in ``output`` for checkpoints of one of several trainings."""
    if output is None or not os.fspath(output).strip():
        return output  # an empty name is for `training.fit` to refuse
    return Path(output, name)


def store_of(
    model: nn.Module,
    recipe: Any,
    batches: Any,
    total: int,
    *,
    output: Place | None,
    every: int,
    marks: frozenset[int],
    shards: Any,
) -> Store | None:
    """Return the checkpoints of a training: in the folder asked for, or in a notebook's run.

    None where neither is, or where a run's machine has too little memory for them.
    """
    if output is None and RESUME not in os.environ:
        return None
    settings = json.loads(json.dumps(asdict(recipe)))
    # By settings, rows, weights and what the methods made of the base, as with one expert a token
    # or two, one training is told from another; a penalty is a function, of which nothing can be
    # told. The steps in all stand for both ways to ask for them.
    run = {
        **settings,
        "steps": total,
        "epochs": None,
        "data": batches.digest(),
        "model": fingerprint(model),
        "methods": checkpoint.origins(model),
    }
    if output is None:
        # Shards are put together again by any number of processes.
        identity = run if shards else {**run, "processes": processes()[1]}
        folder = place(model, identity)
    else:
        folder = Path(output)
    (folder,) = broadcast_object_list([folder])  # others may be on another machine
    if folder is None:
        return None
    asked = output is not None
    return Store(
        folder=folder, run=run, every=every, marks=marks, asked=asked, shards=shards
    )


def check_marks(marks: Collection[int], newest: int, total: int) -> None:
    """Refuse marks that a training from its newest checkpoint to the last step does not pass."""
    for mark in sorted(marks):
        if mark and not newest <= mark <= total:
            reason = f"the training goes from step {newest} to {total}"
            refuse("E-RANGE", f"milestone at step {mark}: {reason}")


def _place(torch: str | None, threads: int, processes: int) -> str:
    return f"torch {torch} on {threads} threads of {processes} processes"


def capture(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Collect what training changes: trainable parameters, buffers, and the optimizer's state."""
    tensors = {name: tensor.detach() for name, tensor in _changing(model).items()}
    for name, parameter in _order(model, optimizer).items():
        for key, value in optimizer.state.get(parameter, {}).items():
            # Bitsandbytes has an int.
            tensors[f"optimizer.{name}.{key}"] = torch.as_tensor(value)
    return tensors


def restore(model: nn.Module, optimizer: Optimizer, tensors: dict[str, Tensor]) -> None:
    """Put back what `capture` collected; refuse names, shapes or dtypes that do not fit."""
    changing = _changing(model)
    order = _order(model, optimizer)
    state: dict[str, dict[str, Tensor | int]] = {name: {} for name in order}
    for key, tensor in tensors.items():
        name, _, part = key.removeprefix("optimizer.").rpartition(".")
        if key.startswith("optimizer.") and name in state:
            # Bitsandbytes counts its steps in an int.
            state[name][part] = int(tensor) if tensor.dtype == torch.int64 else tensor

    if "fused" in optimizer.param_groups[0]:  # torch's
        stepped = {name: part for name, part in order.items() if state[name]}
        wanted = changing | _moments(stepped)
        saved = tensors
    else:  # bitsandbytes', whose states depend on the device
        wanted = changing
        saved = {n: tensor for n, tensor in tensors.items() if n.startswith("model.")}
    misfits = sorted(wanted.keys() ^ saved.keys())
    if not misfits:
        for name, tensor in saved.items():
            fits = tensor.shape == wanted[name].shape
            if not fits or tensor.dtype != wanted[name].dtype:
                misfits.append(f"{name} {tuple(tensor.shape)} {tensor.dtype}")
    if misfits:
        what = f"{len(misfits)} tensors do not fit this model"
        refuse("E-SHAPE", f"{what}, first {misfits[:3]}")

    # All checks are done: from here on the model changes.
    with torch.no_grad():
        for name, tensor in changing.items():
            tensor.copy_(tensors[name])
    # The optimizer knows its parameters by number, in the order of `_order`.
    numbered = dict(enumerate(state.values()))
    optimizer.load_state_dict({**optimizer.state_dict(), "state": numbered})


def _read(folder: Path, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Read a folder's tensors into the shards of their likenesses; one without stays on meta."""
    reader = HuggingFaceStorageReader(str(folder))
    try:
        found = reader.read_metadata().state_dict_metadata
    except SafetensorError as error:
        refuse("E-FORMAT", f"{folder} holds files that are not safetensors ({error})")
    tensors = {}
    odd = {}
    for name, kept in found.items():
        kind = (kept.size, kept.properties.dtype)
        if name in like and (like[name].shape, like[name].dtype) == kind:
            tensors[name] = torch.empty_like(like[name])
        else:
            odd[name] = torch.empty(
                kept.size, dtype=kept.properties.dtype, device="meta"
            )
    dcp.load(
        tensors, storage_reader=reader, no_dist=not torch.distributed.is_initialized()
    )
    return tensors | odd


def _moments(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What AdamW keeps of each parameter, by the name that it has in a checkpoint."""
    kept: dict[str, Tensor] = {}
    for name, tensor in parameters.items():
        kept[f"optimizer.{name}.step"] = torch.zeros(())
        kept[f"optimizer.{name}.exp_avg"] = tensor
        kept[f"optimizer.{name}.exp_avg_sq"] = tensor
    return kept


def _changing(model: nn.Module) -> dict[str, Tensor]:
    """Trainable parameters, tied ones once, and persistent buffers, as ``model.<name>``."""
    persistent = model.state_dict().keys()
    changing = {name: p for name, p in model.named_parameters() if p.requires_grad}
    changing |= {
        name: part for name, part in model.named_buffers() if name in persistent
    }
    return {f"model.{name}": tensor for name, tensor in changing.items()}


def _order(model: nn.Module, optimizer: Optimizer) -> dict[str, nn.Parameter]:
    """The optimizer's parameters by name, in the order of its own numbering."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    order: dict[str, nn.Parameter] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            order[names[id(parameter)]] = parameter
    return order
