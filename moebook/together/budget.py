"""What a training may spend: tokens, or FLOPs that are measured; and how many steps that buys.

Trained parameters are the third budget. They are a matter of sizes, which `experiments.crafts` sets
before the first step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, get_args

import numpy as np
import scipy.linalg
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import (
    flop_registry,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from moebook.errors import refuse
from moebook.nn import plain
from moebook.nn.batch import check_batch
from moebook.nn.passes import modes_kept
from moebook.runtime import random_states_kept
from moebook.settings import checked
from moebook.training.batches import Batches
from moebook.training.loop import Penalty

Kind = Literal["tokens", "flops"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Price = Callable[[int], float]  # of a step, by its number
MOST = 10_000_000  # steps of a training
PROBED = 6  # batches on which a step's FLOPs are measured
LOOKED_AT = 200  # steps from which they are chosen
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


class Flops(TorchDispatchMode):
    """Counts the FLOPs of products and attention while it is entered, backward passes included.

    PyTorch's own counter also follows modules, which doubles a small model's time and fails where a
    backward pass calls another; and it knows neither a CPU's attention nor oneDNN's product.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an op and add what it costs."""
        result = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        name = func._overloadpacket.__name__
        # PyTorch's own formula of the op, if it has one.
        if packet in flop_registry:
            self.total += flop_registry[packet](*args, **(kwargs or {}), out_val=result)
        elif name == ATTENTION:
            # Query, key and value.
            self.total += sdpa_flop_count(*(part.shape for part in args[:3]))
        elif name == f"{ATTENTION}_backward":
            # The output's gradient, then the same three.
            self.total += sdpa_backward_flop_count(*(part.shape for part in args[:4]))
        elif name == "_linear_pointwise":
            # x [..., I] by a weight [O, I]: 2 I O FLOPs a row.
            self.total += 2 * args[0].numel() * args[1].shape[0]
        return result


@checked
def price(
    kind: Kind, model: nn.Module, batches: Batches, penalty: Penalty | None
) -> Price:
    """Return what each step of a training costs: its tokens, or its FLOPs without the optimizer's.

    FLOPs are linear in a batch's tokens, padding included, in these times its length (attention),
    and in the places whose logits are needed: the factors are fitted to `PROBED` measured batches.
    """
    if kind == "tokens":
        return lambda step: float(batches.tokens(step))

    def sizes(step: int) -> NDArray[np.float64]:
        batch = batches[step]
        rows, length = batch["input_ids"].shape
        kept = len(batch["logits_to_keep"])
        # B T, B T^2 and B P, with P the places whose logits are needed.
        return np.array([rows * length, rows * length**2, rows * kept], dtype=float)

    # The steps among whose sizes the factors are told apart best.
    several = max(PROBED, min(batches.per_epoch, LOOKED_AT))
    every = np.stack([sizes(step) for step in range(several)])  # [S, 3]
    probes = _apart(every)
    # FLOPs = sizes @ factors, [PROBED, 3] @ [3], by least squares.
    flops = [measured(model, [batches[step]], penalty) for step in probes]
    factors, *_ = np.linalg.lstsq(every[probes], flops)
    return lambda step: float(sizes(step) @ factors)


def _apart(sizes: NDArray[np.float64]) -> list[int]:
    """Choose `PROBED` rows of ``sizes [S, 3]``, first those that are least like one another.

    A QR decomposition's pivots are the row that is longest, then each time the one of which most
    is left beside those before it.
    """
    relative = sizes / sizes.max(axis=0)
    _, order = scipy.linalg.qr(relative.T, mode="r", pivoting=True)  # [S]
    pivots = order[: sizes.shape[1]].tolist()
    others = [step for step in range(len(sizes)) if step not in pivots]
    return pivots + others[: PROBED - len(pivots)]


def measured(
    model: nn.Module, batches: Iterable[Mapping[str, Any]], penalty: Penalty | None
) -> int:
    """Count the FLOPs of forward and backward passes over batches; gradients stay as they were."""
    if not any(part.requires_grad for part in model.parameters()):
        why = "no parameter requires a gradient, so a step has no backward pass"
        refuse("E-MODEL", f"{why}; let some train, by requires_grad_")
    device = next(model.parameters()).device
    # Dropout draws, but what the caller draws next stays the same.
    kept = random_states_kept()
    with (
        Flops() as counted,
        kept,
        _gradients_kept(model),
        modes_kept(model),
        plain(model),
    ):
        model.train()
        for batch in batches:
            check_batch("measured", model, batch, needs=["labels"])
            inputs = {
                k: v.to(device) if isinstance(v, Tensor) else v
                for k, v in batch.items()
            }
            loss = model(**inputs, use_cache=False).loss
            if penalty:
                loss = loss + penalty(model)
            loss.backward()
    return counted.total


@contextmanager
def _gradients_kept(model: nn.Module) -> Iterator[None]:
    """Give each parameter its own gradient back after the block, which begins without any."""
    gradients = [(part, part.grad) for part in model.parameters()]
    model.zero_grad()
    try:
        yield
    finally:
        for part, gradient in gradients:
            part.grad = gradient


@checked
def affordable(cost: Price, budget: float) -> tuple[int, float]:
    """Return how many steps, one at least, come nearest to a budget, and what they cost."""

    def of_step(step: int) -> float:
        price = cost(step)
        if not (math.isfinite(price) and price > 0):
            refuse(
                "E-RANGE",
                f"step {step} costs {price}, expected a finite number above 0",
            )
        return price

    steps = 1
    spent = of_step(0)
    # A step brings the sum nearer to the budget if at least half of it fits.
    while spent + of_step(steps) / 2 <= budget:
        spent += of_step(steps)
        steps += 1
        # By the mean of some steps, at the latest of `MOST`: to count them all takes long.
        mean = spent / steps
        if steps >= LOOKED_AT and budget > MOST * mean:
            bought = f"it buys more than {MOST:,} steps of {mean}"
            refuse("E-RANGE", f"budget is {budget}, {bought}")
    return steps, spent
