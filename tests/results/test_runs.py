"""Values, curves and runs refuse what breaks a rule; a run's file comes back to the last bit."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from moebook import results
from moebook.errors import Refusal
from moebook.results import Curve, Run, Value, rounded
from moebook.results.runs import HEAD

RUN = Run(
    notebook="toy",
    protocol="nano",
    tier="study",
    seed=3,
    values=(
        Value("toy/a", 1 / 3, "share", items=(0.0, 0.0, 1.0)),
        Value("toy/tiny", 5e-324, "nats"),
        Value("toy/big", 1.7976931348623157e308, "number"),
    ),
    curves=(Curve("toy/a", "nats", (1.0, 2.0), (0.1 + 0.2, -1e-300)),),
    arms=("left", "right"),
    settings={"base": "nano", "lr": 1e-3, "steps": 600, "flag": True},
    rows={"train": "ab", "test": "cd"},
    code={"notebook": "ef", "lock": None, "modules": {"nn/routing.py": "01"}},
    manifest={"date": "2026-01-02T03:04:05+00:00", "seconds": 1.5, "commit": None, "é": ["x"]},
)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (Value, {"name": "/pesc"}), (Value, {"name": "pesc//x"}), (Value, {"name": "a b"}),
        (Value, {"name": 3}), (Value, {"unit": "shares"}), (Value, {"value": 1.5}),
        (Value, {"value": -0.1}), (Value, {"value": math.nan}), (Value, {"value": True}),
        (Value, {"value": "0.5"}), (Value, {"items": ()}), (Value, {"items": (1.0, math.inf)}),
        (Value, {"items": (1.0, 1.0)}), (Curve, {"name": "a b"}), (Curve, {"unit": "shares"}),
        (Curve, {"x": (1.0,)}), (Curve, {"x": (), "y": ()}), (Curve, {"y": (1.0, math.nan)}),
        (Curve, {"x": (1.0, math.inf)}),
    ],
)  # fmt: skip
def test_a_value_or_curve_that_breaks_a_rule_is_refused(kind: Any, fields: dict[str, Any]) -> None:
    good = {"value": 0.5} if kind is Value else {"x": (1.0, 2.0), "y": (3.0, -4.0)}
    good |= {"name": "pesc/dense/accuracy", "unit": "share" if kind is Value else "nats"}
    assert kind(**good).name == good["name"]
    with pytest.raises(Refusal, match=r"E-(VALUE|TYPE|RANGE)"):
        kind(**(good | fields))


def test_items_are_kept_to_four_digits_and_their_mean_may_be_off_by_no_more() -> None:
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


def test_writing_and_reading_a_run_keeps_every_bit(path: Path) -> None:
    found = results.read_run(path)
    assert found == RUN
    for mine, read in zip(RUN.values, found.values, strict=True):
        assert mine.value.hex() == read.value.hex()
    bare = Run("toy", "cpu", "cpu", 0, ())
    results.write_run(path, bare)
    assert results.read_run(path) == bare


def test_no_damaged_byte_and_no_cut_goes_unseen(path: Path) -> None:
    whole, draw = path.read_bytes(), random.Random(0)
    for place in [0, *draw.sample(range(len(whole)), 300), len(whole) - 1]:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
        try:  # what no reader looks at, such as a statistic, may differ: then the run does not
            assert results.read_run(path) == RUN, f"byte {place}"
        except Refusal as refusal:
            assert refusal.code in ("E-RUN", "E-VALUE", "E-TIER"), f"byte {place}"
    for size in (0, 3, *draw.sample(range(4, len(whole)), 20), len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(Refusal, match="E-RUN"):
            results.read_run(path)


def _head(change: Callable[[dict[str, object]], object]) -> Callable[[pa.Table], pa.Table]:
    def edit(table: pa.Table) -> pa.Table:
        head = json.loads(table.schema.metadata[HEAD])
        change(head)
        return table.replace_schema_metadata({HEAD: json.dumps(head).encode()})

    return edit


def _value(table: pa.Table) -> pa.Table:
    """Change the last bit of one value, and keep the digest."""
    column = table.column("value").to_pylist()
    column[1] = 0.0
    return table.set_column(table.schema.get_field_index("value"), "value", [column])


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (_value, "altered"),
        (_head(lambda head: head.update(seed=4)), "altered"),
        (_head(lambda head: head["settings"].update(steps=601)), "altered"),
        (_head(lambda head: head.update(digest="0" * 64)), "altered"),
        (_head(lambda head: head.update(format=2)), "has format 2, this moebook reads 1: update"),
        (_head(lambda head: head.pop("digest")), "no run of moebook"),
        (_head(lambda head: head.pop("tier")), "no run of moebook"),
        (_head(lambda head: head.update(more=1)), "no run of moebook"),
        (_head(lambda head: head.update(arms=3)), "no run of moebook"),
        (lambda table: table.drop_columns(["items"]), "no run of moebook"),
        (lambda table: table.replace_schema_metadata({}), "no run of moebook"),
        (lambda table: table.replace_schema_metadata({HEAD: b"[1]"}), "no run of moebook"),
    ],
)  # fmt: skip
def test_a_file_that_says_anything_else_is_refused_by_name(
    path: Path, edit: Callable[[pa.Table], pa.Table], message: str
) -> None:
    pq.write_table(edit(pq.read_table(path)), path)
    with pytest.raises(Refusal, match=f"E-RUN: .*0.parquet .*{message}"):
        results.read_run(path)
    path.unlink()
    with pytest.raises(Refusal, match="E-NOFILE"):
        results.read_run(path)


def test_a_name_that_stands_twice_or_an_unknown_tier_is_refused() -> None:
    for twice in ({"values": RUN.values + RUN.values[:1]}, {"curves": RUN.curves * 2}):
        with pytest.raises(Refusal, match="E-VALUE: toy, seed 3: toy/a is recorded twice"):
            replace(RUN, **twice)
    with pytest.raises(Refusal, match="E-TIER: unknown tier 'studi': did you mean 'study'"):
        replace(RUN, tier="studi")
