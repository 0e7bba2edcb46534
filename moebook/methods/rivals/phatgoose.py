"""PHATGOOSE: a gate vector for each LoRA and layer, learnt on the LoRA's own rows, routes tokens.

First, with all else frozen, ``y = W x + sigmoid(v_n . x) s_n B_n A_n x``, v = 0 at the start. Then
``y = W x + sum_n g_n s_n B_n A_n x`` with g the softmax over a token's k largest
``a_n = n(v_n) . n(x) / sqrt D``, n = LayerNorm without weights. Nothing is trained on the target.
Muqeeth et al. (2024), Learning to Route Among Specialized Experts for Zero-Shot Generalization,
arXiv 2402.05859; code: r-three/phatgoose.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from moebook import training
from moebook.errors import refuse
from moebook.kernels.dispatch import shapes
from moebook.methods.rivals import mixing, tuning
from moebook.methods.rivals.tuning import Data, Tuned
from moebook.methods.rocket.bank import Bank, check
from moebook.settings import Count, Positive, Presets, settings

__all__ = [
    "Config",
    "Learnt",
    "gates",
    "load",
    "tuned",
]


@settings
class Config(Presets):
    """On what and how gates are learnt, and how they route. The defaults are the preset ``bank``.

    ``paper`` and ``released`` learn gates on 1024 rows a step, the latter with eps; ``mttl``
    on 4, at its own rate; ``bank`` on 32, as Rocket trains.

    Attributes:
        rows: Each gate learns on its LoRA's own rows (paper), or all on the target's: what Rocket
            may have done, whose row has D_K and D_A, which the method has no use for.
        top_k: LoRAs a token uses.
        eps: Added to the sum of the chosen probabilities, 1e-6 as released, which moves a gate by
            6e-8.
        steps, lr, batch: Of a gate's training at a constant rate, after 6 % of warm-up. Released:
            100, 5e-3 and 1024; mttl: 100, 1e-3 and 4.
    """

    rows: Literal["sources", "target"] = "sources"
    top_k: Count = 2
    eps: Annotated[float, Field(ge=0)] = 0.0
    steps: Count = 100
    lr: Positive = 5e-3
    batch: Count = 32

    PRESETS: ClassVar = {
        "paper": {"batch": 1024},
        "released": {"batch": 1024, "eps": 1e-6},
        "mttl": {"batch": 4, "lr": 1e-3},
        "bank": {},
    }


@settings
class Origin(tuning.Origin):
    """What a model that PHATGOOSE routes was made from."""

    method: ClassVar[str] = "phatgoose"
    config: Config


class Gate(nn.Module):
    """A lone LoRA's weight while its gate is learnt: ``sigmoid(v . x)``, a half at the start."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.v = nn.Parameter(torch.zeros(width))  # [D]

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[..., 1]`` for ``x [..., D]``."""
        return (x.to(self.v.dtype) @ self.v).sigmoid().unsqueeze(-1)


class Gates(nn.Module):
    """A token's weights ``[.., N]``: the softmax over the k largest `scores`, 0 elsewhere."""

    def __init__(self, vectors: Tensor, config: Config) -> None:
        super().__init__()
        self.top_k = config.top_k
        self.eps = config.eps
        self.register_buffer("vectors", vectors)  # [N, D]

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[..., N]`` for ``x [..., D]``."""
        score = scores(x, self.vectors)  # [..., N]
        # The softmax over k scores is that over all N, divided by the sum of the k.
        weights = mixing.strongest(score, self.top_k)
        if self.eps:
            # As released, divided by that sum + eps.
            chosen = score.softmax(-1) * (weights > 0)
            kept = chosen.sum(-1, keepdim=True)  # [..., 1]
            weights = weights * kept / (kept + self.eps)
        return weights


class Learnt(NamedTuple):
    """One LoRA's gates, and what they did to the loss of the rows that they were learnt on."""

    vectors: dict[str, Tensor]  #: the gates' v, [D] by path
    before: float  #: loss, nats a token, at half strength
    #: The same with the gates as they were learnt.
    after: float
    #: What learning them took.
    cost: tuning.Cost


