"""A bank of random LoRAs on a tiny host, and what they come to when they are merged."""

import copy
from functools import cache

import torch
from torch.nn import functional as F

from moebook.methods.rocket.loras import Lora, linears
from moebook.models.checkpoint import fingerprint
from tests import tokens
from tests.faults.healthy import hosts

TARGETS = ("q_proj", "v_proj")


def host():
    """A host that the tokenizer fits."""
    return hosts.host(vocab_size=300, max_position_embeddings=128)


@cache
def base():
    return fingerprint(host())


@cache
def _factors(seed, rank):
    generator = torch.Generator().manual_seed(seed)
    layers = linears(host(), TARGETS)
    draw = lambda *shape: 0.5 * torch.randn(*shape, generator=generator)  # noqa: E731
    down = {path: draw(rank, layer.in_features) for path, layer in layers.items()}
    return down, {
        path: draw(layer.out_features, rank) for path, layer in layers.items()
    }


def lora(name="a", seed=0, rank=2, **changes):
    """A random LoRA on q and v of the host."""
    down, up = copy.deepcopy(_factors(seed, rank))
    return Lora(
        **{
            "name": name,
            "rank": rank,
            "alpha": 4.0,
            "down": down,
            "up": up,
            "base": base(),
        }
        | changes
    )


def bank():
    """Three LoRAs of one kind."""
    return {name: lora(name, seed) for seed, name in enumerate("abc")}


def right(*loras):
    """Whether LoRAs are ones of the host, alike."""
    layers = {
        path: (part.out_features, part.in_features)
        for path, part in linears(host(), TARGETS).items()
    }
    for one in loras:
        if one.down.keys() != one.up.keys() or not one.down or not one.alpha > 0:
            raise ValueError("layers")
        for path in one.down:
            shape = layers[path]
            a = one.down[path]
            b = one.up[path]
            if a.shape != (one.rank, shape[1]) or b.shape != (shape[0], one.rank):
                raise ValueError("shape")
            if not (a.isfinite().all() and b.isfinite().all()):
                raise ValueError("NaN")
    if len({one.rank for one in loras}) > 1:
        raise ValueError("rank")
    return loras


def merged(model, one):
    """The model with a LoRA in its weights."""
    right(one)
    if one.base not in (None, base()):
        raise ValueError("base")
    for path, down in one.down.items():
        linear = model.get_submodule(path)
        delta = one.alpha / one.rank * (one.up[path].double() @ down.double())
        linear.weight.data = (linear.weight.double() + delta).float()
    return model


def logits(model):
    """What a model says of one batch."""
    with torch.no_grad():
        return model(**hosts.seen()).logits


def nats(model, row):
    """The nats of each token of a row's answer."""
    tokenizer = tokens.byte_tokenizer()
    before = tokenizer(f"### Human:\n{row['prompt']}\n### Assistant:\n")["input_ids"]
    after = [*tokenizer(row["answer"])["input_ids"], tokenizer.eos_token_id]
    ids = torch.tensor([[tokenizer.bos_token_id, *before, *after]])
    if ids.shape[1] > 128:
        raise ValueError("too long")
    said = model(input_ids=ids).logits[0, :-1].double()
    return F.cross_entropy(said[-len(after) :], torch.tensor(after), reduction="none")
