"""What a training step of an arm costs: seconds, and bytes counted tensor by tensor (Fig. 4)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from datasets import Dataset as Rows
from torch import nn

from moebook.analysis.memory import step_memory
from moebook.training import fit
from moebook.training.batches import Batches

STEPS = 9
"""Of the short run that is timed; the first one, which warms up, is not counted."""


def cost(model: nn.Module, train: Rows, **recipe: Any) -> dict[str, float]:
    """Train a few steps and count what a step holds and what is stored for the task.

    Args:
        model: From `full`, `lora` or `specialise`; its parameters move.
        train: Rows as `training.fit` takes them.
        recipe: As for `training.fit`, with ``batch``, ``seed`` and ``pad_id``; the number of steps
            is `STEPS`.

    Returns:
        ``time``, the median step in seconds; in bytes ``peak_memory`` of a step, ``resident``
        (weights and buffers), ``optimizer`` (AdamW's two moments) and ``storage`` (what trains).
    """
    first = Batches(train, recipe["batch"], seed=recipe["seed"], pad_id=recipe["pad_id"])[0]
    device = next(model.parameters()).device
    inputs = {k: part.to(device) if torch.is_tensor(part) else part for k, part in first.items()}
    held = step_memory(model.train(), inputs)
    seconds = fit(model, train, **recipe | {"steps": STEPS}).seconds
    return {
        "time": float(np.median(np.diff(seconds))),
        "peak_memory": held.total,
        "resident": held.parameters,
        "optimizer": 2 * held.trained // 3,
        "storage": held.trained // 3,
    }
