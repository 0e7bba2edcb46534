"""Where the tensors of a decoder layer that routers may start from are to be seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from torch import Tensor, nn

from moebook.errors import refuse
from moebook.models.anatomy import Anatomy, Layer

TENSORS = ("attention_output", "residual", "ffn_input", "block_input")


@contextmanager
def listening(host: Anatomy, tensor: str, keep: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Hand the chosen tensor of every layer to ``keep`` while the context is open.

    Args:
        host: Whose layers.
        tensor: One of `TENSORS`.
        keep: Called in every forward pass with a layer's number and its tensor ``[B, T, D]``.

    Raises:
        Refusal: E-MODEL for a layer without the tensor.
    """
    sources = [(layer, *_source(layer, tensor)) for layer in host.layers]  # all, or no hook at all
    with ExitStack() as hooks:
        for layer, module, takes_output in sources:

            def hook(
                _: nn.Module, args: tuple, kwargs: dict, output: object = None,
                index: int = layer.index, takes_output: bool = takes_output,
            ) -> None:  # fmt: skip
                value = output if takes_output else (*args, *kwargs.values())[0]
                keep(index, value[0] if isinstance(value, tuple) else value)

            if takes_output:
                hooks.enter_context(module.register_forward_hook(hook, with_kwargs=True))
            else:
                hooks.enter_context(module.register_forward_pre_hook(hook, with_kwargs=True))
        yield


def _source(layer: Layer, tensor: str) -> tuple[nn.Module, bool]:
    """Return the module to listen to and whether its output counts, not its input."""
    if tensor == "block_input":
        return layer.block, False
    if tensor == "ffn_input":
        return layer.mlp, False
    if tensor == "attention_output":
        if layer.attention is None:
            refuse("E-MODEL", f"decoder layer {layer.index} has no attention module")
        return layer.attention, True
    before, after = (f"{side}_feedforward_layernorm" for side in ("pre", "post"))
    if hasattr(layer.block, after) and not hasattr(layer.block, before):
        return layer.mlp, False  # OLMo 2, EXAONE 4: the MLP reads the residual stream as it is
    for name in (before, "post_attention_layernorm"):
        if isinstance(norm := getattr(layer.block, name, None), nn.Module):
            return norm, False
    refuse("E-MODEL", f"decoder layer {layer.index} has no norm before its feed-forward part")