def scores(x: Tensor, vectors: Tensor) -> Tensor:
    """Return ``n(v_n) . n(x) / sqrt D`` as ``[..., N]``, for x ``[..., D]`` and v ``[N, D]``.

    They lie within sqrt D of 0, and the mean of a gate does not matter. Nor does its length, unless
    its variance comes near LayerNorm's eps: at a standard deviation of 1e-3 scores fall to 0.3 of
    theirs. A gate of zeros scores 0 for every token, so it can still win.
    """
    shapes("scores", {"x": (x, "... D"), "vectors": (vectors, "N D")})
    width = vectors.shape[1:]
    # n(x); the method's eps, 1e-5, is torch's default.
    normed = F.layer_norm(x.to(vectors.dtype), width)
    # n(v_n) . n(x) / sqrt D.
    return normed @ F.layer_norm(vectors, width).mT / math.sqrt(vectors.shape[1])


def gates(
    model: nn.Module, bank: Bank, data: Data, config: Config, *, seed: int = 0
) -> dict[str, Learnt]:
    """Learn each LoRA's gates, alone on the base: on its own rows, once for all targets."""
    of_target = config.rows == "target"
    plan: dict[str, Any] = {
        "steps": config.steps,
        "lr": config.lr,
        "batch": config.batch,
    }
    learnt = {}
    for name in bank:
        rows = data.rows if of_target else data.source(name)
        # y = W x + sigmoid(v . x) s B A x, where W, A and B are frozen: v alone trains.
        alone = tuning.attach(
            model,
            {name: bank[name]},
            lambda _, part: Gate(part.in_features),
            mix="outputs",
            learnt=False,
        )
        with tuning.undone(alone):
            before = training.nats(model, rows, pad_id=data.pad_id)
        alone = tuning.fit(alone, data, rows=rows, warmup=0.06, seed=seed, **plan)
        with tuning.undone(alone):
            after = training.nats(model, rows, pad_id=data.pad_id)
        vectors: dict[str, Tensor] = {}
        for path, part in alone.parts.items():
            vectors[path] = part.weigh.v.detach().clone()
        learnt[name] = Learnt(vectors, before, after, alone.cost)
        alone.detach()
    return learnt


def tuned(
    model: nn.Module,
    bank: Bank,
    data: Data,
    config: Config,
    *,
    seed: int = 0,
    learnt: Mapping[str, Learnt] | None = None,
    **recipe: Any,
) -> Tuned:
    """Put the bank on the base, routed by its gates: of ``learnt`` (see `gates`), or learnt here.

    Nothing else is trained, so the ``recipe`` goes unused. The cost is that of gates learnt on the
    target's rows; on their own rows it is the bank's makers'.
    """
    check(bank, ranks=False)
    mixing.check_choice(config.top_k, bank)
    for path, down in next(iter(bank.values())).down.items():
        width = down.shape[1]  # D
        if width < 3:
            why = "where LayerNorm leaves a sign: D > 2"
            refuse("E-RANGE", f"{path} has D = {width}, {why}")
    known = dict(learnt or {})
    new = {name: lora for name, lora in bank.items() if name not in known}
    known |= gates(model, new, data, config, seed=seed)

    def weigh(path: str, _: nn.Module) -> Gates:
        # In the order of the bank, as the LoRAs are stacked: [N, D].
        vectors = [known[name].vectors[path] for name in bank]
        return Gates(torch.stack(vectors), config)

    done = tuning.attach(
        model, bank, weigh, mix="outputs", learnt=False, kind=Origin, config=config
    )
    if config.rows == "sources":
        return done
    costs = [known[name].cost for name in bank]
    whole = tuning.Cost(
        trained=sum(cost.trained for cost in costs),
        forward=sum(cost.forward for cost in costs),
        backward=sum(cost.backward for cost in costs),
    )
    return replace(done, cost=whole)


def load(model: nn.Module, folder: str | Path) -> Tuned:
    """Restore what `Tuned.save` wrote onto its base."""
    return tuning.load_routed(model, folder, Origin, Gates)
