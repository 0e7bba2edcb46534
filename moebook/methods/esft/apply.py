"""Specialising: only the chosen experts of a mixture train, and the base can be put back.

``full`` and ``lora`` make what it is compared with.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, ClassVar

import torch
from peft import LoraConfig
from pydantic import Field
from torch import Tensor, nn

from moebook.errors import refuse
from moebook.methods.esft.choose import Selection
from moebook.models import checkpoint
from moebook.models.anatomy import Layer, anatomy, incompatibility, sparse_layers
from moebook.models.lora import put_on, refuse_adapted
from moebook.nn import SplitExperts
from moebook.nn.batch import IDS, MASK, check_batch
from moebook.settings import Size, checked, settings

EXPERTS = "experts.json"


@settings
class Origin(checkpoint.Origin):
    """What a specialised model was made from, kept as ``model.esft``."""

    method: ClassVar[str] = "esft"
    # Which a checkpoint keeps as published.
    selection: Annotated[Selection, Field(exclude=True)]
    # The base's parameters that train beside the routed experts.
    options: Annotated[dict[str, Tensor], Field(exclude=True, repr=False)]


def specialise(model: nn.Module, selection: Selection) -> nn.Module:
    """Let the selected experts train and nothing else, in place (Sec. 3.3).

    transformers 5 keeps a layer's experts as one tensor, of which no part can be frozen: a masked
    gradient is still moved by weight decay. So the chosen experts become a parameter of their own,
    ``[N, ...]``, and the host's gets neither gradient nor optimizer state. Hosts are mixtures with
    fused gated experts (Mixtral, DeepSeek, OLMoE, Qwen, or upcycled here).

    >>> from moebook import models
    >>> model, _ = models.load("nano-moe")
    >>> chosen = Selection(experts={1: (0,), 2: (3,), 3: (1,)})
    >>> [len(part) for part in trained(specialise(model, chosen)).values()]
    [1, 1, 1, 1, 1, 1]
    """
    if checkpoint.origin_or_none(model, Origin):
        refuse(
            "E-MODEL",
            "the model is specialised already: esft.restore or esft.merge it first",
        )
    layers = fitting(model, selection)
    return install(model, selection, layers, checkpoint.fingerprint(model))


def install(
    model: nn.Module, selection: Selection, layers: list[Layer], base: str
) -> nn.Module:
    """Split the experts of `fitting` layers and set what trains."""
    # From the whole to its parts: each line overrides what stands before it.
    model.requires_grad_(selection.non_expert_modules)
    for layer in layers:
        layer.experts.requires_grad_(False)
        layer.router.requires_grad_(selection.router)
        if layer.shared is not None:
            layer.shared.requires_grad_(selection.shared_experts)
    # What trains beside experts, as it was: by these the base comes back. On meta,
    # where `load` tries a checkpoint first, there are no values to copy.
    copies = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not parameter.is_meta:
            copies[name] = parameter.detach().to("cpu", copy=True)
    for layer in layers:
        split = SplitExperts(layer.experts, selection.experts[layer.index])
        # A new module is in training mode, whatever its host is in.
        layer.mlp.experts = split.train(layer.experts.training)
    model.esft = Origin(base=base, selection=selection, options=copies)
    return model


def fitting(model: nn.Module, selection: Selection) -> list[Layer]:
    """Return the sparse layers, or refuse what does not fit: experts are gated and fused."""
    layers = sparse_layers(model)
    named = sorted(selection.experts)
    sparse = sorted(layer.index for layer in layers)
    if named != sparse:
        refuse(
            "E-KEYS",
            f"the selection names layers {named}, the sparse ones are {sparse}",
        )
    hidden = anatomy(model).hidden
    for layer in layers:
        where = f"layer {layer.index}"
        largest = max(selection.experts[layer.index])
        if largest >= layer.count:
            refuse(
                "E-RANGE",
                f"{where}: expert {largest}, the model has 0 to {layer.count - 1}",
            )
        bank = layer.experts
        if isinstance(bank, SplitExperts):
            bank = bank.frozen
        shapes = {name: tuple(p.shape) for name, p in bank.named_parameters()}
        fused = {
            "gate_up_proj": (layer.count, 2 * layer.width, hidden),
            "down_proj": (layer.count, hidden, layer.width),
        }
        if shapes != fused or incompatibility(bank):
            kind = f"{type(bank).__name__} holds {shapes}, {incompatibility(bank) or 'gated'}"
            refuse(
                "E-MODEL",
                f"{where}: {kind}; expected {fused} and act_fn(gate) * up alone",
            )
    return layers


def merge(model: nn.Module) -> nn.Module:
    """Put the trained experts into their places: a plain model again, for ``save_pretrained``."""
    checkpoint.origin(model, Origin)
    for layer in sparse_layers(model):
        layer.mlp.experts = layer.experts.merged()
    return _released(model)


@torch.no_grad()
def restore(model: nn.Module) -> nn.Module:
    """Drop what was trained and put the base back, bit for bit; all parameters train again."""
    base_options = checkpoint.origin(model, Origin).options
    for layer in sparse_layers(model):
        layer.mlp.experts = layer.experts.frozen
    for name, value in base_options.items():
        model.get_parameter(name).copy_(value)
    return _released(model)


def _released(model: nn.Module) -> nn.Module:
    del model.esft
    return model.requires_grad_(True)


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return what trains in a specialised model, by name."""
    checkpoint.origin(model, Origin)
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def save(model: nn.Module, folder: str | os.PathLike[str]) -> Path:
    """Write what was trained, the selection in its published form and the base's fingerprint."""
    made = checkpoint.origin(model, Origin)
    published = json.dumps(made.selection.published()).encode()
    return checkpoint.save(folder, made, trained(model), {EXPERTS: published})


