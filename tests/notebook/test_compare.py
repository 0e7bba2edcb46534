"""`moebook compare`: a reader's notebook beside the book's runs and the paper."""

import json

import pytest

from moebook import results
from moebook.errors import Refusal
from moebook.notebook.compare import compare
from moebook.notebook.session import NOTE, VALUE
from moebook.results import Run, Value

PARAMETERS = """\
tier: str = "cpu"  # scale {smoke, cpu, study, gpu, paper}
seed: int = 0  # of everything [0, 100]
steps: int = 100  # steps [1, inf)"""
HERE = {"python": "3.11.2", "cpu": "X 9000", "versions": {"torch": "2.13.0"}}


def values(sparse, dense, seed=0):
    scores = {"sparse": sparse, "dense": dense}.items()
    return tuple(Value(f"pesc/{a}/accuracy", x + seed / 1000, "share") for a, x in scores)


def cell(source, tags, outputs):
    facts = {"cell_type": "code", "metadata": {"tags": tags}}
    return {**facts, "source": source, "outputs": outputs}


def reader(folder, shown, note=None, **parameters):
    """A reader's executed notebook, with what papermill set."""
    injected = "\n".join(["# Parameters", *(f"{k} = {v!r}" for k, v in parameters.items())])
    bundles = [{VALUE: results.plain(value)} for value in shown]
    bundles += [{NOTE: note}] if note is not None else []
    outputs = [{"output_type": "display_data", "data": data, "metadata": {}} for data in bundles]
    cells = [cell(PARAMETERS, ["parameters"], []), cell(injected, ["injected-parameters"], []),
             cell("run.record(...)", [], outputs)]  # fmt: skip
    metadata = {"papermill": {"version": "2.7.0", "duration": 12.34}}
    notebook = {"nbformat": 4, "nbformat_minor": 5, "metadata": metadata, "cells": cells}
    path = folder / "my_run.ipynb"
    path.write_text(json.dumps(notebook), encoding="utf-8")
    return path


@pytest.fixture
def empty(tmp_path):
    """A project of two notebooks that nothing was run of."""
    for name in ("00_bases", "01_pesc"):
        page = {"nbformat": 4, "cells": [cell(PARAMETERS, ["parameters"], [])]}
        results.write(tmp_path / "notebooks" / f"{name}.ipynb", json.dumps(page))
    return tmp_path


@pytest.fixture
def project(empty):
    """The same with three seeds of a protocol."""
    facts = {"settings": {"tier": "study", "steps": 600}, "manifest": {"environment": HERE}}
    for seed in range(3):
        recorded = values(0.45, 0.40, seed)
        run = Run("pesc", "nano", "study", seed, recorded, arms=("sparse", "dense"), **facts)
        results.write_run(empty / "results" / "pesc" / "nano" / f"{seed}.parquet", run)
    return empty


def test_the_readers_run_stands_beside_the_book_and_the_paper(project):
    lines = compare(reader(project, values(0.42, 0.44), steps=50), project).splitlines()
    place = next(i for i, line in enumerate(lines) if line.startswith("pesc.sparse-beats-dense:"))
    assert lines[:2] == [
        "my_run.ipynb: notebook pesc, tier cpu, 2 values",
        "beside the book's runs at nano, seeds 0, 1, 2; differences (yours | book's):",
    ]
    assert lines[place + 1].startswith("  paper  twelve benchmarks")
    assert lines[place + 2].startswith("  book   direction holds (nano, 3 seeds: +5.0 points")
    assert lines[place + 3].startswith("  yours  inconclusive (mine, 1 seed: -2.0 points, against")
    text = compare(reader(project, values(0.42, 0.44)), project)
    assert {"  cpu: unknown | X 9000", "  parameter steps: 100 | 600"} <= set(text.splitlines())
    environment = {"python": "3.12.1", "cpu": "X 9000", "versions": {"torch": "2.12.0"}}
    note = {"environment": environment, "arms": ["dense"]}
    text = compare(reader(project, values(0.42, 0.44), note, steps=50), project)
    lines = [line for line in text.splitlines() if line.startswith("  ") and " | " in line]
    assert [line for line in lines if "hash of" not in line] == [
        "  parameter tier: cpu | study", "  parameter steps: 50 | 600",
        "  arms: dense | sparse, dense", "  version of torch: 2.12.0 | 2.13.0",
        "  python: 3.12.1 | 3.11.2", "  seconds: 12.3 | unknown",
    ]  # fmt: skip


def test_the_books_own_run_is_not_compared_with_itself(project):
    path = reader(project, values(0.42, 0.40))
    executed = {"executed": results.digest(path)}
    shown = Run("pesc", "cpu", "cpu", 0, values(0.42, 0.40), manifest=executed)
    results.write_run(project / "book" / "notebooks" / "01_pesc.parquet", shown)
    with pytest.raises(Refusal, match=r"E-COMPARE: .*my_run\.ipynb is the book's own run"):
        compare(path, project)
    assert "runs at this build" in compare(reader(project, values(0.42, 0.41)), project)


def test_a_notebook_without_claims_or_without_a_run_of_the_book_is_compared_by_what_is_there(empty):
    text = compare(reader(empty, values(0.42, 0.40)), empty)
    assert "the book has no run of this notebook yet" in text and "  book   not run" in text
    assert "  yours  inconclusive (mine, 1 seed: +2.0 points, as claimed so far)" in text
    path = reader(empty, (Value("bases/gcd/accuracy", 0.5, "share"),))
    line = "bases/gcd/accuracy: yours 0.5 | book's {} share"
    assert compare(path, empty).splitlines()[-1] == line.format("unknown")
    for seed, value in enumerate((0.25, 0.5)):
        run = Run("bases", "nano", "study", seed, (Value("bases/gcd/accuracy", value, "share"),))
        results.write_run(empty / "results" / "bases" / "nano" / f"{seed}.parquet", run)
    assert compare(path, empty).splitlines()[-1] == line.format("0.375")


@pytest.mark.parametrize(("old", "new", "message"), [
    ("# Parameters", "steps = = 5", "E-PARAMETER: my_run.ipynb: the injected cell is not name"),
    ('"outputs": []', '"output": []', "E-NOTEBOOK: my_run.ipynb has a cell without outputs"),
    ('"outputs": [{', '"outputs": [3, {', "E-NOTEBOOK: my_run.ipynb has a cell without"),
    ('"metadata": {"tags"', '"metadata": [], "m": {"tags"', "E-NOTEBOOK: .*malformed cells"),
    ('{"nbformat": 4', '{"nbformat": ', "E-NOTEBOOK: .*is not JSON"),
    ("pesc/", "pecs/", "E-NOTEBOOK: my_run.ipynb records values of 'pecs'; did you mean"),
    (VALUE, "text/plain", "E-RUN: my_run.ipynb holds no recorded values; execute it first"),
    ('{"environment": {}', '{"environment": []', "E-OUTPUT.*malformed note"),
])  # fmt: skip
def test_what_is_no_executed_notebook_of_this_book_is_refused(project, old, new, message):
    path = reader(project, values(0.42, 0.40), {"environment": {}})
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, -1 if "/" in old else 1), encoding="utf-8")
    with pytest.raises(Refusal, match=message):
        compare(path, project)
    with pytest.raises(Refusal, match="E-NOFILE"):
        compare(project / "absent.ipynb", project)
