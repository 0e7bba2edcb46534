"""Clouds of points: colours by name across panels, shared axes, refusals."""

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from moebook import plotting
from moebook.errors import Refusal
from moebook.plotting.theme import COLOURS

CLOUD = np.array([[0.0, 1.0], [2.0, 3.0]])


def test_a_series_keeps_its_colour_in_every_panel_and_stands_once_in_the_legend():
    panels = {"one": {"pool": CLOUD, "shots": CLOUD + 1}, "two": {"shots": CLOUD}}
    figure = plotting.points(panels, xlabel="x", ylabel="y")
    one, two = figure.axes
    assert tuple(two.collections[0].get_facecolor()[0][:3]) == to_rgb(COLOURS[1])
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["pool", "shots"]
    assert one.get_xlim() == two.get_xlim()
    assert np.asarray(one.collections[1].get_offsets()).tolist() == (CLOUD + 1).tolist()


def test_the_legend_hides_no_label():
    panels = {name: {"pool": CLOUD, "shots": CLOUD} for name in "abcd"}
    figure = plotting.points(panels, xlabel="x", ylabel="y")
    figure.draw_without_rendering()
    legend = figure.legends[0].get_window_extent()
    labels = [axes.xaxis.label for axes in figure.axes if axes.get_xlabel()]
    assert len(labels) == 3
    assert not any(legend.overlaps(label.get_window_extent()) for label in labels)


def test_maps_without_meaning_carry_no_numbers_and_large_clouds_are_pale():
    figure = plotting.points({"map": {"pool": np.random.rand(200, 2)}}, ticks=False)
    (axes,) = figure.axes
    assert len(axes.get_xticks()) == len(axes.get_yticks()) == 0
    assert axes.collections[0].get_alpha() < 0.5
    assert figure.legends == []


def test_wrong_shapes_and_no_panels_are_refused():
    with pytest.raises(Refusal, match=r"E-SHAPE: points: 'a' of 'p' is \(3,\)"):
        plotting.points({"p": {"a": np.zeros(3)}})
    with pytest.raises(Refusal, match="E-DATA"):
        plotting.points({})
