"""The notebook's arms, and what upcycling does to a model before its first step."""

import pytest
import torch

from moebook.methods import upcycling


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
    assert [name for name, arm in arms.items() if not arm.laboratory] == list(upcycling.MAIN)
    assert (arms["su4"].start, arms["su4"].length) == ("random", "raw")
    assert (arms["crsu"].start, arms["crsu"].length, arms["crsu"].path) == ("crsu", "unit", "crsu")
    assert (arms["crsu_matched"].length, arms["trsu4"].length) == ("matched", "unit")
    assert arms["crsu_matched"].path == "lab/crsu_matched"
    rules = {name for name, arm in arms.items() if arm.combine == "renormalised"}
    assert rules == {"su4_renormalised", "crsu_renormalised"}
    assert all(arm.experts == 4 for arm in arms.values() if arm.laboratory)


def test_step_zero_measures_loss_and_gradient_of_each_rule_and_leaves_the_model(host, batch):
    dense = host().requires_grad_(False)
    start = upcycling.random(dense, 4, kind="wide")
    table = upcycling.step_zero(dense, {"wide": start}, batch)
    assert list(table.index.names) == ["combine", "experts per token", "start"]
    assert len(table) == 4
    assert type(dense.model.layers[0].mlp).__name__ == "LlamaMLP"
    assert table.loss["renormalised"].abs().max() < 1e-5
    assert table.gradient["renormalised"].max() < 1e-5
    model = host().requires_grad_(True)
    plain = model(**batch).loss.item()
    upcycling.upcycle(model, upcycling.Config(experts=4, top_k=1, combine="probability"), start)
    loss = model(**batch).loss
    loss.backward()
    grads = [layer.mlp.router.weight.grad.flatten() for layer in model.model.layers]
    line = table.loc["probability", 1, "wide"]
    assert line.loss == pytest.approx(loss.item() - plain, abs=1e-6)
    assert line.gradient == pytest.approx(torch.cat(grads).norm().item(), rel=1e-5)
