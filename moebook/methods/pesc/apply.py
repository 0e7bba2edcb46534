"""Sparsity crafting: each MLP of a dense decoder becomes that MLP, E adapters and a router."""

from __future__ import annotations

import os
from pathlib import Path
from typing import ClassVar

import torch
from peft import LoraConfig
from torch import nn

from moebook import nn as mnn
from moebook.errors import extra, refuse
from moebook.methods.pesc.config import Config
from moebook.models import checkpoint
from moebook.models.anatomy import Anatomy, Layer, anatomy, beside, dense_layers, graft
from moebook.models.lora import check_rank, put_on, refuse_adapted
from moebook.settings import settings

Chosen = tuple[Anatomy, list[Layer]]


@settings
class Origin(checkpoint.Origin):
    """What a model was made from, kept as ``model.pesc``; the dense arm is not sparse."""

    method: ClassVar[str] = "pesc"
    config: Config
    sparse: bool


def craft(model: nn.Module, config: Config) -> nn.Module:
    """Turn a dense decoder into its sparse form in place, equal to it at first (Eq. 7 to 9).

    In each chosen layer the MLP stays, runs once a token, and is joined by a router that reads the
    MLP's input and E adapters that read its output. Since a token's gates sum to 1 this is Eq. 7,
    and since ``up`` starts at zero it is the dense function until the first step. A norm after the
    MLP (Gemma 2) cancels no gates: they weigh a part of what is normed. Adapters and routers are
    float32 or wider; what trains is set by `prepare`. Hosts are causal language models with gated
    MLPs (Llama, Mistral, Qwen, Yi ...); refused ones are left untouched.
    """
    chosen = craftable(model, config)
    base = checkpoint.fingerprint(model)
    install(chosen, config)
    model.pesc = Origin(config=config, sparse=True, base=base)
    return model


def full_experts(model: nn.Module, config: Config) -> nn.Module:
    """Craft in place with E full copies of each MLP as experts: what PESC approximates (Eq. 3).

    Renormalised gates make it the dense function at first, as PESC is. Experts and routers alone
    train (theta_i of Eq. 3); ``config.host`` must be ``"frozen"``.
    """
    if config.host != "frozen":
        refuse(
            "E-CHOICE",
            f"host is '{config.host}', expected 'frozen': Eq. 6 is of experts",
        )
    chosen = craftable(model, config)
    base = checkpoint.fingerprint(model)
    # Listed before the graft adds experts and routers, which train.
    of_host = list(model.parameters())

    def build(layer: Layer, router: mnn.Router) -> nn.Module:
        # Eq. 3: each theta_i starts from theta_o, the dense MLP's weights.
        return mnn.ExpertMoE(router, mnn.Experts(layer.mlp, config.experts))

    graft(*chosen, build, experts=config.experts, top_k=config.top_k)
    for parameter in of_host:
        parameter.requires_grad_(False)
    model.pesc = Origin(config=config, sparse=True, base=base)
    return model


def craftable(model: nn.Module, config: Config) -> Chosen:
    """Return the host's anatomy and the layers to craft, or refuse what cannot be crafted."""
    if checkpoint.origin_or_none(model, Origin):
        refuse(
            "E-MODEL",
            "the model has been through PESC already: load the dense host again",
        )
    # PESC's own LoRA would take the place of such layers, or they would train as it.
    refuse_adapted(model)
    host = anatomy(model)
    return host, dense_layers(host, config.layers, "PESC")


def install(chosen: Chosen, config: Config) -> None:
    """Put adapters and a router into each chosen layer."""

    def build(layer: Layer, router: mnn.Router) -> nn.Module:
        experts, width = router.weight.shape  # E, D
        scales = {"scale": config.adapter_scale, "served_scale": config.served_scale}
        start = {"dropout": config.adapter_dropout, "down_init": config.down_init}
        made = {**scales, **start, **beside(router.weight)}
        adapters = mnn.Adapters(width, experts, config.adapter_width, **made)
        # Eq. 7, Fig. 3: experts share the MLP, E(x), and differ by their adapter alone.
        return mnn.AdapterMoE(layer.mlp, router, adapters)

    graft(*chosen, build, experts=config.experts, top_k=config.top_k)


def prepare(model: nn.Module, config: Config, *, sparse: bool = True) -> nn.Module:
    """Make a dense model ready to train, in place: the host's tuning and, when sparse, `craft`.

    Camelidae is ``sparse=True``; Camel, the dense arm, is ``sparse=False``: no adapters. Afterwards
    exactly what `trained` lists requires a gradient. With ``host="qlora"`` linear layers of the
    decoder are NF4, doubly quantised, and compute in the host's dtype.

    >>> from moebook import models
    >>> config = Config(experts=2, top_k=2, adapter_width=4, host="frozen")
    >>> model = prepare(models.load("nano")[0], config)
    >>> sum(part.numel() for part in trained(model, config).values())
    9216
    """
    base = checkpoint.fingerprint(model)
    return assemble(model, Origin(config=config, sparse=sparse, base=base))


