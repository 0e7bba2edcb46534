"""Experiments: what arms need is told before any work, rates, and arms made, trained and kept."""

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from datasets import Dataset

from moebook import experiments, lists, models
from moebook.experiments import experiment as module
from moebook.experiments import rates
from moebook.lab.pages import plans
from moebook.lab.run import study
from moebook.methods import pesc
from tests.experiments import notebooks
from tests.refusals import refused

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = notebooks.notebook("pesc")
given = partial(notebooks.given, "pesc")


CANNOT = {
    "host = 'full': matched widens": {"arms": "matched,sparse", "host": "full"},
    "host = 'frozen': dense tunes": {"arms": "dense", "host": "frozen"},
    "top_k = 8: experts4 has 4 experts; take 1 to 4": {
        "arms": "experts4",
        "top_k": 8,
        "experts": 8,
    },
    "top_k = 8: expected 1 to 4, since experts = 4": {
        "arms": "dense",
        "top_k": 8,
        "experts": 4,
    },
    "experts = 256 and adapter_width = 8192: wide would": {
        "arms": "wide",
        "experts": 256,
        "adapter_width": 8192,
    },
    r"tasks lists 'gcd2': mix = 'embedded' takes .* did you mean 'gcd'": {
        "tasks": "gcd2"
    },
    "tasks lists ' isa'": {"tasks": "gcd, isa"},
    "tasks = '' holds an empty name": {"tasks": ""},
    "tasks lists 'isa' twice": {"tasks": "isa,isa"},
    "arms lists 'sprase': did you mean 'sparse'": {"arms": "sprase"},
    "arms is empty; one of: ": {"arms": ""},
    "rates lists 'abc': expected a number above 0 and below 1": {"rates": "abc"},
    "rates lists '5'": {"rates": "5"},
    "rates lists 'nan'": {"rates": "0.1,nan"},
    "rates lists 0.001 twice: give": {"rates": "0.001,1e-3"},
    "rates lists 0.00123457 twice, to the six digits": {
        "rates": "0.001234567,0.001234568"
    },
    "rate_steps = 1: the only step of a trial": {
        "rates": "0.001,0.002",
        "rate_steps": 1,
    },
    "steps = 1: the only step is that of the warm-up": {"steps": 1},
    "rates = '0.004' and fixed_rates = 'dense=0.1': give rates to choose from": {
        "arms": "dense",
        "rates": "0.004",
        "fixed_rates": "dense=0.1",
    },
}
FIXED = {
    "fixed_rates = 'dense=0.1' has no rate for matched, sparse: add matched=..., sparse=...": (
        "dense=0.1"
    ),
    "fixed_rates names 'spares': did you mean 'sparse'": "dense=0.1,spares=0.1",
    "fixed_rates names 'dense' twice": "dense=0.1,matched=0.1,sparse=0.1,dense=0.2",
    "fixed_rates gives dense '0': expected a number above 0": "dense=0,matched=0.1,sparse=0.1",
    "fixed_rates gives dense '-1'": "dense=-1,matched=0.1,sparse=0.1",
    "fixed_rates gives dense ''": "dense=,matched=0.1,sparse=0.1",
    "fixed_rates holds '0.1': expected name=rate, as in dense=0.001": "0.1",
}
CANNOT |= {
    message: {"arms": "dense,matched,sparse", "rates": "", "fixed_rates": text}
    for message, text in FIXED.items()
}


@pytest.mark.parametrize(("message", "changes"), CANNOT.items(), ids=CANNOT)
def test_parameters_with_which_an_arm_cannot_run_are_refused_before_any_work(
    message, changes
):
    refused(f"E-RANGE: {message}", experiments.check, "pesc", given(**changes))


