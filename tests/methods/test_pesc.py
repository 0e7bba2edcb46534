"""PESC: crafting, the plain-loop oracle, the balance loss in a model, generation, settings."""

import copy
import math
from dataclasses import FrozenInstanceError, replace

import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model
from torch import nn

from moebook.methods import pesc
from moebook.models.anatomy import anatomy
from moebook.nn import AdapterMoE, routers
from tests.refusals import refused

FAMILIES = ["Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2"]
SMALL = {"experts": 4, "adapter_width": 6, "adapter_dropout": 0.0, "host": "frozen"}


def shaken(model):
    """Move adapters and routers away from their start, so that experts differ."""
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in pesc.trained(model, model.pesc.config).values():
            parameter += 0.3 * torch.randn_like(parameter)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_crafted_model_equals_the_dense_one_at_step_0(family, host, batch):
    dense = host(family)
    model = host(family)
    assert pesc.craft(model, pesc.Config(**SMALL)) is model
    assert all(isinstance(layer.mlp, AdapterMoE) for layer in anatomy(model).layers)
    want = dense(**batch)
    got = model(**batch)
    torch.testing.assert_close(got.logits, want.logits, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got.loss, want.loss)


@pytest.mark.parametrize("family", FAMILIES)
def test_router_reads_the_ffn_input_and_adapters_its_output(family, host, batch):
    model = shaken(pesc.craft(host(family), pesc.Config(**SMALL)))
    seen = {}
    layer = model.model.layers[1]
    for name in ("shared", "router", "adapters"):
        part = getattr(layer.mlp, name)
        part.register_forward_hook(
            lambda m, args, out, n=name: seen.update({n: (args[0], out)})
        )
    norm = "post_attention_layernorm"
    if family == "Gemma2":
        norm = "pre_feedforward_layernorm"
    getattr(layer, norm).register_forward_hook(
        lambda m, args, out: seen.update(norm=out)
    )
    model(**batch)
    assert torch.equal(seen["router"][0], seen["norm"])
    assert torch.equal(seen["shared"][0], seen["norm"])
    assert torch.equal(seen["adapters"][0], seen["shared"][1].flatten(0, 1))


class Loop(nn.Module):
    """One MoE layer as a loop over tokens and experts, from the equations, in float64."""

    def __init__(self, block, scale, top_k):
        super().__init__()
        self.block = block
        self.scale = scale
        self.top_k = top_k

    def forward(self, x):
        shared = self.block.shared
        down = self.block.adapters.down
        up = self.block.adapters.up
        rows = []
        self.dispatched = []
        self.probability = []
        for token in x.reshape(-1, x.shape[-1]):
            gate = shared.gate_proj.weight @ token
            swish = gate / (1 + (-gate).exp())
            h = shared.down_proj.weight @ (swish * (shared.up_proj.weight @ token))
            logits = [row @ token for row in self.block.router.weight]
            from_best = sorted(range(len(logits)), key=lambda e: -logits[e].item())
            best = from_best[: self.top_k]
            total = sum(logits[e].exp() for e in best)
            y = torch.zeros_like(h)
            for e in best:  # Eq. 7 with Eq. 8, the residual inside each expert
                pre = h @ down[e]
                active = pre * (1 + torch.erf(pre / math.sqrt(2))) / 2
                y = y + logits[e].exp() / total * (self.scale * (active @ up[e]) + h)
            rows.append(y)
            self.dispatched.append(best)
            everything = sum(logit.exp() for logit in logits)
            self.probability.append([logit.exp() / everything for logit in logits])
        return torch.stack(rows).view_as(x)

    def balance(self, mask):
        """Eq. 10 over the tokens that are no padding."""
        real = [t for t, keep in enumerate(mask.flatten().tolist()) if keep]
        total = 0
        for e in range(len(self.probability[0])):
            f = sum(self.dispatched[t].count(e) for t in real) / (
                len(real) * self.top_k
            )
            total += f * sum(self.probability[t][e] for t in real) / len(real)
        return len(self.probability[0]) * total


