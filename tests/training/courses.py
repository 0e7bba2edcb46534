"""One short training of each method, for processes that train together."""

import random

import torch
from datasets import Dataset
from torch.distributed.fsdp import FSDPModule
from transformers import LlamaConfig, LlamaForCausalLM, OlmoeConfig, OlmoeForCausalLM

from moebook.methods import esft, pesc, rocket, upcycling
from moebook.methods.rocket.loras import Lora, linears
from moebook.training.sharding import fit

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "pad_token_id": 2,
}
RECIPE = {
    "steps": 6,
    "batch": 6,
    "lr": 1e-2,
    "weight_decay": 0.1,
    "pad_id": 2,
    "seed": 3,
}
TARGETS = ("q_proj", "v_proj")


def rows():
    draw = random.Random(0)
    ids = []
    for _ in range(23):
        length = draw.randint(4, 20)
        ids.append([draw.randrange(3, 64) for _ in range(length)])
    labels = [[-100] * (len(row) // 2) + row[len(row) // 2 :] for row in ids]
    return Dataset.from_dict({"input_ids": ids, "labels": labels})


def dense():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPE))


def adapted():
    """PESC with LoRA: what is frozen is tied too, and the balance loss reads the routers."""
    settings = {
        "experts": 4,
        "adapter_width": 8,
        "adapter_dropout": 0.0,
        "lora_dropout": 0.0,
    }
    lora = {"host": "lora", "lora_rank": 4, "lora_targets": TARGETS}
    return pesc.prepare(dense(), pesc.Config(**settings, **lora)), pesc.balance_loss


def upcycled():
    """Full experts in 3-D weights; everything trains, the tied embeddings too."""
    model = upcycling.upcycle(dense(), upcycling.Config(experts=4)).requires_grad_(True)
    return model, upcycling.balance_loss


def specialised():
    """ESFT on transformers' fused experts, which stay whole and frozen beside the chosen ones."""
    torch.manual_seed(0)
    mixture = {"intermediate_size": 16, "num_experts": 6, "num_experts_per_tok": 2}
    model = OlmoeForCausalLM(OlmoeConfig(**{**SHAPE, **mixture}))
    return esft.specialise(
        model, esft.Selection(experts={0: (3, 1), 1: (2, 0, 4)})
    ), None


def mixed():
    """Rocket's mixture of LoRAs."""
    model = dense()
    loras = []
    for name in "abcd":
        layers = linears(model, TARGETS)
        down = {
            path: 0.3 * torch.randn(4, each.in_features)
            for path, each in layers.items()
        }
        up = {
            path: 0.3 * torch.randn(each.out_features, 4)
            for path, each in layers.items()
        }
        loras.append(Lora(name=name, rank=4, alpha=8.0, down=down, up=up))
    return rocket.apply.build(model, loras, rocket.Config(lora_dropout=0.0)), None


def total(model):
    return sum(p.double().square().sum().item() for p in model.parameters())


def halved():
    """Full experts of a host in bfloat16, behind routers in float32."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        return upcycled()
    finally:
        torch.set_default_dtype(torch.float32)


METHODS = {"pesc": adapted, "upcycling": upcycled, "esft": specialised, "rocket": mixed}
# Which rounds to 8 bits, so that no two layouts give the same numbers.
APART = {"halved": halved}


def course(name, **more):
    """Train by one method; return what happened, and the weights at milestones and at the end."""
    model, penalty = (METHODS | APART)[name]()
    sharded = []

    def seen(trained):
        sharded.append(isinstance(trained, FSDPModule))
        return penalty(trained) if penalty else torch.zeros(())

    recipe = {"penalty": seen, "milestones": [((0, 4), total)], **RECIPE, **more}
    found = fit(model, rows(), **recipe)
    weights = [*found.milestones[0].values(), total(model)]
    numbers = {"loss": found.loss, "penalty": found.penalty, "norm": found.norm}
    return {**numbers, "weights": weights, "sharded": all(sharded) and bool(sharded)}