def test_all_complaints_stand_in_one_line_and_a_gpu_is_asked_for_where_the_device_is_known():
    wrong = given(
        arms="dense,matched,experts4",
        host="frozen",
        experts=8,
        top_k=5,
        rates="7",
        tasks="gcd,gcd",
        optimizer="paged_8bit",
    )
    cpu = torch.device("cpu")
    refusal = refused("E-RANGE: rates lists '7'", experiments.pesc.check, wrong, cpu)
    parts = refusal.message.split("; and ")
    starts = ["rates lists", "tasks lists", "optimizer =", "host = 'frozen': dense"]
    starts += ["host = 'frozen': matched", "top_k = 5: experts4"]
    assert len(parts) == len(starts)
    assert all(
        part.startswith(start) for part, start in zip(parts, starts, strict=True)
    )
    # Where it will run is not known.
    experiments.pesc.check(given(optimizer="paged_8bit"))
    experiments.pesc.check(given(optimizer="paged_8bit"), torch.device("cuda"))


@pytest.mark.parametrize("protocol", NOTEBOOK.protocols)
def test_every_protocol_passes_its_own_check(protocol):
    settings = given(protocol)
    asked = experiments.pesc.check(settings)
    named = settings["arms"].split(",")
    if settings["arms"] == "all":
        named = [*experiments.pesc.ARMS]
    assert sorted(asked) == sorted(named)


def test_what_a_methods_settings_refuse_is_told_once_with_the_arms_names():
    odd = replace(experiments.pesc.ARMS["sparse"], name="odd")
    even = replace(odd, name="even")
    arms = {"odd": odd, "even": even}
    (told,) = experiments.arm.needs(arms, given() | {"adapter_width": 0})
    assert told.startswith("arm odd, even: adapter_width is 0")
    assert told.count("adapter_width") == 1


@pytest.mark.parametrize("call", ["plan", "study"])
def test_the_planner_and_a_study_refuse_what_the_notebook_refuses(
    call, tmp_path, monkeypatch
):
    wrong = {"arms": "dense,matched", "host": "full", "rates": ""}
    message = "E-RANGE: host = 'full': matched widens"
    if call == "plan":
        refused(message, plans.trainings, "pesc", given("nano", **wrong))
        return
    monkeypatch.setattr(
        study, "freeze", lambda folder: pytest.fail("a commit was frozen")
    )
    (tmp_path / "notebooks").mkdir()
    shutil.copy(NOTEBOOK.path, tmp_path / "notebooks")
    lines = [f"{name}: {json.dumps(value)}" for name, value in wrong.items()]
    text = "\n".join(["tier: study", *lines])
    (tmp_path / "notebooks" / "01_pesc.own.yaml").write_text(text)
    refused(message, study.study, "pesc", "own", [1], folder=tmp_path)


def test_rates_are_read_from_a_list_and_by_name_and_a_rate_beside_the_arms_is_no_harm():
    assert lists.rates("rates", "0.004") == [0.004]
    assert lists.rates("rates", "1e-3, 0.5,") == [0.001, 0.5]
    assert lists.rates("rates", "") == []
    for read in (lists.rates, lists.numbers, lists.rates_by_name):
        for parted in ([0.004], None, 0.004):
            refused("E-TYPE: rates is .*expected a text", read, "rates", parted)
    refused("E-TYPE: tasks is .'a'., expected", lists.listed, "tasks", ["a"], ["a"])
    text = " dense = 0.004, sparse=2e-3 "
    assert lists.rates_by_name("x", text, ["dense", "sparse"]) == {
        "dense": 0.004,
        "sparse": 0.002,
    }
    one = given(arms="sparse", rates="", fixed_rates=text)
    chosen = rates.given(one, experiments.pesc.check(one))
    assert chosen.by_arm == {"sparse": 0.002}
    assert chosen.losses == {}
    assert chosen.ends == {}


def test_without_a_grid_or_fixed_rates_each_arm_has_its_parameter():
    usual = given(arms="dense,upcycled", rates="", lr=0.3, lr_full=0.2)
    chosen = rates.given(usual, experiments.pesc.check(usual))
    assert chosen.by_arm == {"dense": 0.3, "upcycled": 0.2}


