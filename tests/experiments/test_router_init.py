"""Router initialisation's arms: what they need, what they are, and what is looked at on the way."""

import json
from dataclasses import replace
from functools import partial

import pandas as pd
import pytest
import torch

from moebook import data, experiments, models, runtime
from moebook.experiments import experiment as module
from moebook.lab.pages import plans
from moebook.methods import upcycling
from moebook.training import batches, fit
from tests.experiments import notebooks
from tests.refusals import refused

NOTEBOOK = notebooks.notebook("router_init")
given = partial(notebooks.given, "router_init")
ROUTER_INIT = experiments.router_init


EMPTY = {"tasks_code": "", "tasks_mathematics": "", "tasks_text": ""}
CANNOT = {
    "tasks_code = '' has no rows of code: trsu starts experts": {
        "arms": "dense,trsu",
        "tasks_code": "",
    },
    "tasks_mathematics = '' has no rows of mathematics: trsu4 starts": {
        "arms": "trsu4",
        "tasks_mathematics": "",
    },
    "tasks_text = '' has no rows of text: trsu3 starts": {
        "arms": "trsu3",
        "tasks_text": "",
    },
    "tasks_code = 'numbers_fr' has no rows of code: trsu starts": {
        "arms": "trsu",
        "tasks_code": "numbers_fr",
    },
    "2 tasks in tasks_code, .*: hidden deals the tasks out to 4 experts": {
        "arms": "hidden",
        "tasks_text": "",
    },
    "steps = 7: the only step of wide, a quarter of them, is .*; take 8 or more": {
        "arms": "su,wide",
        "steps": 7,
    },
    "kept_tokens = 7: crsu8 starts experts at centroids of 8 tokens": {
        "arms": "crsu8",
        "kept_tokens": 7,
    },
    "kept_tokens = 3: the starts are compared with 4 experts, .*; take 4 or more": {
        "arms": "su",
        "kept_tokens": 3,
    },
    "quarter_rows = 3: the test at the end has test_rows = 2 .*; take 0 to 2": {
        "quarter_rows": 3
    },
    "hardest_share = 0.04: it is less than one of the 24 rows of code": {
        "hardest_share": 0.04
    },
    "tasks_code, tasks_mathematics, tasks_text are empty": {"arms": "dense", **EMPTY},
    "tasks_text lists 'isb': .* did you mean 'isa'": {"tasks_text": "isb"},
    "tasks_text lists 'gcd', and so does tasks_mathematics": {"tasks_text": "gcd"},
    "rates lists 'abc'": {"rates": "abc"},
    "rates lists 0.001 twice": {"rates": "0.001,0.001"},
    "rate_steps = 1: the only step of a trial": {"rate_steps": 1},
    "arms lists 'crus': did you mean 'crsu'": {"arms": "crus"},
}


@pytest.mark.parametrize(("message", "changes"), CANNOT.items(), ids=CANNOT)
def test_parameters_with_which_an_arm_cannot_run_are_refused_before_any_work(
    message, changes
):
    for refuses in (experiments.check, plans.trainings):
        refused(f"E-RANGE: {message}", refuses, "router_init", given(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"arms": "dense,crsu", "tasks_code": ""},
        {"arms": "trsu", "tasks_text": ""},
        {"arms": "trsu3", "tasks_code": "", "tasks_text": "mmlu", "mix": "router_init"},
    ],
)
def test_an_arm_that_does_without_a_domain_runs_without_it(changes):
    experiments.check("router_init", given(**changes))


def written(path, domains):
    """Write a row for each domain, none of which is in the row where it is empty."""
    lines = []
    for number, domain in enumerate(domains):
        row = {"prompt": f"{number} + 1 =", "answer": str(number + 1)}
        lines.append(json.dumps(row | ({"domain": domain} if domain else {})) + "\n")
    path.write_text("".join(lines))
    return str(path)


@pytest.mark.parametrize("third", ["", "law", "text"])
def test_rows_of_a_file_that_are_neither_code_nor_mathematics_are_text(tmp_path, third):
    mix = written(tmp_path / "mix.jsonl", ["code", "mathematics", third] * 20)
    experiments.check("router_init", given(arms="trsu3", mix=mix))
    mix = written(tmp_path / "code.jsonl", ["code", third] * 20)
    words = "E-RANGE: .*trsu3 starts experts from rows whose 'domain' is 'mathematics'"
    refused(words, experiments.check, "router_init", given(arms="trsu3", mix=mix))
    mix = written(tmp_path / "two.jsonl", ["code", "mathematics"] * 20)
    words = "E-RANGE: .*trsu3 starts experts from rows whose 'domain' is 'text'"
    refused(words, experiments.check, "router_init", given(arms="trsu3", mix=mix))


