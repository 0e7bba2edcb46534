"""The arms of Table 1: settings that hold, and rates that some arm of the table was given."""

from dataclasses import replace

import pytest
import torch

from moebook.methods.rivals import phatgoose, pi_tuning, table
from moebook.methods.rivals.tuning import Data
from tests.refusals import refused

QUICK = {"steps": 2, "batch": 4}


@pytest.fixture
def data(rows, bank):
    few = rows.select(range(4))
    return Data(few, sources=dict.fromkeys(bank, few))


@pytest.mark.parametrize(("size", "experts"), [(12, 4), (3, 2), (38, 4)])
def test_every_arm_has_settings_and_takes_the_rate_of_an_arm_with_its_own_settings(
    size, experts
):
    arms = table.arms(size, rate=0.1, searches=40, experts=experts, top_k=2)
    for name, arm in arms.items():
        named = {"named": "one"} if arm.preset.startswith("source_best") else {}
        config = table.MODULES[arm.rival].Config.preset(
            arm.preset, **{**arm.changes, **named}
        )
        of = arms[arm.rated].rated if arm.rated else ""
        assert of == arm.rated
        assert name.startswith((arm.rated, arm.rival))
        if arm.rival == "arrow":
            assert config.top_k <= (experts if arm.bank == "chosen" else size)
    assert set(table.RIVALS) <= set(arms)
    assert len(arms) == 29
    assert [name for name, arm in arms.items() if arm.bank == "chosen"] == [
        "rocket",
        *(f"{name}_chosen" for name in table.RIVALS[1:]),
    ]


@pytest.mark.parametrize("shipped", ["", "a", "abcd"])
@pytest.mark.parametrize("at", [0.05, 0.01])
def test_gates_that_were_not_shipped_are_learnt_at_the_arms_rate(
    at, shipped, model, bank, data
):
    config = phatgoose.Config(lr=0.05, **QUICK)
    learnt = phatgoose.gates(model, bank, data, config)
    made = table.Shipped(gates={at: {name: learnt[name] for name in shipped}})
    arm = table.Arm(rival="phatgoose", rated="phatgoose", changes=QUICK)
    done = table.tuned(model, arm, bank, data, made, lr=0.05)
    for path, part in done.parts.items():
        want = torch.stack([learnt[name].vectors[path] for name in bank])
        assert torch.equal(part.weigh.vectors, want)
        assert want.any()


@pytest.mark.parametrize("shipped", ["", "a", "abcd"])
def test_fishers_that_were_not_shipped_are_made(shipped, base, bank, data):
    config = pi_tuning.Config(neighbours=1)
    known = pi_tuning.fishers(base(), bank, data, config)
    made = table.Shipped(fishers={name: known[name] for name in shipped})
    arm = table.Arm(rival="pi_tuning", rated="pi_tuning", changes={"neighbours": 1})
    how = {"lr": 1e-3, "warmup": 0.0, **QUICK}
    got = table.tuned(base(), arm, bank, data, made, **how)
    want = pi_tuning.tuned(base(), bank, data, config, embeddings=known, **how)
    assert got.origin == want.origin
    assert got.lora().digest == want.lora().digest


@pytest.mark.parametrize("rival", ["phatgoose", "pi_tuning"])
def test_what_was_not_shipped_needs_the_rows_of_its_lora(rival, model, bank, data):
    arm = table.Arm(rival=rival, rated=rival)
    bare = replace(data, sources={})
    words = "E-DATA: the rows that 'a' was trained on are needed"
    refused(
        words, table.tuned, model, arm, bank, bare, table.Shipped(), lr=0.01, **QUICK
    )
