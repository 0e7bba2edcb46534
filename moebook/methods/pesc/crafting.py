"""Sparsity crafting: each MLP of a dense decoder becomes that MLP, E adapters and a router."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import nn

from moebook import nn as mnn
from moebook.errors import refuse
from moebook.methods.pesc.config import Config
from moebook.models import checkpoint
from moebook.models.anatomy import Anatomy, Layer, anatomy, dense_layers
from moebook.settings import settings


@settings
class Origin(checkpoint.Origin):
    """What a model was made from, kept on the model as ``model.pesc``.

    Attributes:
        config: The settings.
        sparse: False for the dense arm, which has the host's tuning alone.
    """

    method: ClassVar[str] = "pesc"
    config: Config
    sparse: bool


def craft(model: nn.Module, config: Config) -> nn.Module:
    """Turn a dense decoder into its sparse form in place, equal to it at first (Eq. 7 to 9).

    In each chosen layer the MLP stays, runs once a token, and is joined by a router that reads the
    MLP's input and E adapters that read its output. Since a token's gates sum to 1 this is Eq. 7,
    and since ``up`` starts at zero it is the dense function until the first step. In hosts with a
    norm after the MLP (Gemma 2) the adapters still read the MLP's own output, before that norm.
    Adapters and routers are float32 (float64 in a float64 host). What trains is not changed here:
    see `prepare`. A model that is refused is left untouched.

    Args:
        model: A dense causal language model with gated MLPs (Llama, Mistral, Qwen, SmolLM, Yi,
            Gemma ...).
        config: Its adapters must not be wider than the host, its layers must exist.

    Returns:
        The same model.
    """
    chosen = craftable(model, config)
    made_from = Origin(config=config, sparse=True, base=checkpoint.fingerprint(model))
    install(chosen, config)
    model.pesc = made_from
    return model


def full_experts(model: nn.Module, config: Config) -> nn.Module:
    """Craft in place with E full copies of each MLP as experts: what PESC approximates (Eq. 3).

    Renormalised gates make it the dense function at first, as PESC is. The experts and routers are
    all of it that trains (theta_i of Eq. 3), the rest of the host is frozen; `balance_loss` works
    on it. ``config.host`` must be ``"frozen"``.
    """
    if config.host != "frozen":
        refuse(
            "E-CHOICE", f"host is '{config.host}': Eq. 6 compares experts alone, use host='frozen'"
        )
    chosen = craftable(model, config)
    made_from = Origin(config=config, sparse=True, base=checkpoint.fingerprint(model))
    graft(
        chosen,
        config,
        lambda layer, router: mnn.ExpertMoE(router, mnn.Experts(layer.mlp, config.experts)),
    )
    model.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, mnn.ExpertMoE):
            module.requires_grad_(True)
    model.pesc = made_from
    return model


def craftable(model: nn.Module, config: Config) -> tuple[Anatomy, list[Layer]]:
    """Return the host's anatomy and the layers to craft, or refuse what cannot be crafted."""
    if checkpoint.origin_or_none(model, Origin):
        refuse("E-MODEL", "the model has been through PESC already: load the dense host again")
    host = anatomy(model)
    layers = dense_layers(host, config.layers, "PESC")
    if config.adapter_width > host.hidden:
        width = f"adapter_width is {config.adapter_width}"
        refuse("E-RANGE", f"{width}, expected 1 to {host.hidden} (the host's width)")
    return host, layers


def install(chosen: tuple[Anatomy, list[Layer]], config: Config) -> None:
    """Put adapters and a router into each chosen layer."""

    def build(layer: Layer, router: mnn.Router) -> nn.Module:
        adapters = mnn.Adapters(
            router.weight.shape[1],
            config.experts,
            config.adapter_width,
            scale=config.adapter_scale,
            served_scale=config.served_scale,
            dropout=config.adapter_dropout,
            down_init=config.down_init,
            dtype=router.weight.dtype,
            device=router.weight.device,
        )
        return mnn.AdapterMoE(layer.mlp, router, adapters)

    graft(chosen, config, build)


def graft(
    chosen: tuple[Anatomy, list[Layer]],
    config: Config,
    build: Callable[[Layer, mnn.Router], nn.Module],
) -> None:
    """Replace the chosen MLPs by what ``build`` makes of each, all built before one is put in."""
    host, layers = chosen
    trace = mnn.Trace()
    modules = []
    for layer in layers:
        weight = next(p for p in layer.block.parameters() if p.is_floating_point())
        router = mnn.Router(
            host.hidden,
            config.experts,
            config.top_k,
            layer=layer.index,
            trace=trace,
            dtype=torch.promote_types(torch.float32, weight.dtype),
            device=weight.device,
        )
        modules.append(build(layer, router).train(layer.block.training))
    for layer, module in zip(layers, modules, strict=True):
        layer.replace(module)
    trace.follow(host.decoder)
