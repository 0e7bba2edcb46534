"""PHATGOOSE: scores and gates by numpy in float64, the first gradient in closed form."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from moebook import training
from moebook.errors import Refusal
from moebook.methods import rocket
from moebook.methods.rivals import phatgoose, tuning
from moebook.methods.rivals.tuning import Data
from moebook.models.checkpoint import fingerprint

PATH = "model.layers.1.self_attn.q_proj"


def normed(rows):
    centred = rows - rows.mean(-1, keepdims=True)
    return centred / np.sqrt(centred.var(-1, keepdims=True) + 1e-5)


@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_gates_are_the_softmax_over_the_two_best_scores(eps):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 5, 16))
    vectors = rng.normal(size=(6, 16))
    part = phatgoose.Gates(torch.tensor(vectors), phatgoose.Config(eps=eps))
    found = part(torch.tensor(x)).numpy()
    scores = normed(x) @ normed(vectors).T / 4
    np.testing.assert_allclose(
        phatgoose.scores(torch.tensor(x), torch.tensor(vectors)), scores
    )
    shares = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    best = np.argsort(-scores)[..., :2]
    kept = np.take_along_axis(shares, best, -1)
    expected = np.zeros_like(scores)
    np.put_along_axis(expected, best, kept / (kept.sum(-1, keepdims=True) + eps), -1)
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    exact = phatgoose.Gates(torch.tensor(vectors), phatgoose.Config())(
        torch.tensor(x)
    ).numpy()
    assert np.abs(found - exact).max() < 1e-5


def test_neither_length_nor_mean_of_a_gate_counts_and_x_itself_scores_root_d():
    torch.manual_seed(0)
    x = torch.randn(4, 256)
    vectors = torch.randn(3, 256)
    scores = phatgoose.scores(x, vectors)
    torch.testing.assert_close(
        phatgoose.scores(x, 7 * vectors + 3), scores, rtol=1e-4, atol=1e-4
    )
    torch.testing.assert_close(
        phatgoose.scores(x, x).diag(), torch.full((4,), 16.0), atol=1e-3, rtol=0
    )
    assert phatgoose.scores(x, torch.zeros(1, 256)).eq(0).all()
    alone = phatgoose.Gates(vectors[:1], phatgoose.Config(top_k=1))
    assert alone(x).eq(1).all()


@pytest.mark.parametrize("deviation", [1e-4, 1e-3, 1e-2, 1.0])
def test_a_short_gate_scores_what_layer_norms_eps_leaves(deviation):
    torch.manual_seed(0)
    x = torch.randn(4, 256).double()
    gate = torch.randn(1, 256).double()
    gate = (gate - gate.mean()) / gate.std(correction=0)
    shares = phatgoose.scores(x, deviation * gate) / phatgoose.scores(x, 1e3 * gate)
    left = deviation / (deviation**2 + 1e-5) ** 0.5  # 0.3 at 1e-3
    torch.testing.assert_close(shares, torch.full_like(shares, left))


def test_a_gate_starts_at_half_strength_with_the_gradient_of_the_closed_form(
    model, batch, bank
):
    lora = bank["b"]
    seen = {}
    with rocket.loras.attached(model, [replace(lora, alpha=lora.alpha / 2)]):
        expected = model(**batch).logits
    done = tuning.attach(
        model,
        {"b": lora},
        lambda _, part: phatgoose.Gate(part.in_features),
        mix="outputs",
        learnt=False,
    )
    part = done.parts[PATH]

    def keep(_, args, y):
        seen["x"] = args[0].detach()
        y.register_hook(lambda gradient: seen.update(gradient=gradient))

    part.register_forward_hook(keep)
    out = model(**batch)
    torch.testing.assert_close(out.logits, expected, rtol=1e-4, atol=1e-5)
    out.loss.backward()
    delta = lora.scale * seen["x"] @ lora.down[PATH].T @ lora.up[PATH].T
    # y = base + sigmoid(v x) delta, and at v = 0 the sigmoid has a slope of 1/4.
    of_gate = (seen["gradient"] * delta).sum(-1, keepdim=True)  # [B, T, 1]
    wanted = 0.25 * (of_gate * seen["x"]).sum((0, 1))
    torch.testing.assert_close(part.weigh.v.grad, wanted, rtol=1e-4, atol=1e-6)
    assert part.down.grad is None
    assert part.base_layer.weight.grad is None


def test_gates_lower_their_rows_loss_and_move_nothing_else(model, rows, bank):
    before = fingerprint(model)
    few = rows.select(range(8))
    data = Data(few, sources=dict.fromkeys(bank, rows))
    digests = {name: lora.digest for name, lora in bank.items()}
    config = phatgoose.Config(steps=20, lr=0.05, batch=8)
    learnt = phatgoose.gates(model, bank, data, config)
    for name, each in learnt.items():
        with rocket.loras.attached(model, [replace(bank[name], alpha=4.0)]):
            assert each.before == pytest.approx(training.nats(model, rows), rel=1e-4)
        assert each.after < each.before - 0.01
        assert each.cost.trained == 4 * 32
    assert fingerprint(model) == before
    assert {name: lora.digest for name, lora in bank.items()} == digests
    done = phatgoose.tuned(model, bank, data, config, learnt=learnt)
    assert torch.equal(done.parts[PATH].weigh.vectors[2], learnt["c"].vectors[PATH])
    assert done.cost == tuning.Cost()
    assert not any(p.requires_grad for p in model.parameters())
    done.detach()
    of_target = phatgoose.gates(model, bank, Data(few), replace(config, rows="target"))
    assert of_target["a"].cost.forward < learnt["a"].cost.forward * 1.1
    assert not torch.equal(of_target["a"].vectors[PATH], learnt["a"].vectors[PATH])


def test_what_cannot_be_gated_is_refused(host, model, rows, bank, make_bank):
    data = Data(rows, sources={"a": rows})
    tiny = host(hidden_size=2, num_attention_heads=1, num_key_value_heads=1)
    for base, loras, changes, message in (
        (model, bank, {}, "E-DATA: the rows that 'b' was trained on are needed"),
        (model, bank, {"top_k": 5}, "E-RANGE: k is 5, expected 1 to 4"),
        (model, {"a": bank["a"]}, {"top_k": 1}, "E-BANK: the bank holds 1 LoRAs"),
        (
            tiny,
            make_bank(tiny),
            {},
            r"E-RANGE: model.layers.0.self_attn.q_proj has D = 2",
        ),
    ):
        with pytest.raises(Refusal, match=message):
            phatgoose.tuned(base, loras, data, phatgoose.Config(**changes))
