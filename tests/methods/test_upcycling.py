"""Upcycling: step 0 against the dense model, the plain loop, gradients, balance loss, the arms."""

import copy

import pytest
import torch
from torch.nn import functional as F

from moebook.analysis.routers import gradients
from moebook.errors import Refusal
from moebook.methods import pesc, upcycling
from moebook.methods.upcycling.config import MAIN
from moebook.methods.upcycling.starts import Start
from moebook.models.anatomy import anatomy
from moebook.nn import routers

FAMILIES = ["Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2"]
MIXED = {"combine": "renormalised", "top_k": 2}


def sparse(model, start=None, **changes):
    return upcycling.upcycle(model, upcycling.Config(**changes), start)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("top_k", [1, 2])
def test_renormalised_model_equals_the_dense_one_at_step_0(family, top_k, host, batch):
    model = sparse(host(family, torch.float64), combine="renormalised", top_k=top_k)
    assert all(layer.kind == "sparse" for layer in anatomy(model).layers)
    want, got = host(family, torch.float64)(**batch), model(**batch)
    torch.testing.assert_close(got.logits, want.logits, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(got.loss, want.loss)


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_probability_scales_each_ffn_by_the_kept_probabilities_as_eq_2_says(top_k, host, batch):
    dense = host(dtype=torch.float64)
    start = upcycling.su(dense, 4, kind="wide", seed=3)
    model = sparse(copy.deepcopy(dense), start, top_k=top_k)

    @torch.no_grad()
    def scale(mlp, args, output, weights):
        rows = []
        for token in args[0].flatten(0, 1):  # Eq. 1, then the K largest
            exps = [float(torch.dot(row, token).exp()) for row in weights.double()]
            rows.append(sum(sorted(exps)[-top_k:]) / sum(exps))
        return output * torch.tensor(rows, dtype=torch.float64).view(*output.shape[:2], 1)

    for layer, weights in zip(dense.model.layers, start.weights, strict=True):
        layer.mlp.register_forward_hook(lambda mlp, args, out, w=weights: scale(mlp, args, out, w))
    got, want = model(**batch).logits, dense(**batch).logits
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    if top_k == 1:
        assert (got - host(dtype=torch.float64)(**batch).logits).abs().max() > 1


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
            row = row + p[expert] * (block.experts.down_proj[expert] @ (F.silu(gate) * up))
        rows.append(row)
    want, got = torch.stack(rows).unsqueeze(0), block(x)
    torch.testing.assert_close(got, want)
    wanted = [x, *block.parameters()]
    pairs = [torch.autograd.grad(y.sin().sum(), wanted) for y in (got, want)]
    for a, b in zip(*pairs, strict=True):
        torch.testing.assert_close(a, b)


def test_router_gradients_at_step_0_are_those_of_the_fact_sheet(host, batch):
    def largest(**changes):
        return gradients(sparse(host(dtype=torch.float64), **changes), batch).gradient.max()

    assert largest(combine="probability", top_k=1) > 1e-3
    assert largest(combine="probability", top_k=2) > 1e-3
    assert largest(combine="renormalised", top_k=1) < 1e-9
    assert largest(**MIXED) < 1e-9
    assert largest(**MIXED, noise=0.1) > 1e-3
    assert largest(combine="renormalised", top_k=1, noise=0.1) < 1e-9


def test_balance_loss_is_eq_3_and_4_over_real_tokens_with_a_term_a_layer(host, batch, apart):
    model = apart(sparse(host(), top_k=2, balance_weight=0.5)).train()
    inputs = {}
    for router in routers(model):
        router.register_forward_hook(lambda m, args, out: inputs.update({m.layer: args[0]}))
    model(**batch)
    loss = upcycling.balance_loss(model)
    want = 0.0
    for router in routers(model):
        real = inputs[router.layer][batch["attention_mask"].bool()]
        p = (real @ router.weight.T).softmax(-1)
        best = p.argmax(1).tolist()
        want += sum(best.count(e) / len(real) * p[:, e].mean().item() for e in range(4)) * 4
    assert loss.item() == pytest.approx(0.5 * want, rel=1e-5)
    loss.backward()
    assert all(router.weight.grad.norm() > 1e-5 for router in routers(model))


def test_a_balance_loss_without_a_gradient_is_refused(host, batch):
    model = sparse(host()).train()
    with pytest.raises(Refusal, match="has not run"):
        upcycling.balance_loss(model)
    with torch.no_grad():
        model(**batch)
    with pytest.raises(Refusal, match="E-GRADIENT"):
        upcycling.balance_loss(model)
    with pytest.raises(Refusal, match="E-MODEL"):
        upcycling.balance_loss(host())


def test_noise_is_a_share_of_the_dense_deviation_and_differs_by_expert(host):
    dense = host("Llama", hidden_size=64, intermediate_size=96, head_dim=16)
    model, again = (sparse(copy.deepcopy(dense), noise=0.25, seed=7) for _ in range(2))
    weight, experts = dense.model.layers[1].mlp.down_proj.weight, anatomy(model).layers[1].experts
    moved = experts.down_proj - weight
    for expert in moved:
        assert expert.std().item() == pytest.approx(0.25 * weight.std().item(), rel=0.05)
    assert abs(torch.corrcoef(moved.flatten(1))[0, 1].item()) < 0.1
    assert torch.equal(anatomy(again).layers[1].experts.down_proj, experts.down_proj)


def test_only_the_chosen_layers_are_upcycled_and_take_their_own_rows_of_the_start(host):
    start = upcycling.su(host(), 3, seed=1)
    model = sparse(host(), start, experts=3, layers=(1,))
    assert [layer.kind for layer in anatomy(model).layers] == ["dense", "sparse"]
    assert torch.equal(routers(model)[0].weight, start.weights[1])


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"experts": 0}, "E-RANGE"),
        ({"experts": 2.0}, "E-TYPE"),
        ({"top_k": 5}, "E-RANGE"),
        ({"top_k": True}, "E-TYPE"),
        ({"combine": "probabilty"}, "E-CHOICE: combine is 'probabilty'"),
        ({"noise": -0.1}, "E-RANGE: noise is -0.1"),
        ({"balance_weight": float("inf")}, "E-RANGE"),
        ({"layers": ()}, "E-RANGE"),
        ({"layers": (0, 0)}, "E-RANGE"),
        ({"layers": (-1,)}, "E-RANGE"),
        ({"seed": -1}, "E-RANGE"),
    ],
)
def test_settings_out_of_range_are_refused(changes, code):
    with pytest.raises(Refusal, match=code):
        upcycling.Config(**changes)