def test_outputs_loss_and_gradients_equal_a_plain_loop_in_float64(host, batch):
    config = pesc.Config(**SMALL, adapter_scale=0.5, balance_weight=0.3)
    model = shaken(pesc.craft(host(dtype=torch.float64), config)).train()
    oracle = copy.deepcopy(model)
    for layer in oracle.model.layers:
        layer.mlp = Loop(layer.mlp, 0.5, 2)
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
    got = model(**inputs)
    logits = oracle(**inputs).logits
    targets = batch["labels"][:, 1:]  # transformers' own loss is in float32
    loss = nn.functional.cross_entropy(
        got.logits[:, :-1].mT, targets
    ) + pesc.balance_loss(model)
    nats = (
        -logits[:, :-1]
        .log_softmax(-1)
        .gather(2, targets.clamp(min=0).unsqueeze(2))
        .squeeze(2)
    )
    masks = batch["attention_mask"], torch.ones_like(batch["attention_mask"])
    balance, padded = (
        sum(layer.mlp.balance(m) for layer in oracle.model.layers) for m in masks
    )
    want = nats[targets != -100].mean() + 0.3 * balance
    torch.testing.assert_close(pesc.balance_loss(model, masks[1]), 0.3 * padded)
    real = batch["attention_mask"].bool()
    torch.testing.assert_close(got.logits[real], logits[real], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(loss, want, rtol=1e-9, atol=1e-9)
    loss.backward()
    want.backward()
    truth = {
        name.replace(".block.", "."): p.grad for name, p in oracle.named_parameters()
    }
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.grad, truth[name], rtol=1e-8, atol=1e-9, msg=name
        )


def test_balance_gradient_reaches_every_router_and_the_released_form_none(host, batch):
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
    for form, alive in (("live", True), ("kept", True), ("constant", False)):
        model = pesc.prepare(host(), pesc.Config(**SMALL, balance=form)).train()
        value, pull = pesc.balance_gradient(model, inputs)
        assert all(p.grad is None for p in model.parameters())
        # The pass before left its graph; the loss is a sum over layers, the value a mean.
        model(**inputs)
        (pesc.balance_loss(model) / 2).backward()
        norms = torch.stack([router.weight.grad.norm() for router in routers(model)])
        assert norms.min() > 1e-5 if alive else norms.max() < 1e-8
        assert pull == pytest.approx(norms.norm().item(), rel=1e-5)
        of_a_layer = pesc.balance_loss(model).item() / 2
        assert value == pytest.approx(of_a_layer, rel=1e-6)
    dense = pesc.prepare(host(), pesc.Config(**SMALL), sparse=False)
    without = pesc.prepare(host(), pesc.Config(**SMALL, balance="none"))
    assert pesc.balance_loss(dense).item() == pesc.balance_loss(without).item() == 0


@pytest.mark.parametrize("tuning", ["frozen", "full"])
@pytest.mark.parametrize("frozen", [(), (0,), (1,)])
def test_a_balance_gradient_repeats_and_leaves_out_frozen_routers(
    frozen, tuning, host, batch
):
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
    model = pesc.prepare(host(), pesc.Config(**{**SMALL, "host": tuning})).train()
    model(**inputs)
    (pesc.balance_loss(model) / 2).backward()
    pulls = [router.weight.grad.norm() for router in routers(model)]
    want = math.hypot(*(p for layer, p in enumerate(pulls) if layer not in frozen))
    for layer in frozen:
        routers(model)[layer].weight.requires_grad_(False)
    first, again = (pesc.balance_gradient(model, inputs) for _ in range(2))
    assert first == again
    assert first[1] == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize(
    ("message", "config", "sparse", "frozen"),
    [
        ("E-MODEL: .*the model has no routers", {}, False, False),
        ("E-CHOICE: .*balance is 'none'", {"balance": "none"}, True, False),
        ("E-GRADIENT: .*the routers are frozen", {}, True, True),
        ("E-GRADIENT: .*the routers are frozen", {"host": "full"}, True, True),
    ],
)
def test_what_has_no_balance_gradient_is_refused_with_its_reason(
    message, config, sparse, frozen, host, batch
):
    model = pesc.prepare(host(), pesc.Config(**{**SMALL, **config}), sparse=sparse)
    for router in routers(model) if frozen else ():
        router.requires_grad_(False)
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
    refused(message, pesc.balance_gradient, model.train(), inputs)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable:FutureWarning")
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
def test_a_dead_balance_loss_is_refused_and_not_returned(host, batch):
    model, reentrant = (
        pesc.prepare(host(), pesc.Config(**SMALL)).train() for _ in range(2)
    )
    refused("has not run", pesc.balance_loss, model)
    with torch.no_grad():
        model(**batch)
    reentrant.gradient_checkpointing_enable({"use_reentrant": True})
    reentrant(**batch, use_cache=False)
    dead = {"E-GRADIENT": model, "use_reentrant=False": reentrant, "E-MODEL": host()}
    for message, given in dead.items():
        refused(message, pesc.balance_loss, given)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable:FutureWarning")
