"""The mixture: a base whose projections hold the chosen LoRAs, routed token by token (Sec. 3.3)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from moebook import nn as mnn
from moebook.errors import nearest, refuse
from moebook.methods.rocket import bank
from moebook.methods.rocket.config import Config
from moebook.methods.rocket.loras import Lora, linears
from moebook.models import checkpoint
from moebook.models.anatomy import anatomy
from moebook.models.checkpoint import fingerprint
from moebook.nn import LoraMixture
from moebook.settings import settings


@settings
class Origin(checkpoint.Origin):
    """What a mixture was made from, kept on the model as ``model.rocket``.

    Attributes:
        config: The settings.
        experts: Names of the LoRAs, in the order of the gates' outputs.
        scales: The factor on each expert's B A.
        rank: R.
        paths: The linear layers that hold experts.
    """

    method: ClassVar[str] = "rocket"
    config: Config
    experts: tuple[str, ...]
    scales: tuple[float, ...]
    rank: int
    paths: tuple[str, ...]

    def __post_init__(self) -> None:
        if not len(self.experts) == len(self.scales) == self.config.experts:
            counts = f"{len(self.experts)} experts and {len(self.scales)} scales"
            refuse("E-RANGE", f"{counts} are given, experts (N) is {self.config.experts}")


def build(model: nn.Module, loras: Sequence[Lora], config: Config) -> nn.Module:
    """Put N LoRAs and a gate into each projection that they adapt, in place (Eq. 8, 9).

    Afterwards exactly the experts and the gates require a gradient; they are float32 or wider.
    Gates start as `nn.Router` does. No balance loss goes with it (neither in the paper nor in the
    code). Any chosen LoRAs do, so rivals that share the bank can be built on the same layers; with
    one LoRA and ``experts=1, top_k=1`` it is that LoRA, tuned alone.

    Args:
        model: The base, unaltered.
        loras: N of them, ``config.experts``; alike in rank and layers.
        config: The settings.

    Returns:
        The same model.

    Raises:
        Refusal: E-MODEL for a model that holds a mixture already, E-RANGE for another number of
            LoRAs than N, E-BANK for LoRAs that differ or come twice, E-BASE for one of another
            base.
    """
    _check(model, loras, config)
    base = fingerprint(model)
    for lora in loras:
        if lora.base and lora.base != base:
            refuse(
                "E-BASE",
                f"'{lora.name}' belongs to base {lora.base[:12]}..., this base is {base[:12]}...",
            )
    scales = tuple(lora.scale if config.lora_scale == "applied" else 1.0 for lora in loras)
    names, paths = tuple(lora.name for lora in loras), tuple(loras[0].down)
    down = {path: torch.stack([lora.down[path] for lora in loras]) for path in paths}
    up = {path: torch.stack([lora.up[path] for lora in loras]) for path in paths}
    made_from = Origin(
        config=config, experts=names, scales=scales, rank=loras[0].rank, paths=paths, base=base
    )
    return install(model, made_from, down, up)


def install(
    model: nn.Module, made_from: Origin, down: dict[str, Tensor], up: dict[str, Tensor]
) -> nn.Module:
    """Replace the linear layers by mixtures of these factors, and let only those train."""
    numbers = {id(layer.block): layer.index for layer in anatomy(model).layers}
    blocks = {path: module for path, module in model.named_modules() if id(module) in numbers}
    model.requires_grad_(False)
    for path in made_from.paths:
        linear = model.get_submodule(path)
        block = next(name for name in blocks if path.startswith(f"{name}."))
        place = {
            "dtype": torch.promote_types(torch.float32, linear.weight.dtype),
            "device": linear.weight.device,
        }
        config = made_from.config
        router = mnn.Router(
            linear.in_features if config.gate_input == "layer" else linear.out_features,
            len(made_from.experts),
            config.top_k,
            layer=numbers[id(blocks[block])],
            **place,
        )
        mixed = LoraMixture(
            linear,
            router,
            down[path].to(**place),
            up[path].to(**place),
            made_from.scales,
            reads=config.gate_input,
            dropout=config.lora_dropout,
        )
        model.set_submodule(path, mixed.train(linear.training))
    model.rocket = made_from
    return model


def save(model: nn.Module, folder: str | os.PathLike[str]) -> Path:
    """Write a mixture's experts and gates to a new folder, or nothing; NaN is refused."""
    return checkpoint.save(folder, origin(model), trained(model))


def load(model: nn.Module, folder: str | os.PathLike[str]) -> nn.Module:
    """Restore a mixture onto its unaltered base, in place and bit for bit, after all checks."""
    return checkpoint.load(model, folder, Origin, _empty)


def _empty(model: nn.Module, made_from: Origin) -> dict[str, nn.Parameter]:
    """Install a mixture whose factors are still to be filled, and return its parameters."""
    _check_plain(model)
    held, size, rank = linears(model, list(made_from.paths)), len(made_from.experts), made_from.rank
    down = {path: torch.zeros(size, rank, held[path].in_features) for path in made_from.paths}
    up = {path: torch.zeros(size, held[path].out_features, rank) for path in made_from.paths}
    return trained(install(model, made_from, down, up))


def remove(model: nn.Module) -> nn.Module:
    """Take the mixture off again, in place: the base as it was, bit for bit.

    Raises:
        Refusal: E-MODEL when the model holds no mixture.
    """
    for path in origin(model).paths:
        model.set_submodule(path, model.get_submodule(path).base_layer)
    del model.rocket
    return model


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the experts' and gates' parameters by name: what trains and what is saved.

    Raises:
        Refusal: E-MODEL when the model holds no mixture.
    """
    return {
        f"{path}.{name}": getattr(part, "weight", part)
        for path in origin(model).paths
        for name, part in (
            (name, getattr(model.get_submodule(path), name)) for name in ("down", "up", "router")
        )
    }


@contextmanager
def only(model: nn.Module, expert: str) -> Iterator[None]:
    """Send every token to one expert of a mixture in this block (the single experts of Table 5).

    Raises:
        Refusal: E-MODEL when the model holds no mixture, E-NAME for an expert that it has not.
    """
    made = origin(model)
    if expert not in made.experts:
        refuse("E-NAME", f"no expert '{expert}' in the mixture; {nearest(expert, made.experts)}")
    parts = [model.get_submodule(path) for path in made.paths]
    for part in parts:
        part.only = made.experts.index(expert)
    try:
        yield
    finally:
        for part in parts:
            part.only = None


def origin(model: nn.Module) -> Origin:
    """Return the `Origin` of a mixture, or refuse a model that holds none (E-MODEL)."""
    return checkpoint.origin(model, Origin)


def _check(model: nn.Module, loras: Sequence[Lora], config: Config) -> None:
    _check_plain(model)
    if len(loras) != config.experts:
        refuse("E-RANGE", f"{len(loras)} LoRAs are given, experts (N) is {config.experts}")
    names = [lora.name for lora in loras]
    if len(set(names)) < len(names):
        refuse("E-BANK", f"a LoRA is named twice: {', '.join(names)}")
    for lora in loras:
        bank.alike(loras[0], lora)


def _check_plain(model: nn.Module) -> None:
    if checkpoint.origin_or_none(model, Origin):
        refuse("E-MODEL", "the model holds a mixture already: mixture.remove takes it off")
