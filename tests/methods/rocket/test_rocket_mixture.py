"""The mixture: one expert is PEFT's LoRA, routing is Eq. 8 and 9, only experts and gates train."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from peft import PeftModel

from moebook.analysis import routing as activation
from moebook.errors import Refusal
from moebook.methods import rocket
from moebook.methods.rocket import apply
from moebook.models.checkpoint import fingerprint
from moebook.nn import Dropout
from moebook.nn.lora_mixture import LoraMixture
from tests.refusals import refused

ONE = {"candidates": 1, "experts": 1, "top_k": 1}


def cast(lora, dtype):
    down = {path: factor.to(dtype) for path, factor in lora.down.items()}
    up = {path: factor.to(dtype) for path, factor in lora.up.items()}
    return replace(lora, down=down, up=up)


@pytest.mark.parametrize("alpha", [8.0, 3.0])
@pytest.mark.parametrize("training", [False, True])
def test_one_expert_equals_pefts_lora(training, alpha, base, batch, lora, tmp_path):
    model = base()
    one = lora(model, "one", 0, alpha=alpha)
    folder = rocket.loras.write(one, tmp_path / "one")
    peft = PeftModel.from_pretrained(base(), folder, is_trainable=True)
    for (
        part
    ) in peft.modules():  # a saved LoRA has no dropout; put the mixture's on both
        if hasattr(part, "lora_dropout"):
            part.lora_dropout["default"] = Dropout(0.25)
    mixed = apply.build(model, [one], rocket.Config(**ONE, lora_dropout=0.25))
    outputs = []
    for each in (peft, mixed):
        torch.manual_seed(7)
        outputs.append(each.double().train(training)(**batch))
        outputs[-1].loss.backward()
    name = "model.layers.1.self_attn.q_proj"
    wrapped = peft.get_submodule(f"base_model.model.{name}")
    part = mixed.get_submodule(name)
    for theirs, ours in (
        (outputs[0].logits, outputs[1].logits),
        (wrapped.lora_A["default"].weight.grad, part.down.grad[0]),
        (wrapped.lora_B["default"].weight.grad, part.up.grad[0]),
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("reads", ["layer", "expert"])
def test_each_projection_is_the_weighted_sum_of_its_experts(reads, base, make_bank):
    model = base().double()
    bank = {
        name: cast(lora, torch.float64) for name, lora in make_bank(model, 4).items()
    }
    bank["c"] = replace(bank["c"], alpha=3.0)
    apply.build(model, list(bank.values()), rocket.Config(gate_input=reads))
    generator = torch.Generator().manual_seed(0)
    parts = {
        n: part for n, part in model.named_modules() if isinstance(part, LoraMixture)
    }
    assert set(parts) == set(bank["a"].down)
    for path, part in parts.items():
        x = torch.randn(2, 5, part.base_layer.in_features, generator=generator).double()
        mixed = part(x)
        for place in np.ndindex(2, 5):
            base_output = part.base_layer(x[place])
            outputs = [
                base_output
                + lora.alpha / 4 * lora.up[path] @ (lora.down[path] @ x[place])
                for lora in bank.values()
            ]
            read = [x[place]] * 4 if reads == "layer" else outputs
            logits = torch.stack(
                [row @ v for row, v in zip(part.router.weight, read, strict=True)]
            )
            top = logits.topk(2)
            gates = zip(top.values.softmax(0), top.indices.tolist(), strict=True)
            assert torch.allclose(
                mixed[place], sum(g * outputs[i] for g, i in gates), atol=1e-12
            )


def test_identical_experts_begin_as_that_lora_whatever_the_gates_say(base, batch, lora):
    model = base()
    one = lora(model, "one", 0)
    with rocket.loras.attached(model, [one]):
        expected = model(**batch).logits
    apply.build(model, [one] * 4, rocket.Config(lora_dropout=0.0))
    torch.testing.assert_close(model(**batch).logits, expected, rtol=1e-3, atol=1e-4)


def test_omitting_the_scale_is_what_the_released_code_does(model, base, batch, lora):
    other = base()
    one = lora(model, "one", 0, alpha=12.0)
    apply.build(model, [one], rocket.Config(**ONE, lora_scale="omitted"))
    apply.build(other, [replace(one, alpha=4.0)], rocket.Config(**ONE))
    assert torch.equal(model(**batch).logits, other(**batch).logits)


@pytest.mark.parametrize("reads", ["layer", "expert"])
def test_a_step_moves_experts_and_gates_and_nothing_else(reads, model, batch, bank):
    before = fingerprint(model)
    apply.build(model, list(bank.values()), rocket.Config(gate_input=reads)).train()
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    learning = {id(parameter): parameter for parameter in apply.trained(model).values()}
    model(**batch).loss.backward()
    torch.optim.AdamW(learning.values(), lr=0.1).step()
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad is (id(parameter) in learning)
        assert torch.equal(values[name], parameter) is not parameter.requires_grad
    assert fingerprint(apply.remove(model)) == before


def test_removing_leaves_the_base_alone_and_one_expert_equals_its_lora(
    model, batch, bank
):
    plain = model(**batch).logits
    for _ in range(3):
        apply.build(model, list(bank.values()), rocket.Config())
        mixed = model(**batch).logits
        twin = copy.deepcopy(model)
        assert torch.equal(apply.remove(model)(**batch).logits, plain)
        assert torch.equal(twin(**batch).logits, mixed)
        assert not torch.allclose(mixed, plain)
    assert not model.get_decoder()._forward_pre_hooks
    with rocket.loras.attached(model, [bank["c"]]):
        expected = model(**batch).logits
    apply.build(model, list(bank.values()), rocket.Config())
    with apply.only(model, "c"):
        assert torch.allclose(model(**batch).logits, expected, atol=1e-5)
    assert not torch.allclose(model(**batch).logits, expected, atol=1e-3)
    with (
        pytest.raises(Refusal, match="E-NAME: no expert 'd1'"),
        apply.only(model, "d1"),
    ):
        pass
    shares = activation.shares(model, {"own": [batch]})
    slots = 2 * 2 * int(batch["attention_mask"].sum())  # two projections, top-2
    assert shares.groupby("layer")["slots"].sum().tolist() == [slots] * 2
    assert activation.load(shares)["entropy"].between(0, 1, inclusive="right").all()


@pytest.mark.parametrize("frozen", ["", "model.norm.weight"])
def test_what_trained_of_the_base_trains_again_after_removing(
    frozen, model, bank, tmp_path
):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name != frozen)
    apply.build(model, list(bank.values()), rocket.Config())
    folder = apply.save(model, tmp_path / "mixture")
    for _ in range(2):
        apply.remove(model)
        for name, parameter in model.named_parameters():
            assert parameter.requires_grad is (name != frozen)
        apply.load(model, folder)
        assert sum(p.requires_grad for p in model.parameters()) == len(
            apply.trained(model)
        )


def test_experts_of_half_precision_are_trained_in_single(base, make_bank):
    model = base(dtype=torch.bfloat16)
    bank = [cast(lora, torch.bfloat16) for lora in make_bank(model, 2).values()]
    apply.build(model, bank, rocket.Config(experts=2))
    assert {p.dtype for p in apply.trained(model).values()} == {torch.float32}
    assert model(torch.tensor([[3, 4, 5]])).logits.dtype == torch.bfloat16


def test_what_makes_no_mixture_is_refused(model, base, bank, lora):
    four = list(bank.values())
    config = rocket.Config()
    other = base()
    torch.nn.init.zeros_(other.lm_head.weight)
    wide = [*four[:3], lora(model, "wide", 9, rank=6)]
    head = [lora(model, f"h{n}", n, targets=("q_proj", "lm_head")) for n in range(4)]
    for host, loras, message in (
        (
            model,
            four[:3],
            r"E-RANGE: 3 experts and 3 scales are given, experts \(N\) is 4",
        ),
        (model, wide, "E-BANK: 'a' and 'wide' differ in rank: 4 and 6"),
        (other, four, "E-BASE: 'a' belongs to base"),
        (model, head, "E-KEYS: 'h0' adapts lm_head, outside of the decoder's layers"),
    ):
        refused(message, apply.build, host, loras, config)
        assert all(parameter.requires_grad for parameter in host.parameters())
    refused("E-MODEL: the model has not been through rocket", apply.remove, model)
    apply.build(model, four, config)
    refused(
        "E-MODEL: the model holds a mixture already", apply.build, model, four, config
    )
