"""What of the host trains beside the adapters: nothing, LoRA, QLoRA or everything."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace
from pathlib import Path

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from peft.utils.integrations import dequantize_module_weight
from torch import nn

from moebook import nn as mnn
from moebook.errors import refuse
from moebook.methods.pesc.config import Config
from moebook.methods.pesc.crafting import Origin, craftable, install
from moebook.models import checkpoint
from moebook.models.anatomy import Anatomy, Layer


def prepare(model: nn.Module, config: Config, *, sparse: bool = True) -> nn.Module:
    """Make a dense model ready to train, in place: the host's tuning and, when sparse, `craft`.

    Camelidae is ``sparse=True``; Camel, the dense arm, is ``sparse=False``: the same quantisation,
    the same LoRA, no adapters, so the arms share everything else. Afterwards exactly what `trained`
    lists requires a gradient. With ``host="qlora"`` the linear layers inside the decoder layers are
    held in NF4 with double quantisation and compute in the host's own dtype (load it in bfloat16
    for the paper's setting); adapters, routers, embeddings, head and norms are not quantised.
    """
    chosen = craftable(model, config)
    if config.host == "qlora" and importlib.util.find_spec("bitsandbytes") is None:
        refuse("E-DEP", "host='qlora' needs bitsandbytes: pip install bitsandbytes, or host='lora'")
    made_from = Origin(config=config, sparse=sparse, base=checkpoint.fingerprint(model))
    return assemble(model, made_from, chosen)


def assemble(model: nn.Module, made_from: Origin, chosen: tuple[Anatomy, list[Layer]]) -> nn.Module:
    """Install adapters (when sparse) and LoRA, and let exactly what was asked for train."""
    config = made_from.config
    if config.host == "qlora":
        _quantise(model, chosen[0])
    if made_from.sparse:
        install(chosen, config)
    if config.host in ("lora", "qlora"):
        lora = LoraConfig(
            r=config.lora_rank,
            lora_alpha=config.lora_alpha,
            lora_dropout=config.lora_dropout,
            target_modules=list(config.lora_targets),
        )
        inject_adapter_in_model(lora, model)
    model.requires_grad_(False)
    for parameter in trained(model, config).values():
        parameter.requires_grad_(True)
        if config.host != "full":  # LoRA takes the host's dtype, in which small updates are lost
            parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
    model.pesc = made_from
    return model


def save(model: nn.Module, folder: str | os.PathLike[str]) -> Path:
    """Write what was trained, the settings and the base's fingerprint to a new folder, or nothing.

    NaN and infinity are refused.
    """
    made_from = checkpoint.origin(model, Origin)
    return checkpoint.save(folder, made_from, trained(model, made_from.config))


def load(model: nn.Module, folder: str | os.PathLike[str]) -> nn.Module:
    """Restore a checkpoint onto its dense base, in place and bit for bit, after all checks.

    Args:
        model: The dense base, as it was before `craft` or `prepare`; untouched when refused.
        folder: Written by `save`.

    Returns:
        The same model, prepared as it was when it was saved.
    """

    def restore(base: nn.Module, made_from: Origin) -> dict[str, nn.Parameter]:
        config = made_from.config
        return trained(assemble(base, made_from, craftable(base, config)), config)

    return checkpoint.load(model, folder, Origin, restore)


def trained(model: nn.Module, config: Config) -> dict[str, nn.Parameter]:
    """Return what trains, by name: adapters, routers and LoRA, or (``"full"``) everything."""
    parameters = dict(model.named_parameters())
    if config.host == "full":
        return parameters
    added = tuple(
        f"{name}."
        for name, part in model.named_modules()
        if isinstance(part, mnn.Adapters | mnn.Router)
    )
    return {n: p for n, p in parameters.items() if n.startswith(added) or ".lora_" in n}


def adapter_norm(model: nn.Module) -> float:
    """Return the norm of all upper matrices, which start at zero: how far the adapters moved."""
    ups = [part.up.detach() for part in model.modules() if isinstance(part, mnn.Adapters)]
    if not ups:
        refuse("E-MODEL", "no adapters to measure: the model is dense or has full experts")
    return torch.stack([up.norm() for up in ups]).norm().item()


@torch.no_grad()
def merge_lora(model: nn.Module) -> nn.Module:
    """Fold LoRA into the host's weights in place, so that the layers are plain linear layers again.

    NF4 weights are dequantised first and stay so: folding into 4 bits again (as PEFT does) would
    round LoRA away. The merged model counts as ``host="full"``, so `save` keeps all of it.
    """
    made_from = checkpoint.origin(model, Origin)
    host = made_from.config.host
    if host not in ("lora", "qlora"):
        refuse("E-MODEL", f"nothing to merge: the model was prepared with host='{host}'")
    for name, layer in list(model.named_modules()):
        if isinstance(layer, LoraLayer):
            model.set_submodule(name, _merged(layer))
    model.is_loaded_in_4bit = False
    model.pesc = replace(made_from, config=replace(made_from.config, host="full"))
    return model


def _merged(layer: LoraLayer) -> nn.Linear:
    base, delta = layer.get_base_layer(), layer.get_delta_weight("default")
    weight = dequantize_module_weight(base)
    linear = nn.Linear(base.in_features, base.out_features, base.bias is not None, device="meta")
    linear.weight = nn.Parameter((weight.to(delta.dtype) + delta).to(weight.dtype))
    if base.bias is not None:
        linear.bias = nn.Parameter(base.bias.detach())
    return linear.train(layer.training)


def _quantise(model: nn.Module, host: Anatomy) -> None:
    """Replace the linear layers inside the decoder layers by NF4 ones (QLoRA)."""
    from bitsandbytes.nn import Linear4bit, Params4bit  # optional, checked by `prepare`

    for layer in host.layers:
        linears = [(n, m) for n, m in layer.block.named_modules() if type(m) is nn.Linear]
        for name, dense in linears:
            quantised = Linear4bit(
                dense.in_features,
                dense.out_features,
                bias=dense.bias is not None,
                compute_dtype=dense.weight.dtype,
                quant_type="nf4",
                device="meta",
            )
            quantised.weight = Params4bit(
                dense.weight.data, requires_grad=False, quant_type="nf4", module=quantised
            ).to(dense.weight.device)
            quantised.bias = dense.bias
            # Else evaluation on a CPU with AVX512-BF16 would repack the weights for good: widths of
            # whole 64-blocks only, double quantisation undone, scales rounded to bfloat16.
            quantised.support_avx512bf16_for_cpu = False
            layer.block.set_submodule(name, quantised)
    model.is_loaded_in_4bit = True  # what PEFT asks before it wraps 4-bit layers
