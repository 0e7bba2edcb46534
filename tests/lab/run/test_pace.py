"""What a notebook says that it will take here; and the record that README and pages read."""

import json
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch

import moebook
from moebook import storage
from moebook.lab.pages import book
from moebook.lab.records import Run, write_run
from moebook.lab.run import pace, sources
from tests.history import commit
from tests.refusals import refused
from workshop import times

ROOT = Path(__file__).parents[3]
RECORD = {
    "version": "1",
    "pace": 1000.0,
    "commands": {},
    "machine": {},
    "notebooks": {"smoke": {"toy": 20.0}, "cpu": {"toy": 90.0}},
}


@pytest.fixture
def told(fresh, monkeypatch):
    """Ask what the toy will take, on a machine half as fast as the one on record."""
    monkeypatch.chdir(fresh)
    monkeypatch.setattr(pace, "pace", lambda: 500.0)
    storage.write(fresh / "results" / pace.RECORD, json.dumps(RECORD))
    declared = sources.find(fresh, "toy").parameters

    def ask(**changes):
        given = {name: one.default for name, one in declared.items()} | changes
        return pace.expected(declared, given)

    return ask


def test_a_notebook_says_what_it_will_take_on_this_machine(told, fresh):
    assert told() == told(seed=7) == "This will take about 3 minutes on this machine."
    smoke = sources.find(fresh, "toy").settings("smoke")
    assert told(**smoke) == "This will take about 40 seconds on this machine."
    changed = "At tier cpu this takes about 3 minutes on this machine; here arms, top_k differ."
    assert told(top_k=1, arms="left") == changed
    assert told(tier="study") is None
    (fresh / "notebooks" / "02_same.ipynb").write_bytes(
        (fresh / "notebooks" / "01_toy.ipynb").read_bytes()
    )
    assert told() is None, "two notebooks have these parameters"


def test_without_a_record_or_a_project_nothing_is_said(
    told, fresh, monkeypatch, tmp_path
):
    (fresh / "results" / pace.RECORD).unlink()
    assert told() is None
    monkeypatch.chdir(tmp_path)
    assert told() is None


@pytest.mark.parametrize(
    "beside", ["{", '{"cells": [], "metadata": {}, "nbformat": 4}']
)
def test_a_neighbour_that_cannot_be_read_stops_no_notebook(told, fresh, beside):
    (fresh / "notebooks" / "30_mine.ipynb").write_text(beside)
    assert told() is None


@pytest.mark.parametrize(
    "record",
    ["{", "[1]", "{}", {"pace": None}, {"notebooks": []}, {"notebooks": {"cpu": {}}}],
)
def test_a_record_that_lacks_a_time_stops_no_notebook(told, fresh, record):
    text = record if isinstance(record, str) else json.dumps(RECORD | record)
    storage.write(fresh / "results" / pace.RECORD, text)
    assert told() is None
    lacking = {name: told for name, told in RECORD.items() if name != "pace"}
    storage.write(fresh / "results" / pace.RECORD, json.dumps(lacking))
    assert told() is None


@pytest.mark.parametrize(
    "notebooks", [[], None, {"cpu": []}, {"cpu": {"toy": "long"}}, {"cpu": {"toy": {}}}]
)
def test_a_record_that_holds_something_else_is_refused_where_notebooks_are_ordered(
    fresh, notebooks
):
    storage.write(
        fresh / "results" / pace.RECORD, json.dumps(RECORD | {"notebooks": notebooks})
    )
    refused("E-FORMAT: .*times.json does not hold", pace.cost, "toy", "cpu", fresh)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (3, "about 10 seconds"),
        (44, "about 40 seconds"),
        (89, "about 90 seconds"),
        (91, "about 2 minutes"),
        (200, "about 3 minutes"),
        (3600, "about 60 minutes"),
    ],
)
def test_a_time_that_is_not_exact_is_told_so(seconds, text):
    assert pace.about(seconds) == text


def test_the_pace_is_measured_in_the_time_that_is_given_and_draws_nothing(monkeypatch):
    ticks = count()
    monkeypatch.setattr(pace.time, "perf_counter", lambda: next(ticks) / 100)
    states = torch.random.get_rng_state(), np.random.get_state()[1].copy()
    # The clock is read once, then before each step: a hundredth of a second a step.
    assert pace.pace(0.205) == pytest.approx(20 / 0.21), "by the time spent"
    assert pace.pace(0.6) == pytest.approx(100, rel=0.02), "a rate, whatever the time"
    assert torch.equal(torch.random.get_rng_state(), states[0])
    assert (np.random.get_state()[1] == states[1]).all()


