"""FSDP2 by accelerate: what trains lies in shards among the processes, and so do its checkpoints.

Loaded, and handed to `loop.fit`, where ``accelerate launch`` has been told of FSDP.

`fully_shard` changes modules for good. So a twin is sharded: the model's modules over again, around
the same tensors. While the twin trains the model is empty; where it is measured, and after the
training, it is whole again, in every process. Accelerate shards on GPUs alone: `adopt` tells it to
do the same on CPUs.

Of a checkpoint each process writes its shards (torch.distributed.checkpoint, as safetensors). It
comes back on any number of processes, and without FSDP2; so does one in one piece with FSDP2.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import DistributedType, gather_object, parse_flag_from_env
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor

from moebook import runtime
from moebook.errors import Refusal, refuse
from moebook.models import checkpoint
from moebook.training import loop

Made = TypeVar("Made")


def adopt(accelerator: Accelerator) -> bool:
    """Say whether ``accelerate launch`` asks for FSDP2; refuse what would not be obeyed."""
    state = accelerator.state
    if state.distributed_type == "MULTI_CPU" and parse_flag_from_env(
        "ACCELERATE_USE_FSDP"
    ):
        if torch.accelerator.is_available():  # fully_shard would take the model there
            refuse(
                "E-DEVICE",
                "FSDP2 with a model on the CPU, beside a GPU: hide it "
                "(CUDA_VISIBLE_DEVICES= ) or put the model there",
            )
        state.distributed_type = DistributedType.FSDP
        # Of the launcher's variables.
        state.fsdp_plugin = FullyShardedDataParallelPlugin()
    if state.distributed_type != "FSDP":
        return False
    plugin = state.fsdp_plugin
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    offloads = isinstance(plugin.cpu_offload, CPUOffloadPolicy)
    not_obeyed = {
        f"mixed_precision: {precision}": precision != "no",
        "fsdp_version: 1": plugin.fsdp_version != 2,
        "fsdp_offload_params: true": offloads,
        "fsdp_cpu_ram_efficient_loading: true": plugin.cpu_ram_efficient_loading,
    }
    for line, is_asked in not_obeyed.items():
        if is_asked:
            refuse(
                "E-CHOICE",
                f"accelerate's configuration says {line}, which would not be "
                "obeyed: take one of recipes/fsdp2_*.yaml",
            )
    return True


def twin(model: nn.Module) -> nn.Module:
    """Copy a model's modules, with their hooks, around its own parameters and buffers."""
    dtypes = {p.dtype for p in model.parameters() if p.requires_grad}
    if len(dtypes) > 1:
        names = " and ".join(sorted(map(str, dtypes)))
        refuse(
            "E-DTYPE",
            f"{names} train together; FSDP2 needs one dtype: load it in float32",
        )
    # Tensors are handed in as copied already, so that both models hold the same ones.
    return copy.deepcopy(
        model, {id(t): t for t in chain(model.parameters(), model.buffers())}
    )


def agreed(work: Callable[[], Made]) -> Made:
    """Work in every process; return what the first made, or raise in all what failed in one."""
    made: Made | None = None
    wrong: Exception | None = None
    try:
        made = work()
    except (OSError, Refusal) as error:
        wrong = error
    # All meet here before any raises: else the others would wait for one that has gone.
    outcomes = gather_object([(made, wrong)])
    for _, failure in outcomes:
        if failure:
            raise failure
    first: Made = outcomes[0][0]
    return first


def write(
    target: Path,
    tensors: Mapping[str, Tensor],
    files: Mapping[str, bytes],
    **facts: Any,
) -> None:
    """Write a new, sealed folder as `checkpoint.write` does, each process its own shards."""
    first = runtime.processes()[0] == 0
    local: dict[str, Tensor] = {}  # this process's part of each
    for name, tensor in tensors.items():
        local[name] = tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def begin() -> Path:
        checkpoint.check_finite(local, "cannot be saved")
        if first:
            return stack.enter_context(checkpoint.building(target, **facts))
        return target

    def fill() -> None:
        if not stage.is_dir():
            refuse(
                "E-PATH",
                f"{stage.parent} is not the first process's: checkpoints of several "
                "machines need a folder that all of them share",
            )
        if first:
            for name, content in files.items():
                (stage / name).write_bytes(content)

    def shards() -> None:
        writer = HuggingFaceStorageWriter(str(stage), save_distributed=True)
        try:
            dcp.save(dict(tensors), storage_writer=writer)
        except CheckpointException as error:
            # What failed in a process, without what torch wraps around it.
            raise next(iter(error.failures.values()))[0] from None

    with ExitStack() as stack:
        stage = agreed(begin)
        agreed(fill)
        agreed(shards)
        agreed(stack.close)  # seals the folder and gives it its name


fit: Any = partial(loop.fit, shards=sys.modules[__name__])
"""`loop.fit` as accelerate's launcher asks for it: in shards by FSDP2, or else as it is."""
