"""What the sparse form costs in time and memory beside the dense one, step by step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from datasets import Dataset as Rows
from torch import Tensor, nn

from moebook.analysis.memory import step_memory
from moebook.methods.pesc.balance import balance_loss
from moebook.training import fit

TURNS, STEPS = 3, 6
"""Short runs of each model, and steps of a run; the first step, which warms up, is not counted."""


@dataclass(frozen=True)
class Cost:
    """Ratios of the sparse model to the dense one.

    Attributes:
        step_times: The median ratio of the seconds of a step, for each turn.
        memory: Bytes that a training step holds, counted tensor by tensor.
    """

    step_times: list[float]
    memory: float


def cost(
    dense: nn.Module, sparse: nn.Module, train: Rows, inputs: Mapping[str, Tensor], **recipe: Any
) -> Cost:
    """Train both in turns on the same batches, so that a busy machine slows both; count bytes.

    Args:
        dense: The dense arm, from `prepare`; it goes on training, as does the other.
        sparse: The crafted one.
        train: Rows as `training.fit` takes them.
        inputs: ``input_ids`` and ``attention_mask`` ``[B, T]`` to count bytes with; each token is
            its label.
        recipe: As for `training.fit`; number of steps, seed and penalty are its own.
    """
    pair = dense.train(), sparse.train()
    labelled = {**inputs, "labels": inputs["input_ids"]}
    held = [step_memory(model, labelled).total for model in pair]
    ratios = []
    for turn in range(TURNS):
        settings = {**recipe, "steps": STEPS, "seed": turn, "penalty": balance_loss}
        times = [np.diff(fit(model, train, **settings).seconds) for model in pair]
        ratios.append(float(np.median(times[1] / times[0])))
    return Cost(ratios, held[1] / held[0])
