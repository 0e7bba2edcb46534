"""LoRA on a mixture in PEFT's form, and which experts a checkpoint moved, whatever trained it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from peft import PeftConfig, PeftModel
from peft.tuners.lora import LoraLayer, ParamWrapper
from torch import Tensor, nn

from moebook.errors import Refusal, lacks_memory, located, refuse
from moebook.methods.esft.apply import EXPERTS, load, merge
from moebook.models import checkpoint
from moebook.models.anatomy import GATED, Layer, anatomy, incompatibility, sparse_layers
from moebook.models.load import load as load_model
from moebook.models.lora import ADAPTER, SETTINGS, TENSORS, write_folder
from moebook.runtime import random_states_kept
from moebook.settings import Place, checked

FUSED = ("gate_up_proj", "down_proj")


@checked
def export(model: nn.Module, folder: Place) -> Path:
    """Write the LoRA that `lora` put on a mixture as a new folder in PEFT's form.

    ``PeftModel.from_pretrained(base, folder)`` then gives the same logits, up to rounding.
    Routed experts are ``target_parameters``, ``A [E * R, in]`` and ``B [out, E * R]``. So
    are linear layers outside of attention, and a gate in it (AFMoE): PEFT would take their
    names for those that experts had before transformers fused them.

    Raises:
        Refusal: E-MODEL for a model without such LoRA, E-EXISTS for a folder that is
            there, E-NONFINITE for NaN.
    """
    adapted = _adapted(model)
    if not adapted:
        refuse("E-MODEL", "the model holds no LoRA: esft.lora puts it on")
    in_attention = set()
    for layer in anatomy(model).layers:
        if layer.attention is not None:
            in_attention.update(layer.attention.modules())

    modules = []
    parameters = []
    for name, part in adapted.items():
        if isinstance(part, ParamWrapper):  # wrappers of one module lie in one another
            owner = name.replace(".base_layer", "")
            parameters.append(f"{owner}.{part.parameter_name}")
        elif part in in_attention and name.rpartition(".")[2] not in GATED:
            modules.append(name)
        else:
            parameters.append(f"{name}.weight")

    # `lora` gives all parts one rank and one alpha.
    first = next(iter(adapted.values()))
    form: dict[str, Any] = {
        "r": first.r[ADAPTER],
        "lora_alpha": first.lora_alpha[ADAPTER],
        "target_modules": modules,
        "target_parameters": parameters,
    }
    tensors = {}
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            # In PEFT's files names begin at its wrapper, and the adapter's is left out.
            key = name.replace(f".{ADAPTER}", "")
            tensors[f"base_model.model.{key}"] = parameter.detach().contiguous()
    return write_folder(Path(folder), form, tensors)


def _adapted(model: nn.Module) -> dict[str, LoraLayer]:
    """Return the parts that bear LoRA, by name."""
    return {
        name: part
        for name, part in model.named_modules()
        if isinstance(part, LoraLayer)
    }


@checked
def moved(base: nn.Module, folder: Place) -> pd.DataFrame:
    """Tell which routed experts a checkpoint moved, and how far, beside its base.

    The folder is one of `save`, one of PEFT's (of `export`, or anybody's), or a whole
    model's (after `merge`). The base and torch's random states stay as they are.

    Returns:
        A row a layer and expert, with ``layer``; ``expert``; ``change``, the Frobenius norm of
        what was added to its weights over that of the weights, a number without unit, 0
        where it was not moved, infinity where only zeros were; ``moved``, whether it is above 0.

    Raises:
        Refusal: E-NOFILE for a folder of none of these, E-BASE for one of another base,
            E-CONFIG for one that PEFT cannot load. E-KEYS for tensors that are not those
            of its settings on this base, E-SHAPE for others in shape or number.
            E-NONFINITE for NaN or infinity in it or in the base's experts, E-MODEL for
            experts of another form.
    """
    folder = Path(folder)
    before = sparse_layers(base)
    with random_states_kept():  # PEFT draws A before it reads it
        after = sparse_layers(_trained(base, folder))
    here = [layer.index for layer in before]
    there = [layer.index for layer in after]
    if there != here:
        layers = f"experts in layers {there}, expected {here} as in the base"
        refuse("E-SHAPE", f"{folder}: {layers}; load the base that it was made from")

    lines = []
    for old, new in zip(before, after, strict=True):
        for layer, where in ((old, "the base"), (new, str(folder))):
            with located(f"{where}: layer {layer.index}"):
                _check(layer)
        with located(folder):
            changes = _changes(old, new)
        for expert, change in enumerate(changes):
            lines.append((old.index, expert, change, change > 0))
    return pd.DataFrame(lines, columns=["layer", "expert", "change", "moved"])


def _trained(base: nn.Module, folder: Path) -> nn.Module:
    """Make a copy of the base what a folder holds, as a plain model."""
    if (folder / EXPERTS).is_file():
        return merge(load(deepcopy(base), folder))
    if (folder / SETTINGS).is_file():
        with located(folder):
            return _with_adapter(base, folder)
    if (folder / "config.json").is_file():
        weight = next(base.parameters())
        # By its whole path: a folder here may be called like a base that we ship.
        path = folder.absolute()
        return load_model(path, device=weight.device, dtype=weight.dtype)[0]
    kinds = f"{EXPERTS}, {SETTINGS} or config.json"
    refuse("E-NOFILE", f"{folder} is no checkpoint; expected {kinds} in it")


def _with_adapter(base: nn.Module, folder: Path) -> nn.Module:
    """Merge an adapter of PEFT's into a copy of the base."""
    if not (folder / TENSORS).is_file():
        refuse("E-NOFILE", f"no {TENSORS}; save it as safetensors")
    with _telling_of_peft():
        config = PeftConfig.from_pretrained(folder)
        adapted = PeftModel(deepcopy(base), config, ADAPTER)
        # `PeftModel.from_pretrained` would keep what did not fit to itself.
        misfits = adapted.load_adapter(folder, ADAPTER)
        _refuse_misfits(misfits.missing_keys, misfits.unexpected_keys)
        checkpoint.check_finite(checkpoint.unpacked(folder / TENSORS), TENSORS)
        merged: nn.Module = adapted.merge_and_unload()
    return merged


