"""Points in the plane: maps of embeddings and one measure against another, panel by panel."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.artist import Artist
from matplotlib.figure import Figure

from moebook.plotting.panels import Series, grid, series
from moebook.plotting.theme import COLOURS, MARKERS

MANY = 150
"""From so many points on in a panel a series is drawn small and pale, as a background."""


def points(
    panels: Mapping[str, Series],
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
    clouds, places = series("points", panels)
    figure, cells = grid(list(panels), 3, 3.0, xlabel, ylabel, title, shared=True)
    handles: dict[str, Artist] = {}
    for axes, own in zip(cells, clouds, strict=True):
        for name, cloud in own.items():
            many = max(len(panel[name]) for panel in clouds if name in panel) >= MANY
            drawn = axes.scatter(
                cloud[:, 0],
                cloud[:, 1],
                s=6 if many else 26,
                alpha=0.35 if many else 0.85,
                color=COLOURS[places[name] % len(COLOURS)],
                marker=MARKERS[places[name] % len(MARKERS)],
                linewidths=0,
            )
            handles.setdefault(name, drawn)
        if not ticks:
            axes.set(xticks=[], yticks=[])
    if len(handles) > 1:
        shown = min(len(handles), 5)
        figure.legend(handles.values(), handles, loc="outside lower center", ncols=shown)
    return figure
