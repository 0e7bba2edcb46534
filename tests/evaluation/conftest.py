"""A random model of 2 layers and width 32, a byte tokenizer, and a model that knows answers."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.modeling_outputs import CausalLMOutputWithPast

SPECIAL = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>"}


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    byte_pairs = Tokenizer(models.BPE())
    byte_pairs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_pairs.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=list(SPECIAL.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    byte_pairs.train_from_iterator(["### Human:\n### Assistant:\n the sum is"] * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=byte_pairs, **SPECIAL)


@pytest.fixture
def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=300,
        max_position_embeddings=512,
        initializer_range=0.4,  # large, so that greedy answers differ from prompt to prompt
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    return LlamaForCausalLM(config).eval()


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