@pytest.mark.parametrize("arm", ["hidden", "hidden_avg", "cheap_embed"])
def test_a_file_is_one_task_that_cannot_be_dealt_out_to_experts(arm, tmp_path):
    mix = written(tmp_path / "mix.jsonl", ["code", "mathematics", "text"] * 20)
    words = (
        f"E-RANGE: mix = .*mix.jsonl': {arm} deals tasks out to 4 .*, or leave {arm}"
    )
    refused(words, experiments.check, "router_init", given(arms=arm, mix=mix))


@pytest.mark.parametrize(
    "domains", [["law", "bio", "art"] * 5, ["law"] * 15, ["", "text", "law"] * 5]
)
def test_a_files_rows_count_once_in_each_area(tmp_path, domains):
    # Of fifteen prompts three are tested on, three validated on, nine trained on.
    path = written(tmp_path / "own.jsonl", domains)
    changes = {**EMPTY, "tasks_text": path, "arms": "dense", "hardest_rows": 100}
    experiments.check("router_init", given(hardest_share=1 / 9, **changes))
    words = "E-RANGE: hardest_share = 0.1: it is less than one of the 9 rows of text"
    refused(
        words, experiments.check, "router_init", given(hardest_share=0.1, **changes)
    )


@pytest.mark.parametrize("lacking", ["su", "crsu"])
def test_an_upcycled_arm_without_a_start_is_refused(lacking):
    settings = given(arms="dense,su,crsu")
    arms = ROUTER_INIT.check(settings)
    starts = {name: None for name in ("su", "crsu") if name != lacking}
    words = f"E-KEYS: no start is given for the routers of {lacking}; give what"
    refused(
        words,
        ROUTER_INIT.experiment,
        *(settings, arms, starts, ROUTER_INIT.rows(settings)),
        *(lambda: None, models.load("nano")[1]),
        bf16=False,
    )


@pytest.mark.parametrize("protocol", NOTEBOOK.protocols)
def test_every_protocol_passes_its_own_check(protocol):
    settings = given(protocol)
    asked = ROUTER_INIT.check(settings)
    named = settings["arms"].split(",")
    if settings["arms"] == "all":
        named = [*ROUTER_INIT.ARMS]
    assert sorted(asked) == sorted(named)


def test_a_shorter_training_has_its_own_steps_and_a_warm_up_as_long_as_the_others():
    settings = given("nano", warmup=0.05)
    steps = settings["steps"]
    for name, arm in ROUTER_INIT.ARMS.items():
        recipe = arm.recipe(settings)
        laboratory = name in upcycling.config.LABORATORY
        assert recipe["steps"] == (steps // 4 if laboratory else steps)
        assert recipe["warmup"] * recipe["steps"] == pytest.approx(0.05 * steps)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("su4", upcycling.Config(experts=4)),
        ("crsu_renormalised", upcycling.Config(experts=4, combine="renormalised")),
    ],
)
def test_an_upcycled_arm_is_what_the_method_makes_of_the_base_and_its_start(
    name, config
):
    start = upcycling.su(models.load("nano")[0], 4, kind="wide", seed=3)
    arm = ROUTER_INIT.ARMS[name]
    settings = given()
    assert arm.configure(settings) == config
    assert arm.penalty is upcycling.balance_loss
    ours = ROUTER_INIT.build(models.load("nano")[0], config, start)
    by_hand = upcycling.upcycle(models.load("nano")[0], config, start)
    for one, other in zip(ours.parameters(), by_hand.parameters(), strict=True):
        assert torch.equal(one, other)
        assert one.requires_grad


def test_starts_get_their_length_and_the_rule_scaled_its_factors(monkeypatch):
    settings = given(arms="dense,su,su_scaled", length="matched")
    base, _ = models.load("nano")
    ids = {"all": [{"input_ids": torch.arange(3, 67).view(4, 16)}]}
    inputs = upcycling.collect(base, ids, tensor="ffn_input")
    made = ROUTER_INIT.started(
        settings,
        ROUTER_INIT.check(settings),
        {"random": lambda experts: upcycling.su(base, experts, seed=2)},
        inputs,
    )
    assert sorted(made) == ["su", "su_scaled"]
    wanted = upcycling.scaled(upcycling.su(base, 2, seed=2), "matched", inputs=inputs)
    assert torch.equal(made["su"].weights, wanted.weights)
    assert made["su"].factors is None
    factors = upcycling.levelled(wanted, inputs, 1).factors
    assert torch.equal(made["su_scaled"].factors, factors)
    assert (factors > 1).all()


