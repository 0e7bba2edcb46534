"""What upcycling costs before the first step, and whether the loss reaches the routers."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from itertools import product
from typing import Annotated

import numpy as np
import pandas as pd
import torch
from accelerate.utils import send_to_device
from pydantic import Field, SkipValidation
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from moebook.analysis.routers import gradients, reach
from moebook.methods.upcycling.apply import upcycle
from moebook.methods.upcycling.config import Config, Rule
from moebook.methods.upcycling.starts import Start
from moebook.nn import evaluating
from moebook.nn.batch import check_batch
from moebook.runtime import random_states_kept
from moebook.settings import checked

FAMILIES = ("llama", "gemma2", "gemma3_text", "olmo2", "olmo3", "exaone4")
TINY = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@checked
def step_zero(
    dense: PreTrainedModel,
    starts: Annotated[Mapping[str, Start], Field(min_length=1)],
    batch: SkipValidation[Mapping[str, Tensor]],
) -> pd.DataFrame:
    """Measure how much loss upcycling costs, and how much gradient reaches the routers.

    One row by rule (Eq. 2's and Mixtral's), experts per token (1 and 2) and start: ``loss``, nats
    per token above the dense model's, and ``gradient``, the Euclidean norm over all routers. The
    batch holds ``input_ids`` and ``labels`` ``[B, T]``. Dropout is off.
    """
    check_batch("step_zero", dense, batch, needs=["labels"])
    batch = send_to_device(batch, dense.device)
    dense_loss = _loss(dense, batch)
    rows = {}
    rules: tuple[Rule, ...] = ("renormalised", "probability")
    for rule, k, (name, start) in product(rules, (1, 2), starts.items()):
        config = Config(experts=start.weights.shape[1], top_k=k, combine=rule)
        # A copy each, since a model is upcycled in place.
        model = upcycle(deepcopy(dense).requires_grad_(True), config, start)
        # The norm of the layers' norms is that over all routers together.
        norm = np.linalg.norm(gradients(model, batch).gradient)
        rows[rule, k, name] = {
            "loss": _loss(model, batch) - dense_loss,
            "gradient": norm,
        }
    return pd.DataFrame(rows).T.rename_axis(["combine", "experts per token", "start"])


def _loss(model: PreTrainedModel, batch: Mapping[str, Tensor]) -> float:
    with evaluating(model):
        loss: float = model(**batch).loss.item()
        return loss


def behind_norms() -> pd.DataFrame:
    """Ask tiny random hosts of six families whether the language-model loss reaches their routers.

    `reach` at step 0 under Eq. 2 for one expert per token, two, and two that noise has parted, a
    row a family. All but Llama norm what the FFN puts out: a factor common to the chosen cancels.
    """
    two = Config(top_k=2)
    forms = {"k1": Config(top_k=1), "k2": two, "k2_noise": replace(two, noise=0.1)}
    ids = torch.arange(48).view(3, 16)
    batch = {"input_ids": ids, "labels": ids}
    lines = {}
    # W-ROUTER would say beforehand what is measured here.
    with random_states_kept(), warnings.catch_warnings(action="ignore"):
        for family in FAMILIES:
            torch.manual_seed(0)
            dense = AutoModelForCausalLM.from_config(
                AutoConfig.for_model(family, **TINY)
            )
            made = {
                name: upcycle(deepcopy(dense), form) for name, form in forms.items()
            }
            lines[family] = {name: reach(model, batch) for name, model in made.items()}
    return pd.DataFrame(lines).T
