"""A case: one op on inputs of given sizes, with all who can do its work."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moebook.bench.timing import Contender
from moebook.errors import Refusal

Letters = Mapping[str, int]
SCALES = ("tiny", "small", "full", "model")
"""``tiny`` tests the plumbing, ``small`` fits a page of the book, ``full`` is what the goals are
stated for, ``model`` has the widths of the papers' own models and wants a GPU."""


@dataclass
class Case:
    """One op on inputs of given sizes.

    Attributes:
        contenders: Ours first, then the floor where there is one, then the peers.
        flops: Of the floor's products; 0 where the floor moves bytes only.
        traffic: Bytes that must be read and written at least once.
        absent: Who could not take part, and why.
    """

    contenders: list[Contender]
    flops: int = 0
    traffic: int = 0
    absent: dict[str, str] = field(default_factory=dict)

    def invite(self, name: str, make: Callable[[], Contender]) -> None:
        """Add a peer, or note why it cannot take part (E-PEER when it is not installed)."""
        try:
            self.contenders.append(make())
        except Refusal as refusal:
            self.absent[name] = refusal.message


@dataclass(frozen=True)
class Op:
    """An op to measure.

    Attributes:
        about: What it does, in a few words.
        build: Makes a case: ``build(device, **letters)``.
        sizes: For each of `SCALES`, its cases by name, each with its letters.
        axes: Letters that the sweep varies, each with the factors on the small case's value.
    """

    about: str
    build: Callable[..., Case]
    sizes: Mapping[str, Mapping[str, Letters]]
    axes: Mapping[str, Sequence[float]]

    def swept(self) -> Iterator[tuple[str, int, Letters]]:
        """Yield letter, value and all letters of every point of the sweep."""
        letters = next(iter(self.sizes["small"].values()))
        for letter, factors in self.axes.items():
            for factor in factors:
                value = max(1, round(letters[letter] * factor))
                yield letter, value, {**letters, letter: value}


def number_format(device: torch.device, bits: int = 0) -> torch.dtype:
    """Return what a device is measured in: bfloat16 on a GPU, else float32; ``bits`` decides."""
    wide = bits == 32 or (not bits and device.type == "cpu")
    return torch.float32 if wide else torch.bfloat16


def stepping(
    name: str, forward: Callable[[], Tensor], cotangent: Tensor, leaves: Sequence[Tensor]
) -> Contender:
    """Return a contender that runs forward and backward; gradients are freed before each turn."""

    def run() -> None:
        forward().backward(cotangent)

    def prepare() -> None:
        for leaf in leaves:
            leaf.grad = None

    return Contender(name, run, prepare, forward)


def size_of(*tensors: Any) -> int:
    """Return the bytes of some tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
