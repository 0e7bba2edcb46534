"""LoRA of PEFT on a model: every LoRA that a method makes and trains is put on here."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, inject_adapter_in_model
from peft.tuners.lora import Linear, LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer, cast_adapter_dtype
from torch import Tensor, nn

from moebook.errors import refuse, saving
from moebook.models import checkpoint
from moebook.nn import Dropout
from moebook.nn.lora import lora_step

ADAPTER = "default"  # PEFT's name of the one adapter
# Files of a folder of PEFT's.
SETTINGS = "adapter_config.json"
TENSORS = "adapter_model.safetensors"


def refuse_adapted(model: nn.Module) -> None:
    """Refuse a model that holds LoRA, or another adapter that PEFT puts on layers (E-MODEL)."""
    if any(isinstance(part, BaseTunerLayer) for part in model.modules()):
        held = "the model holds LoRA or another adapter of PEFT's already"
        remedy = "merge it by PEFT's merge_and_unload(), or load the base again"
        refuse("E-MODEL", f"{held}: {remedy}")


def put_on(model: nn.Module, config: LoraConfig) -> nn.Module:
    """Put LoRA on the layers that a configuration of PEFT names, in place.

    A and B are float32 on a model in 16 bits too, as in PEFT's ``get_peft_model``.
    """
    check_rank(model, config)
    inject_adapter_in_model(config, model, ADAPTER)
    cast_adapter_dtype(model, ADAPTER)
    return _quick(model)


def in_wrapper(model: nn.Module, config: LoraConfig) -> PeftModel:
    """Put LoRA on a model in PEFT's wrapper, which can take it off again."""
    check_rank(model, config)
    peft = get_peft_model(model, config, ADAPTER)
    _quick(peft)
    return peft


def write_folder(
    folder: Path, form: Mapping[str, Any], tensors: Mapping[str, Tensor], **facts: Any
) -> Path:
    """Write LoRA of a form, fields of `LoraConfig`, as a new folder of PEFT's with a manifest."""
    config = LoraConfig(**form, task_type="CAUSAL_LM", inference_mode=True)
    settings = {}
    for name, value in config.to_dict().items():
        settings[name] = sorted(value) if isinstance(value, set) else value
    text = json.dumps(settings, indent=1, sort_keys=True).encode()
    files = {TENSORS: checkpoint.packed(tensors), SETTINGS: text}
    with saving(folder):
        return checkpoint.write(folder, files, **facts)


def check_rank(model: nn.Module, config: LoraConfig) -> None:
    """Refuse a rank above the smaller side of every matrix that LoRA would adapt (E-RANGE).

    B A has no higher rank than that, so what lies above costs memory and time alone.
    """
    sides = [
        min(part.in_features, part.out_features)
        for name, part in model.named_modules()
        if isinstance(part, nn.Linear) and _is_named(name, config.target_modules)
    ]
    sides += [
        min(parameter.shape[-2:])
        for name, parameter in model.named_parameters()
        if _is_named(name, config.target_parameters)
    ]
    most = max(sides, default=config.r)
    if config.r > most:
        why = "the largest rank of a matrix that it adapts; a higher one adds nothing"
        refuse(
            "E-RANGE", f"the rank of LoRA is {config.r}, expected at most {most}, {why}"
        )


def _is_named(name: str, targets: Collection[str] | str | None) -> bool:
    """Whether PEFT's targets name a part, whole or by its last words; a pattern is not read."""
    ends = () if targets is None or isinstance(targets, str) else targets
    return any(name == end or name.endswith(f".{end}") for end in ends)


class LoraLinear(Linear):
    """PEFT's LoRA beside a linear layer; with dropout on a CPU it trains by `lora_step`."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return ``[..., O]`` for ``x [..., D]``, as PEFT's layer does."""
        if args or kwargs or not self._is_plain(x):
            result: Tensor = super().forward(x, *args, **kwargs)
            return result
        (name,) = self.active_adapters
        base = self.base_layer
        return lora_step(
            x,
            base.weight,
            base.bias,
            self.lora_A[name].weight,
            self.lora_B[name].weight,
            scale=self.scaling[name],
            share=self.lora_dropout[name].p,
        )

    def _is_plain(self, x: Tensor) -> bool:
        """Whether `lora_step` computes what PEFT would: one LoRA in training, in one dtype."""
        if x.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
            return False
        if not self.training or self.disable_adapters or self.merged:
            return False
        if len(self.active_adapters) != 1:
            return False
        (name,) = self.active_adapters
        if name not in self.lora_A or name in self.lora_variant or self.lora_bias[name]:
            return False

        # Without dropout PEFT has nothing to pass over.
        drop = self.lora_dropout[name]
        if type(drop) is not Dropout or not 0 < drop.p < 1:
            return False

        # `lora_step` has no gradient for the base's weight.
        base = self.base_layer
        if type(base) is not nn.Linear or self.fan_in_fan_out:
            return False
        if any(part.requires_grad for part in base.parameters()):
            return False

        weights = base.weight, self.lora_A[name].weight, self.lora_B[name].weight
        return all(
            part.dtype == x.dtype and part.device == x.device for part in weights
        )


def _quick(model: nn.Module) -> nn.Module:
    """Give PEFT's layers our dropout, of the same distribution, and linear ones our step."""
    for layer in model.modules():
        if not isinstance(layer, LoraLayer):
            continue
        for name, part in layer.lora_dropout.items():
            if type(part) is nn.Dropout:
                layer.lora_dropout[name] = Dropout(part.p).train(part.training)
        if type(layer) is Linear:
            layer.__class__ = LoraLinear
    return model
