"""Calls of PESC that are right, and what they must come to."""

from dataclasses import replace
from functools import cache
from unittest.mock import patch

import torch
from torch.nn import functional as F

from moebook.methods import pesc
from moebook.methods.pesc import measure
from tests.faults.healthy import hosts
from tests.faults.hostile import Row, must, new_folder

CONFIG = pesc.Config(
    experts=4, top_k=2, adapter_width=2, adapter_dropout=0.0, host="frozen"
)
LORA = pesc.Config(
    experts=4, top_k=2, adapter_width=2, host="lora", lora_rank=2, lora_dropout=0.0
)
CONFIGS = {
    "layers": pesc.Config(layers=(5,), host="frozen"),
    "trains the host": pesc.Config(host="full"),
}


def folder(name="saved"):
    """A folder that is not there yet, in one that is."""
    return new_folder() / name


def logits(model):
    """What a model says of one batch."""
    with torch.no_grad():
        return model(**hosts.seen()).logits


def root_by_hand(base, mix):
    """Where the claims of a base and a mixture stand."""
    root = "pesc"
    if "13b" in base:
        root += "/13b"
    if mix == "idae-720k":
        root += "/pro"
    return root


def dense_logits(model, config):
    """At first a crafted model is its dense host."""
    if config.layers is not None:
        raise ValueError("layers")
    return logits(hosts.host())


def moved(config=CONFIG):
    """A crafted model whose adapters and routers are no longer at their start."""
    torch.manual_seed(0)
    model = pesc.prepare(hosts.host(), config)
    for parameter in pesc.trained(model, config).values():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


@cache
def saved():
    """The folder of a crafted model."""
    return pesc.save(moved(), folder())


def saved_and_loaded(model, folder):
    return logits(pesc.load(hosts.host(), pesc.save(model, folder)))


def ran(model):
    """A model that has just had a pass."""
    model(**hosts.seen())
    return model


def dense():
    """The dense arm: a host with LoRA and no experts."""
    return pesc.prepare(hosts.host(), LORA, sparse=False)


def balance_loss(attention_mask, balance="live"):
    return pesc.balance_loss(
        ran(moved(replace(CONFIG, balance=balance))), attention_mask
    )


def true_balance(attention_mask):
    """Eq. 10 written out, over both layers."""
    model = ran(moved())
    total = 0
    if attention_mask.shape[0] != 2 or attention_mask.shape[1] < 5:
        raise ValueError("mask")
    real = attention_mask[:, -5:].flatten().bool()
    for layer in model.model.layers:
        decision = layer.mlp.router.trace.decisions[layer.mlp.router.layer]
        ids = decision.ids[real]
        share = decision.logits[real].double().softmax(-1)
        load = torch.bincount(ids.flatten(), minlength=4).double()
        count = max(len(ids), 1)
        total = total + 4 * (load / (2 * count) * share.sum(0) / count).sum()
    return 0.01 * total


def true_gradient(batch):
    if "input_ids" not in batch or batch["input_ids"].shape != (2, 5):
        raise ValueError("ids")
    model = moved().train()
    model(**batch)
    total = true_balance_of(model, batch)
    weights = [layer.mlp.router.weight for layer in model.model.layers]
    grads = torch.autograd.grad(total, weights)
    return total.item(), torch.stack([grad.norm() for grad in grads]).norm().item()


def true_balance_of(model, batch):
    mask = batch.get("attention_mask", torch.ones(2, 5)).bool()
    if mask.shape != (2, 5):
        raise ValueError("mask")
    total = 0
    real = mask.flatten()
    for layer in model.model.layers:
        decision = layer.mlp.router.trace.decisions[layer.mlp.router.layer]
        ids = decision.ids[real]
        share = decision.logits[real].softmax(-1)
        load = torch.bincount(ids.flatten(), minlength=4)
        count = max(len(ids), 1)
        total = total + 0.01 * 4 * (load / (2 * count) * share.sum(0) / count).sum() / 2
    return total


@cache
def _trio():
    """Adapters and full experts that have moved from one dense base."""
    torch.manual_seed(1)
    full = pesc.full_experts(hosts.host(), CONFIG)
    for parameter in full.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return moved(), full


def approximation(batches):
    return pesc.approximation_error(*_trio(), hosts.host(), batches)[:2]


def true_approximation(batches):
    rows = []
    for batch in batches:
        ids = batch["input_ids"]
        labels = batch["labels"]
        mask = batch["attention_mask"]
        known = {*labels.flatten().tolist()} <= {-100, *range(48)}
        if not ids.shape == labels.shape == mask.shape or not known or not ids.numel():
            raise ValueError("batch")
        if (
            not {*mask.flatten().tolist()} <= {0, 1}
            or not (labels[:, 1:] >= 0).any(1).all()
        ):
            raise ValueError("mask")
        losses = []
        for model in (*_trio(), hosts.host()):
            said = model(input_ids=ids, attention_mask=mask).logits[:, :-1].double()
            nats = F.cross_entropy(
                said.mT, labels[:, 1:], reduction="none", ignore_index=-100
            )
            losses.append(nats.sum(1) / (labels[:, 1:] != -100).sum(1))
        rows.append(torch.stack(losses))
    of_pesc, of_full, of_dense = torch.cat(rows, 1)
    gain = (of_dense - of_full).mean()
    return (of_full - of_pesc).abs().tolist(), ((of_dense - of_pesc) / gain).tolist()