def assemble(model: nn.Module, made_from: Origin) -> nn.Module:
    """Install adapters (when sparse) and LoRA, and let exactly what was asked for train."""
    config = made_from.config
    chosen = craftable(model, config)
    lora = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        target_modules=list(config.lora_targets),
    )
    if config.host in ("lora", "qlora"):
        check_rank(model, lora)  # before anything is changed
    if config.host == "qlora":
        with extra("quantised", "host='qlora'"):
            import bitsandbytes  # noqa: F401  # before anything is changed
        _quantise(model, chosen[0])
    if made_from.sparse:
        install(chosen, config)
    if config.host in ("lora", "qlora"):
        put_on(model, lora)
    model.requires_grad_(False)
    for parameter in trained(model, config).values():
        parameter.requires_grad_(True)
    model.pesc = made_from
    return model


def save(model: nn.Module, folder: str | os.PathLike[str]) -> Path:
    """Write what was trained, the settings and the base's fingerprint to a new folder.

    Raises:
        Refusal: E-MODEL where the model has full experts, which `load` does not make.
    """
    made_from = checkpoint.origin(model, Origin)
    if any(isinstance(part, mnn.Experts) for part in model.modules()):
        why = "the model has full experts: keep its state_dict"
        refuse("E-MODEL", f"pesc.save writes adapters, and {why}")
    return checkpoint.save(folder, made_from, trained(model, made_from.config))


def load(model: nn.Module, folder: str | os.PathLike[str]) -> nn.Module:
    """Prepare a dense base as a saved model was, bit for bit; a refused one is left untouched."""

    def restore(base: nn.Module, made_from: Origin) -> dict[str, nn.Parameter]:
        return trained(assemble(base, made_from), made_from.config)

    return checkpoint.load(model, folder, Origin, restore)


def trained(model: nn.Module, config: Config) -> dict[str, nn.Parameter]:
    """Return what trains, by name: adapters, routers and LoRA, or (``"full"``) everything.

    Full experts (`full_experts`) are none of these.
    """
    parameters = dict(model.named_parameters())
    if config.host == "full":
        return parameters
    kinds = mnn.Adapters | mnn.Router
    modules = model.named_modules()
    # An empty tuple in the dense arm, with which no name starts.
    added = tuple(f"{path}." for path, part in modules if isinstance(part, kinds))
    return {
        name: parameter
        for name, parameter in parameters.items()
        if name.startswith(added) or ".lora_" in name
    }


def adapter_norm(model: nn.Module) -> float:
    """Return the norm of all upper matrices, which start at zero: how far the adapters moved."""
    adapters = [part for part in model.modules() if isinstance(part, mnn.Adapters)]
    if not adapters:
        why = "the model is dense or has full experts"
        refuse("E-MODEL", f"no adapters to measure: {why}")
    # The norm of their norms is that of all entries together.
    norms = [part.up.detach().norm() for part in adapters]
    return torch.stack(norms).norm().item()


def _quantise(model: nn.Module, host: Anatomy) -> None:
    """Replace the linear layers inside the decoder layers by NF4 ones (QLoRA)."""
    from bitsandbytes.nn import (
        Linear4bit,
        Params4bit,
    )  # optional, checked by `assemble`

    for layer in host.layers:
        for name, dense in list(layer.block.named_modules()):
            if type(dense) is not nn.Linear:
                continue
            sizes = (dense.in_features, dense.out_features)
            biased = dense.bias is not None
            form = {
                "compute_dtype": dense.weight.dtype,
                "quant_type": "nf4",
                "device": "meta",  # its own weight is replaced at once
            }
            quantised = Linear4bit(*sizes, bias=biased, **form)
            # `to` is what quantises; double quantisation is the default of Params4bit.
            quantised.weight = Params4bit(
                dense.weight.data,
                requires_grad=False,
                quant_type="nf4",
                module=quantised,
            ).to(dense.weight.device)
            quantised.bias = dense.bias
            # Else evaluation on a CPU with AVX512-BF16 would repack the weights for
            # good: widths of whole 64-blocks only, double quantisation undone, scales
            # rounded to bfloat16.
            quantised.support_avx512bf16_for_cpu = False
            layer.block.set_submodule(name, quantised)
    model.is_loaded_in_4bit = True  # what PEFT asks before it wraps 4-bit layers
