"""`moebook compare`: a reader's notebook beside the book's runs and the paper."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moebook import results
from moebook.errors import Refusal
from moebook.notebook.compare import compare, read
from moebook.notebook.session import ENVIRONMENT, VALUE
from moebook.results import Record, Value

PARAMETERS = (
    'tier: str = "cpu"  # scale {smoke, cpu, study, gpu, paper}\nsteps: int = 100  # steps [1, inf)'
)


def values(sparse: float, dense: float, seeds: int = 1) -> list[Value]:
    return [
        Value(f"pesc/{name}/accuracy", score + seed / 1000, "share", seed)
        for name, score in (("sparse", sparse), ("dense", dense))
        for seed in range(seeds)
    ]


def cell(source: str, tags: list[str], outputs: list[Any]) -> dict[str, Any]:
    metadata = {"tags": tags}
    return {"cell_type": "code", "source": source, "metadata": metadata, "outputs": outputs}


def reader(
    folder: Path,
    found: list[Value],
    papermill: dict[str, Any] | None = None,
    environment: Any = None,
) -> Path:
    set_by_it = (papermill or {}).get("parameters", {})
    injected = "\n".join(["# Parameters", *(f"{k} = {v!r}" for k, v in set_by_it.items())])
    shown: list[dict[str, Any]] = [{VALUE: value.to_json()} for value in found]
    shown += [{ENVIRONMENT: environment}] if environment is not None else []
    outputs = [{"output_type": "display_data", "data": data, "metadata": {}} for data in shown]
    notebook = {
        "nbformat": 4,
        "nbformat_minor": 5,
        "metadata": {"papermill": papermill or {}},
        "cells": [
            cell(PARAMETERS, ["parameters"], []),
            cell(injected, ["injected-parameters"], []),
            cell("run.record(...)", [], outputs),
        ],
    }
    path = folder / "my_run.ipynb"
    path.write_text(json.dumps(notebook), encoding="utf-8")
    return path


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "results" / "pesc" / "study"
    folder.mkdir(parents=True)
    record = Record("pesc", "study", tuple(values(0.45, 0.40, seeds=3)))
    (folder / "record.json").write_text(record.to_text(), encoding="utf-8")
    manifest = {
        "date": "2026-11-01T00:00:00+00:00",
        "parameters": {"tier": "study", "steps": 600},
        "environment": {"python": "3.11.2", "cpu": "X 9000", "versions": {"torch": "2.13.0"}},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    return tmp_path


def test_the_readers_run_stands_beside_the_book_and_the_paper(project: Path) -> None:
    injected = {"parameters": {"steps": 50}, "version": "2.7.0", "duration": 12.34}
    text = compare(reader(project, values(0.42, 0.44), injected), project)
    lines = text.splitlines()
    place = next(i for i, line in enumerate(lines) if line.startswith("pesc.sparse-beats-dense:"))
    assert lines[0] == "my_run.ipynb: notebook pesc, tier cpu, 2 values"
    assert lines[place + 1].startswith("  paper  twelve benchmarks")
    assert lines[place + 2].startswith("  book   direction holds (study, 3 seeds: +5.0 points")
    assert lines[place + 3].startswith("  yours  inconclusive (cpu, 1 seed: -2.0 points, against")


def test_differences_in_parameters_versions_and_hardware_are_named(project: Path) -> None:
    injected = {"parameters": {"steps": 50}, "version": "2.7.0", "duration": 12.34}
    environment = {"python": "3.12.1", "cpu": "X 9000", "versions": {"torch": "2.12.0"}}
    text = compare(reader(project, values(0.42, 0.44), injected, environment), project)
    differences = [line for line in text.splitlines() if line.startswith("  ") and " | " in line]
    assert differences == [
        "  parameter tier: cpu | study",
        "  parameter steps: 50 | 600",
        "  version of torch: 2.12.0 | 2.13.0",
        "  python: 3.12.1 | 3.11.2",
        "  seconds: 12.3 | unknown",
    ]


def test_what_a_notebook_does_not_say_is_unknown_and_nonsense_is_refused(project: Path) -> None:
    assert "  cpu: unknown | X 9000" in compare(reader(project, values(0.42, 0.44)), project)
    with pytest.raises(Refusal, match=r"E-OUTPUT.*malformed environment"):
        compare(reader(project, values(0.42, 0.44), environment=["X 9000"]), project)


def test_a_manifest_beside_the_notebook_is_read(project: Path) -> None:
    path = reader(project, values(0.42, 0.40))
    environment = {"python": "3.11.2", "cpu": "Y 1", "versions": {"torch": "2.13.0"}}
    manifest = {
        "parameters": {"tier": "study", "steps": 600},
        "environment": environment,
        "hashes": {"executed": results.digest(path)},
    }
    path.with_suffix(".manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    text = compare(path, project)
    differences = [line for line in text.splitlines() if line.startswith("  ") and " | " in line]
    assert differences == ["  cpu: Y 1 | X 9000"]
    assert read(path).scale == "study"
    committed = path.rename(path.with_name("notebook.ipynb"))
    path.with_suffix(".manifest.json").rename(path.with_name("manifest.json"))
    assert read(committed).manifest["parameters"]["steps"] == 600


def test_the_manifest_of_another_run_is_left_aside(project: Path) -> None:
    path = reader(project, values(0.42, 0.40), {"parameters": {"steps": 50}})
    manifest = {"parameters": {"tier": "study", "steps": 600}, "hashes": {"executed": "0" * 64}}
    path.with_suffix(".manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    assert read(path).manifest["parameters"] == {"tier": "cpu", "steps": 50}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"hashes": {', "E-RECORD: .*my_run.manifest.json is not JSON"),
        ("[]", "E-RECORD: .*my_run.manifest.json is no JSON object"),
        ('{"hashes": []}', "E-RECORD: .*my_run.manifest.json: malformed hashes"),
        ('{"environment": {"versions": 3}}', "E-RECORD: .*malformed versions"),
    ],
)
def test_a_malformed_manifest_is_refused(project: Path, text: str, message: str) -> None:
    path = reader(project, values(0.42, 0.40))
    path.with_suffix(".manifest.json").write_text(text, encoding="utf-8")
    with pytest.raises(Refusal, match=message):
        compare(path, project)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("# Parameters", "steps = = 5", "E-PARAMETER: my_run.ipynb: the injected cell is not name"),
        ('"outputs": []', '"output": []', "E-NOTEBOOK: my_run.ipynb has a cell without outputs"),
        ('"outputs": [{', '"outputs": [3, {', "E-NOTEBOOK: my_run.ipynb has a cell without"),
        ('"metadata": {"tags"', '"metadata": [], "m": {"tags"', "E-NOTEBOOK: .*malformed cells"),
    ],
)
def test_a_notebook_that_was_edited_by_hand_is_refused(
    project: Path, old: str, new: str, message: str
) -> None:
    path = reader(project, values(0.42, 0.40))
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(Refusal, match=message):
        compare(path, project)


def test_a_malformed_manifest_of_the_book_is_refused(project: Path) -> None:
    place = project / "results" / "pesc" / "study" / "manifest.json"
    place.write_text('{"parameters": [1]}', encoding="utf-8")
    with pytest.raises(Refusal, match=r"E-RECORD: manifest of pesc .study.: malformed"):
        compare(reader(project, values(0.42, 0.40)), project)


def test_without_a_record_of_the_book_the_readers_ledger_is_shown_alone(tmp_path: Path) -> None:
    text = compare(reader(tmp_path, values(0.42, 0.40)), tmp_path)
    assert "the book has no record of this notebook yet" in text
    assert "  book   not run" in text
    assert "  yours  inconclusive (cpu, 1 seed: +2.0 points, as claimed so far)" in text


def test_what_is_no_executed_notebook_of_this_book_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="E-NOFILE"):
        compare(tmp_path / "absent.ipynb", tmp_path)
    with pytest.raises(Refusal, match="holds no recorded values; execute it first"):
        compare(reader(tmp_path, []), tmp_path)
    foreign = reader(tmp_path, [Value("pecs/sparse/accuracy", 0.4, "share")])
    with pytest.raises(Refusal, match=r"records values of 'pecs'; did you mean 'pesc'"):
        compare(foreign, tmp_path)
    (tmp_path / "cut.ipynb").write_text('{"nbformat": 4, "cells": [', encoding="utf-8")
    with pytest.raises(Refusal, match="E-NOTEBOOK"):
        compare(tmp_path / "cut.ipynb", tmp_path)
