"""A training as it is planned, and its size, which follows from dry runs of two depths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from moebook.errors import Refusal, refuse
from moebook.lab.planning.methods import Method
from moebook.lab.planning.tally import Op, Tally
from moebook.models.anatomy import NAME, anatomy, count, register_experts
from moebook.models.skeleton import autocast, configuration, on_meta, skeleton
from moebook.nn.batch import longest
from moebook.settings import Count, record
from moebook.training import recompute, widen

NF4 = (4 + 8 / 64 + 32 / (64 * 256)) / 8
"""Bytes a weight in 4 bits: a scale of 8 bits for 64 of them, and one of 32 bits for 256 scales."""
# Bytes a trained parameter; AdamW's are in its dtype.
MOMENTS = {
    "paged_32bit": 8,
    "paged_8bit": 2,
}


@record
class Training:
    """A method on a host, with the recipe that decides what it needs; every row is full.

    Those with equal ``host``, ``method``, ``length``, ``dtype`` and ``autocast`` have one size.
    """

    host: str  #: what `configuration` takes
    #: What is made of the host.
    method: Method
    length: Count  #: tokens a row
    batch: Count = field(compare=False)  #: rows a step, of all devices together
    #: Of the optimizer.
    steps: Count = field(compare=False)
    #: Name of the training.
    name: str = field(default="", compare=False)
    #: Of the host; what trains is float32 or wider, as in `fit`.
    dtype: torch.dtype = torch.float32
    autocast: bool = False  #: computed in bfloat16, whatever the weights are in
    #: Parts of a step that each device computes in turn.
    accumulate: Count = field(default=1, compare=False)
    turns: Count = field(default=1, compare=False)  #: tasks, and tries of a rate
    #: As in `training.Recipe`.
    optimizer: Literal["adamw", "paged_32bit", "paged_8bit"] = field(
        default="adamw", compare=False
    )
    #: Whether activations are computed again to save memory.
    checkpointing: bool = field(default=False, compare=False)
    #: Bytes that the notebook holds beside it.
    beside: Annotated[float, Field(ge=0)] = field(default=0.0, compare=False)


@dataclass(frozen=True)
class Size:
    """What one micro-batch takes on one device; sums over layers, but for ``block``, ``linear``."""

    #: Numbers in the model.
    parameters: int
    #: Those of them that train.
    trained: int
    weights: float  #: bytes, and so are the next four
    #: Bytes of what trains.
    gradients: float
    saved: float  #: by 4 bits, of the frozen linear layers inside decoder layers
    activations: float  #: at the peak, above weights and gradients
    #: Products and what they move, with how often each comes.
    ops: Counter[Op]
    block: float  #: bytes of the largest decoder layer, which FSDP2 gathers
    linear: float  #: bytes of the largest frozen linear layer, which 4 bits unpack

    @property
    def flops(self) -> float:
        """FLOPs of all ops."""
        return sum(count * flops for (_, flops, _), count in self.ops.items())

    def seconds(self, rates: Mapping[torch.dtype, float], bandwidth: float) -> float:
        """Return the time at the roofline: each op takes its FLOPs or its bytes, the longer.

        ``rates`` are FLOPs a second by type, that of float32 where one is missing.
        """
        slowest = rates[torch.float32]
        return sum(
            count * max(flops / rates.get(dtype, slowest), moved / bandwidth)
            for (dtype, flops, moved), count in self.ops.items()
        )

    def deeper(self, other: Size, times: int) -> Size:
        """Add so many times what ``other``, one layer deeper, has more than this."""
        kinds = self.ops | other.ops
        more = {
            op: self.ops[op] + times * (other.ops[op] - self.ops[op]) for op in kinds
        }
        whole: dict[str, Any] = {
            "ops": Counter(more),
            "block": max(self.block, other.block),
            "linear": max(self.linear, other.linear),
        }
        one = vars(self)
        two = vars(other)
        sums = {n: one[n] + times * (two[n] - one[n]) for n in one if n not in whole}
        return Size(**whole, **sums)


def dry_run(
    training: Training,
    *,
    layers: int | None = None,
    rows: int = 1,
    checkpointing: bool = False,
) -> Size:
    """Run forward and backward pass on meta, as one part of an accumulated step: gradients exist.

    The host has so many ``layers``, by default all of its own.
    """
    model = skeleton(configuration(training.host), training.dtype, layers=layers)
    if training.length > longest(model):
        where = f"{training.host}: a row has {training.length} tokens"
        refuse(
            "E-RANGE", f"{where}, the model takes {longest(model)}: lower the length"
        )
    register_experts()
    model.set_experts_implementation(NAME)
    # Which methods change in place.
    blocks = [layer.block for layer in anatomy(model).layers]
    with _without_values(training.host), on_meta():
        model = training.method.make(model).train()
    widen(model)
    if training.autocast:
        autocast(model)
    if checkpointing:
        recompute(model)
    trained = [part for part in model.parameters() if part.requires_grad]
    if not trained:
        refuse(
            "E-MODEL",
            f"{training.host}: no parameter requires a gradient; nothing would be trained",
        )
    for part in trained:
        part.grad = torch.empty_like(part)
    gradients = [part.grad for part in trained if part.grad is not None]
    held = [*model.parameters(), *model.buffers(), *gradients]
    ids = torch.zeros(rows, training.length, dtype=torch.long, device="meta")
    # Our ops look for it, see `kernels.dispatch.lowered`; linear layers are told above.
    products = torch.autocast("cpu", torch.bfloat16, enabled=training.autocast)
    with _without_values(training.host), on_meta(), products, Tally(held) as tally:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    linears: list[Tensor] = []
    largest = 0
    for block in blocks:
        linears += _linears(block)
        size = sum(part.nbytes for part in block.parameters())
        largest = max(largest, size)
    return Size(
        parameters=count(model),
        trained=count(model, trained=True),
        weights=sum(part.nbytes for part in model.parameters()),
        gradients=sum(part.nbytes for part in gradients),
        saved=sum(weight.nbytes - NF4 * weight.numel() for weight in linears),
        activations=tally.peak - tally.start,
        ops=tally.ops,
        block=largest,
        linear=max((weight.nbytes for weight in linears), default=0),
    )


@contextmanager
def _without_values(host: str) -> Iterator[None]:
    """Tell in one line that a host's layers ask for values, which a model on meta has none of."""
    try:
        yield
    except Refusal:
        raise
    except Exception as error:
        problem = f"{type(error).__name__}: {error!s:.300}"
        refuse(
            "E-MODEL",
            f"{host}: its layers cannot run without values ({problem}): no plan",
        )


