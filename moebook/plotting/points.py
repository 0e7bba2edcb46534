"""Points in the plane: maps of embeddings, one measure against another, effects with intervals."""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from moebook.errors import refuse
from moebook.plotting.theme import INK, WIDTH, Series, arrays, grid, legend, look, require

MANY = 150
"""From so many points on in a panel a series is drawn small and pale, as a background."""
COLUMNS = ("panel", "line", "series", "value", "low", "high", "sure")


def points(
    panels: Mapping[str, Series],
    *,
    xlabel: str = "",
    ylabel: str = "",
    title: str = "",
    ticks: bool = True,
) -> Figure:
    """Draw one cloud a series, by colour and by marker; panels share their axes.

    ``panels`` is the panel's title to its series: name to points ``[n, 2]``, drawn in this order.
    Without ``ticks`` the axes carry no numbers; those of a t-SNE or UMAP map mean nothing.
    """
    clouds, looks = arrays("points", panels)
    figure, cells = grid(list(panels), 3, 3.0, xlabel, ylabel, title, shared=True)
    handles: dict[str, Artist] = {}
    for axes, panel in zip(cells, clouds, strict=True):
        for name, cloud in panel.items():
            many = max(len(other[name]) for other in clouds if name in other) >= MANY
            dress = looks[name] | ({"s": 6, "alpha": 0.35} if many else {"s": 26, "alpha": 0.85})
            handles.setdefault(name, axes.scatter(*cloud.T, linewidths=0, **dress))
        if not ticks:
            axes.set(xticks=[], yticks=[])
    legend(figure, handles, 5)
    return figure


def forest(frame: pd.DataFrame, *, xlabel: str, title: str = "") -> Figure:
    """Draw effects as points with intervals around a line at zero, the first row on top.

    ``frame`` has one row a point: ``panel`` (the unit, which its horizontal axis has), ``line``
    (what stands at the left), ``series`` (colour and marker, such as the scale), ``value``, ``low``
    and ``high`` in the panel's unit, and ``sure``: a filled marker, else a hollow one. Rows of one
    panel and line stand beneath one another. ``xlabel`` says what an effect to the right means.
    """
    require("forest", frame, COLUMNS)
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
    marks = {name: Line2D([], [], ls="", **look(place)) for place, name in enumerate(names)}
    legend(figure, marks, 5)
    return figure


def _panel(axes: Axes, part: pd.DataFrame, names: list[str]) -> None:
    """Draw the effects of one unit."""
    lines = list(dict.fromkeys(part.line))
    present = [name for name in names if name in set(part.series)]
    for row in part.itertuples():
        dress = look(names.index(row.series))
        shift = (present.index(row.series) - (len(present) - 1) / 2) * 0.3
        height = lines.index(row.line) + shift
        axes.plot([row.low, row.high], [height, height], color=dress["color"], lw=1.6)
        face = dress["color"] if row.sure else "white"
        axes.plot(row.value, height, ls="", mfc=face, markersize=5.5, zorder=3, **dress)
    axes.axvline(0, color=INK, lw=1)
    axes.set_yticks(range(len(lines)), lines, fontsize=8.5)
    axes.set_ylim(len(lines) - 0.4, -0.6)
    axes.grid(axis="x")
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
