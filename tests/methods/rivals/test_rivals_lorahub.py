"""LoRAHub: nevergrad's 40 points, the symmetry of factors, one-hot weights, bad input."""

import sys
import warnings

import numpy as np
import pytest
import torch

from moebook import training
from moebook.errors import Refusal
from moebook.methods import rocket
from moebook.methods.rivals import lorahub, tuning
from moebook.models.checkpoint import fingerprint


def bowl(weights):
    """A loss whose least value lies partly beyond the box."""
    goal = np.linspace(-1.8, 1.2, len(weights))
    return float(((weights - goal) ** 2).sum() + 0.3 * np.prod(np.cos(weights)))


def points(size, **changes):
    seen = []
    config = lorahub.Config.preset("bank", **changes)
    best = lorahub.search(lambda w: seen.append(w) or bowl(w), size, config)
    return np.array(seen), best


@pytest.mark.parametrize("size", [8, 20, 38])
def test_the_search_goes_through_the_points_of_nevergrads_ngopt(size):
    nevergrad = pytest.importorskip("nevergrad")
    theirs = []
    box = nevergrad.p.Array(init=[0] * size, upper=[1.5] * size, lower=[-1.5] * size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        search = nevergrad.optimizers.NGOpt(parametrization=box, budget=40)
        found = search.minimize(lambda w: theirs.append(np.array(w)) or bowl(w)).value
    ours, best = points(size)
    np.testing.assert_allclose(ours, theirs, atol=1e-12)
    np.testing.assert_allclose(best, found, atol=1e-12)


def test_the_first_probes_are_the_base_and_one_coordinate_after_another():
    ours, best = points(8)
    assert len(ours) == 40
    assert not ours[0].any()
    assert np.abs(ours).max() <= 1.5
    moved = np.diff(ours[:9], axis=0)
    assert np.abs(ours[1:9]).max() == 0.5
    assert (np.count_nonzero(ours[1:9], axis=1) <= 8).all()
    assert set(np.abs(moved[moved != 0])) == {0.5}
    assert bowl(best) == min(map(bowl, ours))
    assert (points(8)[0] == ours).all()
    assert lorahub.folded(np.array([1.6, -1.7, 5.0, 0.3])).tolist() == pytest.approx(
        [1.4, -1.3, -1.5, 0.3]
    )


def test_cma_is_nevergrads_where_installed():
    pytest.importorskip("nevergrad")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours, best = points(4, optimiser="cma", budget=200)
    assert len(ours) == 200
    assert bowl(best) < bowl(np.zeros(4))
    assert np.abs(ours).max() <= 1.5


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen3", "Gemma2"])
def test_it_finds_better_than_the_base_and_ends_as_one_lora(
    family, host, rows, make_bank, tmp_path
):
    model = host(family)
    before = fingerprint(model)
    bank = make_bank(model, 3, size=0.7)  # which six looks improve on
    data = tuning.Data(rows.select(range(6)))
    plain = training.nats(model, data.rows)
    tuned = lorahub.tuned(model, bank, data, lorahub.Config(budget=6))
    assert min(tuned.history.loss) < tuned.history.loss[0] == pytest.approx(plain)
    w = tuned.weights()["model.layers.0.self_attn.q_proj"]
    nats = training.nats(model, data.rows)
    assert nats + 0.05 * w.abs().mean() == pytest.approx(
        min(tuned.history.loss), rel=1e-5
    )
    folder = tuned.save(tmp_path / "hub")
    assert fingerprint(tuned.detach()) == before
    with rocket.loras.attached(model, [rocket.loras.read(folder, model, before)]):
        assert training.nats(model, data.rows) == pytest.approx(nats, rel=1e-5)
    tokens = 6 * sum(map(len, data.rows["input_ids"]))
    assert (tuned.cost.trained, tuned.cost.forward, tuned.cost.backward) == (
        3,
        tokens,
        0,
    )


@pytest.mark.parametrize("preset", lorahub.Config.PRESETS)
def test_losses_of_the_presets_by_hand_and_the_model_at_one_hot(
    preset, model, rows, make_bank, monkeypatch
):
    values = []
    w = np.array([0.5, -1, 0])
    monkeypatch.setattr(
        lorahub, "search", lambda f, *_, **__: values.append(f(w)) or -w
    )
    config = lorahub.Config.preset(preset, experts=3, optimiser="cobyla")
    bank = make_bank(model, 3)
    tuned = lorahub.tuned(model, bank, tuning.Data(rows), config)
    seen = rows if preset == "bank" else rows.select(range(5))
    nats = training.nats(model, seen)  # at -w, the same model
    penalised = {"bank": nats + 0.05 * 0.5, "released": nats / 5 + 0.05 * 0.5}
    assert values == pytest.approx([penalised.get(preset, nats + 0.05 * 1.5)], rel=1e-5)
    with torch.no_grad():
        tuned.parts["model.layers.0.self_attn.q_proj"].weigh.weights.copy_(
            torch.eye(3)[1]
        )
    alone = training.nats(model, seen)
    tuned.detach()
    with rocket.loras.attached(model, [bank[tuned.origin.names[1]]]):
        assert training.nats(model, seen) == pytest.approx(alone, rel=1e-5)


def test_bad_input_is_one_line_and_leaves_the_base(model, rows, make_bank, monkeypatch):
    before = fingerprint(model)
    data = tuning.Data(rows)
    bank = make_bank(model)
    huge = make_bank(model, size=1e30)
    for loras, changes, message in (
        (bank, {"budget": 5}, "E-RANGE: budget is 5, COBYLA needs 6 for 4 LoRAs"),
        (bank, {"experts": 5}, "E-RANGE: experts is 5, expected 1 to 4"),
        (huge, {}, "E-NONFINITE: the loss on 24 rows is nan"),
        (bank, {"shots": 25}, "E-KSHOT: have 24 shots, need 25"),
        ({"a": bank["a"]}, {}, "E-BANK: the bank holds 1 LoRAs"),
        (bank | {"e": bank["b"]}, {}, "E-BANK: 'b' and 'e' are the same LoRA"),
        (
            bank,
            {"optimiser": "cma"},
            "E-DEP: optimiser 'cma' needs the package nevergrad",
        ),
    ):
        with monkeypatch.context() as patch, pytest.raises(Refusal, match=message):
            patch.setitem(sys.modules, "nevergrad", None)
            lorahub.tuned(model, loras, data, lorahub.Config(**changes))
        assert fingerprint(model) == before
    with pytest.raises(
        Refusal, match="E-CHOICE: unknown preset 'realesed'; did you mean 'released'"
    ):
        lorahub.Config.preset("realesed")
