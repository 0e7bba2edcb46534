"""LoRAHub: one number per LoRA, searched without gradients on a few shots (arXiv 2307.13269).

``A = sum_i w_i A_i``, ``B = sum_i w_i B_i`` (factors), in all layers alike; the LoRAs are frozen;
``w = argmin nats(rows; A, B) + 0.05 * mean_i |w_i|`` over ``w in [-1.5, 1.5]^N`` from w = 0, the
base. The result is one LoRA of the same rank. The authors' code is for encoder-decoders; here nats
are means over the answers' tokens of a causal model.

The released search asks nevergrad's NGOpt, which for this box and budget is COBYLA. That is
deterministic: it goes through w = 0 and one coordinate after another by 0.5 before its model takes
a step. So 40 evaluations of 38 LoRAs leave one. The paper has CMA-ES and an L1 penalty, as three
summaries agree; its text was not at hand, and that its penalty is a sum is unverified.
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from scipy.optimize import minimize
from torch import nn

from moebook import training
from moebook.errors import extra, refuse
from moebook.kernels.dispatch import shapes
from moebook.methods.rivals import mixing, tuning
from moebook.methods.rivals.tuning import Cost, Data, Tuned
from moebook.methods.rocket.bank import Bank, check
from moebook.settings import Count, Presets, Seed, Size, checked, settings

__all__ = [
    "Config",
    "search",
    "tuned",
]

Loss = Callable[[np.ndarray], float]
BOX = 1.5  # |w_i| at most
STRENGTH = 0.05  # of the penalty
STEP = 0.5  # of the first probes


@settings
class Config(Presets):
    """What is searched, where and how. The defaults are the preset ``bank``.

    ``bank`` searches over the whole bank on all rows, its penalty in the definition's
    proportion. ``released`` and ``paper`` draw 20 LoRAs and take 5 shots.

    Attributes:
        optimiser: SciPy's COBYLA (what the released code comes to), or CMA-ES by nevergrad (paper).
        penalty: 0.05 times the mean of ``|w_i|`` (released) or their sum (paper, unverified).
        loss: Mean nats, or mean nats over ``batch``, as released, where the penalty so weighs
            ``batch`` times as much.
        budget: Evaluations of the loss; COBYLA may stop earlier, when it has converged.
        batch: Rows in a forward pass.
        experts: LoRAs drawn at random from the bank, None for all.
        shots: The first rows of D_K, and nothing else; None for D_K and D_A.
    """

    optimiser: Literal["cobyla", "cma"] = "cobyla"
    penalty: Literal["mean", "sum"] = "mean"
    loss: Literal["mean", "over_batch"] = "mean"
    budget: Count = 40
    batch: Count = 5
    experts: Count | None = None
    shots: Count | None = None

    PRESETS: ClassVar = {
        "bank": {},
        "released": {"loss": "over_batch", "experts": 20, "shots": 5},
        "paper": {"optimiser": "cma", "penalty": "sum", "experts": 20, "shots": 5},
    }


def tuned(
    model: nn.Module, bank: Bank, data: Data, config: Config, **recipe: Any
) -> Tuned:
    """Attach the mixture that the search finds; of ``recipe`` only the seed matters.

    The history holds the loss of each evaluation, with its penalty.
    """
    seed = recipe.get("seed", 0)
    bank = _drawn(bank, config.experts, seed)
    rows = data.rows if config.shots is None else data.first(config.shots)
    # One module for all layers, since w is the same in each.
    fixed = mixing.Fixed(torch.zeros(len(bank)))  # [N]
    result = tuning.attach(model, bank, lambda *_: fixed, mix="factors", learnt=False)
    values: list[float] = []

    def loss(weights: np.ndarray) -> float:
        fixed.weights.copy_(torch.from_numpy(weights))
        nats = training.nats(model, rows, pad_id=data.pad_id, batch=config.batch)
        if config.loss == "over_batch":
            nats /= config.batch
        # nats(rows; A, B) + 0.05 * mean_i |w_i|, or the sum.
        sizes = np.abs(weights)
        size = sizes.mean() if config.penalty == "mean" else sizes.sum()
        values.append(float(nats + STRENGTH * size))
        return values[-1]

    with tuning.undone(result), torch.no_grad():
        best = search(loss, len(bank), config, seed=seed)
        # The mixture is still at the last point that was tried.
        fixed.weights.copy_(torch.from_numpy(best))
    # Each evaluation is one forward pass over all rows; there is no backward pass.
    tokens = sum(map(len, rows["input_ids"]))
    steps = list(range(1, len(values) + 1))
    history = training.History(
        step=steps, loss=values, tokens=[tokens * step for step in steps]
    )
    return replace(result, cost=Cost(len(bank), tokens * len(values)), history=history)


@checked
def search(loss: Loss, size: Size, config: Config, *, seed: Seed = 0) -> np.ndarray:
    """Return the best w ``[N]`` among all that the optimiser looked at.

    A loss that is no finite number is refused: no w is better than another by it.
    """
    seen: list[tuple[float, np.ndarray]] = []

    def noted(weights: np.ndarray) -> float:
        value = loss(weights)
        if not math.isfinite(value):
            at = ", ".join(f"{weight:.3g}" for weight in weights[:8])
            refuse(
                "E-NONFINITE",
                f"the loss is {value} at weights [{at}], expected a finite one",
            )
        seen.append((value, weights))
        return value

    (_cobyla if config.optimiser == "cobyla" else _cma)(
        noted, size, config.budget, seed
    )
    return min(seen, key=lambda pair: pair[0])[1]


def _cobyla(loss: Loss, size: int, budget: int, seed: int) -> None:
    # Nothing is drawn by the seed: COBYLA is deterministic.
    if budget < size + 2:
        left = f"its first {size + 1} look at w = 0 and at each LoRA; then a step must be left"
        refuse(
            "E-RANGE",
            f"budget is {budget}, COBYLA needs {size + 2} for {size} LoRAs: {left}",
        )
    with warnings.catch_warnings():  # that a tolerance of 0 was raised
        warnings.filterwarnings("ignore", ".*RHOEND.*")
        # As nevergrad: tolerance 0, and w = 0.5 z, since first steps are 1 in z.
        minimize(
            lambda z: loss(folded(STEP * z)),
            np.zeros(size),
            method="COBYLA",
            tol=0,
            options={"maxiter": budget},
        )


def folded(weights: np.ndarray) -> np.ndarray:
    """Fold what lies outside the box back at its wall, as nevergrad does; at most to the other."""
    shapes("folded", {"weights": (weights, "...")})
    size = np.abs(weights)
    back = BOX - np.abs(BOX - size)  # as far inside the wall as it was outside
    return np.clip(np.sign(weights) * back, -BOX, BOX)


def _cma(loss: Loss, size: int, budget: int, seed: int) -> None:
    with extra("rivals", "optimiser 'cma'"):
        import nevergrad

    box = nevergrad.p.Array(init=np.zeros(size), lower=-BOX, upper=BOX)
    box.random_state.seed(seed)
    nevergrad.optimizers.registry["CMA"](parametrization=box, budget=budget).minimize(
        loss
    )


def _drawn(bank: Bank, experts: int | None, seed: int) -> Bank:
    check(bank)
    if experts is None:
        return bank
    if experts > len(bank):
        refuse(
            "E-RANGE",
            f"experts is {experts}, expected 1 to {len(bank)}, the bank's LoRAs",
        )
    # Sorted, so that the order of the bank does not matter.
    names = random.Random(f"lorahub/{seed}").sample(sorted(bank), experts)
    return {name: bank[name] for name in names}
