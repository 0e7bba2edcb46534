"""Values and records: what they refuse, and that writing and reading changes nothing."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from moebook import results
from moebook.errors import Refusal
from moebook.results import Record, Value, rounded


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "/pesc"},
        {"name": "pesc//x"},
        {"name": "a b"},
        {"unit": "shares"},
        {"value": 1.5},
        {"value": -0.1},
        {"value": math.nan},
        {"value": True},
        {"value": "0.5"},
        {"seed": -1},
        {"seed": 0.5},
        {"items": ()},
        {"items": (1.0, math.inf)},
        {"items": (1.0, 1.0)},
    ],
)
def test_a_value_that_breaks_a_rule_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(Refusal, match="E-VALUE"):
        Value(**({"name": "pesc/dense/accuracy", "value": 0.5, "unit": "share"} | fields))


def test_items_are_kept_to_four_digits_and_their_mean_may_be_off_by_no_more() -> None:
    exact = (1.00049, -2.34567e-7, 12345.0, 0.0, math.pi)
    assert tuple(map(rounded, exact)) == (1.0, -2.346e-7, 12345.0, 0.0, 3.142)
    worst = (1.000499, 1.000499)
    assert Value("a", 1.000499, "nats", items=tuple(map(rounded, worst))).items == (1.0, 1.0)
    with pytest.raises(Refusal, match="is not the mean"):
        Value("a", 1.00051, "nats", items=(1.0, 1.0))


def test_an_unknown_unit_names_the_nearest_one() -> None:
    with pytest.raises(Refusal, match="did you mean 'share'"):
        Value("a", 0.5, "shares")


def test_writing_and_reading_a_record_keeps_every_bit(tmp_path: Path) -> None:
    values = (
        Value("a/b", 1 / 3, "share", seed=0, items=(0.0, 0.0, 1.0)),
        Value("a/b", 2 / 3, "share", seed=1),
        Value("time", 1e-7, "seconds"),
    )
    record = Record("toy", "study", values, {"date": "2026-01-02T03:04:05+00:00"})
    path = tmp_path / "results" / "toy" / "study" / "record.json"
    results.write(path, record.to_text())
    results.write(path.with_name("manifest.json"), json.dumps(record.manifest))
    assert results.read(path) == record
    assert results.records("toy", tmp_path) == {"study": record}
    assert results.records("other", tmp_path) == {}


def test_a_value_recorded_twice_is_refused_unless_the_seeds_differ() -> None:
    once = Value("a", 0.5, "share", seed=1)
    assert Record("toy", "cpu", (once, Value("a", 0.5, "share", seed=2))).values[0] == once
    with pytest.raises(Refusal, match="a@1 twice"):
        Record("toy", "cpu", (once, once))


@pytest.mark.parametrize("text", ["", "[]", '{"notebook": "toy"}', '{"values": 3}', "{"])
def test_a_file_that_is_no_record_is_refused_with_its_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "record.json"
    path.write_text(text)
    path.with_name("manifest.json").write_text("{}")
    with pytest.raises(Refusal, match=r"record\.json"):
        results.read(path)


def test_a_record_without_a_manifest_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text(Record("toy", "study", ()).to_text())
    with pytest.raises(Refusal, match=r"manifest\.json is missing"):
        results.read(path)


def test_the_day_is_the_manifests() -> None:
    record = Record("toy", "study", (), {"date": "2026-01-02T23:00:00+00:00"})
    assert str(results.day(record)) == "2026-01-02"
    with pytest.raises(Refusal, match="no UTC date"):
        results.day(Record("toy", "study", ()))


def test_a_record_names_what_changed_since_it_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "package"
    results.write(package / "a.py", "x = 1\n")
    monkeypatch.setattr("moebook.results.reach.PACKAGE", package)
    cell = {"cell_type": "code", "source": "from moebook import a"}
    results.write(tmp_path / "notebooks" / "01_toy.ipynb", json.dumps({"cells": [cell]}))
    results.write(tmp_path / "requirements.lock", "torch==2.13.0\n")
    record = Record("toy", "study", (), {"hashes": results.current("toy", tmp_path)})
    assert results.changed(record, tmp_path) == ()
    results.write(package / "__pycache__" / "a.pyc", "")
    assert results.changed(record, tmp_path) == ()
    results.write(package / "a.py", "x = 2\n")
    assert results.changed(record, tmp_path) == ("package",)
    results.write(tmp_path / "requirements.lock", "torch==2.14.0\n")
    assert results.changed(record, tmp_path) == ("package", "lock")


def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "record.json"
    results.write(path, "old")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        results.write(path, "new")
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["record.json"]


def test_the_project_is_the_nearest_folder_with_a_config(tmp_path: Path) -> None:
    inner = tmp_path / "notebooks" / "deep"
    inner.mkdir(parents=True)
    with pytest.raises(Refusal, match=r"_config\.yml"):
        results.root(inner)
    (tmp_path / "_config.yml").touch()
    assert results.root(inner) == tmp_path
