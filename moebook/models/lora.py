"""LoRA of PEFT on a model: every LoRA that a method makes and trains is put on here."""

from __future__ import annotations

from peft import LoraConfig, PeftModel, get_peft_model, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import cast_adapter_dtype
from torch import nn

from moebook.nn import Dropout

ADAPTER = "default"  # PEFT's name of the one adapter


def put_on(model: nn.Module, config: LoraConfig) -> nn.Module:
    """Put LoRA on the layers that a configuration of PEFT names, in place.

    A and B are float32 on a model in 16 bits too, as in PEFT's ``get_peft_model``.
    """
    inject_adapter_in_model(config, model, ADAPTER)
    cast_adapter_dtype(model, ADAPTER)
    return _with_our_dropout(model)


def in_wrapper(model: nn.Module, config: LoraConfig) -> PeftModel:
    """Put LoRA on a model in PEFT's wrapper, which can take it off again."""
    peft = get_peft_model(model, config, ADAPTER)
    _with_our_dropout(peft)
    return peft


def _with_our_dropout(model: nn.Module) -> nn.Module:
    """Replace torch's dropout in PEFT's layers by ours, of the same distribution."""
    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            for name, part in layer.lora_dropout.items():
                if type(part) is nn.Dropout:
                    layer.lora_dropout[name] = Dropout(part.p).train(part.training)
    return model