def load(model: nn.Module, folder: str | os.PathLike[str]) -> nn.Module:
    """Put a task's trained experts on their base, or in place of another task's, bit for bit."""

    def swap(model: nn.Module, made: Origin) -> dict[str, nn.Parameter]:
        if checkpoint.origin_or_none(model, Origin):
            restore(model)
        return trained(
            install(model, made.selection, fitting(model, made.selection), made.base)
        )

    # The manifest holds neither: the selection has a file of its own, and `install`
    # copies the options from this base.
    selection = Selection.load(checkpoint.place(folder) / EXPERTS)
    return checkpoint.load(model, folder, Origin, swap, selection=selection, options={})


@torch.no_grad()
def round_trip(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, float]:
    """Take a trained model apart and put it together again: save, restore, load, merge.

    Returns the largest differences of a logit of a real token, for ``input_ids`` and
    ``attention_mask [B, T]``, after ``loading`` and ``merging``; ``base unchanged``: 1, or it is
    refused (E-BASE); ``bytes`` saved. Where it fails, the model is as it was; for that, what trains
    is in memory twice.
    """
    base = checkpoint.origin(model, Origin).base
    check_batch("round_trip", model, batch)
    inputs = {
        key: part.to(next(model.parameters()).device) for key, part in batch.items()
    }
    with _kept(model), TemporaryDirectory() as scratch:
        want = model.eval()(**inputs).logits
        folder = save(model, Path(scratch) / "task")
        size = sum(path.stat().st_size for path in folder.iterdir())
        if checkpoint.fingerprint(restore(model)) != base:
            changed = "weights that should be frozen have changed since specialise"
            refuse("E-BASE", f"round_trip: {changed}; load the base again")
        loaded = load(model, folder)(**inputs).logits
        merged = merge(model)(**inputs).logits
    mask = inputs.get(MASK, torch.ones_like(inputs[IDS])).bool()
    real = mask[:, -want.shape[1] :]  # logits may be of the last columns alone
    return {
        "base unchanged": 1.0,
        "loading": _apart(loaded, want, real),
        "merging": _apart(merged, want, real),
        "bytes": float(size),
    }


def _apart(logits: Tensor, want: Tensor, real: Tensor) -> float:
    """Return the largest difference of logits ``[B, T, V]`` at real tokens ``[B, T]``."""
    largest = (logits - want).abs().amax(-1)  # [B, T]
    return float(largest.masked_fill(~real, 0).max())


@contextmanager
def _kept(model: nn.Module) -> Iterator[None]:
    """Put a specialised model back as it was, what it trained included, if a block fails."""
    made = checkpoint.origin(model, Origin)
    modes = [(part, part.training) for part in model.modules()]
    learning = [(part, part.requires_grad) for part in model.parameters()]
    # `restore` takes these modules out and writes over the options.
    splits = [(layer.mlp, layer.experts) for layer in sparse_layers(model)]
    options = {name: model.get_parameter(name).clone() for name in made.options}
    # `merge` writes over these rows of the base.
    rows = []
    for _, split in splits:
        for bank in (split.frozen.gate_up_proj, split.frozen.down_proj):
            rows.append((bank, split.chosen, bank[split.chosen]))
    try:
        yield
    except BaseException:
        for mlp, split in splits:
            mlp.experts = split
        for name, value in options.items():
            model.get_parameter(name).copy_(value)
        for bank, chosen, before in rows:
            bank[chosen] = before
        for parameter, learns in learning:
            parameter.requires_grad_(learns)
        for module, mode in modes:
            module.training = mode
        model.esft = made
        raise


def full(model: nn.Module) -> nn.Module:
    """Let every parameter of a mixture train, routers included (FFT)."""
    _check_plain(model)
    return model.requires_grad_(True)


@checked
def lora(
    model: nn.Module, *, rank: Size = 8, scale: float = 2.0, attention: bool = False
) -> nn.Module:
    """Freeze a mixture and put LoRA on it in place, with PEFT.

    On modules that the paper leaves open: the linear layers of attention, of dense layers' MLPs and
    of shared experts, and the routed experts' fused tensors; or on ``attention`` alone. PEFT adds
    to a fused tensor one product of rank ``rank`` per expert (a fused gate and up share it), times
    ``scale``.
    """
    _check_plain(model)
    layers = anatomy(model).layers
    adapted = [layer.attention for layer in layers]
    fused: set[nn.Parameter] = set()
    if not attention:
        for layer in layers:
            adapted.append(layer.mlp if layer.kind == "dense" else layer.shared)
        for sparse in sparse_layers(model):
            fused.update(sparse.experts.parameters())
    linears: set[nn.Module] = set()
    for part in adapted:
        if part is not None:  # a sparse layer without shared experts
            linears |= {one for one in part.modules() if isinstance(one, nn.Linear)}

    # PEFT gets the blocks, which bear no configuration: by a model's it would take
    # "gate_proj" for the name of an unfused expert, rename it, and leave dense layers
    # and shared experts out.
    blocks = nn.ModuleList(layer.block for layer in layers)
    config = LoraConfig(
        r=rank,
        lora_alpha=scale * rank,  # PEFT multiplies by lora_alpha / r
        target_modules=[
            name for name, part in blocks.named_modules() if part in linears
        ],
        target_parameters=[
            name for name, part in blocks.named_parameters() if part in fused
        ],
    )
    put_on(blocks, config)
    # PEFT saw the blocks alone: embeddings, the last norm and the head freeze here.
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name)
    return model


def _check_plain(model: nn.Module) -> None:
    refuse_adapted(model)
    if checkpoint.origin_or_none(model, Origin):
        refuse(
            "E-MODEL", "the model is specialised: esft.restore or esft.merge it first"
        )
    sparse_layers(model)
