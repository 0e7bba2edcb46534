"""Clouds of texts as a network represents them, trained and untrained (Fig. 1, with a control)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from moebook.methods.upcycling.representations import Representations, collect


def clouds(
    model: PreTrainedModel,
    tokenizer: Any,
    texts: Mapping[str, Iterable[str]],
    *,
    tensor: str = "attention_output",
    max_length: int = 48,
    seed: int = 0,
) -> dict[str, Representations]:
    """Represent each text by its mean, in a network and in the same one with random weights.

    Each text is read alone, so that no padding enters its mean. The paper's figure lacks the
    control: words alone differ between domains, so an untrained network separates them in part.

    Args:
        model: A trained dense decoder.
        tokenizer: Its tokenizer.
        texts: Texts by domain.
        tensor: Which tensor, see `collect`.
        max_length: Longer texts are cut, tokens.
        seed: Of the random weights.

    Returns:
        ``pretrained`` and ``random``, each with a point a text.
    """
    read = {
        domain: [
            tokenizer(text, truncation=True, max_length=max_length, return_tensors="pt")
            for text in several
        ]
        for domain, several in texts.items()
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        control = type(model)(model.config).to(model.device, model.dtype)
    networks = {"pretrained": model, "random": control}
    return {
        state: collect(network, read, tensor=tensor, tokens="mean")
        for state, network in networks.items()
    }