def test_each_arm_gets_the_rate_of_its_least_loss_and_a_best_at_an_end_is_told():
    losses = {
        ("low", 0.1): 1.0,
        ("low", 0.2): 2.0,
        ("low", 0.4): 3.0,
        ("inside", 0.1): 2.0,
        ("inside", 0.2): 1.0,
        ("inside", 0.4): 3.0,
        ("high", 0.1): 2.0,
        ("high", 0.2): 2.0,
        ("high", 0.4): 1.0,
        ("tied", 0.1): 2.0,
        ("tied", 0.2): 1.0,
        ("tied", 0.4): 1.0,
    }
    tried = []

    def loss(arm, rate):
        tried.append((arm, rate))
        return losses[arm, rate]

    names = ["low", "inside", "high", "tied"]
    chosen = rates.choose(names, [0.4, 0.1, 0.2], loss)
    assert tried == [
        (arm, rate) for arm in names for rate in (0.4, 0.1, 0.2)
    ]  # one grid for all
    assert chosen.by_arm == {"low": 0.1, "inside": 0.2, "high": 0.4, "tied": 0.2}
    assert chosen.ends == {"low": "lowest", "high": "highest"}
    table = chosen.table
    assert list(table.index) == names
    assert table.loc["high", "0.4"] == 1.0
    assert table["end of the grid"].tolist() == ["lowest", "", "highest", ""]
    assert rates.choose(["low"], [0.1], loss).ends == {}  # one rate is no grid