def _linears(block: nn.Module) -> list[Tensor]:
    kinds = [part for part in block.modules() if type(part) is nn.Linear]
    return [part.weight for part in kinds if not part.weight.requires_grad]


@cache
def size(training: Training, rows: int, checkpointing: bool) -> Size:
    """Size a training by dry runs with one layer of the last kind, and with one more.

    Where no two of the last layers are alike, as in Jamba, all of them run. The peak grows linearly
    where the same moment is the peak at both depths and at the last: once a layer's activations
    outweigh the gradient of the largest weight.
    """
    every, first = _depths(training.host)
    how: dict[str, Any] = {"rows": rows, "checkpointing": checkpointing}
    if every <= first + 1:
        return dry_run(training, **how)
    one, two = (
        dry_run(training, layers=layers, **how) for layers in (first, first + 1)
    )
    return one.deeper(two, every - first)


@cache
def alone(host: str, dtype: torch.dtype) -> int:
    """Count the bytes of a host's weights in a type, before any method changes it."""
    model = skeleton(configuration(host), dtype)
    return sum(part.nbytes for part in model.parameters())


@cache
def _depths(host: str) -> tuple[int, int]:
    """Return how many layers a host has, and up to which from the first one they differ.

    From there on all have parameters of the same names and shapes.
    """
    blocks = [layer.block for layer in anatomy(skeleton(configuration(host))).layers]
    shapes: list[dict[str, torch.Size]] = []
    for block in blocks:
        shapes.append({name: part.shape for name, part in block.named_parameters()})
    first = len(shapes)
    while first > 1 and shapes[first - 2] == shapes[-1]:
        first -= 1
    return len(shapes), first
