"""A case: one op on inputs of given sizes, its floor, and all who can do it."""

from __future__ import annotations

import importlib
import time
import timeit
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moebook.errors import refuse
from moebook.kernels.matmul import product
from moebook.lab.bench.timing import Contender, why

BLOCK = 2**22  # numbers a floor writes at once: more would be new memory in every call
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


Shapes = Counter[tuple[int, int, int]]  # rows, inner width and columns of products


def listed(shapes: Shapes) -> list[Product]:
    """List counted products."""
    return [Product(*shape, times) for shape, times in shapes.items()]


def expert_step(slots: int, trained: int, width: int, expert: int) -> list[Product]:
    """Forward and backward pass of gated experts: ``6 S D F (2 + p)`` FLOPs.

    S = T K ``slots``, p S of them ``trained`` with weight gradients; D ``width``, F
    ``expert``.
    """
    # Three matrices (gate, up, down), each forward and backward to what went in.
    passes = Product(slots, width, expert, times=3 * 2)
    # Once more for a matrix's own gradient.
    weight_gradients = Product(trained, width, expert, times=3)
    return [passes, weight_gradients]


def dense(
    products: Sequence[Product], device: torch.device, dtype: torch.dtype
) -> Contender:
    """Return the floor as a contender: the products, each by the fastest library."""
    fastest = [_fastest(shape, device, dtype) for shape in products]

    def run() -> None:
        for shape, multiply in zip(products, fastest, strict=True):
            for _ in range(shape.times):
                multiply()

    return Contender("floor", run)


def _fastest(shape: Product, device: torch.device, dtype: torch.dtype) -> Run:
    """Return `torch.mm` of two matrices or, if faster on a CPU, our product."""
    left = torch.randn(shape.rows, shape.inner, device=device).to(dtype)
    right = torch.randn(shape.inner, shape.columns, device=device).to(dtype)
    out = torch.empty(shape.rows, shape.columns, device=device, dtype=dtype)
    blocks = left.split(max(1, BLOCK // shape.columns))

    def blocked() -> None:
        for block in blocks:
            product(block, right)

    whole = partial(torch.mm, left, right, out=out)
    if device.type == "cuda":
        return whole
    ways: list[Run] = [whole, blocked]
    return min(ways, key=_seconds)


def _seconds(run: Run) -> float:
    """CPU time of the fastest of four runs."""
    return min(timeit.repeat(run, timer=time.process_time, repeat=4, number=1))


@dataclass
class Case:
    """One op on inputs of given sizes."""

    traffic: int  # bytes that must be read and written at least once
    # The gradient of the output; without it, forward only and no graph.
    cotangent: Tensor | None = None
    leaves: list[Tensor] = field(default_factory=list)  # what has a gradient
    flops: int = 0  # of the floor's products; 0 where the floor moves bytes only
    # Ours first, then the floor if there is one, then the peers.
    contenders: list[Contender] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)  # who is not in it, and why

    def add(
        self, name: str, forward: Run, *, host: bool = False, after: Run = tuple
    ) -> None:
        """Add who computes by ``forward``, on the CPU if ``host``, and ends with ``after``."""

        def without_graph() -> Any:
            with torch.no_grad():
                result = forward()
            after()
            return result

        def step() -> None:
            forward().backward(self.cotangent)
            after()

        if self.cotangent is None:
            contender = Contender(name, without_graph, host=host)
        else:
            contender = Contender(name, step, self.leaves, forward, host)
        self.contenders.append(contender)

    def invite(self, name: str, make: Callable[[], Run], **how: Any) -> None:
        """Add what ``make`` returns, or note why it fails (E-PEER: not installed)."""
        try:
            self.add(name, make(), **how)
        except Exception as error:  # a peer may fail in any way
            self.absent[name] = why(error)

    def floor(
        self, products: Sequence[Product], device: torch.device, dtype: torch.dtype
    ) -> None:
        """Add dense products as the floor."""
        self.flops = sum(product.flops for product in products)
        self.contenders.append(dense(products, device, dtype))


def number_format(device: torch.device, bits: int = 0) -> torch.dtype:
    """Return bfloat16 on a GPU or for 16 ``bits``, else float32."""
    half = bits == 16 or device.type == "cuda"
    return torch.bfloat16 if half else torch.float32


def size_of(*tensors: Any) -> int:
    """Return the bytes of some tensors."""
    return sum(tensor.nbytes for tensor in tensors)
