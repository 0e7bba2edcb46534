"""What trains is float32 or wider, whatever its host is in: one rule, for every method.

A weight in bfloat16 has 8 significant bits. A step of AdamW is about as large as the learning rate;
one that is smaller than half of the weight's last bit is lost, which at a rate of 3e-5 are nearly
all. Arms of which one trains in 16 bits and another in 32 cannot be compared.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from peft.tuners.boft import BOFTLayer
from peft.tuners.hra import HRALayer
from peft.tuners.ia3 import IA3Layer
from peft.tuners.lora import LoraLayer
from peft.tuners.lycoris_utils import LycorisLayer
from peft.tuners.oft import OFTLayer
from peft.tuners.trainable_tokens import TrainableTokensLayer
from torch import Tensor, nn

from moebook.errors import refuse
from moebook.kernels.matmul import wide
from moebook.nn import Adapters, Experts, Router, SplitExperts
from moebook.nn.lora_mixture import LoraMixture

CASTING = (Adapters, Experts, LoraMixture, Router, SplitExperts)
"""Modules of ours that compute beside a host in 16 bits: they cast what they read, or their own."""
TUNERS = (
    *(BOFTLayer, HRALayer, IA3Layer, LoraLayer, LycorisLayer, OFTLayer),
    TrainableTokensLayer,
)
"""Layers of PEFT that do so: LoRA and DoRA, LoHa and LoKr, and others. VeRA's do not, nor copies of
a host's norms (LN tuning), and what nobody tried is not counted."""


def widen(model: nn.Module) -> None:
    """Turn what is to train in 16 bits into float32, in place and without changing a value.

    What is frozen keeps its dtype, so the model may hold two: then each module with parameters that
    train must be one that computes in both, of `CASTING` or of PEFT's `TUNERS`. A module of the
    host is not, and would fail in its first product.

    Raises:
        Refusal: E-DTYPE where a part of a host in 16 bits is to train beside a frozen part.
    """
    narrow = [part for part in model.parameters() if _is_narrow(part)]
    # Where all that is narrow trains, all becomes wide, and no module meets two dtypes.
    if not all(part.requires_grad for part in narrow):
        _check_modules(model)
    for part in narrow:
        if part.requires_grad:
            # The parameter stays the same object, so that tied ones stay tied.
            part.data = wide(part.data)
            part.grad = None  # one from before is in the old dtype


def _check_modules(model: nn.Module) -> None:
    """Refuse parameters to widen whose own module cannot compute beside a host in 16 bits."""
    casting = {id(module) for module in _casting(model)}
    for path, module in model.named_modules():
        for name, part in module.named_parameters(path, recurse=False):
            if part.requires_grad and _is_narrow(part) and id(module) not in casting:
                refuse(
                    "E-DTYPE",
                    f"{name} is {part.dtype} and is to train, in float32, which its module "
                    f"({type(module).__name__}) cannot beside what is frozen in 16 bits: load the "
                    "base in float32",
                )


def _casting(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules whose parameters may be wider than what they read."""
    for module in model.modules():
        if isinstance(module, CASTING):
            yield module
        elif isinstance(module, TUNERS):
            for name in module.adapter_layer_names:
                yield from getattr(module, name).modules()


def _is_narrow(tensor: Tensor) -> bool:
    """Whether a tensor is of a floating-point type below float32."""
    return tensor.is_floating_point() and tensor.dtype.itemsize < torch.float32.itemsize
