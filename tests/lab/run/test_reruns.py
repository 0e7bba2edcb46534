"""Notebooks rerun with other parameters: each runs to its end, or is refused before any work."""

import json
import math
import os
import random
import re
import time
from datetime import date

import pytest

from moebook.errors import Refusal
from moebook.lab.run.session import NOTE, VALUE
from moebook.training import loop
from tests.book import own
from tests.experiments import draws
from tests.experiments.test_effects import IDLE, write_rows

# One task or target alone, where every protocol has several.
ONE_TASK = {
    "pesc": {"tasks": "gcd", "arms": "sparse"},
    "router_init": {"tasks_code": "", "tasks_text": "", "arms": "su,crsu"},
    "rocket": {"targets": "kinship_told", "arms": "mixture,expert_lora"},
    "esft": {"tasks": "isa", "general": "gcd", "arms": "gate,lora"},
    "rivals": {"targets": "kinship_told", "arms": "expert_lora,smear"},
    "together": {"tasks": "gcd", "arms": "full,lora", "again": "lora"},
    "banks": {"targets": "copyleft", "arms": "own_choice,rotated"},
}
# A user's own files among tasks and targets: rows with choices, and rows without.
OWN = {
    "pesc": {"tasks": "gcd,teams.jsonl,chosen.jsonl", "arms": "sparse"},
    "router_init": {"tasks_text": "teams.jsonl", "arms": "su,crsu"},
    "rocket": {"targets": "chosen.jsonl,teams.jsonl", "arms": "mixture,expert_lora"},
    "esft": {
        "tasks": "teams.jsonl,isa:chosen.jsonl",
        "general": "gcd",
        "alignment": "teams.jsonl",
        "arms": "gate,lora",
    },
    "rivals": {"targets": "teams.jsonl", "arms": "rocket,expert_lora,lorahub"},
    "together": {
        "tasks": "gcd,teams.jsonl",
        "new": "chosen.jsonl",
        "arms": "full,lora",
        "again": "lora",
    },
}
# What strangers bring: weights, a bank of LoRAs, rows.
STRANGERS = {
    "rocket": {
        "base": "my-model",
        "bank_folder": "my-loras",
        "targets": "train.jsonl",
        "arms": "mixture,random_lora,perplexity,expert_lora",
    },
    "rivals": {
        "base": "my-model",
        "bank_folder": "my-loras",
        "targets": "train.jsonl",
        "arms": "rocket,random,smear,lorahub,arrow,expert_lora",
    },
    "esft": {"base": "my-moe", "tasks": "train.jsonl", "arms": "gate,lora"},
    "pesc": {
        "base": "my-model",
        "mix": "train.jsonl",
        "tasks": "test.jsonl",
        "arms": "sparse",
    },
}
DRAWS = 60  # of parameters, in `make soak`
MEASURED = re.compile("cost|time|memory|_over_")  # by a clock: never the same twice
LATE = 5  # seconds of CPU after the imports, before which a refusal comes


def reruns():
    """Each arm alone, pairs of arms, and one task; all arms at once are smoke itself."""
    cases = list(ONE_TASK.items())
    for name in draws.NOTEBOOKS:
        names = list(draws.known(name))
        draw = random.Random(f"pairs/{name}")
        pairs = [",".join(draw.sample(names, 2)) for _ in range(3)]
        alone = {"again": ""} if name == "together" else {}
        cases += [(name, {"arms": arms, **alone}) for arms in [*names, *pairs]]
    return cases


RERUNS = reruns()
SHARE = 20  # of all cases one in so many is in a run of `make soak`; MOEBOOK_FAULTS=10 runs all
TODAY = random.Random(f"{date.today()}")


TURN = TODAY.choice(["arms", "own files", "strangers", "drawn"])
"""The kind of rerun of which `make test` has a case today."""


