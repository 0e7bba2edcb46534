"""Speed: times beside ours with the floor drawn in, growth on log axes, what the roof leaves."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from moebook.errors import refuse
from moebook.lab.plotting import charts
from moebook.lab.plotting.charts import COLOURS, INK, Series, grid, legend


def multiples(frame: pd.DataFrame, *, xlabel: str, title: str = "") -> Figure:
    """Draw each contender's time as a multiple of ours; the floor is a thick tick.

    ``frame`` has one row a bar: ``group``, ``contender``, ``value`` (its time over
    ours, above 0) and ``floor`` (the floor's time over ours, the same in a group; NaN
    where there is none).
    """
    charts.require("multiples", frame, ("group", "contender", "value", "floor"))
    if not (frame["value"] > 0).all():
        refuse("E-RANGE", "multiples: values must be above 0; the axis is logarithmic")
    groups = list(frame.groupby("group", sort=False))

    # One column: beside a second one, its axis would have room for one number or two.
    lines = len(frame) + len(groups)  # a bar each, and one for a group's name
    figure, axes = charts.single(0.16 * lines + 0.8)
    handles = _bars(axes, groups)
    axes.set_xlabel(xlabel, fontsize=9)
    charts.entitle(figure, title)
    legend(figure, handles)
    return charts.finished(figure)


def _bars(axes: Axes, groups: list[tuple[str, pd.DataFrame]]) -> dict[str, Artist]:
    """Draw groups of bars, one below the other; return what a legend explains."""
    handles: dict[str, Artist] = {}
    labels: list[str] = []  # one a line, from the top
    titles = []  # lines that hold a group's name
    for group, bars in groups:
        titles.append(len(labels))
        labels.append(charts.spoken(group))
        floor = bars["floor"].iloc[0]
        for contender, value in zip(bars["contender"], bars["value"], strict=True):
            place = len(labels)
            labels.append(f"{charts.spoken(contender)}  ")
            slower = value >= 1
            colour = COLOURS[0] if slower else COLOURS[1]
            bar = axes.barh(place, value - 1, 0.75, left=1, color=colour)
            meaning = "slower than ours" if slower else "faster than ours"
            handles[meaning] = bar.patches[0]
            number = f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"
            axes.annotate(
                number,
                (np.fmax(max(value, 1), floor), place),  # clear of the floor, too
                (4, 0),
                textcoords="offset points",
                va="center",
                size=7,
            )
        if np.isfinite(floor):
            ends = [titles[-1] + 0.5, len(labels) - 0.5]
            # Behind the bars: of one that ends at the floor nothing would be seen.
            (handles["floor"],) = axes.plot(
                [floor, floor], ends, color=INK, lw=2.5, zorder=0.5
            )
    axes.axvline(1, color=INK, lw=1, ls=(0, (4, 3)))
    axes.set(xscale="log", ylim=(len(labels) - 0.3, -0.8))
    charts.logarithmic(axes.xaxis)
    axes.set_yticks(range(len(labels)), labels, fontsize=7.5)
    names = axes.get_yticklabels()
    for place in titles:
        names[place].set_fontweight("bold")
    axes.tick_params(axis="x", labelsize=8)
    axes.grid(axis="x")
    axes.margins(x=0.1)
    return handles


def growth(
    panels: Mapping[str, Series], *, xlabel: str, ylabel: str, title: str = ""
) -> Figure:
    """Draw how cost grows, a panel a sweep, on two log axes: a power law is a line.

    ``panels`` is the panel's title to its series, name to points ``[n, 2]``; ``ours``
    is thick.
    """
    curves, looks = charts.arrays("growth", panels)
    figure, cells = grid(list(panels), 3, 1.0, xlabel, ylabel, title)
    handles: dict[str, Artist] = {}
    for axes, name, panel in zip(cells, panels, curves, strict=True):
        axes.set_title(charts.spoken(name), fontsize=8.5, pad=3)
        for series, line in panel.items():
            width = 2 if series == "ours" else 1
            (curve,) = axes.plot(*line.T, lw=width, ms=3, **looks[series])
            handles[series] = curve
        axes.set(xscale="log", yscale="log")
        axes.tick_params(labelsize=8, pad=2, length=2)
        charts.logarithmic(axes.yaxis)
        axes.minorticks_off()
        values = np.concatenate(list(panel.values()))[:, 0]
        axes.set_xticks(sorted({values.min(), values.max()}))
        axes.xaxis.set_major_formatter("{x:g}")
    legend(figure, handles)
    return charts.finished(figure)


def roofline(
    runs: Mapping[str, tuple[float, float]],
    *,
    flops: float,
    bandwidth: float,
    machine: str,
) -> Figure:
    """Draw what each op reached beside the roof that the machine puts over it.

    ``runs`` is the name to (FLOPs per byte that must move, FLOPs a second). ``flops`` a
    second are measured on a dense product, ``bandwidth`` in bytes a second on a large
    copy: the roof is the lower of ``flops`` and of what the bytes allow. The op that
    comes nearest to its roof is on top; the headline counts those that reach half.
    """
    if min(flops, bandwidth) <= 0:
        rates = f"flops {flops:g} and bandwidth {bandwidth:g}"
        refuse("E-RANGE", f"roofline: {rates} must be above 0")
    roofs: dict[str, float] = {}
    shares: dict[str, float] = {}
    for name, (intensity, rate) in runs.items():
        roofs[name] = min(intensity * bandwidth, flops)
        shares[name] = rate / roofs[name]
    names = sorted(shares, key=lambda name: -shares[name])
    figure, axes = charts.single(0.22 * len(names) + 0.9)
    handles: dict[str, Artist] = {}
    for place, name in enumerate(names):
        _, rate = runs[name]
        limit = "memory" if roofs[name] < flops else "arithmetic"
        dress = charts.look(0 if limit == "memory" else 1) | {"ls": ""}
        (handles[f"limited by {limit}"],) = axes.plot(rate / 1e9, place, **dress)
        (roof,) = axes.plot(roofs[name] / 1e9, place, **charts.PRINTED)
        handles["its roof"] = roof
    axes.set_xscale("log")
    charts.logarithmic(axes.xaxis)
    axes.set_yticks(range(len(names)), names, fontsize=8.5)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("GFLOPs a second")
    half = sum(share >= 0.5 for share in shares.values())
    title = f"{half} of {len(names)} cases reach half of what {machine} allows"
    charts.entitle(figure, title)
    legend(figure, handles)
    return charts.finished(figure)