def test_hosts_and_starts_that_do_not_fit_are_refused_and_the_model_is_untouched(host, batch):
    model = host()
    before = model(**batch).logits
    for start, changes, code in (
        (None, {"layers": (2,)}, "E-RANGE: layers names layer 2, the host has 0 to 1"),
        (Start(torch.zeros(2, 4, 32), "0" * 64), {}, "E-BASE: collected from base 000000000000"),
        (Start(torch.full((2, 4, 32), torch.inf)), {}, "E-NONFINITE"),
        (Start(torch.zeros(2, 3, 32)), {}, r"E-SHAPE.*\(2, 3, 32\)"),
        (Start(torch.zeros(1, 4, 32)), {}, r"E-SHAPE.*\(1, 4, 32\)"),
    ):
        with pytest.raises(Refusal, match=code):
            sparse(model, start, **changes)
        assert all(layer.kind == "dense" for layer in anatomy(model).layers)
    assert torch.equal(model(**batch).logits, before)
    with pytest.raises(Refusal, match="has biases"):
        sparse(host(mlp_bias=True))
    for taken in (
        sparse(host(), layers=(1,)),
        pesc.craft(host(), pesc.Config(adapter_width=4)),
        host("Mixtral", num_local_experts=2),
    ):
        with pytest.raises(Refusal, match=r"E-MODEL: layer . is sparse already"):
            sparse(taken)


def test_a_training_is_measured_at_quarters_and_thirds_of_its_own_steps():
    arms = upcycling.arms(120, length="unit", combine="probability")
    assert arms["dense"].watched == ()
    assert arms["su"].scored == (120,)
    assert arms["su"].watched == (0, 40, 80, 120)
    assert arms["crsu"].scored == (30, 60, 90, 120)
    assert set(arms["crsu"].watched) == {0, 10, 20, 30, 40, 80, 120}
    assert (arms["wide"].steps, arms["wide"].scored) == (30, (30,))
    assert arms["wide"].watched == (0, 10, 20, 30)
    for arm in upcycling.arms(4).values():
        assert arm.scored[-1] == arm.steps
        assert not arm.start or arm.watched[3] == arm.steps


def test_arms_differ_from_their_rivals_in_what_their_names_say():
    arms = upcycling.arms(8, length="unit", combine="probability")
    assert [name for name, arm in arms.items() if not arm.laboratory] == list(MAIN)
    assert (arms["su4"].start, arms["su4"].length) == ("random", "raw")
    assert (arms["crsu"].start, arms["crsu"].length, arms["crsu"].path) == ("crsu", "unit", "crsu")
    assert (arms["crsu_matched"].length, arms["trsu4"].length) == ("matched", "unit")
    assert arms["crsu_matched"].path == "lab/crsu_matched"
    rules = {name for name, arm in arms.items() if arm.combine == "renormalised"}
    assert rules == {"su4_renormalised", "crsu_renormalised"}
    assert all(arm.experts == 4 for arm in arms.values() if arm.laboratory)


def test_step_zero_measures_loss_and_gradient_of_each_rule_and_leaves_the_model(host, batch):
    dense = host().requires_grad_(False)
    start = upcycling.su(dense, 4, kind="wide")
    table = upcycling.step_zero(dense, {"wide": start}, batch)
    assert list(table.index.names) == ["combine", "experts per token", "start"]
    assert len(table) == 4
    assert type(dense.model.layers[0].mlp).__name__ == "LlamaMLP"
    assert table.loss["renormalised"].abs().max() < 1e-5
    assert table.gradient["renormalised"].max() < 1e-5
    model = host()
    plain = model(**batch).loss.item()
    loss = sparse(model, start)(**batch).loss
    loss.backward()
    grads = torch.cat([router.weight.grad.flatten() for router in routers(model)])
    line = table.loc["probability", 1, "wide"]
    assert line.loss == pytest.approx(loss.item() - plain, abs=1e-6)
    assert line.gradient == pytest.approx(grads.norm().item(), rel=1e-5)
