"""Calls of *Together* that are right, and what they must come to."""

import math

import numpy as np
import pandas as pd
import torch
from torch.nn import functional as F

from moebook import nn as mnn
from moebook import together
from moebook.methods import pesc
from moebook.methods.rocket.loras import Lora
from moebook.methods.upcycling.starts import Start
from moebook.together import budget, combining
from moebook.training.batches import Batches
from tests import tokens
from tests.faults.healthy import hosts
from tests.faults.healthy.pesc import CONFIG, logits
from tests.faults.healthy.training import true_nats
from tests.faults.hostile import Row

L = 2
E = 4
D = 8


def true_affordable(cost, budget):
    """Step after step, by the half of the next one."""
    if not math.isfinite(budget) or budget > 1e7:
        raise ValueError(budget)
    prices = [cost(step) for step in range(2000)]
    if not all(math.isfinite(price) and price > 0 for price in prices):
        raise ValueError("cost")
    steps = 1
    spent = prices[0]
    while spent + prices[steps] / 2 <= budget:
        spent = spent + prices[steps]
        steps = steps + 1
    return steps, spent


def price(kind, step):
    batches = Batches(hosts.rows(), 3, seed=0, pad_id=2)
    return budget.price(kind, hosts.host(), batches, None)(step)


def crafted():
    return pesc.craft(hosts.host(), CONFIG)


def start():
    """Routers for both layers, all of one length."""
    weights = torch.randn(L, E, D, generator=torch.Generator().manual_seed(2))
    return Start(weights=F.normalize(weights, dim=-1))


def true_routed(start):
    weights = start.weights
    if weights.shape != (L, E, D) or not weights.isfinite().all():
        raise ValueError("start")
    return list(weights.float())


def routed(start):
    return [router.weight for router in mnn.routers(combining.route(crafted(), start))]


def nats():
    table = [[1.0, 2.0, 3.0], [2.0, 1.0, 4.0], [5.0, 5.0, 3.5]]
    return pd.DataFrame(table, index=list("abc"))


def true_dealt(nats, experts):
    """Each shot to the LoRA with the least nats."""
    if not {*experts} <= {*nats.index} or not len(experts) or not nats.size:
        raise ValueError(experts)
    lines = {name: nats.loc[name].to_numpy(float) for name in experts}
    if not all(np.isfinite(line).all() for line in lines.values()):
        raise ValueError("nats")
    dealt = {name: [] for name in experts}
    best = np.min(list(lines.values()), axis=0)
    for shot, least in enumerate(best):
        owner = next(name for name in experts if lines[name][shot] == least)
        dealt[owner].append(shot)
    return {
        name: shots or [int(np.argmin(lines[name] - best))]
        for name, shots in dealt.items()
    }


def down_lora(name="a", seed=0):
    """A LoRA on the last projection of the MLPs."""
    generator = torch.Generator().manual_seed(seed)
    paths = [f"model.layers.{n}.mlp.down_proj" for n in range(L)]
    down = {path: torch.randn(2, 12, generator=generator) for path in paths}
    return Lora(
        name,
        2,
        4.0,
        down,
        {path: torch.randn(D, 2, generator=generator) for path in paths},
    )


ROWS = {
    "together.budget.affordable": Row(
        budget.affordable,
        lambda: {"cost": lambda step: 2.0 + step % 3, "budget": 20.0},
        true_affordable,
        more={
            "cost": {
                "nan": lambda step: math.nan,
                "free": lambda step: 0.0,
                "negative": lambda step: -1.0,
            }
        },
        settings=("cost",),
    ),
    "together.budget.price": Row(
        price,
        lambda: {"kind": "tokens", "step": 0},
        settings=("step",),
    ),
    "together.budget.measured": Row(
        lambda batch: budget.measured(hosts.host(), [batch], None),
        lambda: {"batch": hosts.batch()},
        fine={
            "batch[input_ids]": "zero",
            "batch[labels]": "zero | negative",
            "batch[attention_mask]": "zero",
        },
    ),
    "together.combining.route": Row(
        routed, lambda: {"start": start()}, true_routed, tolerance=1e-3
    ),
    "together.combining.by_expert": Row(
        combining.by_expert,
        lambda: {"nats": nats(), "experts": ["a", "b"]},
        true_dealt,
        several=("experts",),
    ),
    "together.combining.as_adapters": Row(
        lambda loras, batches: combining.as_adapters(hosts.host(), loras, batches).up,
        lambda: {
            "loras": [down_lora(), down_lora("b", 1)],
            "batches": 3 * [hosts.seen()],
        },
        settings=("loras",),
        fine={
            "batches[0][input_ids]": "zero",
            "batches[0][attention_mask]": "zero | dtype",
            "batches": "long",
        },
        more={"loras": {"empty": []}},
    ),
    "together.combining.beside_experts": Row(
        lambda experts, top_k, width: logits(
            combining.beside_experts(
                hosts.sparse(), experts=experts, top_k=top_k, width=width
            )
        ),
        lambda: {"experts": 4, "top_k": 2, "width": 2},
        lambda experts, top_k, width: logits(hosts.sparse()),
    ),
    "together.texts": Row(
        lambda size, length, seed: len(
            together.texts(tokens.byte_tokenizer(), size, length=length, seed=seed)
        ),
        lambda: {"size": 2, "length": 16, "seed": 0},
        fine={"seed": "negative | zero | huge", "length": "huge"},
    ),
    "together.forgotten": Row(
        lambda plain, pad_id: together.forgotten(
            hosts.host(), hosts.host(), plain, pad_id=pad_id
        ),
        lambda: {"plain": hosts.rows(), "pad_id": 2},
        lambda plain, pad_id: 0 * true_nats(hosts.host(), plain, pad_id, 32),
    ),
}
