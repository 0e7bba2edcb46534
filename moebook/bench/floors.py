"""The least that an op's work costs: dense products of equal FLOPs, timed in the same run."""

from __future__ import annotations

import time
import timeit
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from moebook.bench.timing import Contender
from moebook.kernels.matmul import product

BLOCK = 2**22
"""Numbers of a result that are written at once: more would be new memory in every call."""


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

    Args:
        slots: S = T K.
        trained: p S, the slots whose experts train: only they have weight gradients.
        width: D.
        expert: F.
    """
    return [Product(slots, width, expert, 6), Product(trained, width, expert, 3)]


def dense(products: Sequence[Product], device: torch.device, dtype: torch.dtype) -> Contender:
    """Return the floor as a contender: the products, each by the fastest library that is there.

    That is `torch.mm` into memory that is there already or, on a CPU, `kernels.matmul.product`,
    which the ops multiply by, whichever is faster in a trial here.
    """
    made = [(_fastest(shape, device, dtype), shape.times) for shape in products]

    def run() -> None:
        for multiply, times in made:
            for _ in range(times):
                multiply()

    return Contender("floor", run)


def _fastest(shape: Product, device: torch.device, dtype: torch.dtype) -> Callable[[], Any]:
    """Draw two matrices, and return how they are multiplied."""
    left = torch.randn(shape.rows, shape.inner, device=device).to(dtype)
    right = torch.randn(shape.inner, shape.columns, device=device).to(dtype)
    out = torch.empty(shape.rows, shape.columns, device=device, dtype=dtype)
    parts = left.split(max(1, BLOCK // shape.columns))

    def blocked() -> None:
        for part in parts:
            product(part, right)

    ways: list[Callable[[], Any]] = [partial(torch.mm, left, right, out=out), blocked]
    return ways[0] if device.type == "cuda" else min(ways, key=_seconds)


def _seconds(run: Callable[[], Any]) -> float:
    return min(timeit.repeat(run, timer=time.process_time, repeat=4, number=1))
