"""What PESC is measured by: Eq. 6 on models of known distance, the printed sizes, the cost."""

import copy

import pytest
import torch

from moebook.analysis.memory import step_memory
from moebook.errors import Refusal
from moebook.methods import pesc
from moebook.models.anatomy import anatomy
from moebook.nn import ExpertMoE, routers

SMALL = {"experts": 3, "adapter_width": 6, "adapter_dropout": 0.0, "host": "frozen"}
PRINTED = {"llama-2-7b": (8, 7), "llama-2-13b": (15, 14), "yi-34b": (38, 35)}  # total, activated


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
    with pytest.raises(Refusal, match="E-CHOICE: host is 'lora'"):
        pesc.full_experts(host(), pesc.Config(**{**SMALL, "host": "lora"}))


def test_error_is_0_for_equal_models_and_1_for_adapters_that_never_moved(host, batch):
    full = train(pesc.full_experts(host(), pesc.Config(**SMALL)), batch, 3, 1e-2)
    itself = pesc.approximation_error(copy.deepcopy(full), full, host(), [batch, batch])
    assert itself == ([0] * 6, 0)
    crafted, dense = pesc.craft(host(), pesc.Config(**SMALL)).train(), host()
    gaps, error = pesc.approximation_error(crafted, full, dense, [batch])
    assert error == pytest.approx(1, abs=1e-5)
    rows = [{key: value[i : i + 1] for key, value in batch.items()} for i in range(3)]
    want = [(dense(**row).loss - full(**row).loss).abs().item() for row in rows]
    assert gaps == pytest.approx(want, rel=1e-3, abs=1e-6)
    assert [model.training for model in (crafted, full, dense)] == [True, False, False]
    with pytest.raises(Refusal, match="E-DATA: no batch to measure"):
        pesc.approximation_error(crafted, full, dense, [])


def test_wide_adapters_come_nearer_to_full_experts_when_they_train(host, batch):
    dense = host()
    full = train(pesc.full_experts(host(), pesc.Config(**SMALL)), batch, 20, 1e-3)
    crafted = pesc.prepare(host(), pesc.Config(**SMALL))
    start, _ = pesc.approximation_error(crafted, full, dense, [batch])
    end, _ = pesc.approximation_error(train(crafted, batch, 40, 3e-3), full, dense, [batch])
    assert sum(end) < sum(start)


def test_width_512_gives_the_printed_sizes_and_64_does_not():
    hosts = {  # dense size, layers, width, and the size with adapters of width 64
        "llama-2-7b": (6_738_415_616, 32, 4096, 6.9),
        "llama-2-13b": (13_015_864_320, 40, 5120, 13.2),
        "yi-34b": (34_388_917_248, 60, 7168, 34.8),
    }
    table = pesc.printed_sizes()
    for name, (dense, layers, width, narrow) in hosts.items():
        size, line = pesc.counts(pesc.Config(), name), table.loc[name]
        assert (size.dense, size.routers) == (dense, layers * 8 * width)
        assert size.adapters == layers * 8 * 2 * width * 512
        assert size.total == line.total == dense + size.adapters + size.routers
        assert size.activated == size.total - size.adapters * 6 // 8
        released = pesc.counts(pesc.Config.preset("released"), name).total
        assert released == line.total_64 and round(released / 1e9, 1) == narrow
        printed = PRINTED[name][0]
        assert round(size.total / 1e9) == printed != round(released / 1e9)
        assert line.implied_width_low < 512 < line.implied_width_high
        per_width = layers * 8 * 2 * width
        for side, end in ((-0.5, line.implied_width_low), (0.5, line.implied_width_high)):
            total = dense + size.routers + end * per_width
            assert total / 1e9 == pytest.approx(printed + side)


def test_only_widths_from_589_to_596_fit_the_printed_activated_size_of_the_13b_host_too():
    fitting = []
    for width in (588, 589, 596, 597):  # counts rise with the width: the edges suffice
        sizes = {name: pesc.counts(pesc.Config(adapter_width=width), name) for name in PRINTED}
        pairs = {n: (round(s.total / 1e9), round(s.activated / 1e9)) for n, s in sizes.items()}
        fitting += [width] if pairs == PRINTED else []
    assert fitting == [589, 596]


def test_counts_of_a_configuration_equal_those_of_the_crafted_model(host):
    config = pesc.Config(experts=4, adapter_width=6, host="frozen", layers=(1,))
    model = pesc.craft(host(), config)
    assert [layer.kind for layer in anatomy(model).layers] == ["dense", "sparse"]
    size = pesc.counts(config, model.config)
    assert size.total == sum(parameter.numel() for parameter in model.parameters())
    assert size.adapters == 4 * 2 * 32 * 6
    with pytest.raises(Refusal, match="did you mean 'llama-2-7b'"):
        pesc.counts(config, "llama-7b")


def test_bytes_are_those_of_a_step_and_every_turn_has_a_ratio(host, batch, rows):
    config = pesc.Config(experts=4, adapter_width=6, host="lora", lora_rank=4)
    dense, sparse = pesc.prepare(host(), config, sparse=False), pesc.prepare(host(), config)
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
    labelled = {**inputs, "labels": inputs["input_ids"]}
    want = [step_memory(model.train(), labelled).total for model in (sparse, dense)]
    times, memory = pesc.cost(dense, sparse, rows, inputs, batch=4, lr=0.01, pad_id=2)
    assert memory == want[0] / want[1] > 1
    assert len(times) == 3 and min(times) > 0
