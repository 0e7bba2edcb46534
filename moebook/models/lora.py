"""LoRA of PEFT on a model: every LoRA that a method makes and trains is put on here."""

from __future__ import annotations

from collections.abc import Collection

from peft import LoraConfig, PeftModel, get_peft_model, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import cast_adapter_dtype
from torch import nn

from moebook.errors import refuse
from moebook.nn import Dropout

ADAPTER = "default"  # PEFT's name of the one adapter


def put_on(model: nn.Module, config: LoraConfig) -> nn.Module:
    """Put LoRA on the layers that a configuration of PEFT names, in place.

    A and B are float32 on a model in 16 bits too, as in PEFT's ``get_peft_model``.
    """
    check_rank(model, config)
    inject_adapter_in_model(config, model, ADAPTER)
    cast_adapter_dtype(model, ADAPTER)
    return _with_our_dropout(model)


def in_wrapper(model: nn.Module, config: LoraConfig) -> PeftModel:
    """Put LoRA on a model in PEFT's wrapper, which can take it off again."""
    check_rank(model, config)
    peft = get_peft_model(model, config, ADAPTER)
    _with_our_dropout(peft)
    return peft


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
        why = "the smaller side of the largest matrix that it adapts; a higher one adds nothing"
        refuse("E-RANGE", f"the rank of LoRA is {config.r}, expected at most {most}, {why}")


def _is_named(name: str, targets: Collection[str] | str | None) -> bool:
    """Whether PEFT's targets name a part, whole or by its last words; a pattern is not read."""
    ends = () if targets is None or isinstance(targets, str) else targets
    return any(name == end or name.endswith(f".{end}") for end in ends)


def _with_our_dropout(model: nn.Module) -> nn.Module:
    """Replace torch's dropout in PEFT's layers by ours, of the same distribution."""
    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            for name, part in layer.lora_dropout.items():
                if type(part) is nn.Dropout:
                    layer.lora_dropout[name] = Dropout(part.p).train(part.training)
    return model
