"""A random model of 2 layers and width 32, a byte tokenizer, and a model that knows answers."""

import pytest
import torch
from torch import nn
from transformers import LlamaConfig
from transformers.modeling_outputs import CausalLMOutputWithPast


@pytest.fixture
def tokenizer(byte_tokenizer):
    return byte_tokenizer


@pytest.fixture
def llama(tiny):
    """Weights are large, so that greedy answers differ from prompt to prompt."""
    return tiny(initializer_range=0.4, tie_word_embeddings=False)


class Memory:
    """What a `Knower` keeps between the steps of a generation: the ids so far."""

    def __init__(self, ids):
        self.ids = ids

    def batch_select_indices(self, lines):
        self.ids = self.ids[lines]


class Knower(nn.Module):
    """Looks the next token up in the texts it was given; certain of it by 40 nats."""

    def __init__(self, texts: list[list[int]], vocabulary: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.config = LlamaConfig(vocab_size=vocabulary)
        self.next = {tuple(t[: n + 1]): t[n + 1] for t in texts for n in range(len(t) - 1)}

    def forward(self, input_ids, attention_mask, past_key_values=None, logits_to_keep=0, **_):
        before = past_key_values.ids if past_key_values else input_ids[:, :0]
        ids = torch.cat([before, input_ids], 1)
        logits = torch.zeros(*ids.shape, self.config.vocab_size)
        for line, (row, mask) in enumerate(zip(ids.tolist(), attention_mask.tolist(), strict=True)):
            start = mask.index(1)
            for place in range(start, len(row)):
                known = self.next.get(tuple(row[start : place + 1]))
                if known is not None:
                    logits[line, place, known] = 40.0
        return CausalLMOutputWithPast(
            logits=logits[:, -logits_to_keep:], past_key_values=Memory(ids)
        )


@pytest.fixture
def knower():
    return Knower
