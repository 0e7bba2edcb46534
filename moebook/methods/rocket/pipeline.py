"""The whole pipeline, arm by arm: one target task with K shots, and what each arm does with it.

What an arm changes is its `Arm`; what all arms share is the `Case`, measured once. ``experts`` and
``rows`` choose by it, ``tune`` trains what they chose. The comparisons of Table 1's upper half are
arms too: a LoRA tuned alone is a mixture of one, which equals PEFT's LoRA exactly.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, cast

import numpy as np
import pandas as pd
import torch
from pydantic import SkipValidation
from torch import nn

from moebook import training
from moebook.data import encode
from moebook.errors import refuse
from moebook.methods.rocket import apply, augment, choose, score
from moebook.methods.rocket.augment import Encoder
from moebook.methods.rocket.choose import Ranking
from moebook.methods.rocket.config import Config
from moebook.methods.rocket.loras import Lora
from moebook.settings import Count, Each, Seed, checked, settings

Row = Mapping[str, str]
RANKED = tuple(choose.RANKINGS)
# A LoRA of the target's own set; the bank's tuned alone.
UNMIXED = (
    "expert_lora",
    "perplexity",
)


@settings
class Arm:
    """How an arm gets its experts and its data."""

    config: Config  # K of it are the first of the case's shots
    # The rankings that choose the experts; "random" draws them, "best" is best on the test rows.
    by: tuple[Literal[Ranking, "random", "best"], ...] = RANKED
    # Whether perplexity is that of answers with their rationales (Eq. 2), or of answers alone.
    rationales: bool = True
    open_data: bool = True  # whether chosen open data join the shots
    # Whether all N experts are the first candidate (Sec. 4.5.2).
    identical: bool = False


def arms(config: Config, *, strict: float) -> dict[str, Arm | None]:
    """Return all arms of the study by name, without those that the settings do not allow.

    Vanilla comparisons (Table 1), other experts (Table 2), data (Table 3), samplers, budgets C and
    thresholds (Figures 9, 10), and K, N and k (Tables 4, 6, 7). None stands for the `UNMIXED`.
    """
    single = replace(config, experts=1, top_k=1)
    budgets = (max(1, config.budget // 3), config.budget * 4)
    experts = [n for n in (2, 6, 8) if config.top_k <= n <= config.candidates]
    study: dict[str, Arm | None] = {
        "mixture": Arm(config=config),
        "source_best_sft": Arm(config=config, by=("best",)),
        "random_lora": Arm(config=single, by=("random",)),
        "random_experts": Arm(config=config, by=("random",)),
        "experts_by_perplexity": Arm(config=config, by=("perplexity",)),
        "experts_by_accuracy": Arm(config=config, by=("accuracy",)),
        "experts_without_diversity": Arm(config=config, by=RANKED[:2]),
        "experts_normalised": Arm(config=replace(config, ranking="normalised")),
        "experts_identical": Arm(config=config, by=("perplexity",), identical=True),
        "shots_only": Arm(config=config, open_data=False),
    }
    changes: dict[str, dict[str, Any]] = {
        "random_data": {"sampler": "random"},
        "data_with_duplicates": {"duplicates": "keep"},
        "data_by_kde": {"sampler": "kde", "gamma": 10.0},
        "data_by_narrower_kde": {"sampler": "kde", "gamma": 2.0},
        "data_by_hull": {"sampler": "hull"},
        "data_by_repr_filter": {"duplicates": "repr"},
        **{f"budget{c}": {"budget": c} for c in budgets},
        "data_strictly_deduplicated": {"threshold": strict},
        **{f"shots{n}": {"shots": n} for n in (1, 5, 20) if n < config.shots},
        **{f"experts{n}": {"experts": n} for n in experts},
        **{f"selected{n}": {"top_k": n} for n in (1, 3, 4) if n <= config.experts},
    }
    study |= {
        name: Arm(config=replace(config, **change)) for name, change in changes.items()
    }
    return study | dict.fromkeys(UNMIXED)


@dataclass(frozen=True)
class Case:
    """A target task with K shots, drawn by the seed, and what the bank makes of them."""

    task: str
    seed: int
    shots: list[Row]  # D_K
    plain: pd.DataFrame  # log-perplexities of the answers [N, K], nats (Eq. 1)
    reasoning: pd.DataFrame  # the same of the answers with their rationales (Eq. 2)
    solved: pd.DataFrame  # which LoRA answers which shot exactly [N, K] (Eq. 5)
    vectors: np.ndarray  # embeddings of the shots [K, D]
    similarities: pd.DataFrame  # cosines of the LoRAs with one another [N, N] (Eq. 6)

    def scores(self, shots: int, *, rationales: bool = True) -> pd.DataFrame:
        """Return `score.scores` of the first K shots, their rationales read or not."""
        nats = self.reasoning if rationales else self.plain
        return score.scores(nats.iloc[:, :shots], self.solved.iloc[:, :shots])


def tested(targets: Sequence[str], benchmarks: Sequence[str]) -> dict[str, str]:
    """Return what evaluates each target: the benchmarks in their order, or itself without any."""
    if benchmarks and len(benchmarks) != len(targets):
        given = f"benchmarks has {len(benchmarks)} names, targets has {len(targets)}"
        refuse("E-RANGE", f"{given}: give one a target, in the targets' order")
    return dict(zip(targets, benchmarks or targets, strict=True))


def score_bank(
    model: nn.Module,
    tokenizer: Any,
    bank: Mapping[str, Lora],
    encoder: Encoder,
    annotated: Sequence[Row],
    config: Config,
    *,
    task: str,
    seed: int,
) -> Case:
    """Draw K shots from a task's annotated rows and score the whole bank on them.

    The encoder is that of the open data. The base writes missing rationales (paper: WizardLM2).
    """
    shots, order = score.draw(annotated, config.shots, seed), config.rationale
    bare = [
        place for place, row in enumerate(shots) if not row.get("rationale", "").strip()
    ]
    if bare:
        rows = [shots[place] for place in bare]
        written = score.write_rationales(rows, model, tokenizer, order=order)
        for place, row in zip(bare, written, strict=True):
            shots[place] = row
    nats = partial(
        score.log_perplexity, model, tokenizer, bank, reduction=config.reduction
    )
    return Case(
        task,
        seed,
        shots,
        plain=nats(shots),
        reasoning=nats(score.expand(shots, order=order)),
        solved=score.accuracy(model, tokenizer, bank, shots),
        vectors=next(encoder.blocks(shots, size=len(shots))),
        similarities=choose.similarity(bank, config),
    )


def experts(
    case: Case, arm: Arm, bank: Collection[str], *, best: str
) -> tuple[str, ...]:
    """Name the LoRAs of the bank that an arm starts from; ``best`` is that on the test rows."""
    if arm.by == ("best",):
        return (best,)
    if arm.by == ("random",):
        if arm.config.experts > len(bank):
            refuse(
                "E-RANGE",
                f"experts (N) is {arm.config.experts}, expected 1 to {len(bank)}",
            )
        draw = random.Random(f"rocket/drawn/{case.task}/{case.seed}")
        return tuple(draw.sample(sorted(bank), arm.config.experts))
    chosen = selected(case, arm, bank)
    return (
        (chosen.candidates.index[0],) * arm.config.experts
        if arm.identical
        else chosen.experts
    )


def selected(case: Case, arm: Arm, bank: Collection[str]) -> choose.Selection:
    """Select experts from a bank that was scored in the case by an arm's rankings (Alg. 1)."""
    rankings = cast(Sequence[Ranking], arm.by)
    scores = case.scores(arm.config.shots, rationales=arm.rationales)
    scores = scores[scores.index.isin(list(bank))]
    return choose.select(scores, case.similarities, arm.config, rankings=rankings)


