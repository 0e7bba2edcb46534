"""What ESFT is compared with, on the same model: full fine-tuning and LoRA (Sec. 4.3)."""

from __future__ import annotations

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from moebook.errors import refuse
from moebook.methods.esft.routing import sparse_layers
from moebook.methods.esft.specialising import Origin
from moebook.models.anatomy import anatomy
from moebook.models.checkpoint import origin_or_none


def full(model: nn.Module) -> nn.Module:
    """Let every parameter train, routers included (FFT).

    Raises:
        Refusal: E-MODEL for a dense model or a specialised one.
    """
    _check(model)
    return model.requires_grad_(True)


def lora(model: nn.Module, *, rank: int = 8, scale: float = 2.0) -> nn.Module:
    """Freeze a mixture and put LoRA on it in place, with PEFT.

    The paper names rank and scale but not the modules. Here they are the linear layers of
    attention, of dense layers' MLPs and of shared experts, and the routed experts' fused tensors,
    to each of which PEFT adds one product of rank ``rank`` per expert (a fused gate and up share
    it). Routers, norms, embeddings and head stay frozen. LoRA weights are float32 or wider.

    Args:
        model: A mixture with fused experts.
        rank: r, at least 1.
        scale: What the product is multiplied by (PEFT's alpha is scale times r).

    Returns:
        The same model.

    Raises:
        Refusal: E-MODEL for a dense model, a specialised one, or one with LoRA; E-RANGE for a rank
            below 1.
    """
    _check(model)
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        refuse("E-RANGE", f"rank is {rank!r}, expected a whole number from 1")
    # PEFT gets the blocks, which bear no configuration: by a model's it would take "gate_proj" for
    # the name of an unfused expert, rename it, and leave dense layers and shared experts out.
    blocks = nn.ModuleList(layer.block for layer in anatomy(model).layers)
    settings = LoraConfig(
        r=rank,
        lora_alpha=scale * rank,
        target_modules=_linears(model, blocks),
        target_parameters=_banks(model, blocks),
    )
    inject_adapter_in_model(settings, blocks)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trains := ".lora_" in name)
        if trains:
            parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
    return model


def _linears(model: nn.Module, blocks: nn.Module) -> list[str]:
    """Return the names, within the blocks, of the linear layers that `lora` adapts."""
    owners = [
        owner
        for layer in anatomy(model).layers
        for owner in (layer.attention, layer.mlp if layer.kind == "dense" else layer.shared)
        if owner is not None
    ]
    wanted = {part for owner in owners for part in owner.modules() if isinstance(part, nn.Linear)}
    return [name for name, module in blocks.named_modules() if module in wanted]


def _banks(model: nn.Module, blocks: nn.Module) -> list[str]:
    """Return the names, within the blocks, of the routed experts' fused tensors."""
    banks = {id(p) for layer in sparse_layers(model) for p in layer.experts.parameters()}
    return [name for name, parameter in blocks.named_parameters() if id(parameter) in banks]


def _check(model: nn.Module) -> None:
    if any(".lora_" in name for name, _ in model.named_parameters()):
        refuse("E-MODEL", "the model holds LoRA already: load the base again")
    if origin_or_none(model, Origin) is not None:
        refuse("E-MODEL", "the model is specialised: esft.restore or esft.merge it first")
    sparse_layers(model)
