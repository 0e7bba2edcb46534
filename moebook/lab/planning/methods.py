"""The methods as a plan takes them: what each makes of a host, on meta as on any device."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import nn

from moebook.experiments import Arm
from moebook.lab import papers
from moebook.methods import esft as specialised
from moebook.methods import pesc as crafted
from moebook.methods import rocket
from moebook.methods import upcycling as upcycled
from moebook.methods.esft.score import check_gates
from moebook.models.anatomy import count, sparse_layers
from moebook.models.lora import put_on
from moebook.models.skeleton import configuration, skeleton

__all__ = [
    "Method",
    "bank_lora",
    "esft",
    "full",
    "lora",
    "mixture",
    "pesc",
    "upcycling",
]

Q_AND_V = ("q_proj", "v_proj")  # what the LoRAs of Rocket's bank adapt (Table 12)


@dataclass(frozen=True)
class Method:
    """What is made of a host before it trains; equal ``settings`` give equal models."""

    #: What decides the model.
    settings: Hashable
    #: Changes a host in place and returns it.
    make: Callable[[nn.Module], nn.Module] = field(compare=False, repr=False)
    #: It keeps its frozen linear layers in 4 bits; on meta they are not.
    quantised: bool = False


def of_arm(arm: Arm, settings: Mapping[str, Any]) -> Method:
    """Take an arm of an experiment, as the notebook makes it with these parameters.

    What would be packed in 4 bits is not on meta, where nothing has a value; a plan allows for it.
    """
    packed = getattr(arm.configure(settings), "host", "") == "qlora"
    values = {**settings, "host": "lora"} if packed else settings
    made_by = (arm.build, arm.configure(values))
    return Method(made_by, partial(arm.make, settings=values), packed)


def full() -> Method:
    """Train all parameters, of a dense host or a mixture."""
    return Method("full", lambda host: host.requires_grad_(True))


def pesc(config: crafted.Config, *, sparse: bool = True) -> Method:
    """Craft a dense host, or tune it by LoRA alone."""
    packed = config.host == "qlora"
    config = replace(config, host="lora") if packed else config
    made = partial(crafted.prepare, config=config, sparse=sparse)
    return Method(("pesc", config, sparse), made, packed)


def upcycling(config: upcycled.Config) -> Method:
    """Copy every FFN into experts, and train all parameters."""

    def made(host: nn.Module) -> nn.Module:
        return upcycled.upcycle(host, config).requires_grad_(True)

    return Method(("upcycling", config), made)


def mixture(config: rocket.Config, rank: int) -> Method:
    """Put a mixture of LoRAs on queries and values; experts and gates train."""

    def made(host: nn.Module) -> nn.Module:
        experts = config.experts
        layers = rocket.loras.linears(host, Q_AND_V)
        down, up = rocket.loras.zeros(layers, rank, experts)
        origin = rocket.apply.Origin(
            base="",
            config=config,
            experts=tuple(map(str, range(experts))),
            scales=(1.0,) * experts,
            rank=rank,
            paths=tuple(down),
        )
        return rocket.apply.install(host, origin, down, up)

    return Method(("mixture", config, rank), made)


def bank_lora(rank: int) -> Method:
    """Train one LoRA on queries and values, as those of Rocket's bank are."""

    def made(host: nn.Module) -> nn.Module:
        dropout = rocket.bank.RECIPE["dropout"]
        shape = rocket.bank.form(host, rank, rank, Q_AND_V, dropout)
        return put_on(host, shape)

    return Method(("bank_lora", rank), made)


def lora(rank: int, scale: float, *, attention: bool = False) -> Method:
    """Put LoRA on a mixture as ESFT's paper compares with it."""
    made = partial(specialised.lora, rank=rank, scale=scale, attention=attention)
    return Method(("lora", rank, scale, attention), made)


def esft(share: float) -> Method:
    """Train this share of each layer's routed experts."""

    def made(host: nn.Module) -> nn.Module:
        check_gates(host)
        chosen = {}
        for layer in sparse_layers(host):
            chosen[layer.index] = tuple(range(max(1, round(share * layer.count))))
        selection = specialised.Selection(experts=chosen)
        return specialised.specialise(host, selection)

    return Method(("esft", share), made)


def esft_share(score: str) -> float:
    """Return the share of experts that a score's printed storage implies (Fig. 4), all tasks' mean.

    That of FFT is all parameters of DeepSeek-V2-Lite.
    """
    printed = papers.wide("esft", "figure_4")["storage"]
    host = skeleton(configuration("deepseek-ai/DeepSeek-V2-Lite"))
    share = printed[f"ESFT-{score.title()}"] / printed["FFT"]
    return float(share * count(host) / routed(host))


def routed(host: nn.Module) -> int:
    """Count the parameters of all routed experts."""
    return sum(count(layer.experts) for layer in sparse_layers(host))
