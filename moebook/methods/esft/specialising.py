"""Specialising: only the chosen experts of a mixture train, and the base can be put back."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from moebook.errors import refuse
from moebook.methods.esft.scoring import sparse_layers
from moebook.methods.esft.selection import Selection
from moebook.models import checkpoint
from moebook.models.anatomy import Layer
from moebook.models.registry import unlike
from moebook.nn import SplitExperts
from moebook.settings import settings

EXPERTS = "experts.json"


@settings
class Origin(checkpoint.Origin):
    """What a specialised model was made from, kept on the model as ``model.esft``.

    Attributes:
        selection: What trains; a checkpoint keeps it in its published form.
        options: Parameters beside the routed experts that train, as they were in the base, by name;
            empty unless an option of the selection is on.
    """

    method: ClassVar[str] = "esft"
    selection: Annotated[Selection, Field(exclude=True)]
    options: Annotated[dict[str, Tensor], Field(exclude=True, repr=False)]


def specialise(model: nn.Module, selection: Selection) -> nn.Module:
    """Let the selected experts train and nothing else, in place (Sec. 3.3).

    transformers 5 keeps a layer's experts as one tensor, of which no part can be frozen: a masked
    gradient is still moved by weight decay. So the chosen experts become a parameter of their own,
    ``[N, ...]``, and the host's tensor gets neither gradient nor optimizer state. The copies are
    float32 or wider, since small updates would be lost in bfloat16; shared experts, routers and
    other modules, where they train, keep the host's dtype. The model computes what it computed.

    Args:
        model: A mixture with fused gated experts: Mixtral, DeepSeek-V2 and V3, OLMoE, Qwen2 and
            Qwen3 MoE, or one upcycled here. One that is refused is left untouched.
        selection: From `select` or a file; every sparse layer of the model, and no other.

    Returns:
        The same model.
    """
    if checkpoint.origin_or_none(model, Origin):
        refuse("E-MODEL", "the model is specialised already: esft.restore or esft.merge it first")
    layers = checked(model, selection)
    return install(model, selection, layers, checkpoint.fingerprint(model))


def merge(model: nn.Module) -> nn.Module:
    """Put the trained experts into their places, so that the model is a plain one again.

    ``save_pretrained`` then writes a checkpoint that transformers loads without this package. All
    parameters are free to train again, as transformers loads them.
    """
    origin(model)
    for layer in sparse_layers(model):
        layer.mlp.experts = layer.experts.merged()
    return _released(model)


@torch.no_grad()
def restore(model: nn.Module) -> nn.Module:
    """Drop what was trained and put the base back, bit for bit; all parameters train again."""
    options_of_base = origin(model).options
    for layer in sparse_layers(model):
        layer.mlp.experts = layer.experts.frozen
    for name, value in options_of_base.items():
        model.get_parameter(name).copy_(value)
    return _released(model)


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return what trains in a specialised model, by name."""
    origin(model)
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def checked(model: nn.Module, selection: Selection) -> list[Layer]:
    """Return the sparse layers, or refuse a selection or a model that does not fit."""
    layers = sparse_layers(model)
    check_layers("the selection", selection.experts, layers)
    for layer in layers:
        last, largest = len(layer.router.weight) - 1, max(selection.experts[layer.index])
        if largest > last:
            refuse("E-RANGE", f"layer {layer.index}: expert {largest}, the model has 0 to {last}")
        _check_form(layer)
    return layers


def check_layers(where: str, numbers: Iterable[int], layers: Iterable[Layer]) -> None:
    """Refuse (E-KEYS) layer numbers that are not exactly those of the model's sparse layers."""
    given, wanted = set(numbers), {layer.index for layer in layers}
    if wanted != given:
        refuse(
            "E-KEYS",
            f"{where}: layers missing {sorted(wanted - given)}, surplus {sorted(given - wanted)};"
            f" the model's sparse layers are {sorted(wanted)}",
        )


def install(model: nn.Module, selection: Selection, layers: list[Layer], base: str) -> nn.Module:
    """Split the experts of checked layers and set what trains."""
    model.requires_grad_(False)
    free = options(model, selection, layers)
    copies = {n: p.detach().to("cpu", copy=True) for n, p in free.items() if not p.is_meta}
    for layer in layers:
        experts = layer.experts
        dtype = torch.promote_types(experts.down_proj.dtype, torch.float32)
        split = SplitExperts(experts, selection.experts[layer.index], dtype=dtype)
        layer.mlp.experts = split.train(experts.training)
    for parameter in free.values():
        parameter.requires_grad_(True)
    model.esft = Origin(base=base, selection=selection, options=copies)
    return model


