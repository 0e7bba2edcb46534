"""What PESC is measured by: Eq. 6 on models of known distance, the printed sizes, the cost."""

import copy

import pandas as pd
import pytest
import torch
from datasets import Dataset

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
    want = (dense(**batch).loss - full(**batch).loss).abs()  # rows' means differ in length only
    assert sum(gaps) / 3 > 0.1 * want.item()
    assert [model.training for model in (crafted, full, dense)] == [True, False, False]
    with pytest.raises(Refusal, match="E-DATA: no batch to measure"):
        pesc.approximation_error(crafted, full, dense, [])


def test_row_losses_are_those_of_transformers(host, batch):
    dense, other = host(), host(initializer_range=0.5)
    row = {key: value[1:2] for key, value in batch.items()}
    (gap,), _ = pesc.approximation_error(dense, other, dense, [row])
    want = (dense(**row).loss - other(**row).loss).abs().item()
    assert gap == pytest.approx(want, rel=1e-4)


def test_wide_adapters_come_nearer_to_full_experts_when_they_train(host, batch):
    dense = host()
    full = train(pesc.full_experts(host(), pesc.Config(**SMALL)), batch, 20, 1e-3)
    crafted = pesc.prepare(host(), pesc.Config(**SMALL))
    start, _ = pesc.approximation_error(crafted, full, dense, [batch])
    end, _ = pesc.approximation_error(train(crafted, batch, 40, 3e-3), full, dense, [batch])
    assert sum(end) < sum(start)


@pytest.mark.parametrize(
    ("name", "dense", "layers", "width", "narrow"),
    [
        ("llama-2-7b", 6_738_415_616, 32, 4096, 6.9),
        ("llama-2-13b", 13_015_864_320, 40, 5120, 13.2),
        ("yi-34b", 34_388_917_248, 60, 7168, 34.8),
    ],
)
def test_width_512_gives_the_printed_sizes_and_64_does_not(name, dense, layers, width, narrow):
    size = pesc.counts(pesc.Config(), name)
    assert size.dense == dense
    assert size.adapters == layers * 8 * 2 * width * 512
    assert size.routers == layers * 8 * width
    assert size.total == dense + size.adapters + size.routers
    assert size.activated == size.total - size.adapters * 6 // 8
    assert round(size.total / 1e9) == PRINTED[name][0]
    released = pesc.counts(pesc.Config.preset("released"), name)
    assert round(released.total / 1e9, 1) == narrow
    assert round(released.total / 1e9) != PRINTED[name][0]


def test_the_table_of_sizes_agrees_with_the_printed_ones():
    table = pesc.printed_sizes()
    printed = pd.Series({name: total for name, (total, _) in PRINTED.items()})
    assert (table.total / 1e9).round().to_dict() == printed.to_dict()
    assert not ((table.total_64 / 1e9).round() == printed).any()
    assert (table.implied_width_low < 512).all() and (table.implied_width_high > 512).all()
    for side, column in ((-0.5, "implied_width_low"), (0.5, "implied_width_high")):
        gained = table[column] * (table.total - table.total_64) / (512 - 64)  # width by width
        rest = table.total - 512 * (table.total - table.total_64) / (512 - 64)
        assert ((gained + rest) / 1e9).to_dict() == pytest.approx((printed + side).to_dict())


def test_only_widths_from_589_to_596_fit_the_printed_activated_size_of_the_13b_host_too():
    fitting = []
    for width in (588, 589, 596, 597):  # counts rise with the width: the edges suffice
        sizes = {name: pesc.counts(pesc.Config(adapter_width=width), name) for name in PRINTED}
        rounded = {
            name: (round(size.total / 1e9), round(size.activated / 1e9))
            for name, size in sizes.items()
        }
        fitting += [width] if rounded == PRINTED else []
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


def test_bytes_are_those_of_a_step_and_every_turn_has_a_ratio(host, batch):
    config = pesc.Config(experts=4, adapter_width=6, host="lora", lora_rank=4)
    dense, sparse = pesc.prepare(host(), config, sparse=False), pesc.prepare(host(), config)
    rows = [torch.randint(3, 48, (7,)).tolist() for _ in range(12)]
    train = Dataset.from_dict({"input_ids": rows, "labels": rows})
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
    labelled = {**inputs, "labels": inputs["input_ids"]}
    want = [step_memory(model.train(), labelled).total for model in (sparse, dense)]
    times, memory = pesc.cost(dense, sparse, train, inputs, batch=4, lr=0.01, pad_id=2)
    assert memory == want[0] / want[1] > 1
    assert len(times) == 3 and min(times) > 0
