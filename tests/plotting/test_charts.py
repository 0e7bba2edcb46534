"""Curves and bars draw the numbers they were given, and refuse the ones that do not fit."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from moebook import plotting
from moebook.errors import Refusal


def _frame() -> pd.DataFrame:
    return pd.DataFrame(
        {
            "domain": ["code", "code", "language", "language"],
            "model": ["dense", "sparse", "dense", "sparse"],
            "value": [0.4, 0.5, 0.2, 0.3],
            "low": [0.3, 0.45, 0.1, np.nan],
            "high": [0.5, 0.6, 0.25, np.nan],
        }
    )


def test_a_curve_is_the_mean_of_its_seeds_and_the_band_their_range() -> None:
    figure = plotting.curves(
        {"sparse": [[3.0, 2.0, 1.0], [5.0, 4.0, 1.0]]},
        steps=[0, 10, 20],
        xlabel="optimizer steps",
        ylabel="loss (nats per token)",
    )
    (axes,) = figure.axes
    np.testing.assert_allclose(axes.lines[0].get_xydata(), [[0, 4.0], [10, 3.0], [20, 1.0]])
    band = axes.collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == (1.0, 5.0)
    assert "2 seeds" in axes.get_legend().get_texts()[0].get_text()


def test_one_seed_has_no_band() -> None:
    figure = plotting.curves({"dense": [2.0, 1.0]}, steps=[0, 1], xlabel="steps", ylabel="nats")
    assert not figure.axes[0].collections


def test_a_moving_average_keeps_a_constant_and_its_ends() -> None:
    figure = plotting.curves(
        {"flat": np.full(9, 2.5), "ramp": np.arange(9.0)},
        steps=np.arange(9),
        xlabel="steps",
        ylabel="nats",
        window=3,
    )
    flat, ramp = (line.get_ydata() for line in figure.axes[0].lines)
    np.testing.assert_allclose(flat, 2.5)
    np.testing.assert_allclose(ramp, [0.5, 1, 2, 3, 4, 5, 6, 7, 7.5])


@pytest.mark.parametrize(("values", "window"), [([1.0, 2.0], 1), ([1.0, 2.0, 3.0], 0)])
def test_curves_that_do_not_fit_are_refused(values: list[float], window: int) -> None:
    with pytest.raises(Refusal, match="curves"):
        plotting.curves({"a": values}, steps=[0, 1, 2], xlabel="", ylabel="", window=window)


def test_bars_stand_at_their_values_with_their_whiskers() -> None:
    figure = plotting.bars(
        _frame(), group="domain", series="model", ylabel="accuracy (share)", chance=0.1
    )
    (axes,) = figure.axes
    dense, sparse = (each for each in axes.containers if hasattr(each, "patches"))
    assert [bar.get_height() for bar in dense] == [0.4, 0.2]
    assert [bar.get_height() for bar in sparse] == [0.5, 0.3]
    whiskers = [path.vertices[:, 1] for path in sparse.errorbar.lines[2][0].get_paths()]
    np.testing.assert_allclose(whiskers, [[0.45, 0.6], [0.3, 0.3]])
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "chance",
        "dense",
        "sparse",
    ]


def test_bars_without_an_interval_column_name_it() -> None:
    with pytest.raises(Refusal, match="low"):
        plotting.bars(_frame().drop(columns="low"), group="domain", series="model", ylabel="")


def test_accuracies_have_students_interval_over_items_and_none_of_a_single_one() -> None:
    items = {"task": ["sum"] * 4 + ["copy"], "correct": [1, 1, 0, 1, 0]}
    tables = {"dense": pd.DataFrame(items), "sparse": pd.DataFrame(items).assign(correct=1)}
    (axes,) = plotting.accuracies(tables, by="task", title="Right").axes
    dense, sparse = (each for each in axes.containers if hasattr(each, "patches"))
    assert [bar.get_height() for bar in dense] == [0.75, 0]
    assert [bar.get_height() for bar in sparse] == [1, 1]
    whiskers = [path.vertices[:, 1] for path in dense.errorbar.lines[2][0].get_paths()]
    told = stats.ttest_1samp([1, 1, 0, 1], 0).confidence_interval()
    np.testing.assert_allclose(whiskers, [[told.low, told.high], [0, 0]])
    assert [text.get_text() for text in axes.get_xticklabels()] == ["sum", "copy"]
    assert axes.get_title() == "Right"
