"""The arms: each of the four methods, its rivals and the combinations, on one base and one budget.

Every arm starts as the base's function, but for those whose LoRAs a part of the budget has trained.
Arms whose size is free train as many parameters as the budget says; where all of the weights train
(full fine-tuning, upcycled experts) the count is what it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from moebook import nn as mnn
from moebook.methods import esft, pesc, rocket
from moebook.methods import upcycling as up
from moebook.methods.rivals import mixlora, table
from moebook.methods.rivals.tuning import Data
from moebook.methods.rocket.loras import Lora, linears
from moebook.models.anatomy import anatomy, sparse_layers
from moebook.together import budget, combining
from moebook.together.setup import Setup
from moebook.training.loop import History, Penalty

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
BALANCE = 0.01  # weight of the balance loss
COMPARED = {
    "lora": ["full"],
    "pesc": ["lora", "full", "gate"],
    "su": ["full"],
    "trsu": ["su"],
    "crsu": ["su"],
    "rocket": ["lora", "pesc", "mixlora", "smear", "arrow"],
    "esft": ["su"],
    "mixlora": ["pesc"],
    "pesc_trsu": ["pesc"],
    "pesc_crsu": ["pesc"],
    "pesc_bank": ["pesc"],
    "pesc_rocket": ["pesc_bank"],
    "pesc_esft": ["pesc"],
    "gate": ["lora", "full", "random_gate"],
    "token": ["gate"],
    "lora_attention": ["lora"],
}
PAIRS = [(arm, other) for arm, others in COMPARED.items() for other in others]
THRESHOLDS = np.linspace(
    0.01, 1, 496
).tolist()  # p of Eq. 8, among which the budget chooses


@dataclass(frozen=True)
class Arm:
    """How an arm is made from a copy of the base, in place, and what trains before and later."""

    make: Make
    penalty: Penalty | None = None
    bank: tuple[
        str, ...
    ] = ()  # projections of the LoRAs that half of the budget trains first
    # Made after half of the budget.
    later: Callable[[Setup, nn.Module], nn.Module] | None = None
    sized: bool = True  # whether it trains the budget's number of parameters
    chosen: bool = False  # whether N LoRAs are chosen from the bank, else all are taken
    # Whether each projection that LoRAs adapt has a router that trains.
    gates: bool = True


@dataclass(frozen=True)
class Trained:
    """An arm after its training, and what that took."""

    model: nn.Module
    histories: tuple[History, ...]  # of its stages, the bank's left out
    spent: float  # of the budget, in its unit
    count: int  # parameters that trained last
    bank: Bank = field(default_factory=dict)


def train(
    setup: Setup, arm: Arm, *, lr: float, amount: float, kind: budget.Kind = "tokens"
) -> Trained:
    """Make an arm and train it until the amount, of tokens or of FLOPs, is spent."""
    model, bank, spent = deepcopy(setup.base), dict[str, Lora](), 0.0
    if arm.bank:
        bank, spent = _bank(setup, arm, lr, amount / 2, kind)
    with torch.random.fork_rng():
        torch.manual_seed(setup.seed)
        model = arm.make(setup, model, bank)
    histories = []
    for part, change in [(amount / 2, arm.later)] * bool(arm.later) + [(amount, None)]:
        cost = budget.price(kind, model, setup.batches(setup.encoded), arm.penalty)
        steps, paid = budget.affordable(cost, part - spent)
        spent += paid
        histories.append(
            setup.fit(model, setup.encoded, lr=lr, steps=steps, penalty=arm.penalty)
        )
        model = change(setup, model) if change else model
    return Trained(model, tuple(histories), spent, combining.trained(model), bank)


def arms(*, sparse: bool) -> dict[str, Arm]:
    """Return all arms by name, of a dense base or of a sparse one."""
    routed = Arm(_pesc(), _balanced)
    copied = Arm(_upcycled("su"), _balanced, sized=False)
    if sparse:
        return {
            "full": Arm(lambda _, model, __: esft.full(model), sized=False),
            "lora": Arm(partial(_sparse_lora, False)),
            "lora_attention": Arm(partial(_sparse_lora, True)),
            "token": Arm(partial(_specialised, "token", False)),
            "gate": Arm(partial(_specialised, "gate", False)),
            "random_gate": Arm(partial(_specialised, "gate", True)),
            "pesc": Arm(_beside, _balanced),
        }
    return {
        "full": Arm(lambda _, model, __: model.requires_grad_(True), sized=False),
        "lora": Arm(_lora),
        "pesc": routed,
        "su": copied,
        "trsu": replace(copied, make=_upcycled("trsu")),
        "crsu": replace(copied, make=_upcycled("crsu")),
        "rocket": Arm(_mixture, bank=QV, chosen=True),
        "esft": replace(copied, later=_experts_later),
        "mixlora": Arm(
            _rival("mixlora"), mixlora.penalty(mixlora.Config.preset("bank"))
        ),
        "smear": Arm(_rival("smear"), bank=QV),
        "arrow": Arm(_rival("arrow"), bank=QV, gates=False),
        "pesc_trsu": replace(routed, make=_pesc("trsu")),
        "pesc_crsu": replace(routed, make=_pesc("crsu")),
        "pesc_bank": Arm(_pesc_of_bank, _balanced, bank=("down_proj",)),
        "pesc_rocket": Arm(
            _pesc_of_choice, _balanced, bank=("down_proj",), chosen=True
        ),
        "pesc_esft": replace(routed, later=_adapters_later),
    }


def choose(setup: Setup, bank: Bank) -> tuple[tuple[str, ...], dict[str, list[Any]]]:
    """Choose N LoRAs by shots of the mixture (Alg. 1), and deal the shots out to them."""
    shots = [*setup.mixed[: setup.config.shots]]
    read = deepcopy(setup.base)
    nats = rocket.score.log_perplexity(read, setup.tokenizer, bank, shots)
    solved = rocket.score.accuracy(read, setup.tokenizer, bank, shots)
    config = _rocket(setup, bank)
    alike = rocket.choose.similarity(bank, config)
    picked = rocket.choose.select(
        rocket.score.scores(nats, solved), alike, config
    ).experts
    dealt = combining.by_expert(nats, picked)
    return picked, {
        name: [shots[shot] for shot in some] for name, some in dealt.items()
    }


def adapter_sizes(setup: Setup, experts: int, *, step: int = 1) -> pesc.Config:
    """Return PESC's settings whose adapters and LoRA together train what the budget says.

    About a quarter goes to LoRA, as in the protocols of PESC; ``step`` divides the width.
    """
    host, config = anatomy(setup.base), setup.config
    per_rank = _per_rank(setup.base, PROJECTIONS)
    per_width = 2 * len(host.layers) * experts * host.hidden * step
    # Without the routers.
    left = config.parameters - len(host.layers) * experts * host.hidden
    usual = max(1, round(config.parameters / 4 / per_rank))

    def size(rank: int) -> tuple[int, int, int]:
        width = max(1, round((left - rank * per_rank) / per_width))
        return abs(left - rank * per_rank - width * per_width), rank, width * step

    _, rank, width = min(size(rank) for rank in range(1, 2 * usual + 1))
    return pesc.Config.preset(
        "fixed",
        experts=experts,
        top_k=min(config.top_k, experts),
        adapter_width=width,
        host="lora",
        lora_rank=rank,
        lora_alpha=float(rank),
    )


def bank_rank(setup: Setup, arm: Arm) -> int:
    """Return the rank of the bank's LoRAs with which an arm trains what the budget says."""
    config, count = (
        setup.config,
        setup.config.experts if arm.chosen else len(setup.rows),
    )
    if arm.bank == ("down_proj",):
        return adapter_sizes(setup, count, step=2).adapter_width // 2
    widths = sum(part.in_features for part in linears(setup.base, QV).values())
    gates = count * widths * arm.gates
    return max(
        1, round((config.parameters - gates) / count / _per_rank(setup.base, QV))
    )