class Kept:
    """Stands in for a run."""

    def __init__(self):
        self.values = {}
        self.lines = {}

    def record(self, name, value, unit, items=None):
        self.values[name] = value, unit

    def curve(self, name, y, unit, x=None):
        self.lines[name] = dict(zip(x, y, strict=True)), unit


def test_the_dense_arm_is_the_base_and_all_of_it_trains():
    arm = ROUTER_INIT.ARMS["dense"]
    made = arm.make(models.load("nano")[0], given())
    assert arm.penalty is None
    assert all(part.requires_grad for part in made.parameters())
    whole = models.load("nano")[0].state_dict()
    assert all(
        torch.equal(part, whole[name]) for name, part in made.state_dict().items()
    )


def test_an_arm_is_trained_as_by_hand_and_looked_at_where_its_plan_says(monkeypatch):
    settings = given(arms="dense,su,su4", rates="", steps=8)
    arms = ROUTER_INIT.check(settings)
    base, tokenizer = models.load("nano")
    rows = ROUTER_INIT.rows(settings)
    starts = {
        name: upcycling.su(base, arms[name].configure(settings).experts, seed=1)
        for name in ("su", "su4")
    }

    def load():
        return models.load("nano")[0]

    made = ROUTER_INIT.experiment(
        settings, arms, starts, rows, load, tokenizer, bf16=False
    )
    tested = []

    def test(model, limit):
        tested.append(limit)
        return pd.DataFrame()

    made = replace(made, test=test)
    parts = batches.fixed(data.grouped(rows.held_out), tokenizer, max_length=160)
    first = next(iter(parts.values()))[0]
    courses = {}
    for name, arm in made.arms.items():
        courses[name] = ROUTER_INIT.run(made, arm, 0.001, parts, first)
    few = settings["quarter_rows"]
    many = settings["test_rows"]
    assert tested == [many, many, few, few, few, many]  # su4 after each quarter
    assert sorted(courses["su4"].answers) == [2, 4, 6, 8]
    assert sorted(courses["su"].answers) == [8]
    assert courses["dense"].before == {}
    assert courses["su"].before["entropy"] > 0
    assert courses["su"].shares is not None
    assert courses["su4"].shares is None
    planned = ROUTER_INIT.plan(settings)["su"]
    assert sorted(courses["su"].routes) == sorted({*planned.watched})

    kept = Kept()
    plan = ROUTER_INIT.plan(settings)
    table = ROUTER_INIT.record_recovery(kept, "root", plan, courses)
    before = made.validate(load())
    assert kept.values["root/dense/step0/nll"] == (pytest.approx(before), "nats")
    damaged, _ = kept.values["root/su/step0/nll"]
    upcycled = upcycling.upcycle(load(), upcycling.Config(experts=2), starts["su"])
    assert damaged == pytest.approx(made.validate(upcycled))
    assert damaged > before + 0.1
    line, unit = kept.lines["root/su/recovery"]
    assert unit == "nats"
    assert sorted(line) == [0, 1, 2, 4, 8]
    assert line[0] == damaged
    assert table.loc["su"].to_dict() == line

    runtime.seed_everything(settings["seed"])
    config = upcycling.Config(experts=2)
    model = upcycling.upcycle(load().requires_grad_(True), config, starts["su"])
    names = "batch schedule warmup clip accumulate optimizer seed".split()
    by_hand = fit(
        model,
        data.encode(rows.train, tokenizer, max_length=160),
        lr=0.001,
        steps=8,
        penalty=upcycling.balance_loss,
        pad_id=tokenizer.pad_token_id,
        **{name: settings[name] for name in names},
    )
    assert courses["su"].history.loss == by_hand.loss

    tried = []
    monkeypatch.setattr(module, "fit", lambda model, rows, **how: tried.append(how))
    monkeypatch.setattr(module, "nats", lambda *_, **__: len(tried))
    searched = replace(
        made, settings=settings | {"rates": "0.002,0.001", "rate_steps": 3}
    )
    chosen = searched.choose_rates()
    assert [how["steps"] for how in tried] == [3] * 6
    assert {how["warmup"] for how in tried} == {settings["warmup"]}
    assert [how["penalty"] for how in tried] == [None] * 2 + [
        upcycling.balance_loss
    ] * 4
    # The rate that was tried first, so of the least "loss".
    assert chosen.by_arm == dict.fromkeys(arms, 0.002)
