"""What PESC is measured by: its balance loss, its distance from full experts, its size and cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from datasets import Dataset as Rows
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig

from moebook import nn as mnn
from moebook.analysis.memory import step_memory
from moebook.data import IGNORED
from moebook.errors import nearest, refuse
from moebook.methods.pesc.config import Config
from moebook.methods.pesc.crafting import Origin, craftable, install
from moebook.models import checkpoint
from moebook.models.anatomy import anatomy
from moebook.nn import balance, evaluating
from moebook.training import fit

# What a count needs of the public configurations; Yi-34B has Llama's form.
NEEDED = (
    "vocab_size", "hidden_size", "intermediate_size",
    "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
)  # fmt: skip
HOSTS = {
    "llama-2-7b": (32000, 4096, 11008, 32, 32, 32),
    "llama-2-13b": (32000, 5120, 13824, 40, 40, 40),
    "yi-34b": (64000, 7168, 20480, 60, 56, 8),
}
PRINTED = {"llama-2-7b": 8, "llama-2-13b": 15, "yi-34b": 38}
"""Billions of parameters that Table 2 prints for the crafted hosts."""
TURNS, STEPS = 3, 6
"""Short runs of each model that are timed, and their steps; the first one, a warm-up, is not."""


def balance_loss(model: nn.Module, attention_mask: Tensor | None = None) -> Tensor:
    """Return ``alpha * E * sum_i f_i p_i``, summed over sparse layers, of the last pass (Eq. 10).

    Each layer has its own term ("for each sparse transformer block"), see `moebook.nn.balancing`.
    A scalar; 0 for the dense arm and for ``balance="none"``. Fits
    ``training.fit(..., penalty=pesc.balance_loss)``.

    Args:
        model: A crafted model that has run forward.
        attention_mask: ``[B, T]``, 1 for real tokens; by default the one the model was called with.
    """
    config, routers = checkpoint.origin(model, Origin).config, mnn.routers(model)
    if config.balance == "none" or not routers:
        return torch.zeros((), device=next(model.parameters()).device)
    return config.balance_weight * balance(routers, attention_mask, form=config.balance)


def balance_gradient(model: nn.Module, batch: Mapping[str, Any]) -> tuple[float, float]:
    """Run one batch and return what the balance loss is, and how hard it pulls at the routers.

    Args:
        model: Crafted, in training mode, with trainable routers; their gradients are changed.
        batch: What the model is called with, ``input_ids`` and ``attention_mask`` ``[B, T]``.

    Returns:
        `balance_loss`, mean over sparse layers, and the norm of its gradient over all routers.
    """
    model(**batch)
    routers = mnn.routers(model)
    value = balance_loss(model) / len(routers)
    value.backward()
    norm = torch.stack([router.weight.grad.norm() for router in routers]).norm()
    return value.item(), norm.item()


@dataclass(frozen=True)
class Approximation:
    """Eq. 6, measured on a set of batches.

    Attributes:
        loss_gap: Mean over rows of ``|loss(full) - loss(pesc)|``, nats per labelled token: xi of
            Eq. 6 with F the training objective.
        gaps: The same row by row.
        output_error: Mean over layers of ``|pesc - full| / |full - dense|``, norms over all real
            tokens: the layers' outputs on equal inputs, those of the dense base. 0 is exact, 1 is
            what never training the adapters would give.
    """

    loss_gap: float
    gaps: list[float]
    output_error: float


@torch.no_grad()
def approximation_error(
    pesc: nn.Module, full: nn.Module, dense: nn.Module, batches: Iterable[Mapping[str, Any]]
) -> Approximation:
    """Measure how far trained adapters are from full experts of the same start and data (Eq. 6).

    Args:
        pesc: Crafted and trained with ``host="frozen"``.
        full: From `full_experts`, trained on the same steps.
        dense: The base both started from.
        batches: Each with ``input_ids``, ``attention_mask`` and ``labels`` ``[B, T]``, as the model
            takes them (also with ``logits_to_keep`` and the labels' last columns alone).
    """
    gaps: list[float] = []
    squares = torch.zeros(2, len(anatomy(dense).layers), dtype=torch.float64)
    models = [pesc, full, dense]
    with evaluating(pesc), evaluating(full), evaluating(dense):
        for given in batches:
            batch = {
                key: value.to(pesc.device) if isinstance(value, Tensor) else value
                for key, value in given.items()
            }
            losses = [_row_losses(model, batch) for model in (pesc, full)]
            gaps += (losses[0] - losses[1]).abs().tolist()
            squares += _squared_distances(models, batch)
    if not gaps:
        refuse("E-DATA", "no batch to measure the approximation error on; give one or more")
    moved = squares[1] > 0
    ratio = (squares[0][moved] / squares[1][moved]).sqrt()
    return Approximation(sum(gaps) / len(gaps), gaps, float(ratio.mean()))


def _row_losses(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """Return the mean nats per labelled token of each row ``[B]``."""
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    logits, labels = model(**inputs).logits[:, :-1].float(), batch["labels"][:, 1:]
    nats = nn.functional.cross_entropy(logits.mT, labels, ignore_index=IGNORED, reduction="none")
    return nats.sum(1) / (labels != IGNORED).sum(1).clamp(min=1)


def _squared_distances(models: list[nn.Module], batch: Mapping[str, Any]) -> Tensor:
    """Return squared distances pesc-full and full-dense, ``[2, L]``, on the dense MLPs' inputs."""
    mlps = [[layer.mlp for layer in anatomy(model).layers] for model in models]
    calls: list[tuple[Tensor, Tensor]] = []
    with ExitStack() as hooks:
        for mlp in mlps[2]:
            note = mlp.register_forward_hook(lambda _, args, out: calls.append((args[0], out)))
            hooks.enter_context(note)
        models[2](input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    real = batch["attention_mask"].bool()
    distances = []
    for pesc, full, (x, dense) in zip(mlps[0], mlps[1], calls, strict=True):
        a, b, c = pesc(x)[real].double(), full(x)[real].double(), dense[real].double()
        distances.append([(a - b).square().sum(), (b - c).square().sum()])
    return torch.tensor(distances, dtype=torch.float64).T


@dataclass(frozen=True)
class Counts:
    """Numbers of parameters, LoRA merged.

    Attributes:
        dense: Of the host.
        adapters: Of all adapters.
        routers: Of all routers.
        total: Of the crafted model.
        activated: That one token uses: the host, the routers, and K of E adapters a layer.
    """

    dense: int
    adapters: int
    routers: int
    total: int
    activated: int


def counts(config: Config, host: str | PreTrainedConfig) -> Counts:
    """Count a crafted model's parameters on the meta device, where nothing is allocated.

    Args:
        config: The settings.
        host: ``"llama-2-7b"``, ``"llama-2-13b"``, ``"yi-34b"``, or a configuration of transformers.
    """
    if isinstance(host, str):
        if host not in HOSTS:
            refuse("E-MODEL", f"unknown host '{host}'; {nearest(host, HOSTS)}")
        sizes: dict[str, Any] = dict(zip(NEEDED, HOSTS[host], strict=True))
        host = LlamaConfig(**sizes, tie_word_embeddings=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(host)
    dense = _size(model)
    install(craftable(model, config), config)
    adapters = sum(_size(part) for part in model.modules() if isinstance(part, mnn.Adapters))
    routers = sum(_size(part) for part in mnn.routers(model))
    idle = adapters * (config.experts - config.top_k) // config.experts
    total = _size(model)
    return Counts(dense, adapters, routers, total, total - idle)


def implied_width(config: Config, host: str | PreTrainedConfig, total: float) -> float:
    """Return the adapter width R at which a crafted host has ``total`` parameters.

    A printed size is rounded: ask for both ends of its range (8B: 7.5e9 and 8.5e9).
    """
    size = counts(config, host)
    return (total - size.dense - size.routers) / (size.adapters / config.adapter_width)


def printed_sizes() -> pd.DataFrame:
    """Set the paper's three crafted hosts beside the sizes that Table 2 prints.

    Returns:
        A line a host, numbers of parameters: ``dense``, ``total`` and ``activated`` at width 512,
        ``total_64`` at width 64, which the released code trains; and ``implied_width_low`` and
        ``implied_width_high``, between which the total rounds to what is printed.
    """
    wide, released = Config.preset("fixed"), Config.preset("released")
    lines = {}
    for host, printed in PRINTED.items():
        size, narrow = counts(wide, host), counts(released, host)
        ends = [implied_width(wide, host, (printed + side) * 1e9) for side in (-0.5, 0.5)]
        lines[host] = [size.dense, size.total, size.activated, narrow.total, *ends]
    whats = ["dense", "total", "activated", "total_64", "implied_width_low", "implied_width_high"]
    return pd.DataFrame(lines, index=whats).T


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


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
    memory = [step_memory(model, labelled).total for model in pair]
    ratios = []
    for turn in range(TURNS):
        settings = {**recipe, "steps": STEPS, "seed": turn, "penalty": balance_loss}
        times = [np.diff(fit(model, train, **settings).seconds) for model in pair]
        ratios.append(float(np.median(times[1] / times[0])))
    return Cost(ratios, memory[1] / memory[0])