def rows(case: Case, arm: Arm, pool: Sequence[Row], vectors: np.ndarray) -> list[Row]:
    """Return an arm's shots, and the open rows that it chooses by their embeddings ``[S, D]``."""
    if len(pool) != len(vectors):
        refuse(
            "E-SHAPE",
            f"the pool has {len(pool)} rows, and embeddings of {len(vectors)}",
        )
    shots, near = case.shots[: arm.config.shots], case.vectors[: arm.config.shots]
    if not arm.open_data:
        return shots
    chosen = augment.choose(near, [vectors], arm.config, seed=case.seed)
    return [*shots, *(pool[place] for place in chosen.index)]


@checked
def tune(
    model: nn.Module,
    tokenizer: Any,
    loras: Each[Lora],
    chosen: SkipValidation[Sequence[Row]],
    config: Config,
    *,
    seed: Seed,
    max_length: Count = 1024,
    **settings: Any,
) -> training.History:
    """Put a mixture of these LoRAs on the base and train it; `apply.remove` takes it off again.

    One LoRA is tuned alone, whatever N and k are. The seed is of the gates' start and the order.
    """
    loras = tuple(loras)
    if len(loras) == 1:
        config = replace(config, experts=1, top_k=1)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        apply.build(model, loras, config)
    encoded = encode(chosen, tokenizer, max_length=max_length)
    return training.fit(
        model, encoded, seed=seed, pad_id=tokenizer.pad_token_id or 0, **settings
    )
