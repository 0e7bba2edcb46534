"""LoRA of PEFT on a model, in place: every LoRA that a method makes and trains is put on here."""

from __future__ import annotations

from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.tuners_utils import cast_adapter_dtype
from torch import nn

ADAPTER = "default"  # PEFT's name of the one adapter


def put_on(model: nn.Module, config: LoraConfig) -> nn.Module:
    """Put LoRA on the layers that a configuration of PEFT names; which parameters train stays.

    A and B are float32 on a model in 16 bits too, as in PEFT's ``get_peft_model``.
    """
    inject_adapter_in_model(config, model, ADAPTER)
    cast_adapter_dtype(model, ADAPTER)
    return model
