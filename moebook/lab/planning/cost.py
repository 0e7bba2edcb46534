"""A training on a machine: bytes a device, whether they fit, what would, hours and cost."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from moebook.errors import refuse, refuse_unknown
from moebook.lab.planning.dry import MOMENTS, Size, Training, alone, size
from moebook.settings import Count, Positive, settings
from moebook.storage import formed

EFFICIENCY = 0.5  # of the roofline that a step reaches, an assumption
LARGEST = 1024  # GPUs over which FSDP2 is tried
SPREAD = 2  # decoder layers that FSDP2 holds whole: the one at work and the next


@settings
class Gpu:
    """One GPU, from ``gpus.yaml``."""

    memory: Positive  # bytes
    half: Positive  # FLOPs a second in 16 bits
    single: Positive  # the same in float32
    bandwidth: Positive  # bytes a second
    price: Positive | None  # dollars an hour, an assumption


with formed(Path(__file__).with_name("gpus.yaml")) as _FILE:
    GPUS = {name: Gpu(**facts) for name, facts in _FILE.items()}


@dataclass(frozen=True)
class Machine:
    """So many equal GPUs."""

    #: What it is called, such as h200x8.
    name: str
    #: The kind of its GPUs.
    gpu: Gpu
    #: How many there are.
    count: int

    @property
    def rates(self) -> dict[torch.dtype, float]:
        """FLOPs a second by type."""
        half = dict.fromkeys((torch.bfloat16, torch.float16), self.gpu.half)
        return half | {torch.float32: self.gpu.single}

    def __str__(self) -> str:
        return f"{self.name}x{self.count}" if self.count > 1 else self.name


def machine(text: str) -> Machine:
    """Read ``h200x8``: a name of `GPUS`, and how many, by default one."""
    name, _, number = (text, "", "1") if text in GPUS else text.rpartition("x")
    if not number.isdecimal() or name not in GPUS:
        name = text
        number = "1"
    refuse_unknown(name, GPUS, "E-NAME", f"--gpu {text}: no GPU '{name}' is known;")
    digits = number.lstrip("0") or "0"
    # By their length first: Python reads no number of thousands of digits.
    if len(digits) > 5 or not 1 <= int(digits) <= 10_000:
        refuse("E-RANGE", f"--gpu {text}: expected 1 to 10000 GPUs, as in h200x8")
    return Machine(name, GPUS[name], int(number))


@dataclass(frozen=True)
class Way:
    """How a training is laid out: what may be changed so that it fits."""

    engine: Literal["DDP", "FSDP2"]
    count: int  # GPUs
    rows: int  # in a micro-batch on each
    checkpointing: bool
    quantised: bool

    def change(self, before: Way) -> str:
        """Say what differs from another way."""
        parts = {
            "gradient checkpointing": self.checkpointing > before.checkpointing,
            f"micro-batches of {self.rows}": self.rows != before.rows,
            "4 bits (QLoRA)": self.quantised > before.quantised,
            f"FSDP2 over {self.count} GPUs": self.engine != before.engine,
            "no 4 bits": self.quantised < before.quantised,
        }
        return " + ".join(part for part, done in parts.items() if done)


@dataclass(frozen=True)
class Need:
    """Bytes on each device."""

    weights: float
    gradients: float
    moments: float  # AdamW's
    activations: float  # at the peak, with all that a step computes in between
    engine: float  # DDP's buckets, or the layers that FSDP2 holds whole
    beside: float  # what else the notebook holds
    paged: float = 0.0  # of the moments, which may go to main memory

    @property
    def total(self) -> float:
        """All that must be on the device."""
        return sum(vars(self).values()) - 2 * self.paged


@dataclass(frozen=True)
class Plan:
    """What a training needs on a machine, as a record; seconds and dollars are of all its turns."""

    #: Name of the training.
    name: str
    #: The model that it starts from.
    host: str
    #: Name of the machine.
    machine: str
    #: Tokens of a row, for which bytes are counted.
    length: int
    #: Numbers in the model.
    parameters: int
    #: Those of them that train.
    trained: int
    #: Bytes of the host without the method, as a model that answers holds it.
    alone: float
    way: Way  #: as it is asked for
    #: Bytes on each device by that way.
    need: Need
    #: Bytes by other ways, its micro-batches alike, whether they fit or not.
    layouts: dict[str, Need]
    #: Whether it fits as it is asked for.
    fits: bool
    #: the smallest that makes it fit; "" where it does, "nothing" where none does
    change: str
    chosen: Way  #: with that change; time and cost are its
    #: Bytes on each device by the chosen way.
    chosen_need: Need
    #: Tokens of the whole training.
    tokens: float
    #: FLOPs of the whole training.
    flops: float
    #: How long it takes.
    seconds: float
    #: What it costs, None without a price.
    dollars: float | None


@settings
class Assumed:
    """What no configuration tells."""

    # Share of the roofline's rate.
    efficiency: Annotated[float, Field(gt=0, le=1)] = EFFICIENCY
    # Dollars an hour for one GPU, by default that of `GPUS`.
    price: Positive | None = None
    tokens: Count | None = None  # the mean of a row, by default its most


def plan(training: Training, on: Machine, **assumed: Any) -> Plan:
    """Plan a training on a machine: as it is, and with the smallest change that makes it fit.

    ``assumed`` are fields of `Assumed`. What GPUs say to one another is no part of the time. A GPU
    computes whole micro-batches: with more GPUs than rows, some have nothing to do.

    >>> from moebook.lab import planning
    >>> training = Training("nano", planning.methods.full(), length=64, batch=8, steps=100)
    >>> plan(training, machine("h100")).fits
    True
    """
    given = Assumed(**assumed)
    mean = given.tokens or training.length
    if mean > training.length:
        most = f"a row of the training has at most {training.length} (length)"
        refuse("E-RANGE", f"tokens is {mean}: {most}")
    rows = math.ceil(training.batch / (on.count * training.accumulate))
    way = Way("DDP", on.count, rows, training.checkpointing, training.method.quantised)
    chosen = _fitting(training, on, way)
    taken = chosen or way
    used = sized(training, taken)
    need = needed(training, taken)

    # A step: the micro-batches of one GPU, then the optimizer, which moves its state.
    times = training.steps * training.turns
    full = mean / training.length
    on_each = full * math.ceil(training.batch / (taken.count * taken.rows))
    on_all = full * training.batch / taken.rows
    moved = state(need, need.moments) / on.gpu.bandwidth
    step = used.seconds(on.rates, on.gpu.bandwidth) * on_each + moved
    seconds = times * step / given.efficiency
    hourly = given.price or on.gpu.price
    return Plan(
        name=training.name,
        host=training.host,
        machine=str(on),
        length=training.length,
        parameters=round(used.parameters),
        trained=round(used.trained),
        alone=alone(training.host, training.dtype),
        way=way,
        need=needed(training, way),
        layouts={name: needed(training, one) for name, one in layouts(way).items()},
        fits=chosen == way,
        change=chosen.change(way) if chosen else "nothing",
        chosen=taken,
        chosen_need=need,
        tokens=times * training.batch * training.length * full,
        flops=times * used.flops * on_all,
        seconds=seconds,
        dollars=hourly and hourly * taken.count * seconds / 3600,
    )


def _fitting(training: Training, on: Machine, start: Way) -> Way | None:
    """Return the first way that fits, if any does."""
    frozen = sized(training, start).saved > 0
    for way in (start, *ways(start, frozen)):
        if needed(training, way).total <= on.gpu.memory:
            return way
    return None


def layouts(way: Way) -> dict[str, Way]:
    """Name the ways that are shown beside one another, with and without checkpointing."""
    sharded = replace(way, engine="FSDP2", count=max(2, way.count), quantised=False)
    plain = {
        "DDP": replace(way, quantised=False),
        "QLoRA": replace(way, quantised=True),
        "FSDP2": sharded,
    }
    every: dict[str, Way] = {}
    for name, one in plain.items():
        every[name] = replace(one, checkpointing=False)
        every[f"{name}, checkpointing"] = replace(one, checkpointing=True)
    return every


def ways(start: Way, frozen: bool) -> Iterator[Way]:
    """Yield ever larger changes, each with those before it; FSDP2 alone goes without 4 bits."""
    way = replace(start, checkpointing=True)
    if not start.checkpointing:
        yield way
    while way.rows > 1:
        way = replace(way, rows=math.ceil(way.rows / 2))
        yield way
    if frozen:
        yield replace(way, quantised=True)
    way = replace(way, engine="FSDP2", count=max(2, way.count), quantised=False)
    while way.count <= LARGEST:
        yield way
        way = replace(way, count=2 * way.count)


def state(found: Size | Need, moments: float) -> float:
    """Bytes that AdamW moves in a step: it reads and writes weights and moments, reads gradients.

    A float32 copy of what trains is as large as its gradients.
    """
    return 3 * found.gradients + 2 * moments


def sized(training: Training, way: Way) -> Size:
    """Size one micro-batch of a way."""
    return size(training, way.rows, way.checkpointing)


def needed(training: Training, way: Way) -> Need:
    """Count the bytes that a way needs on each device."""
    found = sized(training, way)
    moments = (
        MOMENTS.get(training.optimizer, 2 * found.gradients / found.trained)
        * found.trained
    )
    share = 1 / way.count if way.engine == "FSDP2" else 1.0
    buckets = found.gradients if way.count > 1 else 0.0
    return Need(
        weights=(found.weights - found.saved * way.quantised) * share,
        gradients=found.gradients * share,
        moments=moments * share,
        activations=found.activations + found.linear * way.quantised,
        engine=SPREAD * found.block if way.engine == "FSDP2" else buckets,
        beside=training.beside,
        paged=moments * share if training.optimizer in MOMENTS else 0.0,
    )
