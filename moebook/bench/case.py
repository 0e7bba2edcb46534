"""A case: one op on inputs of given sizes, with all who can do its work."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moebook.bench import floors
from moebook.bench.floors import Product
from moebook.bench.timing import Contender, why

Letters = Mapping[str, int]
Cases = Mapping[str, Letters]
Run = Callable[[], Any]
SCALES = ("tiny", "small", "full", "model")
ROLES = ("T", "E", "N")


class Axis(NamedTuple):
    """A letter that an op's sweep varies, what it counts there, and its rising values."""

    letter: str
    meaning: str
    values: Sequence[int]


@dataclass(frozen=True)
class Op:
    """An op to measure: the letters of each of its cases at each scale, and its sweep.

    Attributes:
        build: Makes a case: ``build(device, **letters)``.
        tiny: Tests the plumbing.
        small: Fits a page of the book.
        full: What the goals of a CPU are stated for.
        model: Has the widths of the papers' own models, and wants a GPU.
        T: What comes in, or goes out: rows.
        E: What a row is set against.
        N: How many of those are chosen; where none are, how wide or deep the work is.
    """

    build: Callable[..., Case]
    tiny: Cases
    small: Cases
    full: Cases
    model: Cases
    T: Axis
    E: Axis
    N: Axis

    @property
    def axes(self) -> tuple[Axis, Axis, Axis]:
        """One for each of `ROLES`."""
        return self.T, self.E, self.N

    def cases(self, scale: str) -> Cases:
        """Return the letters of each case at one of `SCALES`."""
        cases: Cases = getattr(self, scale)
        return cases

    def swept(self, points: int | None = None) -> Cases:
        """Vary each letter over its first values, all others being those of the first small one."""
        letters = next(iter(self.small.values()))
        return {
            f"{axis.letter}={value}": {**letters, axis.letter: value}
            for axis in self.axes
            for value in axis.values[:points]
        }


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

    def add(self, name: str, forward: Run, *, host: bool = False, after: Run | None = None) -> None:
        """Add a contender: ours, the floor, or a peer.

        Args:
            name: Its name.
            forward: Its forward pass.
            host: Whether it works on the CPU whatever the device.
            after: What it does behind its backward pass.
        """

        def step() -> None:
            forward().backward(self.cotangent)
            if after:
                after()

        if self.cotangent is None:
            self.contenders.append(Contender(name, torch.no_grad()(forward), host=host))
        else:
            self.contenders.append(Contender(name, step, self.leaves, forward))

    def invite(self, name: str, make: Callable[[], Run], **how: Any) -> None:
        """Add what ``make`` returns, or note why it fails (E-PEER when it is not installed)."""
        try:
            self.add(name, make(), **how)
        except Exception as error:  # a peer may fail in any way
            self.absent[name] = why(error)

    def floor(self, products: Sequence[Product], device: torch.device, dtype: torch.dtype) -> None:
        """Add dense products as the floor."""
        self.flops = sum(product.flops for product in products)
        self.contenders.append(floors.dense(products, device, dtype))


def number_format(device: torch.device, bits: int = 0) -> torch.dtype:
    """Return what a device is measured in: bfloat16 on a GPU or for 16 ``bits``, else float32."""
    return torch.bfloat16 if bits == 16 or device.type == "cuda" else torch.float32


def size_of(*tensors: Any) -> int:
    """Return the bytes of some tensors."""
    return sum(tensor.nbytes for tensor in tensors)
