"""A case: one target task with K shots, and what the whole bank makes of them.

It is measured once; each arm chooses its experts and its rows by it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from torch import nn

from moebook.data.tasks import Task
from moebook.methods.rocket import choose, score
from moebook.methods.rocket.augment import Encoder
from moebook.methods.rocket.config import Config
from moebook.methods.rocket.loras import Lora

Row = Mapping[str, str]


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
    own: Mapping[str, Task] = score.NONE,
) -> Case:
    """Draw K shots from a task's annotated rows and score the whole bank on them.

    The encoder is that of the open data. The base writes missing rationales (paper: WizardLM2).
    Shots of a user's file are judged by its task, among ``own`` by name.
    """
    shots = score.draw(annotated, config.shots, seed)
    order = config.rationale
    # Shots of a data set that has rationales keep their own.
    without = [
        place for place, row in enumerate(shots) if not row.get("rationale", "").strip()
    ]
    if without:
        rows = [shots[place] for place in without]
        written = score.write_rationales(rows, model, tokenizer, order=order)
        for place, row in zip(without, written, strict=True):
            shots[place] = row
    nats = partial(
        score.log_perplexity, model, tokenizer, bank, reduction=config.reduction
    )
    return Case(
        task,
        seed,
        shots,
        plain=nats(shots),  # Eq. 1
        reasoning=nats(score.expand(shots, order=order)),  # Eq. 2, of y^ = Phi(x, y)
        solved=score.accuracy(model, tokenizer, bank, shots, own=own),  # Eq. 5
        vectors=next(encoder.blocks(shots, size=len(shots))),  # Eq. 10, in one block
        similarities=choose.similarity(bank, config),  # Eq. 6
    )
