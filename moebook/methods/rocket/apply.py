"""The mixture: a base whose projections hold the chosen LoRAs, routed token by token (Sec. 3.3)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from moebook.errors import refuse, refuse_unknown
from moebook.methods.rocket.config import Config
from moebook.methods.rocket.loras import (
    Lora,
    check_alike,
    check_mixable,
    linears,
    zeros,
)
from moebook.models import checkpoint
from moebook.models.anatomy import anatomy, beside
from moebook.nn import Router
from moebook.nn.lora_mixture import LoraMixture
from moebook.settings import settings

__all__ = [
    "build",
    "load",
    "only",
    "remove",
    "save",
    "trained",
]


@settings
class Origin(checkpoint.Origin):
    """What a mixture was made from, kept on the model as ``model.rocket``."""

    method: ClassVar[str] = "rocket"
    config: Config
    experts: tuple[str, ...]  # names of the LoRAs, in the order of the gates' outputs
    scales: tuple[float, ...]  # the factor on each one's B A
    rank: int  # R
    paths: tuple[str, ...]  # of the linear layers that hold them
    # The base's parameters that required a gradient, which `remove` gives back.
    learning: Annotated[tuple[str, ...], Field(exclude=True, repr=False)] = ()

    def __post_init__(self) -> None:
        if not len(self.experts) == len(self.scales) == self.config.experts:
            counts = f"{len(self.experts)} experts and {len(self.scales)} scales"
            refuse(
                "E-RANGE", f"{counts} are given, experts (N) is {self.config.experts}"
            )


def build(model: nn.Module, loras: Sequence[Lora], config: Config) -> nn.Module:
    """Put N alike LoRAs and a gate into each projection that they adapt, in place (Eq. 8, 9).

    Afterwards exactly the experts and the gates require a gradient; they are float32 or wider.
    Gates start as `nn.Router` does. No balance loss goes with it (neither in the paper nor in the
    code). Any LoRAs do, also one N times (Sec. 4.5.2); with one LoRA and ``experts=1, top_k=1`` it
    is that LoRA, tuned alone.
    """
    _refuse_mixture(model)
    base = checkpoint.fingerprint(model)
    check_alike(loras)
    for lora in loras:
        # One that does not tell its base is taken for this one's, if it fits.
        checkpoint.check_base(f"'{lora.name}'", lora.base or base, base)
    check_mixable(model, loras)
    applied = config.lora_scale == "applied"
    down: dict[str, Tensor] = {}  # A [N, R, D] by path
    up: dict[str, Tensor] = {}  # B [N, O, R]
    for path in loras[0].down:
        down[path] = torch.stack([lora.down[path] for lora in loras])
        up[path] = torch.stack([lora.up[path] for lora in loras])
    source = Origin(
        base=base,
        config=config,
        experts=tuple(lora.name for lora in loras),
        scales=tuple(lora.scale if applied else 1.0 for lora in loras),
        rank=loras[0].rank,
        paths=tuple(down),
    )
    return install(model, source, down, up)


def install(
    model: nn.Module,
    made_from: Origin,
    down: Mapping[str, Tensor],
    up: Mapping[str, Tensor],
) -> nn.Module:
    """Replace the linear layers by mixtures of these factors, and let only those train."""
    config = made_from.config
    numbers: dict[nn.Module, int] = {}  # of the decoder layer that a module is part of
    for layer in anatomy(model).layers:
        numbers |= dict.fromkeys(layer.block.modules(), layer.index)
    learning = [name for name, part in model.named_parameters() if part.requires_grad]
    # First all is frozen: what is made from here on requires a gradient.
    model.requires_grad_(False)
    for path in made_from.paths:
        linear = model.get_submodule(path)
        own = beside(linear.weight)
        # Eq. 9: gates read each expert's output g_i(x) [O]; as released, x [D].
        reads_input = config.gate_input == "layer"
        width = linear.in_features if reads_input else linear.out_features
        number = numbers[linear]
        router = Router(width, config.experts, config.top_k, layer=number, **own)
        # Eq. 8: g(x) = sum_i G_i(x) g_i(x), with g_i(x) = W x + scale_i B_i A_i x.
        mixed = LoraMixture(
            linear,
            router,
            down[path].to(**own),
            up[path].to(**own),
            made_from.scales,
            reads=config.gate_input,
            dropout=config.lora_dropout,
        )
        # A new module is in training mode; this one takes the layer's.
        model.set_submodule(path, mixed.train(linear.training))
    model.rocket = replace(made_from, learning=tuple(learning))
    return model


def save(model: nn.Module, folder: str | os.PathLike[str]) -> Path:
    """Write a mixture's experts and gates to a new folder, or nothing; NaN is refused."""
    return checkpoint.save(folder, checkpoint.origin(model, Origin), trained(model))


def load(model: nn.Module, folder: str | os.PathLike[str]) -> nn.Module:
    """Restore a mixture onto its unaltered base, in place and bit for bit, after all checks."""
    # What trains is the model's own matter, and in no manifest.
    return checkpoint.load(model, folder, Origin, _empty, learning=())


def _empty(model: nn.Module, made_from: Origin) -> dict[str, nn.Parameter]:
    """Install a mixture whose factors are still to be filled, and return its parameters."""
    _refuse_mixture(model)
    layers = linears(model, made_from.paths)
    factors = zeros(layers, made_from.rank, len(made_from.experts))
    return trained(install(model, made_from, *factors))


def _refuse_mixture(model: nn.Module) -> None:
    if checkpoint.origin_or_none(model, Origin):
        fix = "rocket.apply.remove takes it off"
        refuse("E-MODEL", f"the model holds a mixture already: {fix}")


def remove(model: nn.Module) -> nn.Module:
    """Take the mixture off again, in place: the base as it was, bit for bit, and what trained."""
    made_from = checkpoint.origin(model, Origin)
    for path in made_from.paths:
        model.set_submodule(path, model.get_submodule(path).base_layer)
    for name in made_from.learning:
        model.get_parameter(name).requires_grad_(True)
    del model.rocket
    return model


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the experts' and gates' parameters by name: what trains and what is saved."""
    parameters: dict[str, nn.Parameter] = {}
    for path in checkpoint.origin(model, Origin).paths:
        mixed = model.get_submodule(path)
        named = {"down": mixed.down, "up": mixed.up, "router": mixed.router.weight}
        parameters |= {f"{path}.{name}": parameter for name, parameter in named.items()}
    return parameters


@contextmanager
def only(model: nn.Module, expert: str) -> Iterator[None]:
    """Send every token to one expert of a mixture in this block (the single experts of Table 5)."""
    experts = checkpoint.origin(model, Origin).experts
    refuse_unknown(expert, experts, "E-NAME", f"no expert '{expert}' in the mixture;")
    parts = [
        model.get_submodule(path) for path in checkpoint.origin(model, Origin).paths
    ]
    for part in parts:
        part.only = experts.index(expert)
    try:
        yield
    finally:
        for part in parts:
            part.only = None
