"""What of the host trains: frozen, LoRA, QLoRA, full; the dense arm; merging; training."""

import importlib.util

import peft
import pytest
import torch
from torch import nn

from moebook.errors import Refusal
from moebook.methods import pesc
from moebook.models.anatomy import anatomy
from moebook.nn import Adapters
from moebook.training import fit

SMALL = {
    "experts": 4, "adapter_width": 6, "adapter_dropout": 0.0, "lora_rank": 4, "lora_dropout": 0.0,
}  # fmt: skip
HOSTS = ("frozen", "lora", "qlora", "full")


def step(model, batch):
    parameters = pesc.trained(model, model.pesc.config).values()
    optimiser = torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1)
    (model.train()(**batch).loss + pesc.balance_loss(model)).backward()
    optimiser.step()
    return model.eval()


@pytest.mark.parametrize("name", HOSTS)
def test_exactly_adapters_routers_and_the_asked_part_of_the_host_train(name, host, batch):
    """What is frozen is equal bit for bit after a step of AdamW with weight decay."""
    model = pesc.prepare(host(), pesc.Config(**SMALL, host=name))
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    training = {n for n, p in model.named_parameters() if p.requires_grad}
    assert training == set(pesc.trained(model, model.pesc.config))
    ours = {n for n in before if ".adapters." in n or ".router." in n}
    lora = {n for n in before if ".lora_A." in n or ".lora_B." in n}
    assert len(ours) == 2 * 3
    assert len(lora) == (2 * 7 * 2 if "lora" in name else 0)
    assert training == (set(before) if name == "full" else ours | lora)
    step(model, batch)
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert moved <= training
    assert any(".adapters.up" in n for n in moved) and any(".router." in n for n in moved)
    assert any(".lora_B." in n for n in moved) == ("lora" in name)


@pytest.mark.parametrize("name", HOSTS)
def test_the_arms_share_the_host_and_are_equal_at_step_0(name, host, batch):
    sparse = pesc.prepare(host(), pesc.Config(**SMALL, host=name))
    dense = pesc.prepare(host(), pesc.Config(**SMALL, host=name), sparse=False)
    torch.testing.assert_close(sparse(**batch).logits, dense(**batch).logits, rtol=1e-6, atol=1e-6)
    names = [
        {n.replace(".mlp.shared.", ".mlp.") for n in pesc.trained(m, m.pesc.config)}
        for m in (sparse, dense)
    ]
    assert names[1] == {n for n in names[0] if ".router." not in n and ".adapters." not in n}
    assert all(layer.kind == "dense" for layer in anatomy(dense).layers)


def test_qlora_holds_the_layers_linears_in_double_quantised_nf4_and_nothing_else(host):
    import bitsandbytes as bnb

    model = pesc.prepare(host(), pesc.Config(**SMALL, host="qlora"))
    quantised = [m for m in model.modules() if isinstance(m, bnb.nn.Linear4bit)]
    assert len(quantised) == 2 * 7
    assert all(m.weight.quant_type == "nf4" and m.weight.quant_state.nested for m in quantised)
    assert all(m.weight.dtype == torch.uint8 for m in quantised)
    assert type(model.lm_head) is nn.Linear
    assert all(layer.router.weight.dtype == torch.float32 for layer in anatomy(model).layers)
    wrapped = [m for m in model.modules() if isinstance(m, peft.tuners.lora.LoraLayer)]
    assert {m.r["default"] for m in wrapped} == {4}
    assert {m.scaling["default"] for m in wrapped} == {16 / 4}


@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("name", ["lora", "qlora"])
def test_merging_lora_changes_no_output_and_leaves_plain_layers(name, sparse, host, batch):
    model = step(pesc.prepare(host(), pesc.Config(**SMALL, host=name), sparse=sparse), batch)
    before = model(**batch).logits
    assert pesc.merge_lora(model) is model
    torch.testing.assert_close(model(**batch).logits, before, rtol=2e-4, atol=2e-4)
    assert not [m for m in model.modules() if isinstance(m, peft.tuners.lora.LoraLayer)]
    assert {type(m).__name__ for m in model.modules() if isinstance(m, nn.Linear)} == {"Linear"}
    with pytest.raises(Refusal, match="nothing to merge"):
        pesc.merge_lora(model)


def test_four_bits_without_bitsandbytes_is_refused_and_the_model_untouched(host, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    model = host()
    before = [type(m) for m in model.modules()]
    with pytest.raises(Refusal, match=r"E-DEP: .*pip install bitsandbytes"):
        pesc.prepare(model, pesc.Config(**SMALL, host="qlora"))
    assert [type(m) for m in model.modules()] == before


def test_a_half_precision_host_gets_float32_adapters_and_runs(host, batch):
    model = pesc.prepare(host(dtype=torch.bfloat16), pesc.Config(**SMALL, host="lora"))
    assert {p.dtype for p in pesc.trained(model, model.pesc.config).values()} == {torch.float32}
    assert step(model, batch)(**batch).logits.isfinite().all()


def test_the_adapters_norm_is_that_of_all_upper_matrices_together(host):
    model = pesc.craft(host(), pesc.Config(**SMALL))
    assert pesc.adapter_norm(model) == 0
    for adapters in (m for m in model.modules() if isinstance(m, Adapters)):
        nn.init.constant_(adapters.up, 0.5)
    entries = 2 * 4 * 6 * 32  # layers, experts, adapter width, width
    assert pesc.adapter_norm(model) == pytest.approx(0.5 * entries**0.5)
    with pytest.raises(Refusal, match="E-MODEL: no adapters"):
        pesc.adapter_norm(host())


@pytest.mark.parametrize("name", HOSTS)
def test_history_holds_the_balance_loss_of_each_step(name, host, rows):
    config = pesc.Config(**SMALL, host=name, balance_weight=0.5)
    recipe = {"steps": 4, "batch": 6, "lr": 0.01, "penalty": pesc.balance_loss, "pad_id": 2}
    penalty = fit(pesc.prepare(host(), config), rows, **recipe).penalty
    assert len(penalty) == 4
    assert all(2 * 0.5 * 0.9 < each < 2 * 0.5 * 2 for each in penalty)
    if name != "frozen":
        dense = pesc.prepare(host(), config, sparse=False)
        assert fit(dense, rows, **recipe).penalty == [0.0] * 4
