"""The whole pipeline, arm by arm: one target task met with K shots, and what each arm does with it.

What an arm changes is its `arms.Arm`; what all arms share is the `Case`, measured once.
``experts`` and ``rows`` choose by it, ``tune`` trains what they chose. The comparisons of Table 1's
upper half are arms too: a LoRA tuned alone is a mixture of one, which equals PEFT's LoRA exactly.
The bank's best LoRA as it is runs under `attachment.attached`; "Expert LoRA" is `bank.train` on the
target's whole training set.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn

from moebook import training
from moebook.data import encode
from moebook.errors import nearest, refuse
from moebook.methods.rocket import augmentation, mixture, rationales, scoring
from moebook.methods.rocket import selection as selecting
from moebook.methods.rocket.arms import OTHERS, Arm
from moebook.methods.rocket.config import Config
from moebook.methods.rocket.encoders import Encoder
from moebook.methods.rocket.loras import Lora
from moebook.methods.settings import whole

Row = Mapping[str, str]


@dataclass(frozen=True)
class Case:
    """A target task met with K shots.

    Attributes:
        task: Its name.
        seed: Of the draw of the shots.
        shots: D_K.
        plain: Log-perplexities of the answers ``[N, K]``, nats (Eq. 1).
        reasoning: The same of the answers with their rationales (Eq. 2).
        solved: Which LoRA answers which shot exactly ``[N, K]`` (Eq. 5).
        vectors: Embeddings of the shots ``[K, D]``.
    """

    task: str
    seed: int
    shots: list[Row]
    plain: pd.DataFrame
    reasoning: pd.DataFrame
    solved: pd.DataFrame
    vectors: np.ndarray[Any, Any]

    def scores(self, shots: int, *, rationales: bool = True) -> pd.DataFrame:
        """Return `scoring.scores` of the first K shots, their rationales read or not."""
        nats = self.reasoning if rationales else self.plain
        return scoring.scores(nats.iloc[:, :shots], self.solved.iloc[:, :shots])


def tested(targets: Sequence[str], benchmarks: Sequence[str]) -> dict[str, str]:
    """Return what evaluates each target: the benchmarks in their order, or itself without any.

    Raises:
        Refusal: E-RANGE for another number of benchmarks than targets.
    """
    if benchmarks and len(benchmarks) != len(targets):
        refuse(
            "E-RANGE",
            f"benchmarks has {len(benchmarks)} names ({', '.join(benchmarks)}), targets has"
            f" {len(targets)} ({', '.join(targets)}): give one a target, in the targets' order",
        )
    return dict(zip(targets, benchmarks or targets, strict=True))


def meet(
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

    Args:
        model: The base, unaltered. It writes the rationale itself where a row carries none (the
            paper has WizardLM2-8x22B write them).
        tokenizer: Its tokenizer.
        bank: LoRAs by name: those that passed the guard against leaks (`bank.guarded`), and any
            other that is to be scored along.
        encoder: Of the open data.
        annotated: What the shots are drawn from, the task's training rows.
        config: K, ``reduction`` and ``rationale``.
        task: The task's name.
        seed: Of the draw.

    Raises:
        Refusal: E-KSHOT for fewer rows than K; those of the scoring and of `rationales.write`.
    """
    shots, order = scoring.draw(annotated, config.shots, seed), config.rationale
    bare = [place for place, row in enumerate(shots) if not row.get("rationale", "").strip()]
    if bare:
        told = rationales.write([shots[place] for place in bare], model, tokenizer, order=order)
        for place, row in zip(bare, told, strict=True):
            shots[place] = row
    nats = partial(scoring.perplexity, model, tokenizer, bank, reduction=config.reduction)
    return Case(
        task,
        seed,
        shots,
        plain=nats(shots),
        reasoning=nats(rationales.expand(shots, order=order)),
        solved=scoring.accuracy(model, tokenizer, bank, shots),
        vectors=encoder.encode([f"{row['prompt']} {row['answer']}" for row in shots]),
    )


def experts(
    case: Case, arm: Arm, bank: Mapping[str, Lora], similarities: pd.DataFrame, *, best: str
) -> tuple[str, ...]:
    """Name the LoRAs that an arm starts from.

    Args:
        case: The task and its shots.
        arm: How they are chosen.
        bank: LoRAs by name, all of them scored in the case, which may have scored more.
        similarities: From `selection.similarity`.
        best: The LoRA that is best on the test rows, for ``by=("best",)``.

    Raises:
        Refusal: E-CHOICE for an unknown way, E-RANGE for more experts than LoRAs; those of
            `selection.select`.
    """
    if arm.by == ("best",):
        return (best,)
    if arm.by == ("random",):
        whole("experts (N)", arm.config.experts, 1, len(bank))
        names = sorted(bank)
        draw = random.Random(f"rocket/drawn/{case.task}/{case.seed}")
        return tuple(draw.sample(names, arm.config.experts))
    odd = [name for name in arm.by if name not in selecting.RANKINGS]
    if odd:
        refuse("E-CHOICE", f"by is {odd[0]!r}; {nearest(odd[0], (*selecting.RANKINGS, *OTHERS))}")
    scores = case.scores(arm.config.shots)
    scores = scores[scores.index.isin(list(bank))]
    return selecting.select(scores, similarities, arm.config, rankings=arm.by).experts


def rows(case: Case, arm: Arm, pool: Sequence[Row], vectors: np.ndarray[Any, Any]) -> list[Row]:
    """Return what an arm is tuned on: its shots, and the open rows that it chooses (Alg. 2).

    Args:
        case: The task and its shots.
        arm: How rows are chosen.
        pool: D_S.
        vectors: Its embeddings ``[S, D]``.
    """
    shots = list(case.shots[: arm.config.shots])
    if not arm.open_data:
        return shots
    near = case.vectors[: arm.config.shots]
    found = augmentation.choose(near, [vectors], arm.config, seed=case.seed)
    return [*shots, *(pool[place] for place in found.index)]


def tune(
    model: nn.Module,
    tokenizer: Any,
    loras: Sequence[Lora],
    chosen: Sequence[Row],
    config: Config,
    *,
    seed: int,
    max_length: int = 1024,
    **settings: Any,
) -> training.History:
    """Put a mixture of these LoRAs on the base and train it; `mixture.remove` takes it off again.

    N and k of the settings give way to the number of LoRAs: one LoRA is tuned alone.

    Args:
        model: The base, unaltered; afterwards it holds the mixture.
        tokenizer: Its tokenizer.
        loras: The experts.
        chosen: Rows to train on.
        config: Settings of the mixture.
        seed: Of the gates' start and of the rows' order, so that an arm does not depend on those
            before it.
        max_length: Longest row in tokens.
        settings: For `training.fit`.
    """
    if len(loras) == 1:
        config = replace(config, experts=1, top_k=1)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        mixture.build(model, loras, config)
    encoded = encode(chosen, tokenizer, max_length=max_length)
    return training.fit(model, encoded, seed=seed, pad_id=tokenizer.pad_token_id or 0, **settings)
