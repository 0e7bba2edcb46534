"""PESC inside transformers' Trainer: the balance loss is added, reported, and moves the routers."""

import pytest
import torch
from datasets import Dataset

from moebook.methods import pesc
from moebook.nn import routers
from moebook.training import fit

SMALL = {"experts": 4, "adapter_width": 6, "host": "lora", "lora_rank": 4}


def rows(count=24):
    torch.manual_seed(4)
    lengths = [5 + i % 4 for i in range(count)]
    ids = [torch.randint(3, 48, (length,)).tolist() for length in lengths]
    return Dataset.from_dict({"input_ids": ids, "labels": ids, "length": lengths})


def tuned(model, **changes):
    settings = {"steps": 4, "batch": 6, "lr": 0.01, "penalty": pesc.balance_loss, "pad_id": 2}
    return fit(model, rows(), **{**settings, **changes})


@pytest.mark.parametrize("name", ["frozen", "lora", "qlora", "full"])
def test_history_holds_the_balance_loss_of_each_step(name, host):
    config = pesc.Config(**{**SMALL, "host": name}, balance_weight=0.5)
    model = pesc.prepare(host(), config)
    history = tuned(model)
    assert len(history.penalty) == 4
    assert all(2 * 0.5 * 0.9 < penalty < 2 * 0.5 * 2 for penalty in history.penalty)


def test_the_dense_arm_has_no_penalty(host):
    dense = pesc.prepare(host(), pesc.Config(**SMALL), sparse=False)
    assert tuned(dense).penalty == [0.0] * 4


def test_a_strong_balance_loss_evens_out_a_collapsed_router(host):
    spread = {}
    for balance in ("live", "constant"):
        config = pesc.Config(**SMALL, balance=balance, balance_weight=10.0, top_k=1)
        model = pesc.prepare(host(), config)
        with torch.no_grad():
            for router in routers(model):
                router.weight *= 4.0
        tuned(model, steps=40)
        with torch.no_grad():
            model.train()(
                input_ids=torch.tensor([row for row in rows()["input_ids"] if len(row) == 8])
            )
        counts = [
            torch.bincount(router.trace.decisions[router.layer].ids.flatten(), minlength=4)
            for router in routers(model)
        ]
        spread[balance] = sum(c.max().item() / c.sum().item() for c in counts) / len(counts)
    assert spread["live"] < spread["constant"]
    assert spread["live"] < 0.45


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable:FutureWarning")
def test_gradient_checkpointing_trains_to_the_same_weights(host):
    weights = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = pesc.prepare(host(), pesc.Config(**SMALL))
        if checkpointing:
            model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
        tuned(model)
        weights.append(pesc.trained(model, model.pesc.config))
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, rtol=1e-4, atol=1e-5, msg=name)
