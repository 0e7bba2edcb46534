"""Upcycling: step 0 against the dense model, loops and Eq. 2 to 4, the arms, export."""

import copy
import errno
import json
from contextlib import nullcontext
from unittest.mock import Mock

import pytest
import torch
from peft import LoraConfig, get_peft_model, inject_adapter_in_model
from safetensors import SafetensorError
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, MixtralForCausalLM

from moebook import models
from moebook.analysis.routers import reach
from moebook.errors import Refusal
from moebook.methods import pesc, upcycling
from moebook.methods.upcycling import exporting, measure
from moebook.methods.upcycling.config import MAIN
from moebook.methods.upcycling.starts import Start
from moebook.models import checkpoint, skeleton
from moebook.models.anatomy import anatomy
from moebook.nn import routers
from moebook.training import fit
from tests.refusals import refused

MIXED = {"combine": "renormalised"}
RAW = {"combine": "probability"}


def sparse(model, start=None, **changes):
    return upcycling.upcycle(model, upcycling.Config(**changes), start)


@pytest.mark.parametrize(
    "family", ["Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2"]
)
@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.filterwarnings("ignore:W-ROUTER")  # K = 1 in Gemma 2
def test_renormalised_model_equals_the_dense_one_at_step_0(family, top_k, host, batch):
    model = sparse(host(family, torch.float64), combine="renormalised", top_k=top_k)
    assert {layer.kind for layer in anatomy(model).layers} == {"sparse"}
    want = host(family, torch.float64)(**batch)
    got = model(**batch)
    torch.testing.assert_close(got.logits, want.logits, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(got.loss, want.loss)


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_probability_scales_each_ffn_by_the_kept_probabilities_as_eq_2_says(
    top_k, host, batch
):
    dense = host(dtype=torch.float64)
    start = upcycling.su(dense, 4, kind="wide", seed=3)
    model = sparse(copy.deepcopy(dense), start, top_k=top_k)

    @torch.no_grad()
    def scale(mlp, args, output, weights):
        rows = []
        for token in args[0].flatten(0, 1):  # Eq. 1, then the K largest
            exps = [float(torch.dot(row, token).exp()) for row in weights.double()]
            rows.append(sum(sorted(exps)[-top_k:]) / sum(exps))
        return output * torch.tensor(rows, dtype=torch.float64).view(
            *output.shape[:2], 1
        )

    for layer, weights in zip(dense.model.layers, start.weights, strict=True):
        layer.mlp.register_forward_hook(
            lambda mlp, args, out, w=weights: scale(mlp, args, out, w)
        )
    got = model(**batch).logits
    want = dense(**batch).logits
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("top_k", [1, 2])
def test_scaled_is_eq_2_times_one_over_the_mean_kept_probability_of_a_layer(
    top_k, host, batch
):
    dense = host(dtype=torch.float64)
    wide = upcycling.su(dense, 4, kind="wide", seed=3)
    inputs = upcycling.collect(dense, {"all": [batch]}, tensor="ffn_input")
    start = upcycling.levelled(wide, inputs, top_k)
    for points, weights, factor in zip(
        inputs.points, wide.weights, start.factors, strict=True
    ):
        shares = []
        for token in points.double():
            exps = [float(torch.dot(row, token).exp()) for row in weights.double()]
            shares.append(sum(sorted(exps)[-top_k:]) / sum(exps))
        assert float(factor) == pytest.approx(len(shares) / sum(shares), rel=1e-5)

    model = sparse(copy.deepcopy(dense), start, top_k=top_k, combine="scaled")
    plain = sparse(copy.deepcopy(dense), wide, top_k=top_k)
    x = torch.randn(1, 6, 32, dtype=torch.float64)
    for layer in range(2):
        ours, eq_2 = (anatomy(one).layers[layer].mlp for one in (model, plain))
        factor = start.factors[layer].double()
        torch.testing.assert_close(ours(x), factor * eq_2(x))


def test_scaled_starts_at_the_dense_model_where_all_tokens_are_kept_alike(host, batch):
    dense = host(dtype=torch.float64)
    inputs = upcycling.collect(dense, {"all": [batch]}, tensor="ffn_input")
    even = upcycling.levelled(Start(torch.zeros(2, 4, 32)), inputs, 1)
    assert even.factors.tolist() == [4, 4]
    model = sparse(copy.deepcopy(dense), even, combine="scaled")
    torch.testing.assert_close(model(**batch).logits, dense(**batch).logits)
    damaged = sparse(copy.deepcopy(dense), Start(torch.zeros(2, 4, 32)))
    assert (damaged(**batch).logits - dense(**batch).logits).abs().max() > 0.01


def test_a_scaled_model_is_saved_and_exported_as_it_is(host, apart, batch, tmp_path):
    inputs = upcycling.collect(host(), {"all": [batch]}, tensor="ffn_input")
    start = upcycling.levelled(upcycling.su(host(), 4, kind="wide"), inputs, 2)
    model = apart(sparse(host(), start, top_k=2, combine="scaled"))
    want = model(**batch).logits
    again = upcycling.load(host(), upcycling.save(model, tmp_path / "ours"))
    assert torch.equal(again(**batch).logits, want)
    assert again.upcycling.config.combine == "scaled"
    plain = AutoModelForCausalLM.from_pretrained(
        upcycling.export(model, tmp_path / "out")
    )
    assert plain.config.model_type == "qwen2_moe"
    real = batch["attention_mask"].bool()
    torch.testing.assert_close(
        plain(**batch).logits[real], want[real], rtol=1e-4, atol=1e-4
    )


def test_outputs_and_gradients_equal_a_loop_over_tokens(host, apart):
    model = apart(sparse(host(dtype=torch.float64), top_k=2))
    block = anatomy(model).layers[0].mlp
    x = torch.randn(1, 6, 32, dtype=torch.float64, requires_grad=True)
    rows = []
    for token in x[0]:
        p = (block.router.weight @ token).softmax(0)
        row = torch.zeros(32, dtype=torch.float64)
        for expert in p.argsort(descending=True)[:2]:
            gate, up = (block.experts.gate_up_proj[expert] @ token).chunk(2)
            row = row + p[expert] * (
                block.experts.down_proj[expert] @ (F.silu(gate) * up)
            )
        rows.append(row)
    want = torch.stack(rows).unsqueeze(0)
    got = block(x)
    torch.testing.assert_close(got, want)
    wanted = [x, *block.parameters()]
    pairs = [torch.autograd.grad(y.sin().sum(), wanted) for y in (got, want)]
    for a, b in zip(*pairs, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    "family",
    [
        "Gemma2",
        "Gemma3",
        "Olmo2",
        "Olmo3",
        "Exaone4",
        "Llama",
        "Qwen3",
        "Gemma",
        "Olmo",
        "StableLm",
    ],
)
def test_routers_whose_weight_is_constant_or_cancels_are_told_of_and_have_no_gradient(
    family, host, batch, rows
):
    def made(**changes):
        return sparse(host(family, torch.float64).requires_grad_(True), **changes)

    cancels = family in ("Gemma2", "Gemma3", "Olmo2", "Olmo3", "Exaone4")
    told = pytest.warns(UserWarning, match=r"W-ROUTER: .* \[0, 1\], .* take top_k=2")
    with told if cancels else nullcontext():
        alone = reach(made(), batch)
    assert alone < 1e-4 if cancels else alone > 0.1
    assert (
        reach(made(top_k=2), batch) < 1e-4
    ) == cancels  # equal experts: only the sum counts
    with nullcontext() if not cancels else told:
        assert reach(made(**MIXED, noise=0.1), batch) < 1e-9
    model = made(**MIXED, top_k=2)
    assert reach(model, batch) < 1e-9
    # By which experts drift apart.
    fit(model, rows, steps=2, batch=8, lr=1e-3, warmup=0.0)
    assert reach(model, batch) > 1e-3
    assert reach(made(top_k=2, noise=0.1), batch) > 0.05
    # Crafted routers learn in all hosts, once the adapters are off their start at zero.
    crafted = pesc.craft(
        host(family).requires_grad_(True), pesc.Config(adapter_width=4)
    )
    for layer in anatomy(crafted).layers:
        torch.nn.init.normal_(layer.experts.up)
    assert reach(crafted, batch) > 0.01


def test_balance_loss_is_eq_3_and_4_over_real_tokens_with_a_term_a_layer(
    host, batch, apart
):
    model = apart(sparse(host(), top_k=2, balance_weight=0.5)).train()
    inputs = {}
    for router in routers(model):
        router.register_forward_hook(
            lambda m, args, out: inputs.update({m.layer: args[0]})
        )
    model(**batch)
    loss = upcycling.balance_loss(model)
    want = 0.0
    for router in routers(model):
        real = inputs[router.layer][batch["attention_mask"].bool()]
        p = (real @ router.weight.T).softmax(-1)
        best = p.argmax(1).tolist()
        want += (
            sum(best.count(e) / len(real) * p[:, e].mean().item() for e in range(4)) * 4
        )
    assert loss.item() == pytest.approx(0.5 * want, rel=1e-5)
    loss.backward()
    assert all(router.weight.grad.norm() > 1e-5 for router in routers(model))


def test_noise_is_a_share_of_the_dense_deviation_and_differs_by_expert_and_layer(host):
    dense = host("Llama", hidden_size=64, intermediate_size=96, head_dim=16)
    plain, model, again = (
        sparse(copy.deepcopy(dense), noise=noise, seed=7) for noise in (0.0, 0.25, 0.25)
    )

    def weights(model, name):
        """Each expert's weights, [L, E, 2FD or DF]."""
        layers = anatomy(model).layers
        return torch.stack([getattr(one.experts, name) for one in layers]).flatten(2)

    for name in ("gate_up_proj", "down_proj"):
        copies = weights(plain, name)
        moved = weights(model, name) - copies
        torch.testing.assert_close(
            moved.std(2), 0.25 * copies.std(2), rtol=0.05, atol=0
        )
        # Of each expert with all others, in both layers.
        alike = torch.corrcoef(moved.flatten(0, 1)) - torch.eye(2 * 4)
        assert alike.abs().max() < 0.1
        assert torch.equal(weights(again, name), weights(model, name))


def test_noise_repeats_neither_between_seeds_and_layers_nor_the_routers_start(host):
    dense = host("Llama", hidden_size=64, intermediate_size=96, head_dim=16)
    drawn = []
    for seed in (0, 1):
        model = sparse(copy.deepcopy(dense), noise=0.25, seed=seed)
        for plain, noisy in zip(
            anatomy(dense).layers, anatomy(model).layers, strict=True
        ):
            # The first rows of expert 0: as many numbers as a router has.
            moved = noisy.experts.gate_up_proj[0] - torch.cat(
                [plain.mlp.gate_proj.weight, plain.mlp.up_proj.weight]
            )
            drawn += [moved[:4].flatten(), noisy.mlp.router.weight.flatten()]
    alike = torch.corrcoef(torch.stack(drawn)) - torch.eye(8)
    assert alike.abs().max() < 0.25  # four deviations of 256 pairs


def test_gate_and_up_get_noise_by_a_deviation_of_their_own_and_none_on_meta(host):
    dense = host("Llama", hidden_size=64, intermediate_size=96, head_dim=16)
    before = {}
    for layer in anatomy(dense).layers:
        layer.mlp.up_proj.weight.data.mul_(0.01)
        parts = (layer.mlp.gate_proj, layer.mlp.up_proj)
        before[layer.index] = [part.weight.clone() for part in parts]
    for layer in anatomy(sparse(dense, noise=0.25)).layers:
        after = layer.experts.gate_up_proj[0].chunk(2)
        for old, new in zip(before[layer.index], after, strict=True):
            share = ((new - old).std() / old.std()).item()
            assert share == pytest.approx(0.25, rel=0.05)
    planned = skeleton.skeleton(skeleton.configuration("nano"))
    assert anatomy(sparse(planned, noise=0.25)).layers[0].kind == "sparse"


def test_only_the_chosen_layers_are_upcycled_and_take_their_own_rows_of_the_start(host):
    start = upcycling.su(host(), 3, seed=1)
    model = sparse(host(), start, experts=3, layers=(1,))
    assert [layer.kind for layer in anatomy(model).layers] == ["dense", "sparse"]
    assert torch.equal(routers(model)[0].weight, start.weights[1])


def adapted(model):
    """A host with LoRA on its MLPs that does something."""
    config = LoraConfig(r=2, target_modules=["up_proj"], init_lora_weights=False)
    return get_peft_model(model, config)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_settings_starts_and_models_that_do_not_fit_are_refused_and_left_untouched(
    host, batch
):
    model = host()
    ran = sparse(host()).train()
    with torch.no_grad():
        ran(**batch)
    for act, given, changes, code in (
        (sparse, model, {"combine": "probabilty"}, "E-CHOICE: combine is 'probabilty'"),
        (sparse, model, {"top_k": 5}, "E-RANGE: top_k is 5, expected 1 to 4"),
        (sparse, model, {"noise": 1e308}, "E-RANGE: noise is 1e.308, expected .* 1000"),
        (sparse, model, {"layers": (0, 0)}, "E-RANGE: layers names a layer twice"),
        (
            sparse,
            model,
            {"layers": (2,)},
            "E-RANGE: layers names layer 2, the host has 0 to 1",
        ),
        (
            sparse,
            model,
            {"start": Start(torch.zeros(2, 4, 32), "0" * 64)},
            "E-BASE: .*0000000",
        ),
        (Start, torch.full((2, 4, 32), torch.inf), {}, "E-NONFINITE: weights is"),
        (
            sparse,
            model,
            {"start": Start(torch.zeros(2, 3, 32))},
            r"E-SHAPE.*\(2, 3, 32\)",
        ),
        (
            sparse,
            model,
            {"start": Start(torch.zeros(1, 4, 32))},
            r"E-SHAPE.*\(1, 4, 32\)",
        ),
        (sparse, model, {"combine": "scaled"}, "E-DATA: .* the start has no factors"),
        (
            sparse,
            model,
            {"start": Start(torch.zeros(2, 4, 32), factors=torch.ones(2))},
            "E-DATA: combine is 'probability', and the start has factors",
        ),
        (
            Start,
            torch.zeros(2, 4, 32),
            {"factors": torch.ones(3)},
            "E-SHAPE: Start: ",
        ),
        (sparse, host(mlp_bias=True), {}, "has biases"),
        (sparse, host("BitNet"), {}, "E-MODEL: BitNetMLP computes more than"),
        (sparse, adapted(host()), {}, "E-MODEL: LlamaMLP computes more than"),
        (
            sparse,
            host("Llama4", intermediate_size_mlp=40, moe_layers=[]),
            {},
            "E-MODEL: Llama4TextMLP has no act_fn",
        ),
        (sparse, sparse(host(), layers=(1,)), {}, "E-MODEL: layer 1 is sparse already"),
        (
            sparse,
            pesc.craft(host(), pesc.Config(adapter_width=4)),
            {},
            "layer 0 is sparse already",
        ),
        (sparse, host("Mixtral", num_local_experts=2), {}, "layer 0 is sparse already"),
        (upcycling.balance_loss, sparse(host()), {}, "has not run"),
        (upcycling.balance_loss, ran, {}, "E-GRADIENT"),
        (upcycling.balance_loss, model, {}, "E-MODEL"),
    ):
        refused(code, act, given, **changes)
    assert torch.equal(model(**batch).logits, host()(**batch).logits)


def test_arms_are_measured_at_parts_of_their_steps_and_differ_as_their_names_say():
    arms = upcycling.arms(120, length="unit", combine="probability")
    assert (arms["su"].scored, arms["su"].watched) == ((120,), (0, 40, 80, 120))
    assert (arms["dense"].watched, arms["crsu"].scored) == ((), (30, 60, 90, 120))
    assert set(arms["crsu"].watched) == {0, 10, 20, 30, 40, 80, 120}
    wide = arms["wide"]
    assert (wide.steps, wide.scored, wide.watched) == (30, (30,), (0, 10, 20, 30))
    for arm in upcycling.arms(4).values():
        assert arm.scored[-1] == arm.steps
        assert not arm.start or arm.watched[3] == arm.steps
    assert [name for name, arm in arms.items() if not arm.laboratory] == list(MAIN)
    assert (arms["su4"].length, arms["wide"].length) == ("unit", "raw")
    assert (arms["crsu"].path, arms["crsu_matched"].path) == (
        "crsu",
        "lab/crsu_matched",
    )
    for rule in ("renormalised", "scaled"):
        of_rule = {name for name, arm in arms.items() if arm.combine == rule}
        assert of_rule == {f"{name}_{rule}" for name in ("su", "trsu", "su4", "crsu")}
    assert arms["su"].recovery == (0, 1, 2, 4, 8, 16, 32, 64, 120)
    assert upcycling.arms(4)["su"].recovery == (0, 1, 2, 4)
    assert arms["wide"].recovery == ()


def test_a_norm_behind_the_ffn_takes_the_routers_gradient_until_two_experts_differ():
    table = upcycling.behind_norms()
    assert table.loc["llama"].min() > 1e-3
    rest = table.drop("llama")
    assert len(rest) == 5
    assert rest[["k1", "k2"]].max(axis=None) < 1e-4 < rest.k2_noise.min()


def test_random_states_of_gpus_come_back_from_what_is_measured_behind_norms(
    monkeypatch,
):
    states = []
    monkeypatch.setattr(measure, "FAMILIES", ("llama",))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_rng_state", lambda gpu: f"of {gpu}")
    monkeypatch.setattr("torch.cuda.set_rng_state", lambda *given: states.append(given))
    upcycling.behind_norms()
    assert states == [("of 0", 0), ("of 1", 1)]


def test_step_zero_measures_loss_and_gradient_of_each_rule_and_leaves_the_model(
    host, batch
):
    dense = host().requires_grad_(False)
    start = upcycling.su(dense, 4, kind="wide")
    table = upcycling.step_zero(dense, {"wide": start}, batch)
    assert list(table.index.names) == ["combine", "experts per token", "start"]
    assert len(table) == 4
    assert table.loc["renormalised"].abs().max(axis=None) < 1e-5
    model = sparse(host(), start)
    plain = dense(**batch).loss.item()
    loss = model(**batch).loss
    loss.backward()
    grads = torch.cat([router.weight.grad.flatten() for router in routers(model)])
    line = table.loc["probability", 1, "wide"]
    assert line.loss == pytest.approx(loss.item() - plain, abs=1e-6)
    assert line.gradient == pytest.approx(grads.norm().item(), rel=1e-5)


@pytest.mark.parametrize("training", [False, True])
def test_step_zero_has_no_dropout_and_leaves_the_mode(training, host, batch):
    start = upcycling.su(host(), 4, kind="wide")
    expected = upcycling.step_zero(host(), {"wide": start}, batch)
    dense = host()
    dense.config.attention_dropout = 0.9
    for layer in dense.model.layers:
        layer.self_attn.attention_dropout = 0.9
    dense.train(training)
    table = upcycling.step_zero(dense, {"wide": start}, batch)
    assert table.equals(expected)
    assert all(module.training is training for module in dense.modules())


@pytest.fixture
def mixed(host, apart):
    """Makes models of three experts, moved apart so that a wrong choice shows."""
    return lambda family="Llama", shape=None, **changes: apart(
        sparse(host(family, **shape or {}), **{"experts": 3, "top_k": 2, **changes})
    )


@pytest.mark.parametrize(
    ("family", "changes", "shape", "form"),
    [
        ("Llama", MIXED, {"tie_word_embeddings": True}, "mixtral"),
        (
            "Mistral",
            {**MIXED, "top_k": 1},
            {"sliding_window": 5, "head_dim": 16},
            "mixtral",
        ),
        ("Llama", {**RAW, "top_k": 3}, {}, "mixtral"),
        ("Llama", {**RAW, "top_k": 1}, {"head_dim": 16}, "qwen2_moe"),
        ("Llama", {**MIXED, "layers": (1,)}, {}, "qwen2_moe"),
        ("Mistral", RAW, {"sliding_window": None}, "qwen2_moe"),
        ("Qwen2", RAW, {"tie_word_embeddings": True}, "qwen2_moe"),
        ("Qwen3", RAW, {}, "qwen3_moe"),
        ("Qwen3", {**MIXED, "layers": (0,)}, {"head_dim": 16}, "qwen3_moe"),
    ],
)
def test_export_reloads_in_plain_transformers_with_equal_logits(
    family, changes, shape, form, batch, mixed, tmp_path
):
    rope = {"rope_type": "default", "rope_theta": 500.0}
    model = mixed(family, {"rope_parameters": rope, **shape}, **changes)
    if family == "Qwen2":  # its biases start at zero
        for layer in model.model.layers:
            layer.self_attn.q_proj.bias.data.normal_()
    want = model(**batch).logits
    folder = upcycling.export(model, tmp_path / "out")
    assert json.loads((folder / "config.json").read_text())["model_type"] == form
    assert checkpoint.verify(folder)["base"] == model.upcycling.base
    plain = AutoModelForCausalLM.from_pretrained(folder)
    assert type(plain).__module__.startswith("transformers.")
    real = batch["attention_mask"].bool()
    torch.testing.assert_close(
        plain(**batch).logits[real], want[real], rtol=1e-4, atol=1e-4
    )
    assert torch.equal(model(**batch).logits, want)
    prompt = batch["input_ids"][:1]
    texts = [
        each.generate(prompt, max_new_tokens=8, do_sample=False)
        for each in (model, plain)
    ]
    assert torch.equal(*texts)


def test_an_export_with_its_tokenizer_is_loaded_whole_and_one_without_is_refused(
    tmp_path,
):
    model, tokenizer = models.load("nano")
    templates = {
        "default": "{{ messages[0].content }}",
        "short": "{{ messages[0].role }}",
    }
    tokenizer.chat_template = templates
    sparse(model, **MIXED)
    folder = upcycling.export(model, tmp_path / "whole", tokenizer=tokenizer)
    loaded, read = models.load(str(folder))
    text = "gcd(35, 55) = 5\n"
    assert read(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert read.special_tokens_map == tokenizer.special_tokens_map
    assert read.chat_template == templates
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits)
    bare = upcycling.export(model, tmp_path / "bare")
    refused(r"E-NOFILE: .*upcycling.export\(tokenizer=", models.load, str(bare))
    tokenizer.add_tokens("one more than the embedding has")
    refused(
        "E-VOCAB: 2049", upcycling.export, model, tmp_path / "more", tokenizer=tokenizer
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bare", "whole"]


def same_weights(model, plain):
    """Whether an export holds a model's weights bit by bit, in the model's dtype."""
    exported = plain.state_dict()
    for name, weight in model.state_dict().items():
        there = exported[name.replace(".mlp.router.", ".mlp.gate.")]
        assert torch.equal(there, weight.to(model.dtype)), name
    return True


def test_a_half_precision_model_exports_close_to_itself(batch, mixed, tmp_path):
    model = mixed(shape={"dtype": torch.bfloat16}, **MIXED)
    plain = AutoModelForCausalLM.from_pretrained(
        upcycling.export(model, tmp_path / "out")
    )
    assert plain.dtype == torch.bfloat16
    assert same_weights(model, plain)
    got = plain(**batch).logits.float()
    want = model(**batch).logits.float()
    assert (got - want).norm() / want.norm() < 0.1


def test_a_model_in_float64_exports_as_it_is(batch, mixed, tmp_path):
    model = mixed(shape={"dtype": torch.float64}, **MIXED)
    plain = AutoModelForCausalLM.from_pretrained(
        upcycling.export(model, tmp_path / "out")
    )
    assert same_weights(model, plain)
    # Its own choice on a CPU, grouped products, knows no float64.
    plain.set_experts_implementation("eager")
    got = plain(**batch).logits
    want = model(**batch).logits
    assert got.dtype == torch.float64
    assert (got - want).norm() / want.norm() < 1e-6


@pytest.mark.parametrize(
    ("family", "changes", "shape", "form", "reason"),
    [
        ("Llama", RAW, {}, "mixtral", "E-FORM.*always renormalises.*'qwen2_moe'"),
        (
            "Llama",
            {**MIXED, "layers": (1,)},
            {},
            "mixtral",
            "E-FORM.*every layer sparse",
        ),
        (
            "Llama",
            {},
            {},
            "qwen3_moe",
            "E-FORM.*holds hosts of type qwen3, this one is llama",
        ),
        (
            "Llama",
            {},
            {"attention_bias": True},
            None,
            "E-FORM.*no biases in its attention",
        ),
        ("Mistral", {}, {"sliding_window": 5}, None, "E-FORM.*sliding window of 5"),
        ("Gemma", {}, {}, None, "E-FORM.*this one is gemma"),
        ("Llama", {}, {}, "mixtrel", "E-CHOICE: form is 'mixtrel'"),
    ],
)
def test_a_form_that_does_not_fit_is_refused(
    family, changes, shape, form, reason, mixed, tmp_path
):
    refused(
        reason,
        upcycling.export,
        mixed(family, shape, **changes),
        tmp_path / "out",
        form=form,
    )
    assert not list(tmp_path.iterdir())


def test_a_refused_or_failed_export_leaves_nothing(host, mixed, tmp_path, monkeypatch):
    model = mixed(
        shape={"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}, **MIXED
    )
    broken = copy.deepcopy(model)
    broken.model.layers[0].mlp.router.weight.data[0, 0] = torch.nan
    for given, code in ((host(), "E-MODEL"), (broken, "E-NONFINITE")):
        refused(code, upcycling.export, given, tmp_path / "out")
    refused("E-EXISTS", upcycling.export, model, tmp_path)
    adapted = copy.deepcopy(model)
    inject_adapter_in_model(LoraConfig(target_modules=["q_proj"]), adapted)
    sampling = copy.deepcopy(model)
    sampling.generation_config.temperature = 0.7  # and do_sample is not set
    with monkeypatch.context() as patch:
        patch.setattr(exporting, "_twin", None)  # nothing is made for them
        for given, words in (
            (adapted, "the model holds LoRA or another adapter"),
            (sampling, "the model's generation_config cannot be saved: .*temperature"),
        ):
            refused(f"E-MODEL: {words}", upcycling.export, given, tmp_path / "out")
    words = "No space left on device"
    for place, name, error in (
        (checkpoint, "seal", OSError(errno.ENOSPC, words)),
        (
            MixtralForCausalLM,
            "save_pretrained",
            SafetensorError(f"I/O error: {words} (os error 28)"),
        ),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, Mock(side_effect=error))
            message = f"E-DISK: .*out is not saved: .*{words}.*; make room there"
            refused(message, upcycling.export, model, tmp_path / "out")
    carried = [key for key in exporting.CARRIED if key != "rope_parameters"]
    monkeypatch.setattr(exporting, "CARRIED", carried)
    with pytest.raises(
        Refusal, match="E-FORM: the logits of MixtralForCausalLM differ"
    ):
        upcycling.export(model, tmp_path / "out")
    assert not list(tmp_path.iterdir())
