"""Values and curves: what they refuse; and files, which are written whole or not at all."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from moebook import results
from moebook.errors import Refusal
from moebook.results import Curve, Value, rounded


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "/pesc"}, {"name": "pesc//x"}, {"name": "a b"}, {"name": 3}, {"unit": "shares"},
        {"value": 1.5}, {"value": -0.1}, {"value": math.nan}, {"value": True}, {"value": "0.5"},
        {"items": ()}, {"items": (1.0, math.inf)}, {"items": (1.0, 1.0)},
    ],
)  # fmt: skip
def test_a_value_that_breaks_a_rule_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(Refusal, match="E-(VALUE|TYPE|RANGE)"):
        Value(**({"name": "pesc/dense/accuracy", "value": 0.5, "unit": "share"} | fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "a b"}, {"unit": "shares"}, {"x": (1.0,)}, {"x": (), "y": ()},
        {"y": (1.0, math.nan)}, {"x": (1.0, math.inf)},
    ],
)  # fmt: skip
def test_a_curve_that_breaks_a_rule_is_refused(fields: dict[str, Any]) -> None:
    good = {"name": "pesc/dense/loss", "unit": "nats", "x": (1.0, 2.0), "y": (3.0, -4.0)}
    assert Curve(**good).y == (3.0, -4.0)
    with pytest.raises(Refusal, match="E-(VALUE|TYPE|RANGE)"):
        Curve(**(good | fields))


def test_items_are_kept_to_four_digits_and_their_mean_may_be_off_by_no_more() -> None:
    exact = (1.00049, -2.34567e-7, 12345.0, 0.0, math.pi)
    assert rounded(exact) == (1.0, -2.346e-7, 12345.0, 0.0, 3.142)
    worst = (1.000499, 1.000499)
    assert Value("a", 1.000499, "nats", items=rounded(worst)).items == (1.0, 1.0)
    with pytest.raises(Refusal, match="is not the mean"):
        Value("a", 1.00051, "nats", items=(1.0, 1.0))


def test_an_unknown_unit_names_the_nearest_one() -> None:
    with pytest.raises(Refusal, match="did you mean 'share'"):
        Value("a", 0.5, "shares")


def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "page.md"
    results.write(path, "old")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        results.write(path, "new")
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["page.md"]


def test_the_project_is_the_nearest_folder_with_a_config(tmp_path: Path) -> None:
    inner = tmp_path / "notebooks" / "deep"
    inner.mkdir(parents=True)
    with pytest.raises(Refusal, match=r"_config\.yml"):
        results.root(inner)
    (tmp_path / "_config.yml").touch()
    assert results.root(inner) == tmp_path
