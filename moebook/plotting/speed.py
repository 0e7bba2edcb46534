"""Speed: times beside ours with the floor drawn in, growth on two logarithmic axes, rooflines."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from moebook.errors import refuse
from moebook.plotting.panels import Series, grid, series, single
from moebook.plotting.theme import COLOURS, INK, MARKERS

ROW = 0.2
"""Inches of a bar and the gap behind it."""


def multiples(frame: pd.DataFrame, *, xlabel: str, title: str = "") -> Figure:
    """Draw each contender's time as a multiple of ours; the floor of a group is a thick tick.

    Args:
        frame: One row a bar, in order: ``group``, ``contender``, ``value`` (its time over ours) and
            ``floor`` (the floor's time over ours, the same in a group; NaN where there is none).
        xlabel: Label of the logarithmic axis.
        title: What the figure shows.

    Raises:
        Refusal: E-KEYS when a column is missing, E-RANGE for a value that is not above 0.
    """
    columns = ("group", "contender", "value", "floor")
    if missing := [column for column in columns if column not in frame]:
        refuse("E-KEYS", f"multiples: no column {missing}; the frame has {list(frame.columns)}")
    if not (frame["value"] > 0).all():
        refuse("E-RANGE", "multiples: values must be above 0, since the axis is logarithmic")
    groups = list(dict.fromkeys(frame["group"]))
    rows = len(frame) + len(groups)
    figure, axes = single(ROW * rows + 1.1)
    place = 0
    names: dict[int, str] = {}
    handles: dict[str, Artist] = {}
    for group in groups:
        part = frame[frame["group"] == group]
        names[place] = str(group)
        first = place + 1
        for _, row in part.iterrows():
            place += 1
            names[place] = f"{row['contender']}  "
            slower = row["value"] >= 1
            colour = COLOURS[0 if slower else 1]
            bar = axes.barh(place, row["value"] - 1, 0.75, left=1, color=colour)
            handles["slower than ours" if slower else "faster than ours"] = bar.patches[0]
            axes.annotate(
                f"{row['value']:#.3g}", (max(row["value"], 1), place), xytext=(3, 0),
                textcoords="offset points", va="center", fontsize=7.5,
            )  # fmt: skip
        floor = part["floor"].iloc[0]
        if np.isfinite(floor):
            tick = axes.plot([floor, floor], [first - 0.5, place + 0.5], color=INK, lw=2.5)
            handles["floor"] = tick[0]
        place += 1
    axes.axvline(1, color=INK, lw=1, ls=(0, (4, 3)))
    axes.set(xscale="log", xlabel=xlabel, title=title, ylim=(place - 0.3, -0.8))
    axes.set_yticks(list(names), list(names.values()), fontsize=8)
    axes.grid(axis="x")
    axes.margins(x=0.12)
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=3)
    return figure


def growth(panels: Mapping[str, Series], *, xlabel: str, ylabel: str, title: str = "") -> Figure:
    """Draw how cost grows, a panel a sweep, on two logarithmic axes: a power law is a line.

    Args:
        panels: Panel's title to its series: name to points ``[n, 2]``; ``ours`` is drawn thick.
        xlabel: Label of the horizontal axes, with its unit.
        ylabel: Label of the vertical axes, with its unit.
        title: What the figure shows.

    Raises:
        Refusal: E-DATA without a panel, E-SHAPE when a series is not ``[n, 2]``.
    """
    curves, places = series("growth", panels)
    figure, cells = grid(list(panels), 3, 2.2, xlabel, ylabel, title)
    handles: dict[str, Artist] = {}
    for axes, own in zip(cells, curves, strict=True):
        for name, line in own.items():
            handles[name] = axes.plot(
                *line.T,
                color=COLOURS[places[name] % len(COLOURS)],
                marker=MARKERS[places[name] % len(MARKERS)],
                lw=2.4 if name == "ours" else 1.2,
                ms=4,
            )[0]
        axes.set(xscale="log", yscale="log")
        axes.tick_params(labelsize=7, which="both")
        axes.minorticks_off()
        axes.set_xticks(sorted({x for line in own.values() for x in line[:, 0]}))
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:g}")
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=3)
    return figure


def roofline(
    runs: Mapping[str, tuple[float, float]], *, flops: float, bandwidth: float, title: str = ""
) -> Figure:
    """Draw what each op reached under the roof that the machine puts over it.

    Args:
        runs: Name to (FLOPs per byte that must move, FLOPs a second).
        flops: The machine's FLOPs a second, measured on a dense product.
        bandwidth: Its bytes a second, measured on a large copy.
        title: What the figure shows.

    Raises:
        Refusal: E-RANGE when the roof is not above 0.
    """
    if min(flops, bandwidth) <= 0:
        refuse("E-RANGE", f"roofline: flops {flops:g} and bandwidth {bandwidth:g} must be above 0")
    figure, axes = single(3.9)
    edge = flops / bandwidth
    found = [intensity for intensity, _ in runs.values()]
    ends = np.array([min([*found, edge]) / 2, edge, max([*found, edge]) * 2])
    axes.plot(ends, np.minimum(ends * bandwidth, flops) / 1e9, color=INK, label="roof")
    axes.axvspan(edge, ends[-1], color=COLOURS[6], alpha=0.08, lw=0)
    for place, (name, (intensity, rate)) in enumerate(runs.items()):
        axes.scatter(
            intensity, rate / 1e9, s=42, label=name, zorder=3,
            color=COLOURS[place % len(COLOURS)],
            marker=MARKERS[(place + place // len(COLOURS)) % len(MARKERS)],
        )  # fmt: skip
    axes.set(
        xscale="log", yscale="log", title=title,
        xlabel="work for each byte that must move (FLOPs per byte)", ylabel="GFLOPs a second",
    )  # fmt: skip
    figure.legend(loc="outside lower center", ncols=4)
    return figure