def drawn(kind, cases):
    """Keep some of the cases for `make soak`, others each day, and one for `make test`."""
    cases = list(cases)
    TODAY.shuffle(cases)
    if os.environ.get("MOEBOOK_FAULTS", "1") == "1":
        cases = cases[: 1 + len(cases) // SHARE]
    params = []
    for place, case in enumerate(cases):
        marks = [] if kind == TURN and place == 0 else [pytest.mark.soak]
        params.append(pytest.param(case, id=str(case), marks=marks))
    return params


@pytest.fixture
def rerun(here, monkeypatch):
    """Run a notebook at smoke with changed parameters; return the refusal, or None."""
    trained = []
    make = loop.make_optimizer

    def counted(*given):
        trained.append(given)
        return make(*given)

    monkeypatch.setattr(loop, "make_optimizer", counted)

    def run(name, changed):
        began = time.process_time()
        try:
            left = here(name, draws.smoke(name) | changed)
        except Refusal as refusal:
            assert not trained, f"refused after a training: {refusal}"
            spent = time.process_time() - began
            assert spent < LATE, f"refused after {spent:.0f} s: {refusal}"
            return refusal
        values = [bundle[VALUE]["value"] for bundle in left if VALUE in bundle]
        assert values
        assert all(map(math.isfinite, values))
        (arms,) = [
            bundle[NOTE]["arms"] for bundle in left if "arms" in bundle.get(NOTE, {})
        ]
        asked = changed.get("arms", "all")
        assert asked == "all" or sorted(arms) == sorted(asked.split(","))
        return None

    return run


@pytest.fixture(scope="session")
def strangers(tmp_path_factory):
    """Models by transformers alone, LoRAs by PEFT alone, and rows."""
    folder = tmp_path_factory.mktemp("strangers")
    own.make(folder)
    return folder


@pytest.fixture
def own_files(tmp_path):
    """Two files of a user's: answers to write, and choices to make."""
    files = [tmp_path / "teams.jsonl", tmp_path / "chosen.jsonl"]
    teams = ["billing", "shipping", "accounts"]
    for file, extra in zip(files, ({}, {"choices": teams}), strict=True):
        lines = []
        for number in range(60):
            team = teams[number % 3]
            row = {"prompt": f"{file.stem} {number}: {team}?", "answer": team, **extra}
            lines.append(json.dumps(row) + "\n")
        file.write_text("".join(lines))
    return files


@pytest.mark.parametrize("case", drawn("arms", RERUNS))
def test_an_arm_alone_two_arms_and_one_task_run(case, rerun):
    name, changed = case
    assert rerun(name, changed) is None


@pytest.mark.parametrize("case", drawn("own files", OWN.items()))
def test_tasks_of_a_users_own_files_run(case, rerun, own_files):
    name, changed = case
    placed = {}
    for parameter, text in changed.items():
        for file in own_files:
            text = text.replace(file.name, str(file))
        placed[parameter] = text
    # Every arm chooses its rate by rows that no arm is trained on.
    rates = {"rates": "0.005,0.01", "valid_rows": 4} if name == "rocket" else {}
    assert rerun(name, placed | rates) is None


@pytest.mark.parametrize("case", drawn("strangers", STRANGERS.items()))
def test_a_strangers_model_loras_and_rows_run(case, rerun, strangers):
    name, changed = case
    places = {
        parameter: ",".join(str(strangers / part) for part in text.split(","))
        for parameter, text in changed.items()
        if parameter != "arms"
    }
    bank = {"members": "", "valid_rows": 4} if name in ("rocket", "rivals") else {}
    if name == "rivals":
        bank["searches"] = 7  # of five LoRAs, and two
    assert rerun(name, changed | places | bank) is None


@pytest.mark.parametrize("number", drawn("drawn", range(DRAWS)))
def test_drawn_parameters_run_or_are_refused_before_any_work(number, rerun):
    name = draws.NOTEBOOKS[number % len(draws.NOTEBOOKS)]
    try:
        changed = draws.changes(name, draws.by_number(number), affordable=True)
    except Refusal:
        return  # outside of what is declared: refused where parameters are read
    rerun(name, changed)  # asserts that all values are finite, or nothing had trained


@pytest.mark.parametrize("idle", drawn("idle", IDLE))
def test_what_is_said_to_do_nothing_changes_no_value(idle, here, recipes):
    name, settings, _, changed = idle
    write_rows(recipes)

    def values(given):
        left = here(name, draws.smoke(name) | given)
        kept = [bundle[VALUE] for bundle in left if VALUE in bundle]
        return {
            value["name"]: value["value"]
            for value in kept
            if not MEASURED.search(value["name"])
        }

    usual = values(settings)
    assert usual
    assert values(settings | changed) == usual
