"""Eq. 6: full experts start as the dense model, and the measured error has the values it must."""

import copy

import pytest
import torch

from moebook.errors import Refusal
from moebook.methods import pesc
from moebook.nn import ExpertMoE, routers

SMALL = {"experts": 3, "adapter_width": 6, "adapter_dropout": 0.0, "host": "frozen"}


def train(model, batch, steps, lr):
    optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    for _ in range(steps):
        optimiser.zero_grad()
        (model.train()(**batch).loss + pesc.balance_loss(model)).backward()
        optimiser.step()
    return model.eval()


def test_full_experts_equal_the_dense_model_at_step_0_and_train_alone(host, batch):
    dense, full = host(), pesc.full_experts(host(), pesc.Config(**SMALL))
    torch.testing.assert_close(full(**batch).logits, dense(**batch).logits, rtol=1e-5, atol=1e-5)
    training = {name for name, p in full.named_parameters() if p.requires_grad}
    assert training == {name for name, _ in full.named_parameters() if ".mlp." in name}
    assert sum(isinstance(m, ExpertMoE) for m in full.modules()) == 2
    full.train()(**batch)
    pesc.balance_loss(full).backward()
    assert all(router.weight.grad.norm() > 0 for router in routers(full))


def test_error_is_0_for_equal_models_and_1_for_adapters_that_never_moved(host, batch):
    full = train(pesc.full_experts(host(), pesc.Config(**SMALL)), batch, 3, 1e-2)
    itself = pesc.approximation_error(copy.deepcopy(full), full, host(), [batch, batch])
    assert itself.output_error == 0
    assert itself.loss_gap == 0
    assert len(itself.gaps) == 6
    still = pesc.approximation_error(
        pesc.craft(host(), pesc.Config(**SMALL)), full, host(), [batch]
    )
    assert still.output_error == pytest.approx(1, abs=1e-5)
    want = (host()(**batch).loss - full(**batch).loss).abs()  # rows' means differ in length only
    assert still.loss_gap > 0.1 * want.item()


def test_row_losses_are_those_of_transformers(host, batch):
    dense, other = host(), host(initializer_range=0.5)
    row = {key: value[1:2] for key, value in batch.items()}
    gap = pesc.approximation_error(dense, other, dense, [row]).loss_gap
    want = (dense(**row).loss - other(**row).loss).abs().item()
    assert gap == pytest.approx(want, rel=1e-4)


def test_wide_adapters_come_nearer_to_full_experts_when_they_train(host, batch):
    dense = host()
    full = train(pesc.full_experts(host(), pesc.Config(**SMALL)), batch, 20, 1e-3)
    crafted = pesc.prepare(host(), pesc.Config(**SMALL))
    start = pesc.approximation_error(crafted, full, dense, [batch])
    end = pesc.approximation_error(train(crafted, batch, 40, 3e-3), full, dense, [batch])
    assert end.loss_gap < start.loss_gap


def test_models_keep_their_modes_and_an_empty_list_is_refused(host, batch):
    crafted, full = pesc.craft(host(), pesc.Config(**SMALL)), host(initializer_range=0.5)
    dense = host().eval()
    for model in (crafted, full):
        model.train()
    pesc.approximation_error(crafted, full, dense, [batch])
    assert [model.training for model in (crafted, full, dense)] == [True, True, False]
    with pytest.raises(Refusal, match="E-DATA: no batch to measure"):
        pesc.approximation_error(crafted, full, dense, [])


def test_other_host_tuning_is_refused(host):
    with pytest.raises(Refusal, match="E-CHOICE: host is 'lora'"):
        pesc.full_experts(host(), pesc.Config(**{**SMALL, "host": "lora"}))
