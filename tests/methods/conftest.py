"""Tiny dense hosts for the methods' tests."""

import pytest
import torch
import transformers as tr


def build(family="Llama", dtype=torch.float32, **changes):
    """A random host of width 32 and 2 layers, in evaluation mode."""
    torch.manual_seed(0)
    size = {
        "vocab_size": 48, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 2,
        "bos_token_id": 0, "eos_token_id": 1, "initializer_range": 0.3,
    }  # fmt: skip
    config = getattr(tr, f"{family}Config")(**{**size, **changes})
    return getattr(tr, f"{family}ForCausalLM")(config).to(dtype).eval()


@pytest.fixture
def host():
    """The builder, so that a test names family and dtype."""
    return build


@pytest.fixture
def batch():
    """Three rows, two of them padded on the right, with labels on the real tokens."""
    torch.manual_seed(1)
    mask = torch.arange(9) < torch.tensor([[9], [6], [4]])
    ids = torch.randint(3, 48, (3, 9)).where(mask, 2)
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.where(mask, -100)}
