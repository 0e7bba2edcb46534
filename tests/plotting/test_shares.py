"""Heat maps and loads draw shares as they are, on one scale, and refuse wrong shapes."""

from __future__ import annotations

import numpy as np
import pytest

from moebook import plotting
from moebook.errors import Refusal


def test_every_panel_of_a_heat_map_has_the_same_colour_scale() -> None:
    first, second = np.array([[0.1, 0.9]]), np.array([[0.4, 0.6]])
    figure = plotting.heatmap(
        {"layer 0": first, "layer 1": second},
        rows=["code"],
        columns=["0", "1"],
        label="share of tokens",
    )
    images = [axes.images[0] for axes in figure.axes if axes.images]
    assert [image.get_clim() for image in images] == [(0.0, 0.9), (0.0, 0.9)]
    np.testing.assert_array_equal(images[1].get_array(), second)
    assert [text.get_text() for text in figure.axes[0].texts] == [".10", ".90"]


def test_the_cells_of_a_heat_map_tell_counts_and_negative_numbers_too() -> None:
    figure = plotting.heatmap(
        {"": np.array([[10.0, 20.33, -0.5]])},
        rows=["law"],
        columns=["0", "1", "2"],
        label="experts",
    )
    assert [text.get_text() for text in figure.axes[0].texts] == ["10.00", "20.33", "-.50"]


@pytest.mark.parametrize("panels", [{}, {"layer 0": np.zeros((2, 3))}])
def test_a_heat_map_of_another_shape_is_refused(panels: dict[str, np.ndarray]) -> None:
    with pytest.raises(Refusal, match="heatmap"):
        plotting.heatmap(panels, rows=["a", "b"], columns=["x", "y"], label="")


def test_loads_stack_to_one_and_number_their_experts() -> None:
    figure = plotting.loads({"layer 0": [0.5, 0.49, 0.01], "layer 1": [0.2, 0.3, 0.5]})
    (axes,) = figure.axes
    widths = np.array([[bar.get_width() for bar in bars.patches] for bars in axes.containers])
    np.testing.assert_allclose(widths.sum(axis=0), 1.0)
    assert [text.get_text() for text in axes.texts] == ["0", "0", "1", "1", "", "2"]


@pytest.mark.parametrize("row", [[0.5, 0.6], [0.2, 0.3, 0.5]])
def test_loads_that_are_not_shares_are_refused(row: list[float]) -> None:
    with pytest.raises(Refusal, match="layer 1"):
        plotting.loads({"layer 0": [0.5, 0.5], "layer 1": row})
