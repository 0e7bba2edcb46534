"""The identity of a base model: one hash over its parameters."""

from __future__ import annotations

import hashlib
import re

import torch
from torch import nn

_WRAPPING = re.compile(r"^base_model\.model\.|\.base_layer(?=\.)")
_ADDED = re.compile(r"\.(lora_\w+|modules_to_save)\.")


def fingerprint(model: nn.Module) -> str:
    """Hash names, shapes, dtypes and bytes of the base's parameters, sorted by name (sha256, hex).

    A PEFT wrapper does not change the answer: its own parameters are left out and its renaming of
    the base's is undone, so that an adapter can be tied to the base it was trained on. Tied
    parameters count once, buffers not at all. The device does not matter; the dtype does.
    """
    named = {
        _WRAPPING.sub("", name): parameter
        for name, parameter in model.named_parameters()
        if not _ADDED.search(name)
    }
    digest = hashlib.sha256()
    for name in sorted(named):
        tensor = named[name].detach().cpu().contiguous()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
