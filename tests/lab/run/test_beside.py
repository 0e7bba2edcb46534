"""A run beside the recorded ones, and its parameters as a table."""

import json
from functools import partial

import numpy as np
import pytest

from moebook import storage
from moebook.lab import records
from moebook.lab.records import Run, Value
from moebook.lab.run import session
from moebook.lab.run.parameters import parse
from moebook.lab.run.session import ABSENT, Witness

PARAMETERS = """\
tier: str = "cpu"  # scale {smoke, cpu, study}
base: str = "nano"  # dense base
steps: int = 3  # optimizer steps [1, 10]"""
LEAD = ("pesc/sparse/accuracy", "pesc/dense/accuracy")


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project of one notebook, in which a protocol decides a claim and another none."""
    monkeypatch.chdir(tmp_path)
    storage.write(tmp_path / "_config.yml", "title: a book\n")
    cell = {"cell_type": "code", "source": PARAMETERS, "outputs": []}
    cell |= {"execution_count": None, "metadata": {"tags": ["parameters"]}}
    page = {"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": [cell]}
    notebooks = tmp_path / "notebooks"
    storage.write(notebooks / "01_pesc.ipynb", json.dumps(page))
    storage.write(notebooks / "01_pesc.many.yaml", "tier: study\n")
    decides = "# Decides: pesc.sparse-beats-dense\ntier: study\n"
    storage.write(notebooks / "01_pesc.deciding.yaml", decides)
    return tmp_path


def keep(folder, protocol, seed, sparse, dense, *others, base="nano"):
    recorded = (
        Value(LEAD[0], sparse, "share"),
        Value(LEAD[1], dense, "share"),
        *others,
    )
    settings = {"tier": "study", "base": base, "steps": 3}
    facts = {"settings": settings, "arms": ("dense", "sparse")}
    kept = Run("pesc", protocol, "study", seed, recorded, **facts)
    records.write_run(folder / "results" / "pesc" / protocol / f"{seed}.parquet", kept)


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setattr(session, "_leave", lambda *_: None)
    witness = Witness({"tier": "cpu", "base": "nano", "steps": 3}, {}, ())
    return session.Run("cpu", witness, parse(PARAMETERS, "here"))


def test_parameters_show_their_value_here_and_what_they_do(run):
    table = run.parameters("steps", "base")
    assert table.loc["steps"].tolist() == [3, "optimizer steps [1, 10]"]
    assert table.index.tolist() == ["steps", "base"]


def test_what_decides_claims_comes_before_more_seeds_and_more_seeds_before_fewer(
    project, run
):
    for seed in range(4):
        keep(project, "many", seed, 0.9, 0.1)
    run.record(LEAD[0], 0.5, "share")
    line = run.beside({"lead": LEAD}).loc["lead"]
    assert line[["this run", "recorded runs", "study"]].tolist() == [
        ABSENT,  # dense did not run
        "+80.0 points",
        "many",
    ]
    session._pools.cache_clear()
    for seed, sparse in enumerate((0.3, 0.5)):
        keep(project, "deciding", seed, sparse, 0.2)
    run.record(LEAD[1], 0.25, "share")
    lines = run.beside({"lead": LEAD, "sparse": LEAD[0]})
    assert lines.loc["lead", "this run"] == "+25.0 points"
    assert lines.loc["lead", "recorded runs"] == "+20.0 points"
    assert lines.loc["sparse"].tolist()[:2] == ["50.0 %", "40.0 %"]
    # Student's quantile of one degree of freedom: 12.706 sqrt(0.02 / 2) = 1.27 on either side,
    # which is more than any two shares differ by.
    assert lines.loc["lead", "95 % interval"] == "−100.0 to +100.0 points"
    assert lines.loc["sparse", "95 % interval"] == "0.0 to 100.0 %"

    session._pools.cache_clear()
    head = project / "notebooks" / "01_pesc.deciding.yaml"
    head.write_text(
        "# Seeds: 0-2\n" + head.read_text()
    )  # of which the last has not run
    assert run.beside({"lead": LEAD}).loc["lead", "study"] == "many"
    assert lines.loc["lead", "seeds"] == 2


def test_who_decides_a_claim_of_the_value_comes_before_who_decides_others(project, run):
    other = "# Decides: pesc.experts-16-over-4\ntier: study\n"
    storage.write(project / "notebooks" / "01_pesc.other.yaml", other)
    for seed in range(4):
        keep(project, "other", seed, 0.9, 0.1)
    for seed in range(2):
        keep(project, "deciding", seed, 0.3, 0.2)
    lines = run.beside({"lead": LEAD, "dense": LEAD[1]})
    assert lines.study.tolist() == ["deciding", "deciding"]


def test_who_decides_other_claims_comes_before_more_lines_and_more_seeds(project, run):
    other = "# Decides: pesc.experts-16-over-4\ntier: study\n"
    storage.write(project / "notebooks" / "01_pesc.other.yaml", other)
    tall = Value("pesc/tall/accuracy", 0.6, "share")
    for seed in range(4):
        keep(project, "many", seed, 0.9, 0.1, tall)
    keep(project, "other", 0, 0.3, 0.2)
    lines = run.beside({"lead": LEAD, "tall": (tall.name, LEAD[1])})
    assert lines.study["lead"] == "other"


def test_one_study_speaks_for_all_lines_of_one_value_that_it_has(project, run):
    tall, wide = (Value(f"pesc/{a}/accuracy", 0.6, "share") for a in ("tall", "wide"))
    storage.write(project / "notebooks" / "01_pesc.more.yaml", "tier: study\n")
    for seed in range(3):  # more seeds, and fewer of the lines
        keep(project, "many", seed, 0.9, 0.1, wide)
    keep(project, "more", 0, 0.8, 0.1, tall, wide)
    levels = {"sparse": LEAD[0], "tall": tall.name, "wide": wide.name}
    table = run.beside({"lead": LEAD, **levels})
    assert table.study.tolist() == ["many", "more", "more", "more"]
    session._pools.cache_clear()
    keep(project, "deciding", 0, 0.3, 0.2, tall)
    table = run.beside({"lead": LEAD, **levels})
    assert table.study.tolist() == ["deciding", "deciding", "deciding", "many"]


def test_differences_come_from_the_study_that_has_most_of_a_table_if_none_decides(
    project, run
):
    tall = Value("pesc/tall/accuracy", 0.6, "share")
    storage.write(project / "notebooks" / "01_pesc.more.yaml", "tier: study\n")
    for seed in range(3):  # more seeds, and fewer of the lines
        keep(project, "many", seed, 0.9, 0.1)
    keep(project, "more", 0, 0.8, 0.1, tall)
    table = run.beside({"lead": LEAD, "tall": (tall.name, LEAD[1])})
    assert table.study.tolist() == ["more", "more"]


def test_without_recorded_runs_on_the_base_a_line_says_so(project, run):
    keep(project, "many", 0, 0.9, 0.1, base="smollm2")
    assert set(run.beside({"lead": LEAD}).loc["lead"]) == {ABSENT}


@pytest.mark.parametrize(("steps", "study"), [(3, "many"), (4, ABSENT)])
def test_runs_stand_beside_this_one_that_share_what_must_be_alike(
    project, run, steps, study
):
    keep(project, "many", 0, 0.9, 0.1)
    run.witness.parameters["steps"] = steps
    assert run.beside({"lead": LEAD}).loc["lead", "study"] == "many"
    alike = run.beside({"lead": LEAD}, alike=["steps"])
    assert alike.loc["lead", "study"] == study


def test_runs_that_do_not_fit_together_are_told_and_end_nothing(project, run):
    keep(project, "many", 0, 0.9, 0.1)
    keep(project, "many", 1, 0.9, 0.1, base="smollm2")
    text = run.beside({"lead": LEAD})
    assert text.startswith("The recorded runs cannot be shown: pesc/many, seed 1")


@pytest.mark.parametrize(
    ("sparse", "title"),
    [
        ([1, 1, 1, 0], "Sparse leads dense"),
        ([0, 0, 0, 0], "Sparse cannot be told from dense"),
        ([-1, -1, -1, 0], "Sparse trails dense"),
    ],
)
def test_a_headline_follows_what_the_run_recorded(run, sparse, title):
    words = "Sparse {leads | trails | cannot be told from: sparse/gain less dense/gain}"
    told = partial(run.headline, f"{words} dense", root="pesc", otherwise="Gains")
    many = np.repeat(sparse, 20).astype(float)
    run.record("pesc/sparse/gain", many.mean(), "percent_points", many)
    assert told() == "Gains"
    run.record("pesc/dense/gain", 0.0, "percent_points", 0 * many)
    assert told() == title


@pytest.fixture(autouse=True)
def forget():
    """Let each test read its own project."""
    session._pools.cache_clear()
