"""What of the host trains beside the adapters: nothing, LoRA, QLoRA or everything."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from moebook import nn as mnn
from moebook.errors import refuse
from moebook.methods.pesc.config import Config
from moebook.methods.pesc.crafting import Origin, checked, install, origin
from moebook.models.anatomy import Anatomy
from moebook.models.fingerprint import fingerprint


def prepare(model: nn.Module, config: Config, *, sparse: bool = True) -> nn.Module:
    """Make a dense model ready to train, in place: the host's tuning and, when sparse, `craft`.

    Camelidae is ``sparse=True``; Camel, the dense arm, is ``sparse=False``: the same quantisation,
    the same LoRA, no adapters, so the arms share everything else. Afterwards exactly what `trained`
    lists requires a gradient. With ``host="qlora"`` the linear layers inside the decoder layers are
    held in NF4 with double quantisation and compute in the host's own dtype (load it in bfloat16
    for the paper's setting); adapters, routers, embeddings, head and norms are not quantised.

    Args:
        model: A dense causal language model.
        config: The settings.
        sparse: Whether to craft.

    Returns:
        The same model, of the same class.

    Raises:
        Refusal: Those of `craft`; E-DEP when 4-bit weights are asked for without bitsandbytes.
    """
    chosen = checked(model, config)
    if config.host == "qlora" and importlib.util.find_spec("bitsandbytes") is None:
        refuse("E-DEP", "host='qlora' needs bitsandbytes: pip install bitsandbytes, or host='lora'")
    made = Origin(config, sparse, fingerprint(model))
    if config.host == "qlora":
        _quantise(model, chosen[0])
    assemble(model, config, chosen, sparse=sparse)
    model.pesc = made
    return model


def assemble(model: nn.Module, config: Config, chosen: tuple, *, sparse: bool) -> None:
    """Install adapters (when sparse) and LoRA, and let exactly what was asked for train."""
    if sparse:
        install(chosen, config)
    if config.host in ("lora", "qlora"):
        settings = LoraConfig(
            r=config.lora_rank,
            lora_alpha=config.lora_alpha,
            lora_dropout=config.lora_dropout,
            target_modules=list(config.lora_targets),
        )
        inject_adapter_in_model(settings, model)
    model.requires_grad_(False)
    for parameter in trained(model, config).values():
        parameter.requires_grad_(True)
        if config.host != "full":  # LoRA takes the host's dtype, in which small updates are lost
            parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))


def trained(model: nn.Module, config: Config) -> dict[str, nn.Parameter]:
    """Return what trains, by name: adapters, routers and LoRA, or (``"full"``) everything."""
    if config.host == "full":
        return dict(model.named_parameters())
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, mnn.Adapters | mnn.Router):
            parts = module.named_parameters()
        elif isinstance(module, LoraLayer):
            parts = (item for item in module.named_parameters() if item[0].startswith("lora_"))
        else:
            continue
        found.update({f"{name}.{part}": parameter for part, parameter in parts})
    return found


def adapter_norm(model: nn.Module) -> float:
    """Return the norm of all upper matrices, which start at zero: how far the adapters moved.

    Raises:
        Refusal: E-MODEL when the model holds no adapters.
    """
    ups = [part.up.detach() for part in model.modules() if isinstance(part, mnn.Adapters)]
    if not ups:
        refuse("E-MODEL", "no adapters to measure: the model is dense or has full experts")
    return torch.stack([up.norm() for up in ups]).norm().item()


def merge_lora(model: nn.Module) -> nn.Module:
    """Fold LoRA into the host's weights in place, so that the layers are plain linear layers again.

    NF4 weights are dequantised first and stay dequantised: folding into 4 bits again would round
    LoRA away. The merged model counts as ``host="full"``, so `save` keeps all of it.

    Returns:
        The same model, equal to what it was to rounding.

    Raises:
        Refusal: E-MODEL when the model holds no LoRA.
    """
    made = origin(model)
    layers = [(name, part) for name, part in model.named_modules() if isinstance(part, LoraLayer)]
    if not layers:
        refuse(
            "E-MODEL", f"nothing to merge: the model was prepared with host='{made.config.host}'"
        )
    for name, layer in layers:
        model.set_submodule(name, _merged(layer))
    model.is_loaded_in_4bit = False
    model.pesc = replace(made, config=replace(made.config, host="full"))
    return model


@torch.no_grad()
def _merged(layer: LoraLayer) -> nn.Linear:
    base = layer.get_base_layer()
    weight = _dense_weight(base)
    linear = nn.Linear(base.in_features, base.out_features, base.bias is not None, device="meta")
    delta = layer.get_delta_weight("default")
    linear.weight = nn.Parameter((weight.to(delta.dtype) + delta).to(weight.dtype))
    if base.bias is not None:
        linear.bias = nn.Parameter(base.bias.detach())
    return linear.train(layer.training)


def _dense_weight(linear: nn.Linear) -> Tensor:
    state = getattr(linear.weight, "quant_state", None)
    if state is None:
        return linear.weight.detach()
    import bitsandbytes.functional as bnb  # an optional dependency, present where 4-bit weights are

    return bnb.dequantize_4bit(linear.weight.data, state)


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
                compress_statistics=True,
                device="meta",
            )
            quantised.weight = Params4bit(
                dense.weight.data, requires_grad=False, quant_type="nf4", compress_statistics=True,
                module=quantised,
            ).to(dense.weight.device)  # fmt: skip
            quantised.bias = dense.bias
            # Else evaluation on a CPU with AVX512-BF16 would repack the weights for good: widths of
            # whole 64-blocks only, double quantisation undone, scales rounded to bfloat16.
            quantised.support_avx512bf16_for_cpu = False
            layer.block.set_submodule(name, quantised)
    model.is_loaded_in_4bit = True  # what PEFT asks before it wraps 4-bit layers