def _bank(
    setup: Setup, arm: Arm, lr: float, amount: float, kind: budget.Kind
) -> tuple[dict[str, Lora], float]:
    """Train a LoRA a task, all for as many steps, until the amount is spent."""
    rank = bank_rank(setup, arm)
    batches = {
        task: setup.batches(setup.encode(rows)) for task, rows in setup.rows.items()
    }
    alone = deepcopy(setup.base)
    if kind == "flops":
        config = rocket.Config.preset("fixed", experts=1, top_k=1, lora_dropout=0.0)
        rocket.apply.build(alone, [_blank(setup.base, arm.bank, rank)], config)
    prices = [budget.price(kind, alone, each, None) for each in batches.values()]
    steps, spent = budget.affordable(
        lambda step: sum(price(step) for price in prices), amount
    )
    bank = rocket.bank.train(
        deepcopy(setup.base),
        setup.tokenizer,
        setup.rows,
        rank=rank,
        alpha=float(rank),
        targets=arm.bank,
        seed=setup.seed,
        format=setup.format,
        max_length=setup.max_length,
        **{**setup.recipe_of(steps), "lr": lr},
    )
    return bank, spent


def _blank(model: nn.Module, targets: Sequence[str], rank: int) -> Lora:
    layers = linears(model, targets).items()
    down = {path: torch.zeros(rank, layer.in_features) for path, layer in layers}
    write = {path: torch.zeros(layer.out_features, rank) for path, layer in layers}
    return Lora("blank", rank, float(rank), down, write)


