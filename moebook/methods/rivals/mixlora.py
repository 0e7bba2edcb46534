"""MixLoRA: no bank; every FFN becomes a mixture of E experts that share it, and differ by LoRAs.

``p = softmax(G h)`` over E, the K largest divided by their sum are the gates g, and
``y = sum_e g_e (W_d + s B_e^d A_e^d)[act((W_g + s B_e^g A_e^g) h) * (W_u + s B_e^u A_e^u) h]``.
Attention gets plain LoRAs on q, k, v and o. All of it is trained from scratch on the target's rows,
with ``c E sum_{slot, e} f_{slot e} P_e`` added to the loss. There f is the share of the tokens
whose slot-th choice is e, and P the mean probability, padding left out; where all P_e are alike it
is c K, and it can be less. Li et al. (2024), arXiv 2404.15159; code: TUDB-Labs/MixLoRA and
TUDB-Labs/MoE-PEFT.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, cast

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from moebook import kernels
from moebook import nn as mnn
from moebook.errors import located, refuse
from moebook.kernels.lora_mixture import lora_mixture
from moebook.methods.rivals import tuning
from moebook.methods.rivals.mixing import Fixed, Mixed
from moebook.methods.rivals.tuning import Data, Tuned
from moebook.methods.rocket.bank import Bank
from moebook.methods.rocket.loras import linears
from moebook.models import checkpoint
from moebook.models.anatomy import GATED, anatomy, beside, dense_layers
from moebook.nn.experts import check_gated
from moebook.runtime import random_states_kept
from moebook.settings import Count, Positive, Presets, Seed, Share, checked, settings
from moebook.training.loop import Penalty

__all__ = [
    "Config",
    "attach",
    "load",
    "penalty",
    "tuned",
]

Factors = tuple[nn.Parameter, nn.Parameter]
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
TABLE_12 = ("q_proj", "v_proj")


@settings
class Config(Presets):
    """The mixture's shape and balance. The defaults are the preset ``released``, but for balance.

    ``paper`` has the README's c and a term a layer (unverified in the paper's text);
    ``released`` pools the layers; ``bank`` is what Table 12 leaves: four experts on q and v.

    Attributes:
        placement: Experts in the FFN and LoRAs on attention (code), or experts on q and v, each
            with a router of its own (what Rocket's Table 12 says of all methods).
        experts, top_k: E and K.
        rank, alpha, dropout: Of every LoRA; s = alpha / rank.
        coefficient: c; README 1e-2, the code's default 1e-3.
        balance: Each layer's own term, their mean; or one term over the tokens of all layers
            (released), to which layers that each use half of the experts look balanced.
        rate: Learning rate of the routers; None for that of the LoRAs.
    """

    placement: Literal["ffn", "projections"] = "ffn"
    experts: Count = 8
    top_k: Count = 2
    rank: Count = 16
    alpha: Positive = 32.0
    dropout: Share = 0.05
    coefficient: Annotated[float, Field(ge=0)] = 1e-3
    balance: Literal["layer", "pooled"] = "layer"
    rate: Positive | None = None

    def __post_init__(self) -> None:
        if self.top_k > self.experts:
            refuse(
                "E-RANGE",
                f"top_k is {self.top_k}, expected 1 to {self.experts} (experts, E)",
            )

    PRESETS: ClassVar = {
        "paper": {"coefficient": 1e-2},
        "released": {"balance": "pooled"},
        "bank": {"placement": "projections", "experts": 4, "alpha": 16.0},
    }


@settings
class Origin(tuning.Origin):
    """What a MixLoRA model was made from."""

    method: ClassVar[str] = "mixlora"
    config: Config


class Gate(nn.Module):
    """A token's gates ``[.., E]``: 0 but for the K chosen experts', which sum to 1."""

    def __init__(self, router: mnn.Router) -> None:
        super().__init__()
        self.router = router
        nn.init.normal_(router.weight, std=0.02)  # as released

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[.., E]`` for ``x [.., D]``."""
        # The K largest p over their sum are the softmax over the K largest logits G h.
        routing = self.router(x)
        gates = routing.weights.new_zeros(len(routing.ids), len(self.router.weight))
        return gates.scatter(1, routing.ids, routing.weights).unflatten(0, x.shape[:-1])


class FFN(nn.Module):
    """Stands in for a gated MLP: E experts that are the MLP with LoRAs, K of them a token.

    Each runs on the MLP's own gate and up, computed once. What its down makes of them is linear, so
    it too runs once, on their weighted sum (released: once for each chosen expert).
    """

    def __init__(
        self, mlp: nn.Module, weigh: Gate, parts: dict[str, Factors], made: Config
    ):
        super().__init__()
        projections = [getattr(mlp, name) for name in GATED]
        with located("", fix="placement='projections' leaves the MLP as it is"):
            check_gated(mlp, *projections, who="MixLoRA's experts")
        self.base_layer = mlp
        self.weigh = weigh
        self.downs = nn.ParameterDict({name: down for name, (down, _) in parts.items()})
        self.ups = nn.ParameterDict({name: up for name, (_, up) in parts.items()})
        self.scale = made.alpha / made.rank
        self.dropout = made.dropout
        self.top_k = made.top_k

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[B, T, D]`` for ``x [B, T, D]``."""
        mlp = self.base_layer
        gates = self.weigh(x)  # [B, T, E]
        weights, ids = gates.topk(self.top_k)  # [B, T, K]
        # Slot k has each token's k-th expert as a row of E numbers, one of them 1.
        slots = F.one_hot(ids, gates.shape[-1]).to(gates).unbind(-2)
        shares = weights.unsqueeze(-1).unbind(-2)  # [B, T, 1], K times

        # W_g h and W_u h are those of all experts: [B, T, F].
        gate = mlp.gate_proj(x)
        up = mlp.up_proj(x)
        mixed: Tensor | int = 0  # sum_e g_e hidden_e
        experts = []
        for share, slot in zip(shares, slots, strict=True):
            # act((W_g + s B_e^g A_e^g) h) * (W_u + s B_e^u A_e^u) h, of slot's expert e.
            of_gate = self._add("gate_proj", x, gate, slot)
            of_up = self._add("up_proj", x, up, slot)
            hidden = mlp.act_fn(of_gate) * of_up  # [B, T, F]
            mixed = mixed + share.to(hidden) * hidden
            experts.append((share * slot, hidden))

        # W_d of the sum, and then g_e s B_e^d A_e^d hidden_e of each expert.
        y = mlp.down_proj(mixed)
        for own, hidden in experts:
            y = self._add("down_proj", hidden, y, own)
        return y

    def _add(self, name: str, x: Tensor, base: Tensor, gates: Tensor) -> Tensor:
        down = self.downs[name]
        up = self.ups[name]
        source = x.to(down.dtype)
        # Drawn anew for each projection and slot.
        if self.training and self.dropout:
            source = mnn.dropout(source, self.dropout)
        return lora_mixture(source, base, gates, down, up, self.scale)


@checked
def attach(
    model: nn.Module, bank: Bank | None, config: Config, *, seed: Seed = 0
) -> Tuned:
    """Put fresh experts, routers and LoRAs on the base; the bank goes unused."""
    tuning.refuse_second(model)
    with random_states_kept():
        torch.manual_seed(seed)
        return _install(model, _origin(model, config))


@checked
def tuned(
    model: nn.Module,
    bank: Bank | None,
    data: Data,
    config: Config,
    *,
    seed: Seed = 0,
    **recipe: Any,
) -> Tuned:
    """Put fresh experts, routers and LoRAs on the base and train them; the bank goes unused."""
    result = attach(model, bank, config, seed=seed)
    more = {"penalty": penalty(config), "seed": seed, **recipe}
    return tuning.fit(result, data, rate=config.rate, names=("router",), **more)


def load(model: nn.Module, folder: str | Path) -> Tuned:
    """Restore what `Tuned.save` wrote onto its base."""

    def install(host: nn.Module, origin: Origin) -> Tuned:
        tuning.check_paths(folder, origin, _paths(host, origin.config))
        return _install(host, origin)

    return tuning.restored(model, folder, Origin, install)


def penalty(config: Config) -> Penalty:
    """Return the balance loss of the last pass, ``c K`` where routing is uniform."""
    # The kernel's f is the share of all K slots together: K times it is their sum.
    weight = config.coefficient * config.top_k  # c K

    def balance(model: nn.Module) -> Tensor:
        routers = mnn.routers(model)
        if not routers:
            missing = "the model has no experts of MixLoRA"
            refuse("E-MODEL", f"no routers to balance: {missing}; attach them first")
        if config.balance == "pooled":
            return weight * _pooled(routers)
        # `mnn.balance` adds up the routers' terms; their mean is taken.
        return weight * mnn.balance(routers) / len(routers)

    return balance


def _pooled(routers: Sequence[mnn.Router]) -> Tensor:
    """Return one term, ``E sum_e f_e P_e``, over the tokens of all L layers together."""
    trace = cast(mnn.Trace, routers[0].trace)  # `_install` gave all routers the same
    decisions = [trace.decisions[router.layer] for router in routers]
    logits = torch.cat([decision.logits for decision in decisions])  # [L * T, E]
    ids = torch.cat([decision.ids for decision in decisions])  # [L * T, K]
    mask = trace.padding(len(decisions[0].ids))  # [T]
    if mask is not None:
        mask = mask.repeat(len(routers))  # the tokens of each layer are the same
    return kernels.balance_loss(logits, ids, mask=mask)


def _paths(model: nn.Module, config: Config) -> list[str]:
    """Return the paths of all that is replaced: linear layers, then MLPs."""
    in_ffn = config.placement == "ffn"
    paths = list(linears(model, ATTENTION if in_ffn else TABLE_12))
    if in_ffn:
        mlps = {layer.mlp for layer in dense_layers(anatomy(model), None, "MixLoRA")}
        paths += [path for path, part in model.named_modules() if part in mlps]
    return paths


def _origin(model: nn.Module, config: Config) -> Origin:
    return Origin(
        base=checkpoint.fingerprint(model),
        config=config,
        paths=tuple(_paths(model, config)),
        mix="outputs",
        names=tuple(f"expert {n}" for n in range(config.experts)),
        rank=config.rank,
        scale=config.alpha / config.rank,
    )


def _install(model: nn.Module, origin: Origin) -> Tuned:
    trace = mnn.Trace()
    made = {}
    # Numbered by module, not by layer, since q and v of a layer have a router each.
    for number, path in enumerate(origin.paths):
        traced = {"layer": number, "trace": trace}
        made[path] = _part(model.get_submodule(path), origin.config, traced)
    hooks = trace.follow(anatomy(model).decoder)
    return replace(tuning.put(model, origin, made), hooks=hooks)


def _part(old: nn.Module, config: Config, traced: dict[str, Any]) -> nn.Module:
    """Make what stands in for an MLP, or for a linear layer: its experts, or its one LoRA."""
    at = beside(next(old.parameters()))

    def factors(linear: nn.Module, count: int) -> Factors:
        # A [count, R, in] and B [count, out, R]; with B = 0 each starts as the base.
        bound = linear.in_features**-0.5  # of PEFT's start: Kaiming with a = sqrt 5
        down = torch.empty(count, config.rank, linear.in_features, **at)
        down.uniform_(-bound, bound)
        up = torch.zeros(count, linear.out_features, config.rank, **at)
        return nn.Parameter(down), nn.Parameter(up)

    def gate(width: int) -> Gate:
        return Gate(mnn.Router(width, config.experts, config.top_k, **traced, **at))

    is_mlp = not hasattr(old, "in_features")
    if is_mlp:
        parts = {name: factors(getattr(old, name), config.experts) for name in GATED}
        return FFN(old, gate(old.gate_proj.in_features), parts, config)

    routed = config.placement == "projections"
    scale = config.alpha / config.rank
    down, up = factors(old, config.experts if routed else 1)
    # A plain LoRA is one expert at weight 1.
    weigh = gate(old.in_features) if routed else Fixed(torch.ones(1, **at))
    return Mixed(old, down, up, scale, weigh, mix="outputs", dropout=config.dropout)
