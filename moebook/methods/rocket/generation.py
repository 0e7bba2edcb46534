"""Greedy answers of a model in memory, through the evaluation's own batched decoding."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from torch import nn

from moebook.evaluation.model import PAIR, InMemory
from moebook.nn import evaluating


def greedy(
    model: nn.Module, tokenizer: Any, contexts: Sequence[list[int]], *, limit: int, batch: int = 32
) -> list[str]:
    """Continue each context with the likeliest tokens up to the end token or the limit.

    Dropout is off while it runs; the model's mode is given back.

    Args:
        model: A causal language model.
        tokenizer: Its tokenizer.
        contexts: Token ids, one list a context.
        limit: Most new tokens.
        batch: B, contexts a forward pass.
    """
    asked = {"until": [], "max_gen_toks": limit}
    requests: list[Any] = [SimpleNamespace(args=("", asked), doc={PAIR: (c, [])}) for c in contexts]
    with evaluating(model):
        return InMemory(model, tokenizer, batch).generate_until(requests)
