"""A tiny base with its tokenizer, random LoRAs on it, and a few K shots."""

import copy

import pytest
import torch

from moebook.methods import rocket
from moebook.models.checkpoint import fingerprint

TARGETS = ("q_proj", "v_proj")


@pytest.fixture
def tokenizer(byte_tokenizer):
    return copy.deepcopy(byte_tokenizer)


@pytest.fixture
def base(host):
    """The builder of a base that the tokenizer fits."""
    size = {"vocab_size": 300, "max_position_embeddings": 256}
    return lambda **changes: host(**{**size, **changes})


@pytest.fixture
def model(base):
    return base()


@pytest.fixture
def bank(model, make_bank):
    """Four random LoRAs on the model, a to d."""
    return make_bank(model)


@pytest.fixture
def lora():
    """Make a random LoRA on q and v of a base."""

    def make(model, name, seed, *, rank=4, alpha=8.0, size=0.3, targets=TARGETS, **changes):
        generator = torch.Generator().manual_seed(seed)
        layers = rocket.loras.linears(model, targets)
        draw = lambda *shape: size * torch.randn(*shape, generator=generator)  # noqa: E731
        return rocket.loras.Lora(
            down={path: draw(rank, layer.in_features) for path, layer in layers.items()},
            up={path: draw(layer.out_features, rank) for path, layer in layers.items()},
            **{"name": name, "rank": rank, "alpha": alpha, "base": fingerprint(model), **changes},
        )

    return make


@pytest.fixture
def make_bank(lora):
    """Make a bank of so many random LoRAs, named a, b, c ..."""
    return lambda model, count=4, **changes: {
        chr(97 + n): lora(model, chr(97 + n), seed=n, **changes) for n in range(count)
    }


@pytest.fixture
def shots():
    rows = [
        ("Add 1 and 2.", "3", "One and two make three."),
        ("What is the capital of France?", "Paris", "Its government sits in Paris."),
        ("Name a colour.", "blue", "The sky is blue."),
        ("Say hello in as few letters as you can, please.", "hi", "Two letters are few."),
    ]
    return [
        {"prompt": prompt, "answer": answer, "rationale": why, "task": "own", "domain": "own"}
        for prompt, answer, why in rows
    ]