def _per_rank(model: nn.Module, targets: Sequence[str]) -> int:
    """Parameters of one rank of a LoRA on these projections."""
    layers = linears(model, targets).values()
    return sum(layer.in_features + layer.out_features for layer in layers)


def _balanced(model: nn.Module) -> Tensor:
    """Return the balance loss of PESC (Eq. 10) and upcycling (Eq. 3), at Switch's weight."""
    return BALANCE * mnn.balance(mnn.routers(model))


def _lora(setup: Setup, model: nn.Module, bank: Bank) -> nn.Module:
    rank = max(1, round(setup.config.parameters / _per_rank(model, PROJECTIONS)))
    config = pesc.Config.preset(
        "fixed", host="lora", lora_rank=rank, lora_alpha=float(rank)
    )
    return pesc.prepare(model, config, sparse=False)


def _pesc(start: str = "") -> Make:
    def make(setup: Setup, model: nn.Module, bank: Bank) -> nn.Module:
        count = setup.config.adapters
        pesc.prepare(model, adapter_sizes(setup, count))
        return combining.route(model, setup.start(start, count)) if start else model

    return make


def _pesc_of_bank(setup: Setup, model: nn.Module, bank: Bank) -> nn.Module:
    pesc.prepare(model, adapter_sizes(setup, len(bank), step=2))
    return combining.start_adapters(model, setup.as_adapters(list(bank.values())))


def _pesc_of_choice(setup: Setup, model: nn.Module, bank: Bank) -> nn.Module:
    """Rocket chooses the LoRAs, which become adapters; routers start at their shots' centroids."""
    chosen, shots = choose(setup, bank)
    pesc.prepare(model, adapter_sizes(setup, len(chosen), step=2))
    start = up.trsu(setup.represent("ffn_input", shots), seed=setup.seed)
    combining.route(model, up.scaled(start, "matched", inputs=setup.inputs))
    return combining.start_adapters(
        model, setup.as_adapters([bank[name] for name in chosen])
    )