LORA = pesc.Config(host="lora", experts=4, adapter_width=8, lora_rank=2)
WIDE = replace(LORA, experts=1, top_k=1, adapter_width=32, balance="none")
BY_HAND = {
    "dense": (LORA, False),
    "wide": (WIDE, True),
    "sparse": (LORA, True),
    "experts16": (replace(LORA, experts=16), True),
    "unbalanced": (replace(LORA, balance="none"), True),
    "paper": (replace(LORA, **pesc.reading("paper")), True),
    "released": (replace(LORA, **pesc.reading("released")), True),
    "adapters": (replace(LORA, host="frozen"), True),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_an_arm_is_what_its_method_makes_of_the_base(name):
    config, sparse = BY_HAND[name]
    both = []
    for make in (
        lambda base: experiments.pesc.ARMS[name].make(base, given()),
        lambda base: pesc.prepare(base, config, sparse=sparse),
    ):
        torch.manual_seed(0)
        both.append(make(models.load("nano")[0]))
    one, other = both
    assert one.pesc.config == other.pesc.config == config
    trained = []
    for model in (one, other):
        named = model.named_parameters()
        trained.append({name: part for name, part in named if part.requires_grad})
    assert trained[0].keys() == trained[1].keys()
    assert all(torch.equal(trained[0][n], trained[1][n]) for n in trained[0])


def test_matched_trains_as_many_parameters_as_sparse_and_upcycled_whole_experts():
    sizes = {}
    for name in ("dense", "matched", "sparse", "upcycled"):
        model = experiments.pesc.ARMS[name].make(models.load("nano")[0], given())
        sizes[name] = sum(
            part.numel() for part in model.parameters() if part.requires_grad
        )
    # Of LoRA on all linear layers of nano.
    per_rank = 4 * (4 * 2 * 128 + 3 * (128 + 352))
    assert sizes["dense"] == 2 * per_rank
    assert abs(sizes["matched"] - sizes["sparse"]) <= per_rank / 2
    assert sizes["upcycled"] == 4 * (4 * 3 * 128 * 352 + 4 * 128)


class Kept:
    """A run that keeps what it is told to record."""

    def __init__(self):
        self.values = {}
        self.lines = {}

    def record(self, name, value, unit, items=None):
        self.values[name] = value

    def curve(self, name, y, unit):
        self.lines[name] = list(y)

    def scores(self, name, table):
        self.values[f"{name}/accuracy"] = table.score.mean()


@pytest.fixture
def calls(monkeypatch):
    """What `fit` is called with; nothing is trained, and losses are the distance from 0.02."""
    fits = []

    def fit(model, rows, **how):
        fits.append(how | {"recomputes": model.is_gradient_checkpointing})
        return SimpleNamespace(loss=[3.0, 2.0])

    monkeypatch.setattr(module, "fit", fit)
    monkeypatch.setattr(module, "nats", lambda *_, **__: abs(fits[-1]["lr"] - 0.02))
    return fits


def started(**changes):
    """Return the experiment of dense and sparse with these parameters, on two rows."""
    settings = given(arms="dense,sparse", **changes)
    arms = experiments.pesc.check(settings)
    _, tokenizer = models.load("nano")
    row = {"task": "gcd", "domain": "mathematics", "prompt": "1?", "answer": "1"}
    rows = experiments.Rows([row], [row], [row], [row])
    made = experiments.pesc.experiment(
        settings, arms, rows, lambda: models.load("nano")[0], tokenizer
    )
    table = pd.DataFrame(
        {"task": ["gcd"], "correct": [1], "score": [1.0], "nll": [0.5]}
    )
    return replace(
        made, train_rows=Dataset.from_list([]), test=lambda model, limit: table
    )


def test_rates_are_tried_alike_for_every_arm_and_the_best_is_trained(calls):
    tried = started(rates="0.01,0.02,0.04", rate_steps=7, checkpointing=True)
    chosen = tried.choose_rates()
    assert [(how["label"], how["steps"]) for how in calls] == [
        (f"{arm}, {rate}", 7)
        for arm in ("dense", "sparse")
        for rate in (0.01, 0.02, 0.04)
    ]
    # A trial takes no more memory than the run.
    assert all(how["recomputes"] for how in calls)
    assert chosen.by_arm == {"dense": 0.02, "sparse": 0.02}
    assert chosen.ends == {}
    calls.clear()
    result = tried.run(tried.arms["sparse"], chosen["sparse"])
    (how,) = calls
    assert (how["lr"], how["steps"], how["label"]) == (0.02, 3, "sparse")
    assert how["penalty"] is pesc.balance_loss
    assert how["recomputes"]
    run = Kept()
    experiments.pesc.record(run, "pesc", result)
    assert run.values["pesc/sparse/accuracy"] == 1.0
    assert run.values["pesc/sparse/trained"] > 0
    assert run.values["pesc/sparse/adapter_norm"] == 0  # nothing was trained
    assert run.lines == {"pesc/sparse/loss": [3.0, 2.0]}


def test_fixed_rates_are_those_that_arms_are_trained_at_and_none_is_tried(calls):
    fixed = started(rates="", fixed_rates="sparse=0.03, dense=0.05, matched=0.9")
    chosen = fixed.choose_rates()
    assert calls == []
    assert chosen.losses == {}
    for name, arm in fixed.arms.items():
        fixed.run(arm, chosen[name])
    assert [(how["label"], how["lr"]) for how in calls] == [
        ("dense", 0.05),
        ("sparse", 0.03),
    ]


def test_what_an_arm_gives_does_not_depend_on_what_was_drawn_before_it(calls):
    tried = started(rates="")
    arm = tried.arms["sparse"]
    weights = []
    for _ in range(2):
        torch.rand(3)
        model = tried.run(arm, 0.1).model
        weights.append(
            torch.cat([p.flatten() for p in pesc.trained(model, LORA).values()])
        )
    assert torch.equal(*weights)


def test_on_a_base_in_16_bits_every_arm_trains_in_float32(calls):
    """Full experts too, of which AdamW would move few weights in bfloat16."""
    settings = given(arms="dense,sparse,adapters,upcycled", rates="")
    tried = started(rates="")
    narrow = lambda: models.load("nano")[0].to(torch.bfloat16)  # noqa: E731
    tried = replace(tried, arms=experiments.pesc.check(settings), load=narrow)
    for arm in tried.arms.values():
        model = tried.run(arm, 0.1).model
        assert {p.dtype for p in model.parameters() if p.requires_grad} == {
            torch.float32
        }
    assert tried.precisions == dict.fromkeys(tried.arms, "float32")


def test_arms_that_train_in_different_precision_are_not_compared(calls):
    tried = started(rates="")
    doubled = replace(
        tried.arms["dense"], name="doubled", build=lambda base, _: base.double()
    )
    tried.run(tried.arms["dense"], 0.1)
    trained = len(calls)
    refused(
        "E-DTYPE: doubled trains in float64, dense in float32", tried.run, doubled, 0.1
    )
    assert len(calls) == trained  # refused before it trains
    started(rates="").run(doubled, 0.1)  # alone it may
