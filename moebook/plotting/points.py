"""Points in the plane: maps of embeddings and one measure against another, panel by panel."""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib.pyplot as plt
import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

from moebook.errors import refuse
from moebook.plotting.theme import COLOURS, MARKERS, WIDTH

MANY = 150
"""From so many points on a series is drawn small and pale, as a background."""


def points(
    panels: Mapping[str, Mapping[str, npt.ArrayLike]],
    *,
    xlabel: str = "",
    ylabel: str = "",
    title: str = "",
    ticks: bool = True,
) -> Figure:
    """Draw one cloud a series, by colour and by marker; panels share their axes.

    Args:
        panels: Panel's title to its series: name to points ``[n, 2]``, drawn in this order. The
            same name has the same colour in every panel.
        xlabel: Label of the horizontal axis, with its unit.
        ylabel: Label of the vertical axis, with its unit.
        title: What the figure shows.
        ticks: Whether the axes carry numbers; those of a t-SNE or UMAP map mean nothing.

    Raises:
        Refusal: E-DATA without a panel, E-SHAPE when a series is not ``[n, 2]``.
    """
    if not panels:
        refuse("E-DATA", "points: no panels; expected at least one")
    names = list(dict.fromkeys(name for series in panels.values() for name in series))
    across = min(len(panels), 3)
    down = -(-len(panels) // across)
    figure, grid = plt.subplots(
        down,
        across,
        figsize=(WIDTH, 3.0 * down + 0.6),
        layout="constrained",
        squeeze=False,
        sharex=True,
        sharey=True,
    )
    plt.close(figure)
    handles = {}
    for axes, (panel, series) in zip(grid.flat, panels.items(), strict=False):
        for name, values in series.items():
            cloud = np.asarray(values, dtype=float)
            if cloud.ndim != 2 or cloud.shape[1] != 2:
                refuse(
                    "E-SHAPE", f"points: '{name}' of '{panel}' is {cloud.shape}; expected [n, 2]"
                )
            place = names.index(name)
            many = len(cloud) >= MANY
            drawn = axes.scatter(
                *cloud.T,
                s=6 if many else 26,
                alpha=0.35 if many else 0.85,
                color=COLOURS[place % len(COLOURS)],
                marker=MARKERS[place % len(MARKERS)],
                linewidths=0,
            )
            handles.setdefault(name, drawn)
        axes.set_title(panel, fontsize=10, pad=5)
        if not ticks:
            axes.set(xticks=[], yticks=[])
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    figure.supxlabel(xlabel, fontsize=10.5)
    figure.supylabel(ylabel, fontsize=10.5)
    figure.suptitle(title, x=0.01, ha="left")
    if len(handles) > 1:
        shown = min(len(handles), 5)
        figure.legend(handles.values(), handles, loc="outside lower center", ncols=shown)
    return figure
