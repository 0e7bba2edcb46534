"""Several LoRAs on one base at once: each block of a batch's rows runs through its own LoRA."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from moebook.methods.rocket.loras import Lora


@contextmanager
def attached(model: nn.Module, loras: Sequence[Lora]) -> Iterator[None]:
    """Run the base with N LoRAs in this block: rows in N equal parts, one part a LoRA, in order.

    Equals PEFT's LoRA, its factors' dtype included; the base's weights are in memory once and its
    modules are untouched (forward hooks, removed at the end). Dropout is the model's affair: LoRA's
    own is never applied here. Every LoRA must cover the same layers with the same rank.

    Args:
        model: The base.
        loras: N of them; the batch size must be a multiple of N.
    """
    with ExitStack() as hooks:
        for path in loras[0].down:
            linear = model.get_submodule(path)
            device = linear.weight.device
            down = torch.stack([lora.down[path] for lora in loras]).to(device)
            up = torch.stack([lora.up[path] for lora in loras]).to(device)
            scale = torch.tensor([lora.scale for lora in loras], dtype=up.dtype, device=device)
            handle = linear.register_forward_hook(_adding(down, up, scale[:, None, None]))
            hooks.callback(handle.remove)
        yield


def _adding(down: Tensor, up: Tensor, scale: Tensor) -> Callable[..., Tensor]:
    """Make the hook that adds ``scale_n * B_n A_n x`` to the n-th part of the rows."""

    def add(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        parts = args[0].to(down.dtype).unflatten(0, (len(down), -1)).flatten(1, -2)  # [N, B * T, D]
        delta = torch.bmm(torch.bmm(parts, down.mT), up.mT) * scale
        return (output + delta.view(output.shape)).to(output.dtype)

    return add
