"""How each arm of *Together* is made from a copy of the base, at the size that the budget says.

A craft takes what all arms share, the copy, and the LoRAs of a bank; it changes the copy in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
from torch import nn

from moebook.data import tasks
from moebook.methods import esft, pesc, rocket
from moebook.methods import upcycling as up
from moebook.methods.rivals import arrow as arrows
from moebook.methods.rivals import mixlora as mixloras
from moebook.methods.rivals import smear as smears
from moebook.methods.rocket.loras import Lora, linears
from moebook.models.anatomy import anatomy, sparse_layers
from moebook.together import Setup, combining

Bank = Mapping[str, Lora]
Make = Callable[[Setup, nn.Module, Bank], nn.Module]
PROJECTIONS = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
)
QV = ("q_proj", "v_proj")  # what Rocket's LoRAs adapt
DOWN = ("down_proj",)  # whose LoRAs become PESC's adapters
# p of Eq. 8, among which the budget chooses.
THRESHOLDS = np.linspace(0.01, 1, 496).tolist()


def chosen_loras(
    setup: Setup, bank: Bank
) -> tuple[tuple[str, ...], dict[str, list[Any]]]:
    """Choose N LoRAs by shots of the mixture (Alg. 1), and deal the shots out to them."""
    shots = [*setup.mixed[: setup.config.shots]]
    read = deepcopy(setup.base)
    nats = rocket.score.log_perplexity(read, setup.tokenizer, bank, shots)
    own = tasks.of_files(setup.rows)
    solved = rocket.score.accuracy(read, setup.tokenizer, bank, shots, own=own)
    scores = rocket.score.scores(nats, solved)
    config = _rocket(setup, bank)
    alike = rocket.choose.similarity(bank, config)
    chosen = rocket.choose.select(scores, alike, config).experts
    dealt: dict[str, list[Any]] = {}
    for name, places in combining.by_expert(nats, chosen).items():
        dealt[name] = [shots[place] for place in places]
    return chosen, dealt


def adapter_sizes(setup: Setup, experts: int, *, step: int = 1) -> pesc.Config:
    """Return PESC's settings whose adapters and LoRA together train what the budget says.

    About a quarter goes to LoRA, as in the protocols of PESC. ``step`` divides the width: 2 where
    LoRAs become adapters, since two neurons of GELU make one linear map, which a rank is.
    """
    host = anatomy(setup.base)
    budget = setup.config.parameters
    # In each of L layers: a router E x D, and E adapters of two matrices, width x D each.
    routers = len(host.layers) * experts * host.hidden
    per_width = 2 * len(host.layers) * experts * host.hidden * step
    per_rank = _per_rank(setup.base, PROJECTIONS)
    usual = max(1, round(budget / 4 / per_rank))

    def size(rank: int) -> tuple[int, int, int]:
        """Return by how much the budget is missed at a rank, the rank, and the best width."""
        left = budget - routers - rank * per_rank  # for adapters
        width = max(1, round(left / per_width))
        return abs(left - width * per_width), rank, width * step

    _, rank, width = min(size(rank) for rank in range(1, 2 * usual + 1))
    return pesc.Config.preset(
        "fixed",
        experts=experts,
        top_k=min(setup.config.top_k, experts),
        adapter_width=width,
        host="lora",
        lora_rank=rank,
        lora_alpha=float(rank),
    )


def bank_rank(
    setup: Setup, targets: Sequence[str], *, chosen: bool, gates: bool = True
) -> int:
    """Return the rank of the bank's LoRAs with which an arm trains what the budget says.

    ``chosen`` and ``gates`` are those of its `Arm`, ``targets`` its bank's projections.
    """
    count = setup.config.experts if chosen else len(setup.rows)
    if targets == DOWN:
        return adapter_sizes(setup, count, step=2).adapter_width // 2
    # A gate reads what its projection reads: a row for each LoRA.
    inputs = sum(part.in_features for part in linears(setup.base, QV).values())
    in_gates = count * inputs if gates else 0
    left = setup.config.parameters - in_gates
    return max(1, round(left / (count * _per_rank(setup.base, QV))))


def _per_rank(model: nn.Module, targets: Sequence[str]) -> int:
    """Count the weights of one rank of a LoRA on these projections: a row of A, a column of B."""
    layers = linears(model, targets).values()
    return sum(layer.in_features + layer.out_features for layer in layers)


# Crafts of a dense base.


def all_parameters(setup: Setup, model: nn.Module, bank: Bank) -> nn.Module:
    """Let every parameter train."""
    return model.requires_grad_(True)


def lora(setup: Setup, model: nn.Module, bank: Bank) -> nn.Module:
    """Put LoRA on all projections."""
    rank = max(1, round(setup.config.parameters / _per_rank(model, PROJECTIONS)))
    config = pesc.Config.preset(
        "fixed", host="lora", lora_rank=rank, lora_alpha=float(rank)
    )
    return pesc.prepare(model, config, sparse=False)


def adapters(start: str = "") -> Make:
    """Return the craft of PESC, whose routers start at random or as upcycling's ``start`` says."""

    def make(setup: Setup, model: nn.Module, bank: Bank) -> nn.Module:
        count = setup.config.adapters
        pesc.prepare(model, adapter_sizes(setup, count))
        return combining.route(model, setup.start(start, count)) if start else model

    return make


