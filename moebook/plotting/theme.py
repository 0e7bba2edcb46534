"""The look of every figure: Okabe-Ito colours, readable sizes, an opaque background."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.rcsetup import cycler

COLOURS: tuple[str, ...] = (
    "#0072B2",  # blue
    "#D55E00",  # vermilion
    "#009E73",  # bluish green
    "#CC79A7",  # reddish purple
    "#E69F00",  # orange
    "#56B4E9",  # sky blue
    "#5F5F5F",  # grey, for Okabe-Ito's black, which would hide axes and error bars
    "#F0E442",  # yellow, last: weakest on white
)
"""Okabe and Ito's palette, told apart with every common colour vision, strongest on white first."""

WIDTH = 7.2
"""Width of a figure in inches: the book's text column."""

MARKERS = "osD^vPX*"
HATCHES = ("", "///", "...", "xxx")
DARK_COLOURS = frozenset({"#0072B2", "#5F5F5F"})
"""Those of `COLOURS` on which white text reads better than dark."""

INK = "#14171A"
RULE = "#C9CED6"
SEQUENTIAL = "Blues"
"""Colour map of shares and counts: one hue, so that lightness alone carries the value."""

_RC: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": RULE,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.labelcolor": INK,
    "axes.labelsize": 10.5,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlepad": 10.0,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    # Opaque on purpose: dark text on a transparent figure vanishes on the book's dark pages.
    "figure.facecolor": "white",
    "figure.dpi": 160,
    "figure.titlesize": 12,
    "figure.titleweight": "bold",
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "grid.color": "#E6E9EE",
    "grid.linewidth": 0.8,
    "image.cmap": SEQUENTIAL,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "lines.linewidth": 1.8,
    "savefig.facecolor": "white",
    "text.color": INK,
    "xtick.color": INK,
    "xtick.labelsize": 9.5,
    "ytick.color": INK,
    "ytick.labelsize": 9.5,
}


def style() -> None:
    """Set matplotlib to the book's look for the rest of the session; call it once a notebook."""
    matplotlib.rcParams.update({**_RC, "axes.prop_cycle": cycler(color=COLOURS)})


def legend_below(figure: Figure, axes: Axes) -> None:
    """Put the legend under the axes, where it hides no data; one entry needs none."""
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) > 1:
        columns = min(len(labels), 5)  # filled one after another: rows should read in order
        order = [place for first in range(columns) for place in range(len(labels))[first::columns]]
        entries = [handles[place] for place in order], [labels[place] for place in order]
        figure.legend(*entries, loc="outside lower center", ncols=columns)


def tilt_when_long(axes: Axes, names: Sequence[object], across: int = 1) -> None:
    """Tilt the horizontal axis's names when side by side they would run into each other.

    Args:
        axes: With these names on it.
        names: Names of one panel.
        across: Panels side by side.
    """
    if across * sum(len(str(name)) for name in names) > 75:
        axes.tick_params(axis="x", rotation=30)
        for label in axes.get_xticklabels():
            label.set(horizontalalignment="right", rotation_mode="anchor")
