"""Parameter counts of a crafted model, without allocating one (Table 2's rows "# Params")."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig

from moebook import nn as mnn
from moebook.errors import nearest, refuse
from moebook.methods.pesc.config import Config
from moebook.methods.pesc.crafting import checked, install

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

    Raises:
        Refusal: E-MODEL for an unknown host, and those of `craft`.
    """
    model = _hollow(host)
    dense = _size(model)
    install(checked(model, config), config)
    adapters = sum(_size(part) for part in model.modules() if isinstance(part, mnn.Adapters))
    routers = sum(_size(part) for part in mnn.routers(model))
    idle = adapters * (config.experts - config.top_k) // config.experts
    total = _size(model)
    return Counts(dense, adapters, routers, total, total - idle)


def implied_width(config: Config, host: str | PreTrainedConfig, total: float) -> float:
    """Return the adapter width R at which a crafted host has ``total`` parameters.

    A printed size is rounded: ask for both ends of its range (8B: 7.5e9 and 8.5e9).
    """
    made = counts(config, host)
    per_width = made.adapters / config.adapter_width
    return (total - made.dense - made.routers) / per_width


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
        made, narrow = counts(wide, host), counts(released, host)
        ends = [implied_width(wide, host, (printed + side) * 1e9) for side in (-0.5, 0.5)]
        lines[host] = [made.dense, made.total, made.activated, narrow.total, *ends]
    whats = ["dense", "total", "activated", "total_64", "implied_width_low", "implied_width_high"]
    return pd.DataFrame(lines, index=whats).T


def _hollow(host: str | PreTrainedConfig) -> nn.Module:
    """Return the host on the meta device."""
    if isinstance(host, str):
        if host not in HOSTS:
            refuse("E-MODEL", f"unknown host '{host}'; {nearest(host, HOSTS)}")
        needed: dict[str, Any] = dict(zip(NEEDED, HOSTS[host], strict=True))
        host = LlamaConfig(**needed, tie_word_embeddings=False)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(host)


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
