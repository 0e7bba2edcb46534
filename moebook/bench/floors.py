"""The least that an op's work costs: dense products of equal FLOPs, timed in the same run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from moebook.bench.timing import Contender


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


def flops(products: Sequence[Product]) -> int:
    """Sum over products."""
    return sum(product.flops for product in products)


def expert_step(slots: int, trained: int, width: int, expert: int) -> list[Product]:
    """Forward and backward pass of gated experts: ``6 S D F (2 + p)`` FLOPs.

    Args:
        slots: S = T K.
        trained: p S, the slots whose experts train: only they have weight gradients.
        width: D.
        expert: F.
    """
    return [Product(slots, width, expert, 6), Product(trained, width, expert, 3)]


def adapter_pass(slots: int, width: int, rank: int, *, backward: bool) -> list[Product]:
    """Pass of routed adapters: ``4 T D K R`` FLOPs forward, twice that backward."""
    return [Product(slots, width, rank, 6 if backward else 2)]


def lora_step(tokens: int, width: int, out: int, columns: int) -> list[Product]:
    """Forward and backward pass of a frozen linear layer with N R = ``columns`` LoRA columns.

    The frozen weight has no gradient: two products for it, and for each factor three.
    """
    return [
        Product(tokens, width, out, 2),
        Product(tokens, width, columns, 3),
        Product(tokens, columns, out, 3),
    ]


def dense(products: Sequence[Product], device: torch.device, dtype: torch.dtype) -> Contender:
    """Return the floor as a contender: the products, written to memory that is there already."""
    made = [
        (
            torch.randn(product.rows, product.inner, device=device).to(dtype),
            torch.randn(product.inner, product.columns, device=device).to(dtype),
            torch.empty(product.rows, product.columns, device=device, dtype=dtype),
            product.times,
        )
        for product in products
    ]

    def run() -> None:
        for left, right, out, times in made:
            for _ in range(times):
                torch.mm(left, right, out=out)

    return Contender("floor", run)