def origin(model: nn.Module) -> Origin:
    """Return the `Origin` of a specialised model, or refuse another (E-MODEL)."""
    return checkpoint.origin(model, Origin)


def save(model: nn.Module, folder: str | os.PathLike[str]) -> Path:
    """Write what was trained, the expert configuration and the base's fingerprint, or nothing.

    Args:
        model: From `specialise`.
        folder: Must not exist yet. The selection stands there in its published form too.

    Raises:
        Refusal: E-EXISTS when the folder exists, E-NONFINITE when a tensor holds NaN or infinity,
            E-MODEL for a model that is not specialised.
    """
    made = origin(model)
    published = json.dumps(made.selection.published()).encode()
    return checkpoint.save(folder, made, trained(model), {EXPERTS: published})


def load(model: nn.Module, folder: str | os.PathLike[str]) -> nn.Module:
    """Put a task's trained experts on their base, in place and bit for bit, after all checks.

    A specialised model is swapped to the new task: what it had trained is dropped (`save` it first)
    and its base, whose fingerprint is known, is used again.

    Args:
        model: The base, or a specialised model on it; untouched when it is refused.
        folder: Written by `save`.

    Returns:
        The same model, specialised as it was when it was saved.
    """

    def swap(model: nn.Module, made: Origin) -> dict[str, nn.Parameter]:
        if checkpoint.origin_or_none(model, Origin):
            restore(model)
        return trained(install(model, made.selection, checked(model, made.selection), made.base))

    selection = Selection.load(Path(folder) / EXPERTS)
    return checkpoint.load(model, folder, Origin, swap, selection=selection, options={})


@torch.no_grad()
def round_trip(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, float]:
    """Take a trained model apart and put it together again: save, restore, load, merge.

    Args:
        model: From `specialise`, trained; in the end it is merged and in evaluation mode.
        batch: ``input_ids`` and ``attention_mask`` ``[B, T]``, to compare logits on.

    Returns:
        ``base unchanged``, 1: restoring brings back the weights that were specialised, bit for bit;
        ``loading`` and ``merging``, the largest differences of any logit from the trained model's;
        ``bytes`` of the saved folder.

    Raises:
        Refusal: E-BASE when restoring brings back anything else; those of `save`.
    """
    base, device = origin(model).base, next(model.parameters()).device
    inputs = {key: part.to(device) for key, part in batch.items()}
    want = model.eval()(**inputs).logits
    with TemporaryDirectory() as scratch:
        folder = save(model, Path(scratch) / "task")
        size = sum(path.stat().st_size for path in folder.iterdir())
        unchanged = checkpoint.fingerprint(restore(model)) == base
        loaded = load(model, folder)(**inputs).logits
    merged = merge(model)(**inputs).logits
    return {
        "base unchanged": float(unchanged),
        "loading": float((loaded - want).abs().max()),
        "merging": float((merged - want).abs().max()),
        "bytes": float(size),
    }


def options(model: nn.Module, selection: Selection, layers: list[Layer]) -> dict[str, nn.Parameter]:
    """Return the parameters beside the routed experts that are to train, by name."""
    routed = _owned(layer.experts for layer in layers)
    shared = _owned(layer.shared for layer in layers)
    routers = _owned(layer.router for layer in layers)
    free = {}
    for name, parameter in model.named_parameters():
        if parameter in routed:
            trains = False
        elif parameter in shared:
            trains = selection.shared_experts
        elif parameter in routers:
            trains = selection.router
        else:
            trains = selection.non_expert_modules
        if trains:
            free[name] = parameter
    return free


def _owned(modules: Iterable[nn.Module | None]) -> set[nn.Parameter]:
    return {p for module in modules if module is not None for p in module.parameters()}


def _check_form(layer: Layer) -> None:
    """Refuse experts that are not gated FFNs in two fused tensors ``[E, 2F, D]``, ``[E, D, F]``."""
    bank = layer.experts.frozen if isinstance(layer.experts, SplitExperts) else layer.experts
    shapes = {name: tuple(p.shape) for name, p in bank.named_parameters()}
    hidden = layer.router.weight.shape[1]
    wanted = {
        "gate_up_proj": (len(layer.router.weight), 2 * layer.width, hidden),
        "down_proj": (len(layer.router.weight), hidden, layer.width),
    }
    problem = unlike(bank)
    if shapes != wanted or problem:
        refuse(
            "E-MODEL",
            f"layer {layer.index}: {type(bank).__name__} holds {shapes}, {problem or 'gated'};"
            f" expected {wanted}, gate and up one after the other, act_fn(gate) * up, and nothing"
            " behind the down projection",
        )


def _released(model: nn.Module) -> nn.Module:
    del model.esft
    return model.requires_grad_(True)
