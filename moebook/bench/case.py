"""A case: one op on inputs of given sizes, the floor of its work, and all who can do it."""

from __future__ import annotations

import importlib
import time
import timeit
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moebook.bench.timing import Contender, why
from moebook.errors import refuse
from moebook.kernels.matmul import product

BLOCK = 2**22  # numbers that a floor writes at once: more would be new memory in every call
Run = Callable[[], Any]


def peer(module: str) -> Any:
    """Import a peer's module, which need not be installed (E-PEER)."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = (error.name or module).partition(".")[0]
        refuse("E-PEER", f"{missing.replace('_', '-')} is not installed")


class Product(NamedTuple):
    """A dense product ``[rows, inner] @ [inner, columns]``, done so many times."""

    rows: int
    inner: int
    columns: int
    times: int = 1

    @property
    def flops(self) -> int:
        """A multiplication and an addition for each term."""
        return 2 * self.rows * self.inner * self.columns * self.times


def expert_step(slots: int, trained: int, width: int, expert: int) -> list[Product]:
    """Forward and backward pass of gated experts: ``6 S D F (2 + p)`` FLOPs.

    S = T K ``slots``, p S of them ``trained`` with weight gradients; D ``width``, F ``expert``.
    """
    return [Product(slots, width, expert, 6), Product(trained, width, expert, 3)]


def dense(products: Sequence[Product], device: torch.device, dtype: torch.dtype) -> Contender:
    """Return the floor as a contender: the products, each by the fastest library that is there."""
    ways = [(shape.times, _fastest(shape, device, dtype)) for shape in products]

    def run() -> None:
        for times, multiply in ways:
            for _ in range(times):
                multiply()

    return Contender("floor", run)


def _fastest(shape: Product, device: torch.device, dtype: torch.dtype) -> Run:
    """Draw two matrices; return `torch.mm` or, if it is faster on a CPU, the ops' own product."""
    left = torch.randn(shape.rows, shape.inner, device=device).to(dtype)
    right = torch.randn(shape.inner, shape.columns, device=device).to(dtype)
    out = torch.empty(shape.rows, shape.columns, device=device, dtype=dtype)
    parts = left.split(max(1, BLOCK // shape.columns))

    def blocked() -> None:
        for part in parts:
            product(part, right)

    ways: list[Run] = [partial(torch.mm, left, right, out=out), blocked]
    return ways[0] if device.type == "cuda" else min(ways, key=_seconds)


def _seconds(run: Run) -> float:
    return min(timeit.repeat(run, timer=time.process_time, repeat=4, number=1))


@dataclass
class Case:
    """One op on inputs of given sizes."""

    traffic: int  # bytes that must be read and written at least once
    cotangent: Tensor | None = None  # gradient of the output; without it, forward only, no graph
    leaves: list[Tensor] = field(default_factory=list)  # what has a gradient
    flops: int = 0  # of the floor's products; 0 where the floor moves bytes only
    contenders: list[Contender] = field(default_factory=list)  # ours, the floor if any, the peers
    absent: dict[str, str] = field(default_factory=dict)  # who could not take part, and why

    def add(self, name: str, forward: Run, *, host: bool = False, after: Run = tuple) -> None:
        """Add who computes by ``forward``, on the CPU if ``host``; ``after`` follows backward."""
        if self.cotangent is None:
            self.contenders.append(Contender(name, torch.no_grad()(forward), host=host))
            return

        def step() -> None:
            forward().backward(self.cotangent)
            after()

        self.contenders.append(Contender(name, step, self.leaves, forward))

    def invite(self, name: str, make: Callable[[], Run], **how: Any) -> None:
        """Add what ``make`` returns, or note why it fails (E-PEER when it is not installed)."""
        try:
            self.add(name, make(), **how)
        except Exception as error:  # a peer may fail in any way
            self.absent[name] = why(error)

    def floor(self, products: Sequence[Product], device: torch.device, dtype: torch.dtype) -> None:
        """Add dense products as the floor."""
        self.flops = sum(each.flops for each in products)
        self.contenders.append(dense(products, device, dtype))


def number_format(device: torch.device, bits: int = 0) -> torch.dtype:
    """Return what a device is measured in: bfloat16 on a GPU or for 16 ``bits``, else float32."""
    return torch.bfloat16 if bits == 16 or device.type == "cuda" else torch.float32


def size_of(*tensors: Any) -> int:
    """Return the bytes of some tensors."""
    return sum(tensor.nbytes for tensor in tensors)
