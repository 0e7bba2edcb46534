"""Notebooks on a user's own files: ``-p mix=FILE`` trains on one, ``-p tasks=FILE`` tests."""

import json
from pathlib import Path

import pytest

from moebook import data, experiments
from moebook.data import tasks
from moebook.experiments import needs
from moebook.lab.run import parameters, sources
from tests.refusals import refused

ROOT = Path(__file__).resolve().parents[2]
TESTED = {"pesc": "tasks", "router_init": "tasks_code", "together": "tasks"}


@pytest.fixture
def file(tmp_path):
    rows = [
        {"prompt": f"{n} + 1 =", "answer": str(n + 1), "domain": domain}
        for n, domain in enumerate(["code", "mathematics", "text"] * 20)
    ]
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def given(name, **changes):
    notebook = sources.find(ROOT, name)
    parameters.check(notebook.parameters, changes, "-p")
    return notebook.defaults | notebook.settings("smoke") | changes


@pytest.mark.parametrize("name", ["pesc", "router_init"])
def test_a_mix_of_your_own_is_parted_in_trained_tested_and_validated_rows(name, file):
    settings = given(name, mix=str(file), **{TESTED[name]: str(file)})
    experiments.check(name, settings)
    rows = getattr(experiments, name).rows(settings)
    task = tasks.find(str(file))
    assert data.hashes(rows.train) == data.hashes(task.rows("train", 36))
    assert data.hashes(rows.held_out) <= data.hashes(task.rows("test", 12))
    assert data.hashes(rows.valid) <= data.hashes(task.rows("validation", 12))
    first = json.dumps(rows.tested)
    file.write_text(file.read_text() + '{"prompt": "1 and 1?", "answer": "2"}\n')
    again = getattr(experiments, name).rows(settings)
    assert json.dumps(again.tested) != first  # runs on another file are no pool


@pytest.mark.parametrize("name", TESTED)
def test_your_own_task_is_one_among_the_tasks_and_a_bad_one_stops_before_any_work(
    name, file
):
    changes = {TESTED[name]: f"python_eval,{file}"}
    if name == "together":
        changes |= {"arms": "full", "again": ""}
    experiments.check(name, given(name, **changes))
    file.write_text('{"prompt": "a", "answer": 4}\n')
    words = "E-RANGE: .*tasks.* lists .*sums.jsonl:1: field 'answer' is int"
    refused(words, experiments.check, name, given(name, **changes))


def test_what_is_tested_is_not_trained_on(file, tmp_path):
    other = tmp_path / "other.jsonl"
    train = tasks.find(str(file)).rows("train", 3)
    rows = [{"prompt": r["prompt"], "answer": "1", "split": "test"} for r in train]
    other.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = given("pesc", mix=str(file), tasks=str(other))
    refused("E-LEAK: 3 of 3", experiments.pesc.rows, settings)


def test_a_domain_that_routers_start_from_and_the_file_lacks_is_told(file):
    file.write_text('{"prompt": "a", "answer": "b", "domain": "code"}\n')
    settings = given("router_init", mix=str(file), arms="trsu")
    words = "E-RANGE: .*sums.jsonl.*'domain' is 'mathematics', and it has none"
    refused(words, experiments.check, "router_init", settings)


def test_a_choice_that_is_a_pattern_takes_a_files_name_and_nothing_else():
    mix = sources.find(ROOT, "pesc").parameters["mix"]
    assert mix.read("data/my.jsonl", "-p") == "data/my.jsonl"
    for text in (".jsonl", "my.json", "idae"):
        refused("E-RANGE: .*one of: .*jsonl", mix.read, text, "-p")
    assert list(needs.files({"mix": "embedded", "tasks": "gcd"})) == []
