"""The arms of ESFT: their names, their tasks, and what each arm's method is called with."""

import copy

import pytest
import torch

from moebook.methods import esft

TRIED = {"gate": [0.1, 0.3], "token": [0.2], "lora": [4, 8], "groups": [2]}
USUAL = {"gate": 0.1, "token": 0.2, "lora": 8}


def test_every_arm_has_a_name_and_none_is_trained_twice():
    known = esft.arms(TRIED, USUAL)
    main = ["fft", "lora", "token", "random_token", "gate", "random_gate"]
    assert list(known) == [*main, "gate-0.3", "lora-4", "fft-g2", "gate-g2"]
    assert [name for name, arm in known.items() if arm.main] == main
    assert known["gate-0.3"] == esft.Arm("gate", 0.3, main=False)
    assert known["random_gate"] == esft.Arm("gate", 0.1, random=True)
    assert known["gate-g2"] == esft.Arm("gate", 0.1, group=2, main=False)
    assert known["lora-4"].size == 4 and known["lora"].size == 8


def test_the_arms_of_a_sweep_are_named_smallest_first():
    want = {"gate": ["gate", "gate-0.3"], "token": ["token"], "lora": ["lora-4", "lora"]}
    assert esft.budget(TRIED, USUAL) == want
    other = esft.budget(TRIED, USUAL | {"gate": 0.2})
    assert other["gate"] == ["gate-0.1", "gate-0.3"]
    assert set(other["gate"]) <= set(esft.arms(TRIED, USUAL | {"gate": 0.2}))


@pytest.fixture
def measured(mixture, batch):
    """A mixture whose K suits groups of two, and what `plan` takes beside the arms."""
    model = mixture("DeepseekV2", num_experts_per_tok=4)
    drawn = {"one": [batch], "two": [{key: part[:1] for key, part in batch.items()}]}
    scores = {task: esft.measure(model, batches) for task, batches in drawn.items()}
    return model, drawn, scores, esft.cooccurrence(model, [batch])


def planned(arms, measured, seed=0):
    return esft.plan(arms, *measured, preset="fixed", scale=3.0, seed=seed)


def test_main_arms_run_on_every_task_and_the_others_on_the_first(measured):
    known = esft.arms(TRIED, USUAL)
    plan = planned(known, measured)
    for name, arm in known.items():
        tasks = [task for other, task in plan if other == name]
        assert tasks == (["one", "two"] if arm.main else ["one"])
    assert plan["fft", "two"] == plan["fft-g2", "one"] == {}
    assert plan["lora", "one"] == {"rank": 8, "scale": 3.0}
    assert plan["lora-4", "one"] == {"rank": 4, "scale": 3.0}


def test_an_arm_gets_the_experts_of_its_own_score_and_threshold(measured):
    plan, scores = planned(esft.arms(TRIED, USUAL), measured), measured[2]
    for name, score, p in (
        ("token", "token", 0.2),
        ("gate", "gate", 0.1),
        ("gate-0.3", "gate", 0.3),
    ):
        want = esft.select(scores["one"], esft.Config(score=score, threshold=p))
        assert plan[name, "one"] == {"selection": want}
    drawn, like = plan["random_gate", "two"]["selection"], plan["gate", "two"]["selection"]
    assert drawn == esft.random_selection(like, scores["two"].experts, "gate/two/0")


def test_an_arm_of_a_part_of_them_gets_what_it_gets_among_all(measured):
    known = esft.arms(TRIED, USUAL)
    plan = planned(known, measured)
    for name in known:
        alone = planned({name: known[name]}, measured)
        assert alone == {key: given for key, given in plan.items() if key[0] == name}
    other = planned(known, measured, seed=5)
    assert {key for key in plan if plan[key] != other[key]} <= {
        key for key in plan if key[0].startswith("random")
    }


def test_grouped_experts_are_measured_in_groups_and_the_base_is_left_alone(measured):
    model, drawn, _, together = measured
    before = copy.deepcopy(model.state_dict())
    (given,) = planned({"gate-g2": esft.Arm("gate", 0.1, group=2, main=False)}, measured).values()
    assert before.keys() == model.state_dict().keys()
    assert all(torch.equal(part, before[name]) for name, part in model.state_dict().items())
    groups = esft.group(model, together, 2)
    config = esft.Config(score="gate", threshold=0.1)
    want = esft.select(esft.measure(model, drawn["one"]), config, groups=groups)
    assert given["selection"] == want
