"""Tiny models, each built once and copied for a call, and what they are called with."""

import copy
from functools import cache

import torch
import transformers as tr
from datasets import Dataset

SIZE = {
    "vocab_size": 48,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "pad_token_id": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "initializer_range": 0.3,
    "max_position_embeddings": 64,
}


@cache
def _built(family, changes):
    torch.manual_seed(0)
    config = getattr(tr, f"{family}Config")(**{**SIZE, **dict(changes)})
    return getattr(tr, f"{family}ForCausalLM")(config).eval()


def host(family="Llama", **changes):
    """A random host of width 8 and 2 layers, in evaluation mode."""
    return copy.deepcopy(_built(family, tuple(changes.items())))


def sparse():
    """A random mixture of 4 experts, 2 a token."""
    return host("Mixtral", num_local_experts=4, num_experts_per_tok=2)


def batch():
    """Two rows, one of them padded on the right, with labels on the real tokens."""
    mask = torch.arange(5) < torch.tensor([[5], [3]])
    ids = torch.randint(
        3, 48, (2, 5), generator=torch.Generator().manual_seed(1)
    ).where(mask, 2)
    return {
        "input_ids": ids,
        "attention_mask": mask.long(),
        "labels": ids.where(mask, -100),
    }


def seen():
    """A batch without labels."""
    return {name: tensor for name, tensor in batch().items() if name != "labels"}


@cache
def rows():
    """Encoded rows of 5 to 8 tokens."""
    torch.manual_seed(4)
    ids = [torch.randint(3, 48, (5 + i % 4,)).tolist() for i in range(6)]
    return Dataset.from_dict(
        {"input_ids": ids, "labels": ids, "length": list(map(len, ids))}
    )
