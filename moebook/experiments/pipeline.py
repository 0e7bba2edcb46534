"""Rocket's pipeline, arm by arm: what each arm chooses for a target task, and how it is tuned.

What an arm changes is its `Arm`; what all arms share is the `Case`, measured once. ``experts`` and
``rows`` choose by it, ``tune`` trains what they chose. The comparisons of Table 1's upper half are
arms too: a LoRA tuned alone is a mixture of one, which equals PEFT's LoRA exactly.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, cast

import numpy as np
import torch
from pydantic import SkipValidation
from torch import nn

from moebook import training
from moebook.data import encode
from moebook.errors import refuse
from moebook.methods.rocket import apply, augment, choose
from moebook.methods.rocket.case import Case
from moebook.methods.rocket.choose import Ranking
from moebook.methods.rocket.config import Config
from moebook.methods.rocket.loras import Lora
from moebook.runtime import random_states_kept
from moebook.settings import Count, Each, Seed, checked, settings

Row = Mapping[str, str]
RANKED = tuple(choose.RANKINGS)


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
    if arm.identical:
        first = chosen.candidates.index[0]
        return (first,) * arm.config.experts
    return chosen.experts


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
    count = arm.config.shots
    shots = case.shots[:count]
    if not arm.open_data:
        return shots
    chosen = augment.choose(case.vectors[:count], [vectors], arm.config, seed=case.seed)
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
    with random_states_kept():
        torch.manual_seed(seed)
        apply.build(model, loras, config)
    encoded = encode(chosen, tokenizer, max_length=max_length)
    return training.fit(
        model, encoded, seed=seed, pad_id=tokenizer.pad_token_id or 0, **settings
    )
