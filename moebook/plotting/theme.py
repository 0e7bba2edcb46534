"""The look of every figure: Okabe-Ito colours, readable sizes, panels of the text's width."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from moebook.errors import refuse

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
"""Okabe and Ito's palette, strongest on white first; told apart with every colour vision."""
DARK_COLOURS = frozenset({"#0072B2", "#5F5F5F"})
"""Those of `COLOURS` on which white text reads better than dark."""
MARKERS = "osD^vPX*"
HATCHES = ("", "///", "...", "xxx")
WIDTH = 7.2
"""Width of a figure in inches: the book's text column."""
INK = "#14171A"
Series = Mapping[str, npt.ArrayLike]
Look = dict[str, Any]


def style() -> None:
    """Set matplotlib to the book's look for the rest of the session; call it once a notebook."""
    plt.style.use(Path(__file__).with_name("book.mplstyle"))


def single(height: float) -> tuple[Figure, Axes]:
    """Open one panel of the text's width and so many inches in height."""
    figure, axes = plt.subplots(figsize=(WIDTH, height), layout="constrained")
    plt.close(figure)
    return figure, axes


def grid(
    names: Sequence[str], across: int, height: float,
    xlabel: str, ylabel: str, title: str, *, shared: bool = False,
) -> tuple[Figure, list[Axes]]:  # fmt: skip
    """Open one panel a name, at most ``across`` in a row of ``height`` inches."""
    if not names:
        refuse("E-DATA", "no panels to draw; expected at least one")
    across = min(across, len(names))
    down = -(-len(names) // across)
    figure, cells = plt.subplots(
        down, across, figsize=(WIDTH, height * down + 0.6), layout="constrained", squeeze=False,
        sharex=shared, sharey=shared,
    )  # fmt: skip
    plt.close(figure)
    for axes, name in zip(cells.flat, names, strict=False):
        axes.set_title(name, fontsize=10, pad=5)
    for axes in cells.flat[len(names) :]:
        axes.set_visible(False)
    for axes in cells.flat[max(0, len(names) - across) : len(names)]:
        axes.set_xlabel(xlabel, fontsize=9)  # a label of the figure would lie under its legend
        axes.tick_params(labelbottom=True)
    figure.supylabel(ylabel, fontsize=10.5)
    figure.suptitle(title, x=0.01, ha="left")
    return figure, list(cells.flat[: len(names)])


def arrays(
    chart: str, panels: Mapping[str, Series]
) -> tuple[list[dict[str, npt.NDArray[np.float64]]], dict[str, Look]]:
    """Return each panel's series as arrays ``[n, 2]``, and the look of each name in all panels."""
    converted: list[dict[str, npt.NDArray[np.float64]]] = []
    for title, panel in panels.items():
        converted.append({name: np.asarray(series, dtype=float) for name, series in panel.items()})
        for name, values in converted[-1].items():
            if values.ndim != 2 or values.shape[1] != 2:
                refuse("E-SHAPE", f"{chart}: '{name}' of '{title}' is {values.shape}, not [n, 2]")
    names = dict.fromkeys(name for panel in converted for name in panel)
    return converted, {name: look(place) for place, name in enumerate(names)}


def look(place: int) -> Look:
    """Return colour and marker of the series at a place; a series has its own in every panel."""
    return {"color": COLOURS[place % len(COLOURS)], "marker": MARKERS[place % len(MARKERS)]}


def require(chart: str, frame: pd.DataFrame, columns: Sequence[str]) -> None:
    """Refuse a frame without these columns."""
    if missing := [column for column in columns if column not in frame]:
        refuse("E-KEYS", f"{chart}: no column {missing}; the frame has {list(frame.columns)}")


def legend(figure: Figure, handles: Mapping[str, Artist], columns: int) -> None:
    """Put the legend under the axes, where it hides no data; one entry needs none."""
    if len(handles) > 1:
        columns = min(len(handles), columns)
        figure.legend(handles.values(), handles, loc="outside lower center", ncols=columns)


def tilt_when_long(axes: Axes, names: Sequence[object], across: int = 1) -> None:
    """Tilt the horizontal axis's names where panels side by side would let them collide."""
    if across * sum(len(str(name)) for name in names) > 75:
        axes.tick_params(axis="x", rotation=30)
        for label in axes.get_xticklabels():
            label.set(horizontalalignment="right", rotation_mode="anchor")
