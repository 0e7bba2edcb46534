"""Poly: weights by hand, by quadrature and by PEFT's; what its switches start and train."""

import numpy as np
import pytest
import torch
from peft import PolyConfig, PolyModel
from scipy.special import expit
from scipy.stats import logistic

from moebook.errors import Refusal
from moebook.methods.rivals import poly, tuning

PATH = "model.layers.0.self_attn.q_proj"


def assignment(z, **switches):
    part = poly.Assignment(len(z), poly.Config(**switches))
    part.z.data = torch.tensor(z)
    return part


def test_evaluation_normalises_sigmoids_and_raw_takes_z_itself():
    weights = assignment([0.0, float(np.log(3))]).eval()(None)
    torch.testing.assert_close(weights, torch.tensor([0.4, 0.6]))
    raw = assignment([1e-3, -5e-4], normalise="raw", noise="none")
    assert torch.equal(raw.train()(None), raw.z)
    assert torch.equal(raw.eval()(None), raw.z)
    start = poly.Assignment(5, poly.Config())
    assert start.z.abs().max() <= 1e-3
    assert not start.z.eq(0).any()
    silent = assignment([0.5, -2.0], noise="none")
    assert torch.equal(silent.train()(None), silent.eval()(None))


@pytest.mark.parametrize("tau", [1.0, 0.5])
def test_the_noise_of_training_is_a_relaxed_bernoulli(tau):
    """z is sigmoid((Z + logistic noise) / tau): its mean over draws against an integral."""
    torch.manual_seed(0)
    part = assignment([1.5] * 20000 + [60.0], temperature=tau).train()
    w = part(None).detach().double().numpy()
    z = w[:-1] / w[-1]  # the last skill's z is 1
    for each, shape in ((z, expit), (z**2, lambda t: expit(t) ** 2)):
        truth = logistic.expect(lambda noise, f=shape: f((1.5 + noise) / tau))
        assert each.mean() == pytest.approx(truth, abs=0.01)
    # Of normal noise with these means half as much would be so far out.
    far = logistic.cdf(-4)
    assert (z < expit((1.5 - 4) / tau)).mean() == pytest.approx(far, rel=0.2)


def test_evaluation_equals_pefts_poly(base, batch, make_bank):
    model = base()
    other = base()
    bank = make_bank(model, 3, alpha=1.0)  # PEFT knows no other
    done = tuning.attach(
        model,
        bank,
        lambda *_: poly.Assignment(3, poly.Config()),
        mix="factors",
        learnt=False,
    )
    config = PolyConfig(
        r=4, n_tasks=1, n_skills=3, n_splits=1, target_modules=["q_proj", "v_proj"]
    )
    theirs = PolyModel(other, config, "default").eval()
    generator = torch.Generator().manual_seed(5)
    for z in (torch.tensor([-60.0, 60.0, -60.0]), torch.randn(3, generator=generator)):
        for path, part in done.parts.items():
            layer = theirs.model.get_submodule(path)
            layer.poly_lora_A["default"].data[0] = part.down.mT
            layer.poly_lora_B["default"].data[0] = part.up.mT
            layer.poly_router["default"].module_logits.data[0] = part.weigh.z.data = z
        logits = theirs(**batch, task_ids=torch.zeros(3, dtype=torch.long)).logits
        torch.testing.assert_close(model(**batch).logits, logits, rtol=1e-4, atol=1e-4)
        if z.abs().max() == 60:
            assert done.weights()[PATH].tolist() == pytest.approx([0, 1, 0])


@pytest.mark.parametrize(
    ("preset", "changes", "rate", "trained", "starts"),
    [
        ("bank", {}, 1e-3, True, True),
        ("bank", {"trains": "Z", "rate": 0.1}, 0.1, False, True),
        ("bank", {"normalise": "raw", "noise": "none"}, 1e-3, True, True),
        ("paper", {}, 0.1, True, False),
        ("released", {}, 0.1, True, False),
    ],
)
def test_switches_say_what_starts_what_trains_and_how_fast(
    preset, changes, rate, trained, starts, model, rows, bank
):
    config = poly.Config.preset(preset, **changes)
    recipe = {"warmup": 0.0, "batch": 4, "lr": 1e-3}
    done = poly.tuned(model, bank, tuning.Data(rows), config, steps=2, **recipe)
    part = done.parts[PATH]
    first = torch.stack([lora.down[PATH] for lora in bank.values()])
    assert rate / 2 < part.weigh.z.abs().max() < 2.1 * rate + 1e-3  # Adam's steps
    assert torch.allclose(part.down, first, atol=3e-3) is starts
    assert torch.equal(part.down, first) is not (trained or not starts)
    assert done.cost.trained == 4 * 4 + trained * 4 * 4 * 2 * (64 + 48)


def test_the_raw_form_refuses_noise():
    with pytest.raises(
        Refusal, match="E-CHOICE: normalise is 'raw', which draws nothing"
    ):
        poly.Config(normalise="raw")
