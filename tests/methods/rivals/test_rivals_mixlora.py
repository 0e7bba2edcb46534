"""MixLoRA: the package `mixlora`, a plain loop, PEFT's LoRA and the balance loss of Mixtral."""

import copy
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from moebook import nn as mnn
from moebook.errors import Refusal
from moebook.methods.rivals import mixlora, tuning
from moebook.models.checkpoint import fingerprint
from tests.refusals import refused

SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SMALL = {"rank": 4, "alpha": 6.0, "experts": 4}
RECIPE = {"steps": 1, "batch": 4, "lr": 1e-2, "warmup": 0.0}


@pytest.fixture
def mixed(rows):
    """A model with MixLoRA on it, whose experts and choices differ."""

    def make(model, **changes):
        config = mixlora.Config.preset("paper", **SMALL | changes)
        result = mixlora.tuned(model, None, tuning.Data(rows), config, **RECIPE)
        torch.manual_seed(0)
        for name, tensor in tuning.tensors(model, result.origin).items():
            if not name.endswith("weigh.weights"):
                tensor.data = torch.randn_like(tensor) * (
                    1.0 if "router" in name else 0.2
                )
        return result

    return make


def named(result):
    """The tensors under the names that the package reads."""
    weights = {}
    for path, part in result.parts.items():
        place = path.replace("model.layers", "mixlora.layers")
        if path.endswith("mlp"):
            weights[f"{place}.moe_gate.weight"] = part.weigh.router.weight
            for name in SEVEN[4:]:
                for e in range(4):
                    lora = f"{place}.{name}.experts.{e}"
                    weights[f"{lora}.lora_A.weight"] = part.downs[name][e]
                    weights[f"{lora}.lora_B.weight"] = part.ups[name][e]
        else:
            weights[f"{place}.lora_A.weight"] = part.down[0]
            weights[f"{place}.lora_B.weight"] = part.up[0]
    return weights


def test_it_is_the_released_packages_model(base, batch, mixed):
    package = pytest.importorskip("mixlora.model")
    config = package.MixLoraConfig.from_config(
        {
            "base_model_name_or_path": "tiny",
            "task_type": "CAUSAL_LM",
            "peft_type": "MIXLORA",
            "r": 4,
            "lora_alpha": 6,
            "lora_dropout": 0.05,
            "target_modules": SEVEN,
            "act_fn": "silu",
            "routing_strategy": "mixlora",
            "num_experts": 4,
            "top_k": 2,
        }
    )
    config.dtype_ = torch.float32
    config.adapter_name_ = "tiny"
    result = mixed(base())
    theirs = base()
    package.inject_adapter_in_model(
        theirs, config, {k: v.data for k, v in named(result).items()}
    )
    theirs.eval()
    for (
        layer
    ) in theirs.model.layers:  # kept in a plain dict, which eval() does not reach
        for expert in layer.mlp.mixlora_moes["tiny"].experts_.values():
            expert.eval()
    expected = theirs(**batch).logits
    torch.testing.assert_close(
        result.model(**batch).logits, expected, rtol=1e-4, atol=1e-4
    )


def test_each_token_gets_its_experts_by_the_definition(base, batch, mixed):
    model = base().double()
    result = mixed(model)
    h = torch.randn(2, 5, 32).double()
    part = result.parts["model.layers.1.mlp"]
    mlp = part.base_layer
    s = 6 / 4
    y = part(h)
    for place in ((0, 0), (1, 3), (1, 4)):
        p = (part.weigh.router.weight @ h[place]).softmax(0)
        expected = 0
        chosen = p.topk(2)
        for share, e in zip(
            chosen.values / chosen.values.sum(), chosen.indices, strict=True
        ):
            merged = {
                name: getattr(mlp, name).weight
                + s * part.ups[name][e] @ part.downs[name][e]
                for name in SEVEN[4:]
            }
            hidden = mlp.act_fn(merged["gate_proj"] @ h[place]) * (
                merged["up_proj"] @ h[place]
            )
            expected = expected + share * merged["down_proj"] @ hidden
        torch.testing.assert_close(y[place], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("placement", "targets"), [("ffn", SEVEN), ("projections", ["q_proj", "v_proj"])]
)
def test_one_expert_is_pefts_lora_and_none_trained_the_base(
    placement, targets, base, batch, mixed, rows
):
    torch.manual_seed(1)
    plain = base()
    model = base()
    config = LoraConfig(r=4, lora_alpha=6, target_modules=targets)
    theirs = get_peft_model(base(), config)
    result = mixed(model, placement=placement, experts=1, top_k=1)
    for path, part in result.parts.items():
        factors = {path: part}
        if path.endswith("mlp"):
            factors = {}
            for name in SEVEN[4:]:
                pair = SimpleNamespace(down=part.downs[name], up=part.ups[name])
                factors[f"{path}.{name}"] = pair
        for full, pair in factors.items():
            lora = theirs.get_submodule(f"base_model.model.{full}")
            lora.lora_A["default"].weight.data = pair.down[0].data
            lora.lora_B["default"].weight.data = pair.up[0].data
            assert full.rpartition(".")[2] in targets
    expected = theirs.eval()(**batch).logits
    torch.testing.assert_close(model(**batch).logits, expected, rtol=1e-4, atol=1e-4)
    result.detach()
    fresh = mixlora.Config(**SMALL, placement=placement)
    mixlora.tuned(model, None, tuning.Data(rows), fresh, **RECIPE | {"lr": 1e-30})
    torch.testing.assert_close(model(**batch).logits, plain(**batch).logits)


