"""Speed: times beside ours with the floor drawn in, growth on two logarithmic axes, rooflines."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from moebook.errors import refuse
from moebook.plotting.charts import COLOURS, INK, MARKERS, Series, arrays, grid, require, single

ROW = 0.2
"""Inches of a bar and the gap behind it."""


def multiples(frame: pd.DataFrame, *, xlabel: str, title: str = "") -> Figure:
    """Draw each contender's time as a multiple of ours; the floor of a group is a thick tick.

    ``frame`` has one row a bar: ``group``, ``contender``, ``value`` (its time over ours, above 0)
    and ``floor`` (the floor's time over ours, the same in a group; NaN where there is none).
    """
    require("multiples", frame, ("group", "contender", "value", "floor"))
    if not (frame["value"] > 0).all():
        refuse("E-RANGE", "multiples: values must be above 0, since the axis is logarithmic")
    groups = dict(list(frame.groupby("group", sort=False)))
    figure, axes = single(ROW * (len(frame) + len(groups)) + 1.1)
    labels: list[str] = []  # one a line, from the top
    handles: dict[str, Artist] = {}
    for group, part in groups.items():
        labels.append(str(group))
        top = len(labels)
        for _, row in part.iterrows():
            slower, place = row["value"] >= 1, len(labels)
            colour, end = COLOURS[0 if slower else 1], (max(row["value"], 1), place)
            bar = axes.barh(place, row["value"] - 1, 0.75, left=1, color=colour)
            handles["slower than ours" if slower else "faster than ours"] = bar.patches[0]
            number = f"{row['value']:#.3g}"
            axes.annotate(number, end, (3, 0), textcoords="offset points", va="center", size=7.5)
            labels.append(f"{row['contender']}  ")
        floor = part["floor"].iloc[0]
        if np.isfinite(floor):
            ends = [top - 0.5, len(labels) - 0.5]
            handles["floor"] = axes.plot([floor, floor], ends, color=INK, lw=2.5)[0]
    axes.axvline(1, color=INK, lw=1, ls=(0, (4, 3)))
    axes.set(xscale="log", xlabel=xlabel, title=title, ylim=(len(labels) - 0.3, -0.8))
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.grid(axis="x")
    axes.margins(x=0.12)
    figure.legend(handles.values(), handles, ncols=3, loc="outside lower center")
    return figure


def growth(panels: Mapping[str, Series], *, xlabel: str, ylabel: str, title: str = "") -> Figure:
    """Draw how cost grows, a panel a sweep, on two logarithmic axes: a power law is a line.

    ``panels`` is the panel's title to its series, name to points ``[n, 2]``; ``ours`` is thick.
    """
    curves, looks = arrays("growth", panels)
    figure, cells = grid(list(panels), 3, 2.2, xlabel, ylabel, title)
    handles: dict[str, Artist] = {}
    for axes, panel in zip(cells, curves, strict=True):
        for name, line in panel.items():
            width = 2.4 if name == "ours" else 1.2
            handles[name] = axes.plot(*line.T, lw=width, ms=4, **looks[name])[0]
        axes.set(xscale="log", yscale="log")
        axes.tick_params(labelsize=7, which="both")
        axes.minorticks_off()
        axes.set_xticks(sorted({x for line in panel.values() for x in line[:, 0]}))
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:g}")
    figure.legend(handles.values(), handles, ncols=3, loc="outside lower center")
    return figure


def roofline(
    runs: Mapping[str, tuple[float, float]], *, flops: float, bandwidth: float, title: str = ""
) -> Figure:
    """Draw what each op reached under the roof that the machine puts over it.

    ``runs`` is the name to (FLOPs per byte that must move, FLOPs a second). ``flops`` a second are
    measured on a dense product, ``bandwidth`` in bytes a second on a large copy.
    """
    if min(flops, bandwidth) <= 0:
        refuse("E-RANGE", f"roofline: flops {flops:g} and bandwidth {bandwidth:g} must be above 0")
    figure, axes = single(3.9)
    edge = flops / bandwidth
    places = [edge, *(intensity for intensity, _ in runs.values())]
    ends = np.array([min(places) / 2, edge, max(places) * 2])
    axes.plot(ends, np.minimum(ends * bandwidth, flops) / 1e9, color=INK, label="roof")
    axes.axvspan(edge, ends[-1], color=COLOURS[6], alpha=0.08, lw=0)
    for place, (name, (intensity, rate)) in enumerate(runs.items()):
        marker = MARKERS[(place + place // len(COLOURS)) % len(MARKERS)]
        colour = COLOURS[place % len(COLOURS)]
        axes.scatter(intensity, rate / 1e9, s=42, label=name, color=colour, marker=marker, zorder=3)
    axes.set(
        xscale="log", yscale="log", title=title,
        xlabel="work for each byte that must move (FLOPs per byte)", ylabel="GFLOPs a second",
    )  # fmt: skip
    figure.legend(ncols=4, loc="outside lower center")
    return figure
