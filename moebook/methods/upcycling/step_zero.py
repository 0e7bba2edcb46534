"""What upcycling does to a model before its first step, by combine rule and experts per token."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy

import numpy as np
import pandas as pd
from torch import Tensor
from transformers import PreTrainedModel

from moebook.analysis.routers import gradients
from moebook.kernels.route import COMBINE
from moebook.methods.upcycling.config import Config
from moebook.methods.upcycling.starts import Start
from moebook.methods.upcycling.upcycling import upcycle


def step_zero(
    dense: PreTrainedModel,
    starts: Mapping[str, Start],
    batch: Mapping[str, Tensor],
    top_k: Iterable[int] = (1, 2),
) -> pd.DataFrame:
    """Measure how much loss upcycling costs, and how much gradient reaches the routers.

    Args:
        dense: The base; it is copied for each measurement and left as it is.
        starts: By name.
        batch: ``input_ids``, ``attention_mask`` and ``labels`` ``[B, T]``.
        top_k: Experts per token.

    Returns:
        A line for each combine rule, number of experts per token and start, ``loss``: nats a token
        above the dense model's, ``gradient``: Euclidean norm over all routers' weights.
    """
    batch = {key: part.to(dense.device) for key, part in batch.items()}
    plain, lines = dense(**batch).loss.item(), {}
    cases = [(rule, k, name) for rule in COMBINE for k in top_k for name in starts]
    for rule, k, name in cases:
        start = starts[name]
        config = Config(experts=start.weights.shape[1], top_k=k, combine=rule)
        model = upcycle(deepcopy(dense).requires_grad_(True), config, start)
        norm = np.linalg.norm(gradients(model, batch).gradient)
        lines[rule, k, name] = {"loss": model(**batch).loss.item() - plain, "gradient": norm}
    table = pd.DataFrame(lines).T
    return table.rename_axis(["combine", "experts per token", "start"])
