"""Forest plots: one line an effect, with its interval, panel by panel of one unit each."""

from __future__ import annotations

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from moebook.errors import refuse
from moebook.plotting.theme import COLOURS, INK, MARKERS, WIDTH

COLUMNS = ("panel", "line", "series", "value", "low", "high", "sure")


def forest(frame: pd.DataFrame, *, xlabel: str, title: str = "") -> Figure:
    """Draw effects as points with intervals around a line at zero, the first row on top.

    Args:
        frame: One row a point: ``panel`` (the unit, which its horizontal axis has), ``line`` (what
            stands at the left), ``series`` (colour and marker, such as the scale), ``value``,
            ``low`` and ``high`` in the panel's unit, and ``sure``: a filled marker, else a hollow
            one. Rows of one panel and line stand beneath one another.
        xlabel: What an effect to the right means; the panel's unit is added.
        title: What the figure shows.

    Raises:
        Refusal: E-KEYS when a column is missing, E-DATA without a row.
    """
    if missing := [column for column in COLUMNS if column not in frame]:
        refuse("E-KEYS", f"forest: no column {missing}; the frame has {list(frame.columns)}")
    if frame.empty:
        refuse("E-DATA", "forest: no effects; expected at least one")
    panels = dict(list(frame.groupby("panel", sort=False)))
    sizes = [part.line.nunique() for part in panels.values()]
    figure, cells = plt.subplots(
        len(panels), 1, figsize=(WIDTH, 0.27 * sum(sizes) + 0.85 * len(panels) + 0.5),
        height_ratios=[size + 0.8 for size in sizes], layout="constrained", squeeze=False,
    )  # fmt: skip
    plt.close(figure)
    names = list(dict.fromkeys(frame.series))
    for axes, (unit, part) in zip(cells.flat, panels.items(), strict=True):
        _panel(axes, part, names)
        axes.set_xlabel(f"{xlabel} ({unit})", fontsize=9)
    figure.suptitle(title, x=0.01, ha="left")
    if len(names) > 1:
        marks = [
            Line2D([], [], color=COLOURS[n % len(COLOURS)], marker=MARKERS[n % len(MARKERS)], ls="")
            for n in range(len(names))
        ]
        figure.legend(marks, names, loc="outside lower center", ncols=min(5, len(names)))
    return figure


def _panel(axes: Axes, part: pd.DataFrame, names: list[str]) -> None:
    """Draw the effects of one unit."""
    lines = list(dict.fromkeys(part.line))
    present = [name for name in names if name in set(part.series)]
    for row in part.itertuples():
        place = names.index(row.series)
        colour, marker = COLOURS[place % len(COLOURS)], MARKERS[place % len(MARKERS)]
        shift = (present.index(row.series) - (len(present) - 1) / 2) * 0.3
        height = lines.index(row.line) + shift
        axes.plot([row.low, row.high], [height, height], color=colour, lw=1.6)
        face = colour if row.sure else "white"
        axes.plot(row.value, height, marker, color=colour, mfc=face, markersize=5.5, zorder=3)
    axes.axvline(0, color=INK, lw=1)
    axes.set_yticks(range(len(lines)), lines, fontsize=8.5)
    axes.set_ylim(len(lines) - 0.4, -0.6)
    axes.grid(axis="x")
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
