"""Speed charts: bars from ours, floors, power laws, the roof; refusals."""

import numpy as np
import pandas as pd
import pytest

from moebook.errors import Refusal
from moebook.plotting import speed

BARS = pd.DataFrame(
    [
        ["experts", "eager", 16.0, 0.8],
        ["experts", "own", 0.5, 0.8],
        ["groups", "loop", 2.0, np.nan],
    ],
    columns=["group", "contender", "value", "floor"],
)


def test_bars_begin_at_ours_and_the_floor_is_drawn_where_there_is_one():
    (axes,) = speed.multiples(BARS, xlabel="time over ours").axes
    ends = [sorted((bar.get_x(), bar.get_x() + bar.get_width())) for bar in axes.patches]
    assert ends == [[1, 16], [0.5, 1], [1, 2]]
    floors = [line for line in axes.lines if line.get_linewidth() == 2.5]
    assert [list(line.get_xdata()) for line in floors] == [[0.8, 0.8]]
    assert axes.get_xscale() == "log"
    shown = [label.get_text().strip() for label in axes.get_yticklabels()]
    assert shown == ["experts", "eager", "own", "groups", "loop"]


def test_a_power_law_is_a_line_in_every_panel():
    sizes = np.array([1.0, 2.0, 4.0])
    series = {"ours": np.stack([sizes, sizes**2], 1), "floor": np.stack([sizes, sizes], 1)}
    figure = speed.growth({"T": series, "E": series}, xlabel="value", ylabel="ms")
    drawn = [axes for axes in figure.axes if axes.get_visible()]
    assert len(drawn) == 2
    assert drawn[0].get_xscale() == drawn[0].get_yscale() == "log"
    assert drawn[0].lines[0].get_linewidth() > drawn[0].lines[1].get_linewidth()


def test_the_roof_rises_with_the_bandwidth_and_is_flat_from_its_edge_on():
    figure = speed.roofline({"experts": (40.0, 5e10)}, flops=1e11, bandwidth=1e10)
    roof = figure.axes[0].lines[0]
    assert list(roof.get_xdata()) == [5, 10, 80]
    assert list(roof.get_ydata()) == pytest.approx([50, 100, 100])


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(Refusal, match="E-KEYS: multiples: no column"):
        speed.multiples(BARS.drop(columns="floor"), xlabel="x")
    with pytest.raises(Refusal, match="E-RANGE: multiples"):
        speed.multiples(BARS.assign(value=0.0), xlabel="x")
    with pytest.raises(Refusal, match="E-DATA"):
        speed.growth({}, xlabel="x", ylabel="y")
    with pytest.raises(Refusal, match="E-SHAPE: growth: 'a' of 'p'"):
        speed.growth({"p": {"a": np.zeros(3)}}, xlabel="x", ylabel="y")
    with pytest.raises(Refusal, match="E-RANGE: roofline"):
        speed.roofline({}, flops=0.0, bandwidth=1.0)