def test_the_longest_begins_by_its_last_time_here_else_by_the_record_and_findings_are_last(
    told, fresh
):
    source = fresh / "notebooks" / "01_toy.ipynb"
    names = ("long", "unknown", "here", "toy_findings")
    for number, name in enumerate(names, start=2):
        (fresh / "notebooks" / f"0{number}_{name}.ipynb").write_bytes(
            source.read_bytes()
        )
    shown = Run("here", "cpu", "cpu", 0, (), manifest={"cpu_seconds": 3.0})
    write_run(fresh / "book" / "notebooks" / "04_here.parquet", shown)
    other = Run("long", "smoke", "smoke", 0, (), manifest={"cpu_seconds": 0.1})
    write_run(fresh / "book" / "notebooks" / "02_long.parquet", other)
    taken = {"toy": 1.0, "long": 2.0, "toy_findings": 9.0, "here": 0.5}
    storage.write(
        fresh / "results" / pace.RECORD,
        json.dumps(RECORD | {"notebooks": {"cpu": taken}}),
    )
    protocols = dict.fromkeys(("unknown", "toy_findings", "toy", "here", "long"), "cpu")
    begun = [job.notebook for job in book._todo(protocols, fresh)]
    assert begun == ["here", "long", "toy", "unknown", "toy_findings"]


def test_the_times_that_we_tell_are_of_this_release_and_of_every_notebook():
    record = pace.times(ROOT)
    if not record:  # then none are told
        assert "\nNot measured yet: " in (ROOT / "README.md").read_text("utf-8")
        return
    assert record["version"] == moebook.__version__
    assert record["machine"]["cpu"]
    assert record["machine"]["cores"] >= 1
    assert record["pace"] > 0
    # The two of the README at least; `smoke` and `soak` may wait for a quiet hour.
    told = record["commands"].keys()
    assert {"book", "test"} <= told <= pace.COMMANDS.keys()
    for command in record["commands"].values():
        assert command["wall"] > 0
        assert command["cpu"] > 0
        assert command["commit"]["id"]
    known = set(sources.notebooks(ROOT))
    executed = {tier for name, tier in times.TIERS.items() if name in told}
    assert record["notebooks"].keys() == executed
    assert all(taken.keys() == known for taken in record["notebooks"].values())


@pytest.fixture
def quiet(fresh, monkeypatch):
    """A project in git, on a machine where nothing else is at work; its commands are short."""
    run = Run("toy", "smoke", "smoke", 0, (), manifest={"cpu_seconds": 3.0})
    write_run(fresh / "book" / "notebooks" / "01_toy.parquet", run)
    # It succeeds only in the folder that PYTHONPATH names, and only in a clone.
    place = f'test "$PYTHONPATH" -ef . && ! test . -ef "{fresh}"'
    storage.write(fresh / "place.sh", place)
    commit(fresh)
    commands = {
        "smoke": "sleep 0.2",
        "test": "sh place.sh",
        "soak": "false",
    }
    monkeypatch.setattr(pace, "COMMANDS", commands)
    monkeypatch.setattr(times, "measured_pace", lambda folder: 500.0)
    monkeypatch.setattr(times.os, "getloadavg", lambda: (0.1, 2.0, 2.0))
    return fresh


def test_commands_are_measured_in_clones_and_another_releases_times_are_dropped(quiet):
    old = RECORD | {"commands": {"book": {"wall": 1.0}}}
    storage.write(quiet / "results" / pace.RECORD, json.dumps(old))
    assert times.main(["smoke", "test"], quiet) == quiet / "results" / pace.RECORD
    record = pace.times(quiet)
    assert (record["version"], record["pace"]) == (moebook.__version__, 500.0)
    assert record["commands"].keys() == {"smoke", "test"}
    measured = record["commands"]["smoke"]
    assert 0.2 <= measured["wall"] < 60
    assert sorted(measured["walls"])[1] == measured["wall"], "the median of three"
    assert 0 < measured["cpu"] < measured["wall"]
    assert measured["commit"] == storage.commit(quiet)
    assert record["notebooks"] == {"smoke": {"toy": 3.0}}
    refused("E-TIMES: false ended with status 1", times.main, ["soak"], quiet)
    assert pace.times(quiet) == record, "what was measured before stays"


def test_beside_other_programs_nothing_is_measured(quiet, monkeypatch):
    monkeypatch.setattr(times.os, "getloadavg", lambda: (0.4, 0.0, 0.0))
    refused("E-TIMES: 0.4 programs are at work here", times.main, ["test"], quiet)
    assert pace.times(quiet) == {}


def test_times_of_another_machine_are_dropped_and_a_pace_comes_with_its_notebooks(
    quiet,
):
    known = {"version": moebook.__version__, "machine": times.machine()}
    old = RECORD | known | {"commands": {"book": {"wall": 1.0}}}
    file = quiet / "results" / pace.RECORD
    storage.write(file, json.dumps(old))
    times.main(["test"], quiet)
    record = pace.times(quiet)
    assert record["commands"].keys() == {"book", "test"}
    assert record["notebooks"] == RECORD["notebooks"]
    assert record["pace"] == RECORD["pace"]
    storage.write(file, json.dumps(old | {"machine": {"cpu": "another"}}))
    times.main(["test"], quiet)
    record = pace.times(quiet)
    assert record["commands"].keys() == {"test"}
    assert record["notebooks"] == {}
    assert "pace" not in record


def test_of_a_notebook_the_median_of_three_runs_is_kept(quiet, monkeypatch):
    seconds = iter((5.0, 3.0, 9.0))

    def measured(*_):
        return {"wall": 1.0, "cpu": 1.0, "notebooks": {"toy": next(seconds)}}

    monkeypatch.setattr(times, "measure", measured)
    times.main(["smoke"], quiet)
    assert pace.times(quiet)["notebooks"] == {"smoke": {"toy": 5.0}}