@pytest.mark.parametrize("placement", ["ffn", "projections"])
def test_the_balance_loss_is_mixtrals_a_layer_or_over_all(
    placement, base, batch, mixed
):
    result = mixed(base(), placement=placement)
    result.model(**batch)
    found = mnn.routers(result.model)
    logits = tuple(router.trace.decisions[router.layer].logits for router in found)
    mask = batch["attention_mask"]
    alone = [load_balancing_loss_func((each,), 4, 2, mask) for each in logits]
    for balance, expected in (
        ("layer", sum(alone) / len(alone)),
        ("pooled", load_balancing_loss_func(logits, 4, 2, mask)),
    ):
        value = mixlora.penalty(
            mixlora.Config(**SMALL, coefficient=0.5, balance=balance)
        )
        torch.testing.assert_close(
            value(result.model), 0.5 * expected, rtol=1e-5, atol=1e-6
        )
    config = mixlora.Config(**SMALL, coefficient=1.0)
    with torch.no_grad():
        for router in found:
            router.weight.zero_()
    result.model(**batch)
    least = mixlora.penalty(config)(result.model).item()
    assert least == pytest.approx(config.top_k)


@pytest.mark.parametrize("balance", ["layer", "pooled"])
def test_a_model_without_routers_has_no_balance(balance, model):
    config = mixlora.Config(**SMALL, balance=balance)
    refused("E-MODEL: no routers to balance", mixlora.penalty(config), model)


def test_layers_that_each_use_half_look_balanced_when_pooled(base, batch, mixed):
    result = mixed(base())
    result.model(**batch)
    pairs = torch.eye(4)[:2].sum(0), torch.eye(4)[2:].sum(0)
    for router, pair in zip(mnn.routers(result.model), pairs, strict=True):
        old = router.trace.decisions[router.layer]
        logits = (10 * pair).expand_as(old.logits)
        router.trace.decisions[router.layer] = old._replace(
            logits=logits, ids=logits.topk(2).indices
        )
    result.model.eval()
    value = {
        balance: mixlora.penalty(
            mixlora.Config(**SMALL, coefficient=1.0, balance=balance)
        )(result.model).item()
        for balance in ("layer", "pooled")
    }
    assert value == pytest.approx({"layer": 4.0, "pooled": 2.0}, abs=0.01)


def test_bad_input_is_one_line_and_nothing_stays_on_the_base(
    model, rows, mixture, mixed
):
    before = fingerprint(model)
    data = tuning.Data(rows)
    with pytest.raises(
        Refusal, match=r"E-RANGE: top_k is 3, expected 1 to 2 \(experts, E\)"
    ):
        mixlora.Config(experts=2, top_k=3)
    with pytest.raises(
        Refusal, match="E-MODEL: layer 0 is sparse already: MixLoRA needs a dense"
    ):
        mixlora.tuned(mixture("Mixtral"), None, data, mixlora.Config(**SMALL), **RECIPE)
    huge = mixlora.Config(**SMALL | {"alpha": 1e38})
    with pytest.raises(Refusal, match="E-NONFINITE: step"):
        mixlora.tuned(model, None, data, huge, **RECIPE | {"steps": 3})
    assert fingerprint(model) == before
    assert not model.get_decoder()._forward_hooks
    result = mixed(model)
    assert copy.deepcopy(model)
    assert fingerprint(result.detach()) == before


# What of an MLP the experts would leave out: a norm, factors, an activation of another name.
FALCON = {
    "mamba_d_ssm": 32,
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mlp_multipliers": [0.5, 0.7],
}
OTHERS = {
    "BitNet": ({}, "BitNetMLP computes more than down_proj"),
    "FalconH1": (FALCON, "FalconH1MLP computes more than down_proj"),
    "Llama4": (
        {"intermediate_size_mlp": 40, "moe_layers": []},
        "Llama4TextMLP has no act_fn: MixLoRA's experts need it",
    ),
}


@pytest.mark.parametrize("family", OTHERS)
def test_an_mlp_that_is_more_than_its_three_layers_is_refused(family, host, batch):
    changes, message = OTHERS[family]
    model = host(family, **changes)
    logits = model(**batch).logits
    refused(
        f"E-MODEL: {message}.*; placement='projections' leaves the MLP",
        mixlora.attach,
        model,
        None,
        mixlora.Config(**SMALL),
    )
    assert torch.equal(model(**batch).logits, logits)
    mixlora.attach(model, None, mixlora.Config(**SMALL, placement="projections"))
    torch.testing.assert_close(model(**batch).logits, logits)


def test_an_mlp_with_biases_keeps_them(host, batch):
    model = host(mlp_bias=True)
    for name, bias in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(bias)
    logits = model(**batch).logits
    mixlora.attach(model, None, mixlora.Config(**SMALL))
    torch.testing.assert_close(model(**batch).logits, logits, rtol=1e-4, atol=1e-4)
