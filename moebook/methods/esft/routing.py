"""What a mixture's routers decide, read by hooks while the model runs: ids, gates, real tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import pandas as pd
import torch
from torch import Tensor, nn

from moebook.errors import refuse
from moebook.kernels import Routing
from moebook.models.anatomy import anatomy
from moebook.nn import evaluating

READ = ("input_ids", "attention_mask")


class Decisions(NamedTuple):
    """One layer's routing of one batch.

    Attributes:
        ids: ``[B, T, K]`` chosen routed experts.
        gates: ``[B, T, K]`` their gates, g of Eq. 2 and 5, without the constant factor that some
            models of DeepSeek's apply afterwards.
        mask: ``[B, T]``, true where a token is real.
    """

    ids: Tensor
    gates: Tensor
    mask: Tensor


Note = Callable[[int, Decisions], None]


@dataclass(frozen=True)
class Sparse:
    """A decoder layer with routed experts; the fields are those of `moebook.models.anatomy`."""

    index: int
    mlp: nn.Module
    width: int
    router: nn.Module
    experts: nn.Module
    shared: nn.Module | None


def sparse_layers(model: nn.Module) -> list[Sparse]:
    """Return the layers that hold routed experts.

    Raises:
        Refusal: E-MODEL for a model without any, and for one whose layers differ in E.
    """
    layers = [
        Sparse(layer.index, layer.mlp, layer.width, layer.router, layer.experts, layer.shared)
        for layer in anatomy(model).layers
        if layer.router is not None and layer.experts is not None
    ]
    if not layers:
        refuse(
            "E-MODEL",
            f"{type(model).__name__} is dense: ESFT needs a mixture of experts"
            " (Mixtral, DeepSeek-V2, OLMoE, Qwen-MoE, or one upcycled here)",
        )
    counts = {layer.index: experts_of(layer) for layer in layers}
    if len(set(counts.values())) > 1:
        refuse("E-MODEL", f"the layers differ in their number of experts: {counts}")
    return layers


def layers(model: nn.Module) -> pd.DataFrame:
    """Describe a mixture layer by layer, as the package sees it.

    Returns:
        By layer: ``kind``; ``width``, F of the dense MLP or of one expert; ``routed experts``, 0 in
        a dense layer; ``parameters`` of the whole block.

    Raises:
        Refusal: Those of `sparse_layers`.
    """
    routed = {layer.index: experts_of(layer) for layer in sparse_layers(model)}
    lines = {
        layer.index: [
            layer.kind,
            layer.width,
            routed.get(layer.index, 0),
            sum(p.numel() for p in layer.block.parameters()),
        ]
        for layer in anatomy(model).layers
    }
    columns = ["kind", "width", "routed experts", "parameters"]
    return pd.DataFrame.from_dict(lines, "index", columns=columns)


def experts_of(layer: Sparse) -> int:
    """Return E of a sparse layer: the rows of its router's weight."""
    weight = getattr(layer.router, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        refuse(
            "E-MODEL", f"layer {layer.index}: {type(layer.router).__name__} has no weight [E, D]"
        )
    return len(weight)


def check_layers(where: str, found: Iterable[int], layers: Sequence[Sparse]) -> None:
    """Refuse (E-KEYS) layer numbers that are not exactly those of the model's sparse layers."""
    wanted, given = {layer.index for layer in layers}, set(found)
    if wanted != given:
        refuse(
            "E-KEYS",
            f"{where}: layers missing {sorted(wanted - given)}, surplus {sorted(given - wanted)};"
            f" the model's sparse layers are {sorted(wanted)}",
        )


@torch.no_grad()
def observe(model: nn.Module, batches: Iterable[Mapping[str, Any]], note: Note) -> None:
    """Run a model over batches and call ``note(layer number, decisions)`` for each sparse layer.

    Nothing is kept. The decoder alone runs, without the head, in evaluation mode; the model is
    given back in the mode it came in.

    Args:
        model: A mixture that transformers can load, or one upcycled here.
        batches: Each with ``input_ids`` and, where padded, ``attention_mask`` ``[B, T]``.
        note: Called during the forward pass.

    Raises:
        Refusal: E-MODEL for a dense model or a router whose output is not understood; E-SHAPE for a
            mask that does not fit its batch.
    """
    layers = sparse_layers(model)
    decoder = anatomy(model).decoder
    device = next(model.parameters()).device
    mask = torch.ones(0)

    def hook(layer: Sparse) -> Callable[..., None]:
        def read(router: nn.Module, args: Any, output: Any) -> None:
            ids, gates = _decided(router, output, layer.index)
            shape = (*mask.shape, ids.shape[-1])
            note(layer.index, Decisions(ids.view(shape), gates.view(shape), mask))

        return read

    with ExitStack() as hooks, evaluating(model):
        for layer in layers:
            hooks.enter_context(layer.router.register_forward_hook(hook(layer)))
        for batch in batches:
            given = {key: batch[key].to(device) for key in READ if key in batch}
            mask = _mask(given)
            decoder(**given, use_cache=False)


def _mask(batch: Mapping[str, Tensor]) -> Tensor:
    ids = batch["input_ids"]
    mask = batch.get("attention_mask", torch.ones_like(ids))
    if mask.shape != ids.shape:
        refuse("E-SHAPE", f"attention_mask {tuple(mask.shape)} for input_ids {tuple(ids.shape)}")
    return mask.bool()


def _decided(router: nn.Module, output: Any, layer: int) -> tuple[Tensor, Tensor]:
    """Return ids and gates ``[B * T, K]`` from a router of transformers or of `moebook.nn`."""
    if isinstance(output, Routing):
        return output.ids, output.weights
    triple = isinstance(output, tuple) and len(output) == 3
    if not triple or output[1].shape != output[2].shape or output[2].is_floating_point():
        refuse(
            "E-MODEL",
            f"layer {layer}: {type(router).__name__} does not return (logits, gates [T, K],"
            " ids [T, K])",
        )
    return output[2], output[1] / getattr(router, "routed_scaling_factor", 1.0)
