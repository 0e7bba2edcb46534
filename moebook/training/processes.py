"""The processes of one training: how they join, and what tells that one of them has ended."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.state import AcceleratorState
from accelerate.utils import parse_flag_from_env
from torch import nn
from torch.distributed.tensor import DTensor

from moebook import runtime
from moebook.errors import lacks_memory, located, refuse
from moebook.training.recipe import Recipe

# In what torch says of a broken connection.
LOST = re.compile("gloo|NCCL", re.IGNORECASE)
# By which accelerate knows how many processes there are.
SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
SUPPORTED = "launch with --multi_gpu, or with FSDP2"
OTHERS = ("DEEPSPEED", "MEGATRON_LM")  # that accelerate can be told to use


def join(model: nn.Module, recipe: Recipe, shards: Any) -> tuple[Accelerator, Any]:
    """Join the other processes; return what shards, if FSDP2 is to shard what they train."""
    # Else the first device is for good.
    AcceleratorState._reset_state(reset_partial_state=True)
    device = next(model.parameters()).device.type
    unused = DistributedDataParallelKwargs(find_unused_parameters=True)
    shard = told_of_fsdp()
    with _alone_if_one(), _starting():
        _refuse_others()
        accelerator = Accelerator(
            cpu=device == "cpu", mixed_precision="no", kwargs_handlers=[unused]
        )

    if accelerator.device.type != device:
        elsewhere = f"accelerate is told of device {accelerator.device}"
        remedy = "unset ACCELERATE_TORCH_DEVICE and ACCELERATE_USE_CPU"
        refuse("E-CHOICE", f"{elsewhere}, the model is on {device}: {remedy}")
    if shard and not shards:
        late = "ACCELERATE_USE_FSDP was set too late"
        refuse("E-CHOICE", f"{late}: start with accelerate launch")
    if shards and not shards.adopt(accelerator):
        shards = None
    known = ["NO", "MULTI_GPU", "MULTI_CPU"]
    if shards:
        known.append("FSDP")
    kind = accelerator.distributed_type
    if kind not in known:
        refuse("E-CHOICE", f"{kind} is not supported: {SUPPORTED}")
    if shards and recipe.optimizer != "adamw":
        why = "takes no shards; with FSDP2 use adamw"
        refuse("E-CHOICE", f"optimizer {recipe.optimizer} {why}")
    in_parts = recipe.accumulate * accelerator.num_processes > 1
    if in_parts and not getattr(model, "accepts_loss_kwargs", True):
        refuse(
            "E-MODEL",
            f"{type(model).__name__} averages its loss: one process, one part",
        )
    return accelerator, shards


def told_of_fsdp() -> bool:
    """Whether accelerate's launcher was told of FSDP."""
    name = "ACCELERATE_USE_FSDP"
    with located(name), _starting():
        return bool(parse_flag_from_env(name))


@contextmanager
def _alone_if_one() -> Iterator[None]:
    """Hide from accelerate how many processes a cluster has, where `runtime` says we are one.

    Without ``LOCAL_RANK`` such a number starts nothing, but on a CPU accelerate would wait for the
    others.
    """
    alone = runtime.processes()[1] == 1 and "LOCAL_RANK" not in os.environ
    hidden = [name for name in SIZES if alone and name in os.environ]
    values = {name: os.environ.pop(name) for name in hidden}
    try:
        yield
    finally:
        os.environ.update(values)


def _refuse_others() -> None:
    """Refuse what accelerate would ask to install, and `join` then not support."""
    for name in OTHERS:
        if parse_flag_from_env(f"ACCELERATE_USE_{name}"):
            refuse("E-CHOICE", f"{name} is not supported: {SUPPORTED}")


@contextmanager
def _starting() -> Iterator[None]:
    """Tell in one line why accelerate does not start, as where its variables are misspelt."""
    try:
        yield
    except (AssertionError, ImportError, RuntimeError, ValueError) as error:
        if lacks_memory(f"{type(error).__name__}: {error}"):
            raise
        cannot = f"accelerate does not start as its configuration says ({error!s:.300})"
        refuse("E-CHOICE", f"{cannot}: {SUPPORTED}")


@contextmanager
def telling() -> Iterator[None]:
    """Tell in one line that another process has gone, on which torch ends in a long error."""
    try:
        yield
    except RuntimeError as error:
        alone = runtime.processes()[1] == 1
        if alone or not LOST.search(str(error)):
            raise
        refuse(
            "E-PROCESS",
            f"another process of this training has ended ({error!s:.200}): see its output "
            "and start all again; training goes on from its last checkpoint",
        )


def release(model: nn.Module, trained: nn.Module) -> None:
    """Free what a model holds whole and its twin in shards."""
    for own, part in zip(model.parameters(), trained.parameters(), strict=True):
        if isinstance(part, DTensor):  # one that is not is the model's own tensor
            own.data = own.data.new_empty(0)


def gather(model: nn.Module, trained: nn.Module) -> None:
    """Give a model all values of its twin; where it is its own twin it has them."""
    for own, part in zip(model.parameters(), trained.parameters(), strict=True):
        if isinstance(part, DTensor):
            own.data = part.detach().full_tensor()
