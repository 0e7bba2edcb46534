"""A case: one op on inputs of given sizes, with all who can do its work."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moebook.bench import floors
from moebook.bench.floors import Product
from moebook.bench.timing import Contender
from moebook.errors import Refusal

Letters = Mapping[str, int]
Run = Callable[[], Any]
SCALES = ("tiny", "small", "full", "model")
"""``tiny`` tests the plumbing, ``small`` fits a page of the book, ``full`` is what the goals are
stated for, ``model`` has the widths of the papers' own models and wants a GPU."""
ROLES = {
    "T": "what comes in, or goes out: rows",
    "E": "what a row is set against",
    "N": "how many of those are chosen; where none are, how wide or deep the work is",
}
"""What the letters of a sweep stand for: each op has one of its own for each, in this order."""


class Axis(NamedTuple):
    """A letter that an op's sweep varies, what it counts there, and its rising values."""

    letter: str
    meaning: str
    values: Sequence[int]


@dataclass
class Case:
    """One op on inputs of given sizes.

    Attributes:
        traffic: Bytes that must be read and written at least once.
        cotangent: Gradient of the output, where a contender runs forward and backward; without it,
            forward only and without a graph.
        leaves: What has a gradient; all of them are freed before each turn.
        flops: Of the floor's products; 0 where the floor moves bytes only.
        contenders: Ours first, then the floor where there is one, then the peers.
        absent: Who could not take part, and why.
    """

    traffic: int
    cotangent: Tensor | None = None
    leaves: list[Tensor] = field(default_factory=list)
    flops: int = 0
    contenders: list[Contender] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, run: Run, *, host: bool = False, after: Run | None = None) -> None:
        """Add a contender.

        Args:
            name: ``"ours"``, ``"floor"``, or the peer's.
            run: Its forward pass.
            host: Whether it works on the CPU whatever the device.
            after: What it does behind its backward pass.
        """
        if self.cotangent is None:
            self.contenders.append(Contender(name, torch.no_grad()(run), host=host))
        else:
            self.contenders.append(stepping(name, run, self.cotangent, self.leaves, after))

    def invite(self, name: str, make: Callable[[], Run], **how: Any) -> None:
        """Add what ``make`` returns, or note why it refuses (E-PEER when it is not installed)."""
        try:
            self.add(name, make(), **how)
        except Refusal as refusal:
            self.absent[name] = refusal.message

    def floor(self, products: Sequence[Product], device: torch.device, dtype: torch.dtype) -> None:
        """Add dense products as the floor."""
        self.flops = floors.flops(products)
        self.contenders.append(floors.dense(products, device, dtype))


@dataclass(frozen=True)
class Op:
    """An op to measure.

    Attributes:
        build: Makes a case: ``build(device, **letters)``.
        sizes: For each of `SCALES`, its cases by name, each with its letters.
        axes: What the sweep varies, an axis for each of `ROLES`; all other letters are those of the
            first small case.
    """

    build: Callable[..., Case]
    sizes: Mapping[str, Mapping[str, Letters]]
    axes: tuple[Axis, Axis, Axis]

    def swept(self, points: int | None = None) -> Iterator[tuple[str, int, Letters]]:
        """Yield letter, value and all letters of the first points of the sweep of each letter."""
        letters = next(iter(self.sizes["small"].values()))
        for axis in self.axes:
            for value in axis.values[:points]:
                yield axis.letter, value, {**letters, axis.letter: value}


def number_format(device: torch.device, bits: int = 0) -> torch.dtype:
    """Return what a device is measured in: bfloat16 on a GPU or for 16 ``bits``, else float32."""
    return torch.bfloat16 if bits == 16 or device.type == "cuda" else torch.float32


def stepping(
    name: str, forward: Run, cotangent: Tensor, leaves: Sequence[Tensor], after: Run | None = None
) -> Contender:
    """Return a contender that runs forward, backward and what comes ``after``."""

    def run() -> None:
        forward().backward(cotangent)
        if after:
            after()

    return Contender(name, run, leaves, forward)


def size_of(*tensors: Any) -> int:
    """Return the bytes of some tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
