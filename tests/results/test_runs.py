"""Values, curves and runs refuse what breaks a rule; a run's file comes back to the last bit."""

import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from moebook import results
from moebook.errors import Refusal
from moebook.results.runs import HEAD, Curve, Run, Value, rounded

NO_RUN = "no run of moebook"
A = Value("toy/a", 1 / 3, "share", items=(0.0, 0.0, 1.0))
RUN = Run(
    "toy", "nano", "study", seed=3,
    values=(A, Value("toy/tiny", 5e-324, "nats"), Value("toy/big", sys.float_info.max, "number")),
    curves=(Curve("toy/a", "nats", (1.0, 2.0), (0.1 + 0.2, -1e-300)),),
    arms=("left", "right"),
    settings={"base": "nano", "lr": 1e-3, "steps": 600, "flag": True},
    rows={"train": "ab", "test": "cd"},
    code={"notebook": "ef", "lock": None, "modules": {"nn/routing.py": "01"}},
    manifest={"date": "2026-01-02T03:04:05+00:00", "seconds": 1.5, "commit": None, "é": ["x"]},
)  # fmt: skip


@pytest.mark.parametrize(("kind", "fields"), [
    (Value, {"name": "/pesc"}), (Value, {"name": "pesc//x"}), (Value, {"name": "a b"}),
    (Value, {"name": 3}), (Value, {"unit": "shares"}), (Value, {"value": 1.5}),
    (Value, {"value": -0.1}), (Value, {"value": math.nan}), (Value, {"value": True}),
    (Value, {"value": "0.5"}), (Value, {"items": ()}), (Value, {"items": (1.0, math.inf)}),
    (Value, {"items": (1.0, 1.0)}), (Curve, {"name": "a b"}), (Curve, {"unit": "shares"}),
    (Curve, {"x": (1.0,)}), (Curve, {"x": (), "y": ()}), (Curve, {"y": (1.0, math.nan)}),
    (Curve, {"x": (1.0, math.inf)}), (Run, {"values": (A, A)}),
    (Run, {"curves": RUN.curves * 2}), (Run, {"tier": "studi"}),
])  # fmt: skip
def test_a_value_curve_or_run_that_breaks_a_rule_is_refused(kind, fields):
    good = {Value: Value("pesc/dense/accuracy", 0.5, "share"), Run: RUN,
            Curve: Curve("pesc/dense/accuracy", "nats", (1.0, 2.0), (3.0, -4.0))}  # fmt: skip
    twice = "E-VALUE: toy, seed 3: toy/a is recorded twice|E-TIER: .*'studi': did you mean 'study'"
    with pytest.raises(Refusal, match=twice if kind is Run else r"E-(VALUE|TYPE|RANGE)"):
        replace(good[kind], **fields)


def test_items_are_kept_to_four_digits_and_their_mean_may_be_off_by_no_more():
    exact = (1.00049, -2.34567e-7, 12345.0, 0.0, math.pi)
    assert rounded(exact) == (1.0, -2.346e-7, 12345.0, 0.0, 3.142)
    worst = (1.000499, 1.000499)
    assert Value("a", 1.000499, "nats", items=rounded(worst)).items == (1.0, 1.0)
    with pytest.raises(Refusal, match="is not the mean"):
        Value("a", 1.00051, "nats", items=(1.0, 1.0))
    with pytest.raises(Refusal, match="unknown unit 'shares'; did you mean 'share'"):
        Value("a", 0.5, "shares")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The file of a run, which the other tests damage."""
    results.write_run(tmp_path / "0.parquet", RUN)
    return tmp_path / "0.parquet"


def test_writing_and_reading_a_run_keeps_every_bit(path):
    found = results.read_run(path)
    assert found == RUN
    assert [v.value.hex() for v in RUN.values] == [v.value.hex() for v in found.values]
    bare = Run("toy", "cpu", "cpu", 0, ())
    results.write_run(path, bare)
    assert results.read_run(path) == bare


def _head(changes: dict[str, object]) -> Callable[[pa.Table], pa.Table]:
    """An edit of the head: None takes a key away."""

    def edit(table: pa.Table) -> pa.Table:
        head = json.loads(table.schema.metadata[HEAD]) | changes
        kept = {key: value for key, value in head.items() if changes.get(key, 0) is not None}
        return table.replace_schema_metadata({HEAD: json.dumps(kept).encode()})

    return edit


def _value(table: pa.Table) -> pa.Table:
    """Change the last bit of one value, and keep the digest."""
    first, _, *rest = table.column("value").to_pylist()
    place = table.schema.get_field_index("value")
    return table.set_column(place, "value", [[first, 0.0, *rest]])


@pytest.mark.parametrize(("edit", "message"), [
    (_value, "altered"), (_head({"seed": 4}), "altered"), (_head({"digest": "0" * 64}), "altered"),
    (_head({"settings": {**RUN.settings, "steps": 601}}), "altered"),
    (_head({"format": 2}), "has format 2, this moebook reads 1: update"),
    (_head({"digest": None}), NO_RUN), (_head({"tier": None}), NO_RUN),
    (_head({"more": 1}), NO_RUN), (_head({"arms": 3}), NO_RUN),
    (lambda table: table.drop_columns(["items"]), NO_RUN),
    (lambda table: table.append_column("note", [["x"] * len(table)]), "other columns or metadata"),
    (lambda table: table.replace_schema_metadata({**table.schema.metadata, "note": "x"}), "other"),
    (lambda table: table.replace_schema_metadata(
        {HEAD: table.schema.metadata[HEAD].replace(b"{", b'{"tier": "gpu", ', 1)}), "twice"),
    (lambda table: table.replace_schema_metadata({}), NO_RUN),
    (lambda table: table.replace_schema_metadata({HEAD: b"[1]"}), NO_RUN),
])  # fmt: skip
def test_a_file_that_says_anything_else_is_refused_by_name(path, edit, message):
    pq.write_table(edit(pq.read_table(path)), path)
    with pytest.raises(Refusal, match=f"E-RUN: .*0.parquet .*{message}"):
        results.read_run(path)
    path.unlink()
    with pytest.raises(Refusal, match="E-NOFILE"):
        results.read_run(path)
