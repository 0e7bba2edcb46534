"""Routers that start at prompts, as mergekit offers it: the tasks' prompts are dealt to experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import nn

from moebook.errors import refuse
from moebook.methods.settings import chosen
from moebook.methods.upcycling.representations import collect
from moebook.methods.upcycling.starts import Start, cheap_embed, hidden

MODES = ("hidden", "hidden_avg", "cheap_embed")


def prompted(
    model: nn.Module,
    tokenizer: Any,
    rows: Sequence[Mapping[str, str]],
    experts: int,
    *,
    mode: str = "hidden",
    most: int = 32,
    max_length: int = 160,
) -> Start:
    """Start each expert at the prompts of its tasks, as mergekit's gate modes do.

    Mergekit wants a few prompts for each expert. Here the tasks, by name, are dealt out evenly.

    Args:
        model: The dense base.
        tokenizer: Its tokenizer, with a pad token.
        rows: With ``task`` and ``prompt``; of an expert's tasks the first prompts are taken.
        experts: E, at most the number of tasks.
        mode: ``"hidden"``, the residual stream at a block's input at the last token;
            ``"hidden_avg"``, its mean; ``"cheap_embed"``, the embeddings alone.
        most: Prompts an expert, at most.
        max_length: Longer prompts are cut, tokens.

    Raises:
        Refusal: E-CHOICE for the mode; E-DATA for fewer tasks than experts.
    """
    chosen("mode", mode, MODES)
    tasks = sorted({row["task"] for row in rows})
    if not 1 <= experts <= len(tasks):
        refuse("E-DATA", f"{len(tasks)} tasks cannot be dealt out to {experts} experts: take fewer")
    batches = {}
    for part in np.array_split(tasks, experts):
        asked = [row["prompt"] for row in rows if row["task"] in part][:most]
        batches["+".join(part)] = [
            tokenizer(
                asked, padding=True, truncation=True, max_length=max_length, return_tensors="pt"
            )
        ]
    if mode == "cheap_embed":
        return cheap_embed(model, batches)
    tokens = "last" if mode == "hidden" else "mean"
    return hidden(collect(model, batches, tensor="block_input", tokens=tokens))
