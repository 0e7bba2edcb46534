"""Forest plots: every effect at its place, in its panel, and refusals of what does not fit."""

from __future__ import annotations

import pandas as pd
import pytest

from moebook import plotting
from moebook.errors import Refusal
from moebook.plotting.forest import COLUMNS

FRAME = pd.DataFrame(
    [
        ["points", "leads", "nano", 2.0, 1.0, 3.0, True],
        ["points", "leads", "smollm2", 1.0, -1.0, 3.0, False],
        ["points", "learns", "nano", -1.0, -2.0, 0.0, False],
        ["nats", "costs", "smollm2", 0.2, 0.1, 0.3, True],
    ],
    columns=COLUMNS,
)


def test_every_effect_lies_at_its_value_and_height_with_its_interval() -> None:
    figure = plotting.forest(FRAME, xlabel="effect", title="Found")
    points, nats = figure.axes
    assert [axes.get_xlabel() for axes in figure.axes] == ["effect (points)", "effect (nats)"]
    assert [text.get_text() for text in points.get_yticklabels()] == ["leads", "learns"]
    spans, dots = points.lines[:6:2], points.lines[1:6:2]
    assert [list(span.get_xdata()) for span in spans] == [[1, 3], [-1, 3], [-2, 0]]
    assert [dot.get_xdata()[0] for dot in dots] == [2, 1, -1]
    heights = [dot.get_ydata()[0] for dot in dots]
    assert heights == pytest.approx([-0.15, 0.15, 0.85])
    assert [list(span.get_ydata()) for span in spans] == [[height] * 2 for height in heights]
    assert points.get_ylim()[0] > points.get_ylim()[1], "the first row is on top"
    assert [dot.get_markerfacecolor() == dot.get_color() for dot in dots] == [True, False, False]
    assert nats.lines[1].get_ydata()[0] == 0
    assert list(points.lines[6].get_xdata()) == [0, 0]
    assert figure.get_suptitle() == "Found"


def test_a_series_keeps_its_colour_and_marker_in_every_panel_and_in_the_legend() -> None:
    figure = plotting.forest(FRAME, xlabel="effect")
    points, nats = figure.axes
    looks = [(dot.get_color(), dot.get_marker()) for dot in (*points.lines[1:4:2], nats.lines[1])]
    (legend,) = figure.legends
    shown = [(mark.get_color(), mark.get_marker()) for mark in legend.legend_handles]
    assert looks == [*shown, shown[1]] and shown[0] != shown[1]
    assert [text.get_text() for text in legend.get_texts()] == ["nano", "smollm2"]
    assert not plotting.forest(FRAME[FRAME.series == "nano"], xlabel="effect").legends


@pytest.mark.parametrize(
    ("frame", "message"),
    [(FRAME.drop(columns="sure"), r"E-KEYS: forest: no column \['sure'\]"),
     (FRAME.iloc[:0], "E-DATA: forest: no effects")],
)  # fmt: skip
def test_a_frame_without_a_column_or_a_row_is_refused(frame: pd.DataFrame, message: str) -> None:
    with pytest.raises(Refusal, match=message):
        plotting.forest(frame, xlabel="effect")