def adapters_of_bank(setup: Setup, model: nn.Module, bank: Bank) -> nn.Module:
    """Start PESC's adapters as the bank's LoRAs."""
    pesc.prepare(model, adapter_sizes(setup, len(bank), step=2))
    return combining.start_adapters(model, setup.as_adapters(list(bank.values())))


def adapters_of_choice(setup: Setup, model: nn.Module, bank: Bank) -> nn.Module:
    """Rocket chooses the LoRAs, which become adapters; routers start at their shots' centroids."""
    chosen, shots = chosen_loras(setup, bank)
    pesc.prepare(model, adapter_sizes(setup, len(chosen), step=2))
    start = up.trsu(setup.represent("ffn_input", shots), seed=setup.seed)
    combining.route(model, up.scaled(start, "matched", inputs=setup.inputs))
    loras = [bank[name] for name in chosen]
    return combining.start_adapters(model, setup.as_adapters(loras))


def upcycled(start: str) -> Make:
    """Return the craft of copies of the FFN, whose routers start as ``start`` says."""

    def make(setup: Setup, model: nn.Module, bank: Bank) -> nn.Module:
        count = setup.config.copies
        top_k = min(setup.config.top_k, count)
        config = up.Config(experts=count, top_k=top_k, combine="renormalised")
        model.requires_grad_(True)
        return up.upcycle(model, config, setup.start(start, count))

    return make


def mixture(setup: Setup, model: nn.Module, bank: Bank) -> nn.Module:
    """Put Rocket's mixture of the LoRAs that it chooses on the base."""
    chosen, _ = chosen_loras(setup, bank)
    loras = [bank[name] for name in chosen]
    return rocket.apply.build(model, loras, _rocket(setup, bank))


def _rocket(setup: Setup, bank: Bank) -> rocket.Config:
    experts = min(setup.config.experts, len(bank))
    top_k = min(setup.config.top_k, experts)
    return rocket.Config.preset(
        "fixed", experts=experts, top_k=top_k, candidates=len(bank)
    )


def mixlora(setup: Setup, model: nn.Module, bank: Bank) -> nn.Module:
    """Put MixLoRA on the base, at the rank of Rocket's LoRAs."""
    rank = bank_rank(setup, QV, chosen=True)
    config = mixloras.Config.preset("bank", rank=rank, alpha=float(rank))
    return mixloras.attach(model, None, config, seed=setup.seed).model


def smear(setup: Setup, model: nn.Module, bank: Bank) -> nn.Module:
    """Put SMEAR on the base: one merged LoRA for each prompt."""
    return smears.attach(model, bank, smears.Config(), seed=setup.seed).model


def arrow(setup: Setup, model: nn.Module, bank: Bank) -> nn.Module:
    """Put Arrow on the base, with two LoRAs a token."""
    return arrows.attach(model, bank, arrows.Config(top_k=2), seed=setup.seed).model


def experts_later(setup: Setup, model: nn.Module) -> nn.Module:
    """Let the experts train on that the mixture uses most (ESFT-Gate)."""
    return esft.specialise(model, _selection(setup, model))


def adapters_later(setup: Setup, model: nn.Module) -> nn.Module:
    """Let the adapters train on that the mixture uses most (ESFT-Gate)."""
    return combining.only(model, _selection(setup, model))


def _selection(setup: Setup, model: nn.Module) -> esft.Selection:
    config = esft.Config(
        score="gate", threshold=setup.config.threshold, normalised=True
    )
    return esft.select(esft.measure(model, setup.samples, config), config)


# Crafts of a sparse base.


def full(setup: Setup, model: nn.Module, bank: Bank) -> nn.Module:
    """Let every parameter of a mixture train."""
    return esft.full(model)


def sparse_lora(*, attention: bool) -> Make:
    """Return the craft of LoRA on a mixture, or on its attention alone."""

    def make(setup: Setup, model: nn.Module, bank: Bank) -> nn.Module:
        least = esft.lora(deepcopy(setup.base), rank=1, attention=attention)
        rank = max(1, round(setup.config.parameters / combining.trained(least)))
        return esft.lora(model, rank=rank, scale=1.0, attention=attention)

    return make


def specialised(score: esft.config.Score, *, random: bool = False) -> Make:
    """Return the craft of ESFT: of all thresholds p the one that comes nearest to the budget."""

    def make(setup: Setup, model: nn.Module, bank: Bank) -> nn.Module:
        first = sparse_layers(model)[0].experts
        per_expert = sum(part[0].numel() for part in first.parameters())
        scores = esft.measure(model, setup.samples)

        def off_budget(selection: esft.Selection) -> int:
            return abs(selection.count * per_expert - setup.config.parameters)

        selections = [
            esft.select(scores, esft.Config(score=score, threshold=p, normalised=True))
            for p in THRESHOLDS
        ]
        nearest = min(selections, key=off_budget)
        if random:
            nearest = esft.random_selection(nearest, scores.experts, setup.seed)
        return esft.specialise(model, nearest)

    return make


def beside(setup: Setup, model: nn.Module, bank: Bank) -> nn.Module:
    """Put PESC's adapters behind the mixture's blocks; the host is frozen."""
    count = setup.config.adapters
    layers = len(sparse_layers(setup.base))
    # In each layer: a router E x D, and E adapters of two matrices, width x D each.
    routers = layers * count * anatomy(model).hidden
    per_width = 2 * routers
    width = max(1, round((setup.config.parameters - routers) / per_width))
    top_k = min(setup.config.top_k, count)
    return combining.beside_experts(model, experts=count, top_k=top_k, width=width)