def test_gradient_checkpointing_gives_the_same_gradients(host, batch):
    grads = []
    config = pesc.Config(experts=4, adapter_width=6, host="lora", lora_rank=4)
    for checkpointing in (False, True):  # with dropout in adapters and LoRA
        model = shaken(pesc.prepare(host(dtype=torch.float64), config)).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        (model(**batch, use_cache=False).loss + pesc.balance_loss(model)).backward()
        assert len(routers(model)[0].trace.decisions) == 2
        grads.append({name: p.grad for name, p in pesc.trained(model, config).items()})
    assert grads[0].keys() == grads[1].keys() != set()
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, msg=name)


def test_literal_zero_start_never_trains_the_adapters_while_the_fixed_one_does(
    host, batch
):
    for preset, moves in (("paper", False), ("fixed", True)):
        config = pesc.Config.preset(preset, experts=4, adapter_width=6, host="frozen")
        model = pesc.prepare(host(), config).train()
        optimiser = torch.optim.AdamW(
            pesc.trained(model, config).values(), lr=0.1, weight_decay=0
        )
        for _ in range(3):
            optimiser.zero_grad()
            (model(**batch).loss + pesc.balance_loss(model)).backward()
            optimiser.step()
        node = routers(model)[0].trace.decisions[0].logits.grad_fn
        # No graph outlives its step.
        with pytest.raises(RuntimeError, match="already been freed"):
            _ = node._saved_self if hasattr(node, "_saved_self") else node._saved_mat2
        ups = [layer.experts.up.abs().max().item() for layer in anatomy(model).layers]
        assert (min(ups) > 0) == moves


def test_released_model_serves_a_quarter_of_what_it_trained(host):
    config = pesc.Config.preset("released", **SMALL)
    block = anatomy(shaken(pesc.craft(host(), config))).layers[0].mlp
    x = torch.randn(1, 5, 32)
    h = block.shared(x)
    torch.testing.assert_close(block.eval()(x) - h, (block.train()(x) - h) / 4)


def test_generation_with_cache_and_left_padding_equals_one_by_one(host):
    model = shaken(pesc.craft(host(dtype=torch.float64), pesc.Config(**SMALL)))
    mask = (torch.arange(7) >= torch.tensor([[4], [0], [2]])).long()
    padded = torch.randint(3, 48, (3, 7)).where(mask.bool(), 2)
    more = {
        "max_new_tokens": 8,
        "min_new_tokens": 8,
        "do_sample": False,
        "pad_token_id": 2,
    }
    together = model.generate(input_ids=padded, attention_mask=mask, **more)
    for row, start in zip(together, (4, 0, 2), strict=True):
        prompt = row[None, start:7]
        for cache in (True, False):
            one = {"attention_mask": torch.ones_like(prompt), "use_cache": cache}
            alone = model.generate(input_ids=prompt, **one, **more)
            assert row[start:].tolist() == alone[0].tolist()


