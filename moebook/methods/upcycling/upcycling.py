"""Sparse upcycling: each FFN of a dense decoder becomes E copies of it behind a router."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import ClassVar, get_args

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from moebook import nn as mnn
from moebook.analysis.routers import gradients, reach
from moebook.errors import refuse
from moebook.methods.upcycling.config import Config, Rule
from moebook.methods.upcycling.starts import Start, su
from moebook.models import checkpoint
from moebook.models.anatomy import Anatomy, Layer, anatomy, beside, dense_layers, normed
from moebook.nn import balance
from moebook.settings import settings

FAMILIES = ("llama", "gemma2", "gemma3_text", "olmo2", "olmo3", "exaone4")
TINY = {
    "vocab_size": 48, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.3,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@settings
class Origin(checkpoint.Origin):
    """The settings of a model and its dense base's fingerprint, kept as ``model.upcycling``."""

    method: ClassVar[str] = "upcycling"
    config: Config


def upcycle(model: nn.Module, config: Config, start: Start | None = None) -> nn.Module:
    """Turn a dense decoder into a sparse one with full experts in place (Sec. 2.1, 4.4).

    In each chosen layer E copies of the FFN, a gated MLP without biases, in fused 3-D weights
    replace it, behind a linear router that reads its (normed) input in float32 or wider; without a
    ``start`` it is SU's, N(0, 0.02^2). What is new requires a gradient; the rest stays (the paper
    trains it all). W-ROUTER warns where, with K = 1, a norm stops them learning.
    """
    host = anatomy(model)
    layers = dense_layers(host, config.layers, "upcycling")
    base = checkpoint.fingerprint(model)
    start = su(model, config.experts, seed=config.seed) if start is None else start
    checkpoint.check_base("the start", start.base or base, base)
    shape, expected = tuple(start.weights.shape), (len(host.layers), config.experts, host.hidden)
    if shape != expected:
        refuse("E-SHAPE", f"the router start is {shape}, expected [L, E, D] = {expected}")
    if config.top_k == 1 < config.experts and (cancelling := normed(host, layers)):
        why = f"norms follow the FFNs of layers {cancelling}, so that a token's only weight cancels"
        hint = "take top_k=2, and noise for a gradient from the first step on"
        text = f"W-ROUTER: {why}: only the balance loss reaches their routers; {hint}"
        warnings.warn(text, stacklevel=2)
    _install(host, layers, start.weights, config)
    model.upcycling = Origin(config=config, base=base)
    return model


def save(model: nn.Module, folder: str | os.PathLike[str]) -> Path:
    """Write all parameters (all of them train) and the `Origin` to a new folder, of any host."""
    tensors = dict(model.named_parameters())
    return checkpoint.save(folder, checkpoint.origin(model, Origin), tensors)


def load(model: nn.Module, folder: str | os.PathLike[str]) -> nn.Module:
    """Restore a saved model onto its dense base, in place and bit for bit, after all checks."""

    def restore(model: nn.Module, made_from: Origin) -> dict[str, nn.Parameter]:
        config = replace(made_from.config, noise=0.0)  # what was drawn is in the checkpoint
        host = anatomy(model)
        layers = dense_layers(host, config.layers, "upcycling")
        _install(host, layers, torch.zeros(len(host.layers), config.experts, host.hidden), config)
        model.upcycling = made_from
        return dict(model.named_parameters())

    return checkpoint.load(model, folder, Origin, restore)


def balance_loss(model: nn.Module, attention_mask: Tensor | None = None) -> Tensor:
    """Return ``alpha * N * sum_i f_i P_i``, summed over sparse layers, of the last pass (Eq. 3, 4).

    f_i counts each token's first choice (the argmax of Eq. 4, also with K = 2). Correction: in
    Eq. 4 f and P sum to B; here both are shares of the batch's real tokens.
    """
    weight = checkpoint.origin(model, Origin).config.balance_weight
    return weight * balance(mnn.routers(model), attention_mask, first=True)


def step_zero(
    dense: PreTrainedModel, starts: Mapping[str, Start], batch: Mapping[str, Tensor]
) -> pd.DataFrame:
    """Measure how much loss upcycling costs, and how much gradient reaches the routers.

    One row by combine rule, experts per token (1 and 2) and start: ``loss``, nats per token above
    the dense model's, and ``gradient``, the Euclidean norm over all routers.
    """
    batch = {key: part.to(dense.device) for key, part in batch.items()}
    dense_loss, rows = dense(**batch).loss.item(), {}
    rules: tuple[Rule, ...] = get_args(Rule)
    for rule, k, (name, start) in product(rules, (1, 2), starts.items()):
        config = Config(experts=start.weights.shape[1], top_k=k, combine=rule)
        model = upcycle(deepcopy(dense).requires_grad_(True), config, start)
        norm = np.linalg.norm(gradients(model, batch).gradient)
        rows[rule, k, name] = {"loss": model(**batch).loss.item() - dense_loss, "gradient": norm}
    return pd.DataFrame(rows).T.rename_axis(["combine", "experts per token", "start"])


def behind_norms() -> pd.DataFrame:
    """Ask tiny random hosts of six families whether the language-model loss reaches their routers.

    `reach` at step 0 under Eq. 2 for one expert per token, two, and two that noise has parted, a
    row a family. All but Llama norm what the FFN puts out: a factor common to the chosen cancels.
    """
    two = Config(top_k=2)
    forms = {"k1": Config(top_k=1), "k2": two, "k2_noise": replace(two, noise=0.1)}
    ids = torch.arange(48).view(3, 16)
    batch, lines = {"input_ids": ids, "labels": ids}, {}
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(action="ignore"):
        for family in FAMILIES:
            torch.manual_seed(0)
            dense = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **TINY))
            made = {name: upcycle(deepcopy(dense), form) for name, form in forms.items()}
            lines[family] = {name: reach(model, batch) for name, model in made.items()}
    return pd.DataFrame(lines).T


def _install(host: Anatomy, layers: list[Layer], weights: Tensor, config: Config) -> None:
    """Make all blocks, with routers that start at ``weights [L, E, D]``, then put them in."""
    trace, blocks = mnn.Trace(), []
    for layer in layers:
        experts = mnn.Experts(layer.mlp, config.experts)
        if config.noise:
            _disturb(experts, config.noise, config.seed + layer.index)
        sizes, kind = (host.hidden, config.experts, config.top_k), beside(experts.down_proj)
        router = mnn.Router(*sizes, layer=layer.index, trace=trace, combine=config.combine, **kind)
        with torch.no_grad():
            router.weight.copy_(weights[layer.index])
        blocks.append(mnn.ExpertMoE(router, experts).train(layer.block.training))
    for layer, block in zip(layers, blocks, strict=True):
        layer.replace(block)
    trace.follow(host.decoder)


@torch.no_grad()
def _disturb(experts: mnn.Experts, noise: float, seed: int) -> None:
    """Add Gaussian noise, drawn on the CPU, of ``noise`` times each dense tensor's deviation."""
    generator = torch.Generator().manual_seed(seed)
    for weight in (experts.gate_up_proj, experts.down_proj):
        drawn = torch.randn(weight.shape, generator=generator, dtype=torch.float32)
        deviation = weight[0].float().std().item()  # all experts are still copies
        weight.add_((drawn * (noise * deviation)).to(weight))