@contextmanager
def _telling_of_peft() -> Iterator[None]:
    """Tell in one line of any error that PEFT makes of others' adapters."""
    try:
        yield
    except Exception as error:
        told = f"{type(error).__name__}: {error!s:.200}"
        if isinstance(error, Refusal) or lacks_memory(told):
            raise
        misfits = [line for line in str(error).splitlines() if "size mismatch" in line]
        if misfits:
            first = misfits[0].strip(" \t.")
            fix = "load the base that it was trained on"
            refuse("E-SHAPE", f"tensors of another base: {first}; {fix}")
        refuse("E-CONFIG", f"PEFT cannot load it: {told}; save it again with PEFT")


def _refuse_misfits(missing: list[str], surplus: list[str]) -> None:
    """Refuse an adapter whose tensors are not those that its settings put on the base."""
    if missing or surplus:
        lacks = f"{len(missing)} tensors missing {missing[:3]}"
        fix = f"{SETTINGS}, {TENSORS} and the base must belong together"
        refuse("E-KEYS", f"{lacks}, {len(surplus)} surplus {surplus[:3]}; {fix}")


def _check(layer: Layer) -> None:
    """Refuse a layer whose experts are not fused and gated, or hold NaN or infinity."""
    problem = incompatibility(layer.experts)
    if problem:
        refuse("E-MODEL", problem)
    for name, weight in zip(FUSED, _fused(layer), strict=True):
        checkpoint.check_finite({name: weight}, "experts")


@torch.no_grad()
def _changes(old: Layer, new: Layer) -> list[float]:
    """Return by how much of its norm each expert's weights changed."""
    added = []
    weights = []
    for before, after in zip(_fused(old), _fused(new), strict=True):
        if before.shape != after.shape:
            shapes = f"{tuple(after.shape)} and {tuple(before.shape)} in the base"
            refuse("E-SHAPE", f"layer {old.index}: experts are {shapes}")
        step = after.double() - before.double()  # [E, ...]
        added.append(step.square().flatten(1).sum(1))  # [E]
        weights.append(before.double().square().flatten(1).sum(1))
    # |W' - W| / |W|, with W all weights of an expert.
    distance = torch.stack(added).sum(0)
    size = torch.stack(weights).sum(0)
    change = torch.where(distance == 0, 0, distance / size)  # 0 / 0 is 0
    return [float(value) for value in change.sqrt()]


def _fused(layer: Layer) -> Iterator[Tensor]:
    """Yield the fused weights of a layer's experts, ``[E, ...]``."""
    for name in FUSED:
        yield layer.experts.get_parameter(name)
