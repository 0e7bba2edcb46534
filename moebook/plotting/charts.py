"""Curves, bars, heat maps, loads of experts, clouds of points and effects, in one look.

Okabe-Ito colours, readable sizes, panels of the text's width, one legend right of them all.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator

from moebook.errors import refuse
from moebook.results.intervals import interval

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
WIDTH = 7.2
"""Width of a figure in inches: the book's text column."""
HEIGHT = 2.7
"""Height of a single panel in inches."""
MOST = 12
"""Entries of a legend that fit beside it."""
INK = "#14171A"
Series = Mapping[str, npt.ArrayLike]
Look = dict[str, Any]
PRINTED: Look = {"ls": "", "marker": "|", "markersize": 13, "color": INK}
COLUMNS = ("panel", "line", "series", "value", "low", "high", "sure")


def curves(
    series: Mapping[str, npt.ArrayLike], *, steps: npt.ArrayLike, xlabel: str, ylabel: str,
    title: str = "", window: int = 1, yscale: str = "linear",
) -> Figure:  # fmt: skip
    """Draw one line a series over training, with a band from the lowest seed to the highest.

    The band is the range and no confidence interval: with three seeds nothing finer is honest.
    ``series`` is the name to values ``[S, T]`` (seeds by points), or ``[T]`` for a single seed, at
    the ``T`` ``steps``. ``window`` points, 1 to T, make a centred moving average, shorter at both
    ends. The axes' labels name their units; the vertical axis may be ``log``, as suits a loss.
    """
    positions = np.asarray(steps, dtype=float)
    if not 1 <= window <= len(positions):
        refuse("E-RANGE", f"curves: window is {window}; expected 1 to {len(positions)} points")
    figure, axes = single(HEIGHT)
    every, handles = max(1, len(positions) // 8), dict[str, Artist]()
    for index, (name, values) in enumerate(series.items()):
        seeds = np.atleast_2d(np.asarray(values, dtype=float))
        if seeds.shape[1] != len(positions):
            lengths = f"has {seeds.shape[1]} points; steps has {len(positions)}"
            refuse("E-SHAPE", f"curves: series '{name}' {lengths}")
        rolling = pd.DataFrame(seeds.T).rolling(window, center=True, min_periods=1)
        seeds = rolling.mean().to_numpy().T
        several = f"\n(mean and range\nof {len(seeds)} seeds)" if len(seeds) > 1 else ""
        dress = look(index) | {"markevery": (index * every // len(series), every), "markersize": 5}
        (handles[f"{name}{several}"],) = axes.plot(positions, seeds.mean(0), **dress)
        if several:
            low, high, colour = seeds.min(0), seeds.max(0), axes.lines[-1].get_color()
            axes.fill_between(positions, low, high, color=colour, alpha=0.18, lw=0)
    axes.set(xlabel=xlabel, ylabel=ylabel, title=title, yscale=yscale)
    if yscale == "log":
        logarithmic(axes.yaxis)
    legend(figure, handles)
    return figure


def heatmap(
    panels: Mapping[str, npt.ArrayLike], *, rows: Sequence[str], columns: Sequence[str], label: str,
    xlabel: str = "", ylabel: str = "", title: str = "",
) -> Figure:  # fmt: skip
    """Draw one heat map a panel (a layer, say) on one colour scale, so that panels compare.

    ``panels`` is the panel's title to its values ``[len(rows), len(columns)]``, named by ``rows``
    and ``columns``. ``label`` says what the colours mean, such as ``share of tokens``.
    """
    tables = {name: np.asarray(values, dtype=float) for name, values in panels.items()}
    shape = len(rows), len(columns)
    for name, table in tables.items():
        if table.shape != shape:
            refuse("E-SHAPE", f"heatmap: panel '{name}' is {table.shape}; expected {shape}")
    across = min(len(tables), 4 if len(columns) <= 8 else 2)
    height = max(1.5, 0.22 * len(rows) + 0.7)
    figure, cells = grid(list(tables), across, height, xlabel, ylabel, title)
    low = min(0.0, *(float(np.nanmin(table)) for table in tables.values()))
    high = max(float(np.nanmax(table)) for table in tables.values())
    for index, (axes, table) in enumerate(zip(cells, tables.values(), strict=True)):
        image = axes.imshow(table, vmin=low, vmax=high, aspect="auto")
        axes.set_xticks(range(len(columns)), columns)
        tilt_when_long(axes, columns, across)
        axes.set_yticks(range(len(rows)), rows if index % across == 0 else [""] * len(rows))
        axes.tick_params(length=0)
        axes.grid(False)
        axes.spines[:].set_visible(False)
        if table.size * len(tables) <= 200:
            for (row, column), number in np.ndenumerate(table):
                axes.text(
                    column, row, re.sub(r"^(-?)0\.", r"\1.", f"{number:.2f}"), ha="center",
                    va="center", fontsize=6.5 if across > 2 else 8,
                    color="white" if number > low + 0.6 * (high - low) else INK,
                )  # fmt: skip
    figure.colorbar(image, ax=figure.axes, label=label, shrink=0.9, pad=0.015, aspect=30)
    return figure


def loads(shares: Mapping[str, npt.ArrayLike], *, title: str = "") -> Figure:
    """Draw one stacked bar a row (a layer, say): which share of the tokens each expert serves.

    The number in a segment is its expert's; dotted lines mark the borders of equal shares.
    ``shares`` is the row's name to the experts' shares ``[E]``, which sum to 1.
    """
    table = {name: np.asarray(row, dtype=float) for name, row in shares.items()}
    experts = len(next(iter(table.values())))
    for name, row in table.items():
        if row.shape != (experts,):
            refuse("E-SHAPE", f"loads: row '{name}' is {row.shape}; expected {(experts,)}")
        if not np.isclose(row.sum(), 1.0, atol=1e-3):
            refuse("E-RANGE", f"loads: row '{name}' sums to {row.sum():.4g}; expected 1")
    figure, axes = single(max(1.8, 0.25 * len(table) + 1.0))
    widths, left = np.stack(list(table.values())), np.zeros(len(table))
    for expert in range(experts):
        colour = COLOURS[expert % len(COLOURS)]
        hatch = ("", "///", "...", "xxx")[expert // len(COLOURS) % 4]
        dress: Look = {"color": colour, "hatch": hatch, "edgecolor": "white"}
        patches = axes.barh(list(table), widths[:, expert], left=left, **dress)
        # Numbers in the bars spare the reader the way to a legend; slivers stay empty.
        names = [str(expert) if share > 0.022 else "" for share in widths[:, expert]]
        axes.bar_label(
            patches, names, label_type="center", fontsize=8.5,
            color="white" if colour in DARK_COLOURS else INK,
            bbox={"facecolor": colour, "edgecolor": "none", "pad": 1.0},
        )  # fmt: skip
        left += widths[:, expert]
    for border in np.arange(1, experts) / experts:
        axes.axvline(border, color=INK, ls=":", lw=0.9)
    axes.invert_yaxis()
    axes.grid(False)
    axes.set(xlabel="share of routed tokens (in the bars: expert)", title=title, xlim=(0, 1))
    axes.margins(y=0.02)
    return figure


def points(
    panels: Mapping[str, Series], *, xlabel: str = "", ylabel: str = "", title: str = "",
    ticks: bool = True, joined: bool = False, front: bool = False, xscale: str = "linear",
    above: str = "",
) -> Figure:  # fmt: skip
    """Draw one cloud a series, by colour and by marker; panels share their axes.

    ``panels`` is the panel's title to its series: name to points ``[n, 2]``, drawn in this order.
    Without ``ticks`` the axes carry no numbers; those of a t-SNE or UMAP map mean nothing. Points
    may be ``joined`` by a line in their order, and the horizontal axis ``log``. ``front`` draws the
    Pareto front, points with none as low to their left. ``above`` names a series to draw on top.
    """
    clouds, looks = arrays("points", panels)
    height = 2.0 if len(looks) <= MOST else 3.0
    figure, cells = grid(list(panels), 3, height, xlabel, ylabel, title, shared=True)
    handles: dict[str, Artist] = {}
    for axes, panel in zip(cells, clouds, strict=True):
        for name, cloud in panel.items():
            many = max(len(other[name]) for other in clouds if name in other) >= 150  # pale
            dress = looks[name] | ({"s": 6, "alpha": 0.35} if many else {"s": 18, "alpha": 0.85})
            edge: Look = {"s": 14, "alpha": 1, "linewidths": 0.6, "edgecolors": INK, "zorder": 3}
            edge = edge if name == above else {"linewidths": 0}
            handles.setdefault(name, axes.scatter(*cloud.T, **dress | edge))
            if joined:
                axes.plot(*cloud.T, color=dress["color"], lw=1.2)
        if front:
            every = np.array(sorted(point for cloud in panel.values() for point in cloud.tolist()))
            lowest = np.minimum.accumulate([np.inf, *every[:-1, 1]])
            axes.plot(*every[every[:, 1] < lowest].T, c=INK, lw=0.8, ds="steps-post", zorder=0)
        axes.set_xscale(xscale)
        if not ticks:
            axes.set(xticks=[], yticks=[])
    for axes in cells if xscale == "log" else ():
        logarithmic(axes.xaxis)
    legend(figure, handles)
    return figure


def forest(frame: pd.DataFrame, *, xlabel: str, title: str = "") -> Figure | None:
    """Draw effects as points with intervals around a line at zero, the first row on top.

    ``frame`` has one row a point: ``panel`` (the unit of its axis), ``line`` (what stands at the
    left), ``series`` (colour and marker, such as the scale), ``value``, ``low`` and ``high``, and
    ``sure``: a filled marker, else a hollow one; None where it has none. ``printed``, if there, is
    the paper's effect, a short line across. ``xlabel`` says what is to the right.
    """
    require("forest", frame, COLUMNS)
    if frame.empty:
        return None
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
    handles = {name: Line2D([], [], ls="", **look(i)) for i, name in enumerate(names)}
    if "printed" in frame and frame.printed.notna().any():
        handles["the paper"] = Line2D([], [], **PRINTED)
    legend(figure, handles)
    return figure


def leads(
    tables: Mapping[str, pd.DataFrame], pairs: Sequence[tuple[str, str]], *, by: str,
    column: str = "correct", title: str = "",
) -> Figure | None:  # fmt: skip
    """Draw how far one arm of a run is ahead of another in points, by group ``by`` and pair.

    ``tables`` are evaluations by arm of the same items. Differences of a ``column`` are paired by
    item; intervals at 95 % cover the choice of items. The fewer of groups and pairs are panels.
    Pairs that did not run are left out; None where there is none.
    """
    rows = []
    for one, other in (pair for pair in pairs if {*pair} <= tables.keys()):
        gaps = 100 * (tables[one][column] - tables[other][column])
        for group, items in gaps.groupby(tables[one][by], sort=False):
            ends = interval(items.to_numpy(float)[None]) or (np.nan, np.nan)
            low, high = np.clip(ends, -100, 100)  # a difference of shares has no room beyond
            names = str(group), f"{one} − {other}"
            rows.append([*names, "", items.mean(), low, high, low * high > 0])
    if not rows:
        return None
    frame = pd.DataFrame(rows, columns=COLUMNS)
    if frame.panel.nunique() > frame.line.nunique():
        frame = frame.rename(columns={"panel": "line", "line": "panel"})
    panels, height = dict(list(frame.groupby("panel", sort=False))), 0.22 * frame.line.nunique()
    figure, cells = grid([*panels], len(panels), height + 0.5, "points", "", title, shared=True)
    for axes, part in zip(cells, panels.values(), strict=True):
        _panel(axes, part, [""])
    low, high = cells[0].get_xlim()
    cells[0].set_xlim(min(low, -5), max(high, 5))  # no difference should look large for want of one
    return figure


def _panel(axes: Axes, part: pd.DataFrame, names: list[str]) -> None:
    """Draw the effects of one unit."""
    lines = list(dict.fromkeys(part.line))
    for place, line in enumerate(lines):
        rows = part[part.line == line].sort_values("series", key=lambda one: one.map(names.index))
        middle, apart = (len(rows) - 1) / 2, min(0.3, 0.8 / len(rows))
        for height, row in enumerate(rows.itertuples()):
            dress, y = look(names.index(row.series)), place + (height - middle) * apart
            axes.plot([row.low, row.high], [y, y], color=dress["color"], lw=1.6)
            face = dress["color"] if row.sure else "white"
            axes.plot(row.value, y, ls="", mfc=face, markersize=5.5, zorder=3, **dress)
        if "printed" in rows and rows.printed.notna().all():
            axes.plot(rows.printed.iloc[0], place, **PRINTED)
    axes.axvline(0, color=INK, lw=1)
    axes.set_yticks(range(len(lines)), lines, fontsize=8.5)
    axes.set_ylim(len(lines) - 0.4, -0.6)
    axes.grid(axis="x")
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)


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
    figure.supylabel(ylabel, fontsize=9)
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
    """Return colour and marker of the series at a place: its own pair, the same in every panel."""
    turned = place + place // len(COLOURS)
    return {"color": COLOURS[place % len(COLOURS)], "marker": MARKERS[turned % len(MARKERS)]}


def require(chart: str, frame: pd.DataFrame, columns: Sequence[str]) -> None:
    """Refuse a frame without these columns."""
    if missing := [column for column in columns if column not in frame]:
        refuse("E-KEYS", f"{chart}: no column {missing}; the frame has {list(frame.columns)}")


def legend(figure: Figure, handles: Mapping[str, Artist]) -> None:
    """Put the legend right of the axes, a long one below; one short entry needs none."""
    if len(handles) > MOST:
        figure.legend(handles.values(), handles, loc="outside lower center", ncols=5)
    elif len(handles) > 1 or any("\n" in name for name in handles):
        figure.legend(handles.values(), handles, loc="outside right upper")


def logarithmic(axis: Axis) -> None:
    """Number a logarithmic axis as one reads it: at 1, 10, 100 ..., or at 1, 2, 5, 10 if few."""
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 40 * low else (1,), numticks=9))
    axis.set_major_formatter("{x:g}")
    axis.minorticks_off()


def tilt_when_long(axes: Axes, names: Sequence[object], across: int = 1) -> None:
    """Tilt the horizontal axis's names where panels side by side would let them collide."""
    if across * sum(len(str(name)) for name in names) > 75:
        axes.tick_params(axis="x", rotation=30)
        plt.setp(axes.get_xticklabels(), ha="right", rotation_mode="anchor")
