"""The style is readable: contrasts are computed, not judged by eye."""

from __future__ import annotations

import io

import matplotlib
import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from moebook import plotting
from moebook.plotting.theme import COLOURS, DARK_COLOURS, INK


def _luminance(colour: str) -> float:
    """Relative luminance as WCAG 2 defines it."""
    channels = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    return float(np.dot([0.2126, 0.7152, 0.0722], channels))


def _contrast(one: str, other: str) -> float:
    high, low = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("colour", COLOURS)
def test_text_on_every_colour_has_a_contrast_of_four_and_a_half(colour: str) -> None:
    assert _contrast(colour, "white" if colour in DARK_COLOURS else INK) >= 4.5


def test_a_styled_figure_has_an_opaque_background_for_dark_pages() -> None:
    with matplotlib.rc_context():
        plotting.style()
        figure = plotting.loads({"layer 0": [0.5, 0.5]})
        page = io.BytesIO()
        figure.savefig(page)
    page.seek(0)
    np.testing.assert_array_equal(imread(page)[0, 0], [1.0, 1.0, 1.0, 1.0])