def test_a_refused_model_is_untouched(host):
    sparse = host("Mixtral", num_local_experts=4)
    crafted = pesc.craft(host(), pesc.Config(**SMALL))
    for model, settings, message in (
        (sparse, SMALL, "sparse already"),
        (crafted, SMALL, "has been through PESC already"),
        (host(), {**SMALL, "layers": (0, 2)}, "layer 2, the host has 0 to 1"),
    ):
        before = {name: p.clone() for name, p in model.named_parameters()}
        hooks = len(model.get_decoder()._forward_pre_hooks)
        for function in (pesc.craft, pesc.prepare, pesc.full_experts):
            refused(message, function, model, pesc.Config(**settings))
        after = dict(model.named_parameters())
        assert after.keys() == before.keys()
        assert all(
            torch.equal(p, before[name]) and p.requires_grad
            for name, p in after.items()
        )
        assert len(model.get_decoder()._forward_pre_hooks) == hooks


@pytest.mark.parametrize("tuning", ["frozen", "lora", "full"])
def test_a_host_that_holds_lora_is_refused_and_keeps_it(tuning, host, batch):
    lora = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model = get_peft_model(host(), lora).eval()
    want = model(**batch).logits
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    config = pesc.Config(**{**SMALL, "host": tuning, "lora_rank": 4})
    crafts = [pesc.craft, pesc.prepare]
    for craft in [*crafts, pesc.full_experts] if tuning == "frozen" else crafts:
        refused("E-MODEL: the model holds LoRA .*: merge it", craft, model, config)
    assert torch.equal(model(**batch).logits, want)
    after = {name for name, p in model.named_parameters() if p.requires_grad}
    assert after == trained
    merged = pesc.prepare(model.merge_and_unload(), config).eval()
    torch.testing.assert_close(merged(**batch).logits, want, rtol=1e-4, atol=1e-4)


def test_a_host_that_holds_another_adapter_of_pefts_is_refused(host):
    scales = IA3Config(target_modules=["k_proj"], feedforward_modules=[])
    message = "E-MODEL: the model holds LoRA or another adapter of PEFT's already"
    refused(message, pesc.craft, get_peft_model(host(), scales), pesc.Config(**SMALL))


def test_presets_differ_where_paper_and_code_do_and_unusable_settings_are_refused_in_one_line():
    _, released, fixed = presets = [
        pesc.Config.preset(n) for n in ("paper", "released", "fixed")
    ]
    read = [
        (preset.down_init, preset.adapter_width, preset.balance) for preset in presets
    ]
    assert read == [
        ("zero", 512, "kept"),
        ("kaiming", 64, "constant"),
        ("kaiming", 512, "live"),
    ]
    assert (released.adapter_scale, released.served_scale, fixed) == (
        1.0,
        0.25,
        pesc.Config(),
    )
    assert pesc.Config.preset("released", adapter_width=8).adapter_width == 8
    sizes = {
        "experts": 4,
        "top_k": 3,
        "adapter_width": 6,
        "host": "lora",
        "lora_rank": 3,
    }
    other = pesc.Config(
        **sizes, served_scale=0.5, adapter_scale=2.0, balance_weight=0.3
    )
    # A reading keeps sizes and host of another.
    for name in ("paper", "released", "fixed"):
        assert replace(other, **pesc.reading(name)) == pesc.Config.preset(name, **sizes)
    for changes, message in (
        ({"top_k": 9}, r"E-RANGE: top_k is 9, expected 1 to 8 \(experts\)"),
        ({"layers": (1, 1)}, "E-RANGE: layers names a layer twice"),
        ({"layers": (-1,)}, "E-RANGE: layers.0 is -1"),
        ({"adapter_scale": math.nan}, "E-RANGE: adapter_scale is nan"),
        ({"experts": 2.0}, "E-TYPE: experts is 2.0"),
        ({"host": "qlor"}, "E-CHOICE: host is 'qlor', expected .*'qlora'"),
        ({"expert": 4}, "E-CHOICE: .*did you mean 'experts'"),
        ({"name": "release"}, "E-CHOICE: .*did you mean 'released'"),
    ):
        refused(message, pesc.Config.preset, **{"name": "fixed", **changes})
    with pytest.raises(FrozenInstanceError):
        pesc.Config().top_k = 9
    with pytest.warns(UserWarning, match="W-ROUTER: top_k is 1: .*; take top_k=2"):
        pesc.Config(top_k=1)
