"""Several LoRAs on one base at once: each block of a batch's rows runs through its own LoRA."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from moebook.kernels.matmul import product
from moebook.methods.rocket.loras import Lora
from moebook.models.anatomy import anatomy


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
            up = torch.stack([lora.up[path] * lora.scale for lora in loras]).to(device)
            handle = linear.register_forward_hook(_adding(down.mT, up.mT))
            hooks.callback(handle.remove)
        yield


class Products(TorchFunctionMode):
    """Linear layers multiply on a CPU, in this block, by `kernels.matmul`: without a gradient."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Take the call of a linear layer; leave any other as it is."""
        if func is not F.linear or kwargs or args[0].device.type != "cpu":
            return func(*args, **(kwargs or {}))
        x, weight, bias = (*args, None)[:3]
        y = product(x.flatten(0, -2), weight.T).unflatten(0, x.shape[:-1])
        return y if bias is None else y.add_(bias)


@contextmanager
def trimmed(model: nn.Module, loras: int, tokens: int, places: Tensor) -> Iterator[None]:
    """Leave out, in this block, what scoring one pack under N LoRAs can do without.

    Inside `attached`, with one row a LoRA and the same tokens in all rows, when hidden states are
    read at some places alone. Products before the first LoRA are then of one row, and the last
    layer needs keys and values everywhere, but its queries and what follows at the places alone:
    zeros stand for the others, which nobody reads.

    Args:
        model: The base.
        loras: N, rows of the batch.
        tokens: T, tokens of a row.
        places: int64, the places in [0, T) whose hidden states are read, each once.
    """
    shared, ends = spared(model)

    def filled(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output.new_zeros(loras, tokens, output.shape[-1]).index_copy_(1, places, output)

    with ExitStack() as hooks:
        for part in shared:
            before = part.register_forward_pre_hook(lambda _, args: args[0][:1])
            after = part.register_forward_hook(lambda _, args, output: output.expand(loras, -1, -1))
            hooks.callback(before.remove)
            hooks.callback(after.remove)
        for part in ends:
            before = part.register_forward_pre_hook(lambda _, args: args[0][:, places])
            hooks.callback(before.remove)
            hooks.callback(part.register_forward_hook(filled).remove)
        yield


def spared(model: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return the parts that `trimmed` runs for one row alone, and those for the places alone."""
    layers = anatomy(model).layers
    ends = _parts(layers[-1].attention, "q_proj", "o_proj")
    ends += [layers[-1].mlp] if layers[-1].kind == "dense" else []
    return _parts(layers[0].attention, "q_proj", "k_proj", "v_proj"), ends


def _parts(module: nn.Module | None, *names: str) -> list[nn.Module]:
    found = (getattr(module, name, None) for name in names)
    return [part for part in found if isinstance(part, nn.Module)]


def _adding(down: Tensor, up: Tensor) -> Callable[..., Tensor]:
    """Make the hook that adds ``x A_n B_n`` to the n-th part of the rows, or to one row for all.

    Args:
        down: A of each LoRA, turned: ``[N, D, R]``.
        up: B of each, turned, times its scale: ``[N, R, O]``.
    """

    def add(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        loras, parts = len(down), 1 if len(output) == 1 else len(down)
        x, base = (t.unflatten(0, (parts, -1)).flatten(1, -2) for t in (args[0], output))
        low = torch.bmm(x.to(down.dtype).expand(loras, -1, -1), down)  # [N, B * T, R]
        base = base.expand(loras, -1, -1)
        if base.dtype == up.dtype:
            return torch.baddbmm(base, low, up).view(-1, *output.shape[1:])
        return (base + torch.bmm(low, up)).to(output.dtype).view(-1, *output.shape[1:])

    return add