def _upcycled(start: str) -> Make:
    def make(setup: Setup, model: nn.Module, bank: Bank) -> nn.Module:
        config, count = setup.config, setup.config.copies
        model.requires_grad_(True)
        made = up.Config(
            experts=count, top_k=min(config.top_k, count), combine="renormalised"
        )
        return up.upcycle(model, made, setup.start(start, count))

    return make


def _mixture(setup: Setup, model: nn.Module, bank: Bank) -> nn.Module:
    chosen, _ = choose(setup, bank)
    return rocket.apply.build(
        model, [bank[name] for name in chosen], _rocket(setup, bank)
    )


def _rocket(setup: Setup, bank: Bank) -> rocket.Config:
    size = min(setup.config.experts, len(bank))
    sizes = {
        "experts": size,
        "top_k": min(setup.config.top_k, size),
        "candidates": len(bank),
    }
    return rocket.Config.preset("fixed", **sizes)


def _rival(name: str) -> Make:
    """Put a rival on the model by a training of one step whose rate, in the warm-up, is zero."""

    def make(setup: Setup, model: nn.Module, bank: Bank) -> nn.Module:
        rank = bank_rank(setup, Arm(_mixture, bank=QV, chosen=True))
        changes: dict[str, dict[str, Any]] = {
            "mixlora": {"rank": rank, "alpha": float(rank)},
            "arrow": {"top_k": 2},
        }
        arm = table.Arm(rival=name, rated=name, changes=changes.get(name, {}))
        rows = Data(setup.encoded, pad_id=setup.pad_id)
        still = {
            **setup.recipe,
            "lr": 1.0,
            "steps": 1,
            "warmup": 0.99,
            "seed": setup.seed,
        }
        table.tuned(model, arm, bank, rows, table.Shipped(), **still)
        return model

    return make


def _experts_later(setup: Setup, model: nn.Module) -> nn.Module:
    """Let the experts train on that the mixture uses most (ESFT-Gate)."""
    return esft.specialise(model, _selection(setup, model))


def _adapters_later(setup: Setup, model: nn.Module) -> nn.Module:
    return combining.only(model, _selection(setup, model))


def _selection(setup: Setup, model: nn.Module) -> esft.Selection:
    config = esft.Config(
        score="gate", threshold=setup.config.threshold, normalised=True
    )
    return esft.select(esft.measure(model, setup.samples, config), config)


def _sparse_lora(
    attention: bool, setup: Setup, model: nn.Module, bank: Bank
) -> nn.Module:
    one = esft.lora(deepcopy(setup.base), rank=1, attention=attention)
    rank = max(1, round(setup.config.parameters / combining.trained(one)))
    return esft.lora(model, rank=rank, scale=1.0, attention=attention)


def _specialised(
    score: esft.config.Score, random: bool, setup: Setup, model: nn.Module, bank: Bank
) -> nn.Module:
    """Train the best experts: of all thresholds p the one that comes nearest to the budget."""
    layers = sparse_layers(model)
    each = sum(part[0].numel() for part in layers[0].experts.parameters())
    scores = esft.measure(model, setup.samples)
    made = (esft.Config(score=score, threshold=p, normalised=True) for p in THRESHOLDS)
    picked = min(
        (esft.select(scores, config) for config in made),
        key=lambda chosen: abs(chosen.count * each - setup.config.parameters),
    )
    if random:
        picked = esft.random_selection(picked, scores.experts, setup.seed)
    return esft.specialise(model, picked)


def _beside(setup: Setup, model: nn.Module, bank: Bank) -> nn.Module:
    """Put PESC's adapters behind the mixture's blocks; the host is frozen."""
    count, hidden = setup.config.adapters, anatomy(model).hidden
    layers = len(sparse_layers(setup.base))
    left = setup.config.parameters - layers * count * hidden
    width = max(1, round(left / (2 * layers * count * hidden)))
    sizes = {"experts": count, "top_k": min(setup.config.top_k, count), "width": width}
    return combining.beside_experts(model, **sizes)