def true_counts(config, host):
    """By hand for width 8 and two layers."""
    if not hasattr(host, "hidden_size") or config is not CONFIG:
        raise ValueError("host")
    dense = sum(p.numel() for p in hosts.host().parameters())
    adapters = 2 * 4 * 2 * 8 * 2
    routers = 2 * 4 * 8
    total = dense + adapters + routers
    return dense, adapters, routers, total, total - adapters // 2


def cost(train, inputs, batch, lr):
    """Whether times and bytes of two arms come out."""
    arms = (
        pesc.prepare(hosts.host(), LORA, sparse=False),
        pesc.prepare(hosts.host(), LORA),
    )
    with patch.multiple(measure, TURNS=1, STEPS=2):
        ratios, memory = pesc.cost(*arms, train, inputs, batch=batch, lr=lr, pad_id=2)
    return {"turns": len(ratios), "memory": memory}


ROWS = {
    "methods.pesc.craft": Row(
        lambda model, config: logits(pesc.craft(model, config)),
        lambda: {"model": hosts.host(), "config": CONFIG},
        dense_logits,
        settings=("config",),
        more={"config": CONFIGS},
    ),
    "methods.pesc.full_experts": Row(
        lambda model, config: logits(pesc.full_experts(model, config)),
        lambda: {"model": hosts.host(), "config": CONFIG},
        dense_logits,
        settings=("config",),
        more={"config": CONFIGS},
    ),
    "methods.pesc.prepare": Row(
        lambda model, config: logits(pesc.prepare(model, config)),
        lambda: {"model": hosts.host(), "config": CONFIG},
        dense_logits,
        settings=("config",),
        more={"config": CONFIGS},
    ),
    "methods.pesc.save": Row(
        saved_and_loaded,
        lambda: {"model": moved(), "folder": folder()},
        lambda model, folder: logits(moved()),
        more={
            "model": {"dense": hosts.host()},
            "folder": {"there": new_folder()},
        },
    ),
    "methods.pesc.load": Row(
        lambda model, folder: logits(pesc.load(model, folder)),
        lambda: {"model": hosts.host(), "folder": saved()},
        lambda model, folder: logits(moved()) if folder == saved() else None,
    ),
    "methods.pesc.adapter_norm": Row(
        pesc.adapter_norm,
        lambda: {"model": moved()},
        lambda model: torch.stack(
            [layer.mlp.adapters.up for layer in model.model.layers]
        ).norm(),
        more={"model": {"dense": hosts.host()}},
    ),
    "methods.pesc.balance_loss": Row(
        balance_loss,
        lambda: {"attention_mask": hosts.batch()["attention_mask"]},
        true_balance,
        fine={"attention_mask": "long"},
    ),
    "methods.pesc.balance_loss of no balance": Row(
        lambda attention_mask: balance_loss(attention_mask, "none"),
        lambda: {"attention_mask": hosts.batch()["attention_mask"]},
        lambda attention_mask: 0 * true_balance(attention_mask),
        fine={"attention_mask": "long"},
    ),
    "methods.pesc.balance_loss of a dense model": Row(
        lambda attention_mask: pesc.balance_loss(ran(dense()), attention_mask),
        lambda: {"attention_mask": hosts.batch()["attention_mask"]},
        lambda attention_mask: (
            must(attention_mask.dim() == 2 and attention_mask.numel() > 0) and 0
        ),
    ),
    "methods.pesc.balance_gradient": Row(
        lambda batch: pesc.balance_gradient(moved().train(), batch),
        lambda: {"batch": hosts.seen()},
        true_gradient,
        tolerance=1e-3,
    ),
    "methods.pesc.approximation_error": Row(
        approximation,
        lambda: {"batches": [hosts.batch()]},
        true_approximation,
        tolerance=1e-3,
    ),
    "methods.pesc.counts": Row(
        pesc.counts,
        lambda: {"config": CONFIG, "host": hosts.host().config},
        true_counts,
        settings=("config", "host"),
        more={"host": {"unknown": "no such", "empty": "", "nul": "a\0b"}},
    ),
    "methods.pesc.cost": Row(
        cost,
        lambda: {"train": hosts.rows(), "inputs": hosts.seen(), "batch": 3, "lr": 1e-3},
        fine={"inputs[input_ids]": "zero", "inputs[attention_mask]": "zero | dtype"},
        settings=("train", "batch", "lr"),
    ),
    "methods.pesc.reading": Row(pesc.reading, lambda: {"name": "paper"}),
    "methods.pesc.root": Row(
        pesc.root,
        lambda: {"base": "llama-2-13b", "mix": "idae-720k"},
        root_by_hand,
    ),
}
