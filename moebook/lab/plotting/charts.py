"""Curves, heat maps, loads of experts, clouds of points and effects, in one look.

Okabe-Ito colours, one legend below all panels. A figure is as wide as a page of a small book, so
that its text can still be read where it fills a phone. Dark pages turn its lightness around
(`moebook.css`). What a reader could not read in a figure is a warning, W-FIGURE (`finished`), and
stops the build of a book.
"""

from __future__ import annotations

import itertools
import math
import re
import textwrap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis, XAxis
from matplotlib.collections import Collection, PathCollection
from matplotlib.colors import to_rgba_array
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Text
from matplotlib.ticker import LogLocator, MaxNLocator

from moebook import storage
from moebook.errors import refuse
from moebook.intervals import interval
from moebook.lab.records.runs import TIERS
from moebook.lab.records.store import BASES

COLOURS: tuple[str, ...] = (
    "#0072B2",  # blue
    "#D55E00",  # vermilion
    "#009E73",  # bluish green
    "#CC79A7",  # reddish purple
    "#E69F00",  # orange
    "#56B4E9",  # sky blue
    "#5F5F5F",  # grey; Okabe-Ito's black would hide axes and error bars
    "#F0E442",  # yellow, last: weakest on white
)
"""Okabe and Ito's palette, strongest on white first, for every colour vision."""
DARK_COLOURS = frozenset({"#0072B2", "#5F5F5F"})
"""Those of `COLOURS` on which white text reads better than dark."""
MARKERS = "osD^vPX*"
WIDTH = 5.4
"""Width of a figure in inches: at a phone's width a point is a pixel."""
HEIGHT = 2.7
"""Height of a single panel in inches."""
ACROSS = 64
"""Characters of a legend that fit into the width of a figure."""
TITLE = 46
"""Characters of a title that do."""
BESIDE = 30
"""Characters that fit left of a panel."""
LINE = 0.2
"""Height of a line of text in inches."""
APART = 4
"""Pixels that names below an axis keep from one another."""
MARK = 24
"""Area of a point in a legend, in square points."""
COLOURED = 3
"""Coloured series that a legend may have; a reader keeps no more in mind."""
INK = "#14171A"
FRAME = "#7F8793"
"""Around a heat map, whose cells of zero look like the page: 3:1 on a light and a dark one."""
MINUS = re.compile(r"(?<![\w.])-(?=[\d.])")  # of a number in a title, not a hyphen
Series = Mapping[str, npt.ArrayLike]
Cloud = npt.NDArray[np.float64]  # points, [n, 2]
Look = dict[str, Any]
PRINTED: Look = {"ls": "", "marker": "|", "markersize": 13, "color": INK}
COLUMNS = ("panel", "line", "series", "value", "low", "high", "sure")


def curves(
    series: Series,
    *,
    steps: npt.ArrayLike,
    xlabel: str,
    ylabel: str,
    title: str = "",
    window: int = 1,
    yscale: str = "linear",
) -> Figure:
    """Draw one line a series over training, with a band from lowest to highest seed.

    The band is the range and no confidence interval: with three seeds nothing finer is
    honest. ``series`` is the name to values ``[S, T]`` (seeds by points), or ``[T]``
    for a single seed, at the ``T`` ``steps``. ``window`` points, 1 to T, make a centred
    moving average, shorter at both ends. The axes' labels name their units; the
    vertical axis may be ``log``, as suits a loss.
    """
    positions = np.asarray(steps, dtype=float)
    count = len(positions)
    if not 1 <= window <= count:
        refuse("E-RANGE", f"curves: window is {window}; expected 1 to {count} points")
    figure, axes = single(HEIGHT)
    handles: dict[str, Artist] = {}
    every = max(1, count // 8)  # points between two markers
    for index, (name, values) in enumerate(series.items()):
        seeds = np.atleast_2d(np.asarray(values, dtype=float))
        if seeds.shape[1] != count:
            lengths = f"has {seeds.shape[1]} points; steps has {count}"
            refuse("E-SHAPE", f"curves: series '{name}' {lengths}")
        rolling = pd.DataFrame(seeds.T).rolling(window, center=True, min_periods=1)
        seeds = rolling.mean().to_numpy().T
        # Lines that lie on each other have their markers at other points.
        dress = look(index) | {"markersize": 5}
        dress["markevery"] = (index * every // len(series), every)
        (line,) = axes.plot(positions, seeds.mean(0), **dress)
        entry = name
        if len(seeds) > 1:
            entry += f"\n({len(seeds)} seeds: mean, range)"
            low = seeds.min(0)
            high = seeds.max(0)
            colour = line.get_color()
            # Pale, with an edge: where bands overlap, each can still be followed.
            band: Look = {"facecolor": (colour, 0.07), "edgecolor": colour}
            axes.fill_between(positions, low, high, lw=0.9, ls=":", **band)
        handles[entry] = line
    axes.set(xlabel=xlabel, ylabel=folded(ylabel), yscale=yscale)
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    entitle(figure, title)
    if yscale == "log":
        logarithmic(axes.yaxis)
    legend(figure, handles)
    return finished(figure)


def heatmap(
    panels: Series,
    *,
    rows: Sequence[str],
    columns: Sequence[str],
    label: str,
    xlabel: str = "",
    ylabel: str = "",
    title: str = "",
) -> Figure:
    """Draw a heat map a panel (a layer, say), all on one colour scale.

    ``panels`` is the panel's title to its values ``[len(rows), len(columns)]``, named
    by ``rows`` and ``columns``. ``label`` says what the colours mean, such as ``share
    of tokens``. Cells are numbered where all numbers have room; what rounds to zero
    stays empty.
    """
    shape = len(rows), len(columns)
    tables = {}
    for name, values in panels.items():
        table = np.asarray(values, dtype=float)
        if table.shape != shape:
            expected = f"is {table.shape}; expected {shape}"
            refuse("E-SHAPE", f"heatmap: panel '{name}' {expected}")
        tables[name] = table
    across = min(len(tables), 3 if len(columns) <= 4 else 2)
    height = max(1.5, 0.22 * len(rows) + 0.7)
    figure, cells = grid(list(tables), across, height, xlabel, ylabel, title)
    every = np.stack(list(tables.values()))
    low = min(0.0, float(np.nanmin(every)))
    high = float(np.nanmax(every))
    numbered = every.size <= 200  # more would not be readable
    numbers: list[Text] = []
    for index, (axes, table) in enumerate(zip(cells, tables.values(), strict=True)):
        image = axes.imshow(table, vmin=low, vmax=high, aspect="auto")
        axes.set_xticks(range(len(columns)), [spoken(name) for name in columns])
        first = index % across == 0  # the others stand right of the same names
        names = [spoken(name) if first else "" for name in rows]
        axes.set_yticks(range(len(rows)), names)
        axes.tick_params(length=0)
        axes.grid(False)
        axes.spines[:].set(visible=True, color=FRAME)
        if numbered:
            numbers += _number(axes, table, low + 0.6 * (high - low))
    # Below all panels, where a long label has room.
    figure.set_figheight(figure.get_figheight() + 3 * LINE)
    below: Look = {"location": "bottom", "shrink": 0.7, "pad": 0.03, "aspect": 40}
    figure.colorbar(image, ax=figure.axes, label=label, **below)
    tilt_where_they_collide(figure, cells)
    figure.draw_without_rendering()
    if not _have_room(numbers, cells[0], shape):
        for number in numbers:
            number.remove()
    return finished(figure)


def _number(axes: Axes, table: npt.NDArray[Any], dark: float) -> Iterator[Text]:
    """Write each cell's number into it, in white from a value on."""
    for (row, column), number in np.ndenumerate(table):
        text = re.sub(r"^(-?)0\.", r"\1.", f"{number:z.2f}")  # .25 for 0.25
        if not np.isfinite(number) or text == ".00":
            continue  # nothing was measured, or nothing to speak of: the colour says it
        colour = "white" if number > dark else INK
        yield axes.text(
            column, row, text, ha="center", va="center", fontsize=8, color=colour
        )


def _have_room(numbers: Sequence[Text], axes: Axes, shape: tuple[int, int]) -> bool:
    """Whether each number fits into a cell of a heat map of so many rows and columns."""
    rows, columns = shape
    box = axes.get_window_extent()
    boxes = [number.get_window_extent() for number in numbers]
    width = max((number.width for number in boxes), default=0)
    height = max((number.height for number in boxes), default=0)
    return width + APART < box.width / columns and height + APART < box.height / rows


# Experts in turn: their numbers tell them apart, and the colours where one ends.
TURNS = (COLOURS[0], COLOURS[5])


def loads(shares: Series, *, title: str = "") -> Figure:
    """Draw a stacked bar a row (a layer, say): the share of tokens each expert serves.

    The number in a segment is its expert's, in two colours by turns; dotted lines
    between the bars mark the borders of equal shares. ``shares`` is the row's name to
    the experts' shares ``[E]``, which sum to 1.
    """
    table = {spoken(row): np.asarray(parts, float) for row, parts in shares.items()}
    experts = len(next(iter(table.values())))
    for name, row in table.items():
        if row.shape != (experts,):
            expected = f"is {row.shape}; expected {(experts,)}"
            refuse("E-SHAPE", f"loads: row '{name}' {expected}")
        if not np.isclose(row.sum(), 1.0, atol=1e-3):
            sums = f"sums to {row.sum():.4g}; expected 1"
            refuse("E-RANGE", f"loads: row '{name}' {sums}")
    figure, axes = single(max(1.8, 0.25 * len(table) + 1.0))
    left = np.zeros(len(table))
    for expert, widths in enumerate(np.stack(list(table.values()), axis=1)):
        colour = TURNS[expert % len(TURNS)]
        patches = axes.barh(
            list(table), widths, 0.65, left=left, color=colour, edgecolor="white"
        )
        # Numbers in the bars spare the reader the way to a legend; slivers stay empty.
        names = [str(expert) if share > 0.022 else "" for share in widths]
        axes.bar_label(
            patches,
            names,
            label_type="center",
            fontsize=8.5,
            color="white" if colour in DARK_COLOURS else INK,
        )
        left += widths
    for border in np.arange(1, experts) / experts:
        # Behind the bars, seen between them: it would strike through numbers.
        axes.axvline(border, color=INK, ls=":", lw=1.2, zorder=0.5)
    axes.invert_yaxis()
    axes.grid(False)
    axes.set(xlim=(0, 1))
    entitle(figure, title)
    axes.set_xlabel("share of routed slots (in the bars: expert)")
    axes.margins(y=0.02)
    return finished(figure)


def points(
    panels: Mapping[str, Series],
    *,
    xlabel: str = "",
    ylabel: str = "",
    title: str = "",
    ticks: bool = True,
    joined: bool = False,
    xscale: str = "linear",
    above: str = "",
    shared: str = "xy",
) -> Figure:
    """Draw one cloud a series, by colour and by marker.

    ``panels`` is the panel's title to its series: name to points ``[n, 2]``, drawn in
    this order. Without ``ticks`` the axes carry no numbers; those of a t-SNE or UMAP
    map mean nothing. Points may be ``joined`` by a line in their order, and the
    horizontal axis ``log``. ``above`` names a series to draw on top; the others are
    hollow then, or specks. Panels have the ``shared`` axes in common, by default both;
    a horizontal axis of its own is numbered at a panel's points.
    """
    clouds, looks = arrays("points", panels)
    figure, cells = grid(list(panels), 3, 2.0, xlabel, ylabel, title, shared=shared)
    largest: dict[str, int] = {}
    for panel in clouds:
        for name, cloud in panel.items():
            largest[name] = max(largest.get(name, 0), len(cloud))
    handles: dict[str, Artist] = {}
    for axes, panel in zip(cells, clouds, strict=True):
        for name, cloud in panel.items():
            dress: Look = {"s": 18, "alpha": 0.85, "linewidths": 0}
            if name == above:
                dress |= {"s": 9, "alpha": 1, "linewidths": 0.6}
                dress |= {"edgecolors": INK, "zorder": 3}
            elif largest[name] >= 150:  # paler, and alike in all panels
                dress |= {"s": 6, "alpha": 0.35}
            elif above:  # hollow: one that lies on another does not hide it
                dress |= {"s": 12, "alpha": 1, "linewidths": 0.8}
                dress |= {"facecolors": "none", "edgecolors": looks[name]["color"]}
            x, y = cloud.T
            dots = axes.scatter(x, y, **looks[name], **dress)
            handles.setdefault(name, dots)
            if joined:
                axes.plot(x, y, color=looks[name]["color"], lw=1.2)
        axes.set_xscale(xscale)
        if not ticks:
            axes.set(xticks=[], yticks=[])
        if xscale == "log":
            logarithmic(axes.xaxis)
        if ticks and "x" not in shared:
            axes.set_xticks(np.unique(np.concatenate(list(panel.values()))[:, 0]))
    legend(figure, handles)
    return finished(figure)


def prices(table: pd.DataFrame, *, title: str = "") -> Figure:
    """Draw a line a row and a panel a column: a loss and prices, lower is better in all.

    ``table`` has the loss in its first column and positive prices in the others, on
    axes of their own, all logarithmic; the row of the lowest loss is on top. A price is
    a filled point where no row has a lower loss for as little (the Pareto front), else
    a hollow one.
    """
    loss, *others = table.columns
    table = table.sort_values(loss)
    height = 0.2 * len(table) + 0.4
    names = [folded(column, 10) for column in table]
    figure, cells = grid(names, len(names), height, "", "", title)
    for axes, column in zip(cells, table, strict=True):
        values = table[column].to_numpy(float)
        best = np.full(len(values), True)
        if column in others:
            best = on_front(table[loss].to_numpy(float), values)
        for place, (value, filled) in enumerate(zip(values, best, strict=True)):
            face = COLOURS[0] if filled else "white"
            dress = look(0) | {"ls": "", "mfc": face, "markersize": 5}
            axes.plot(value, place, **dress)
        axes.set_xscale("log")
        logarithmic(axes.xaxis)
        lines = [spoken(line) if axes is cells[0] else "" for line in table.index]
        axes.set_yticks(range(len(lines)), lines, fontsize=8.5)
        axes.set_ylim(len(lines) - 0.4, -0.6)
        axes.margins(x=0.15)
        axes.tick_params(axis="y", length=0)
        axes.tick_params(axis="x", labelsize=8)
    return finished(figure)


def on_front(losses: Cloud, prices: Cloud) -> npt.NDArray[np.bool_]:
    """Whether no row with a lower loss has as low a price, by row ``[n]``."""
    rows = zip(losses, prices, strict=True)
    beaten = [((losses < loss) & (prices <= price)).any() for loss, price in rows]
    return ~np.array(beaten, dtype=bool)


def forest(frame: pd.DataFrame, *, xlabel: str, title: str = "") -> Figure | None:
    """Draw effects as points with intervals around a line at zero, the first on top.

    ``frame`` has one row a point: ``panel`` (the unit of its axis), ``line`` (what
    stands at the left), ``series`` (colour and marker, such as the scale), ``value``,
    ``low`` and ``high``, and ``sure``: a filled marker, else a hollow one. ``printed``,
    if there, is the paper's effect, a short line across all series of its line.
    ``xlabel`` says what is to the right. Returns None where there is no row.
    """
    require("forest", frame, COLUMNS)
    for column in ("panel", "line", "series"):
        if frame[column].isna().any():
            refuse("E-DATA", f"forest: a row has no {column}; name it")
    if frame.empty:
        return None
    panels = list(frame.groupby("panel", sort=False))
    lines = [effects.line.nunique() for _, effects in panels]
    height = 0.27 * sum(lines) + 0.85 * len(panels) + 0.5
    figure, cells = plt.subplots(
        len(panels),
        1,
        figsize=(WIDTH, height),
        height_ratios=[count + 0.8 for count in lines],
        layout="constrained",
        squeeze=False,
    )
    plt.close(figure)
    names = list(dict.fromkeys(frame.series))
    for axes, (unit, effects) in zip(cells.flat, panels, strict=True):
        _effects(axes, effects, names)
        axes.set_xlabel(f"{xlabel} ({unit})", fontsize=9)
    entitle(figure, title)
    handles = {}
    for place, name in enumerate(names):
        handles[name] = Line2D([], [], ls="", **look(place))
    if "printed" in frame and frame.printed.notna().any():
        handles["the paper"] = Line2D([], [], **PRINTED)
    legend(figure, handles)
    return finished(figure)


def leads(
    tables: Mapping[str, pd.DataFrame],
    pairs: Sequence[tuple[str, str]],
    *,
    by: str,
    column: str = "correct",
    title: str = "",
    names: Mapping[str, str] = {},
) -> Figure | None:
    """Draw how far one arm is ahead of another in points, by group ``by`` and pair.

    ``tables`` are evaluations by arm of the same items. Differences of a ``column`` are
    paired by item; intervals at 95 % cover the choice of items. The fewer of groups and
    pairs are panels. Pairs that did not run are left out; None where there is none.
    ``names`` are what arms are called, if not by their own name.
    """
    rows = []
    for arm, other in pairs:
        if arm not in tables or other not in tables:
            continue
        gaps = 100 * (tables[arm][column] - tables[other][column])
        for group, items in gaps.groupby(tables[arm][by], sort=False):
            ends = interval(items.to_numpy(float)[None]) or (np.nan, np.nan)
            low, high = np.clip(ends, -100, 100)  # shares differ by no more
            # Items that all differ alike show no spread: that is no certainty.
            sure = low < high and low * high > 0
            pair = f"{names.get(arm, arm)} − {names.get(other, other)}"
            rows.append([str(group), pair, "", items.mean(), low, high, sure])
    if not rows:
        return None
    frame = pd.DataFrame(rows, columns=COLUMNS)
    if frame.panel.nunique() > frame.line.nunique():
        frame = frame.rename(columns={"panel": "line", "line": "panel"})
    panels = dict(list(frame.groupby("panel", sort=False)))
    height = 0.22 * frame.line.nunique() + 0.5
    figure, cells = grid(
        list(panels), len(panels), height, "points", "", title, shared="xy"
    )
    for axes, effects in zip(cells, panels.values(), strict=True):
        _effects(axes, effects, [""])
    # A small difference should not look large because there is no larger one.
    low, high = cells[0].get_xlim()
    cells[0].set_xlim(min(low, -5), max(high, 5))
    return finished(figure)


def _effects(axes: Axes, effects: pd.DataFrame, names: list[str]) -> None:
    """Draw the effects of one unit, a line each, its series one below the other."""
    lines = effects.groupby("line", sort=False)
    for place, (_, rows) in enumerate(lines):
        rows = rows.sort_values("series", key=lambda series: series.map(names.index))
        middle = (len(rows) - 1) / 2
        apart = min(0.3, 0.8 / len(rows))
        for index, row in enumerate(rows.itertuples()):
            y = place + (index - middle) * apart
            marker = look(names.index(row.series))
            colour = marker["color"]
            if math.isfinite(row.low):  # a single item has no interval
                axes.plot([row.low, row.high], [y, y], color=colour, lw=1.6)
            face = colour if row.sure else "white"  # filled where it excludes zero
            axes.plot(row.value, y, ls="", mfc=face, markersize=5.5, zorder=3, **marker)
        if "printed" in rows:
            for printed in rows.printed.dropna().unique():
                axes.plot(printed, place, **PRINTED)
    axes.axvline(0, color=INK, lw=1)
    labels = [textwrap.fill(spoken(line), BESIDE) for line in lines.groups]
    axes.set_yticks(range(len(lines)), labels, fontsize=8.5)
    axes.set_ylim(len(lines) - 0.4, -0.6)
    axes.grid(axis="x")
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)


def style() -> None:
    """Set matplotlib to the book's look for the session; call it once a notebook."""
    plt.style.use(Path(__file__).with_name("book.mplstyle"))


def single(height: float) -> tuple[Figure, Axes]:
    """Open one panel of the text's width and so many inches in height."""
    figure, axes = plt.subplots(figsize=(WIDTH, height), layout="constrained")
    plt.close(figure)
    return figure, axes


def grid(
    names: Sequence[str],
    across: int,
    height: float,
    xlabel: str,
    ylabel: str,
    title: str,
    *,
    shared: str = "",
) -> tuple[Figure, list[Axes]]:
    """Open one panel a name, at most ``across`` in a row of ``height`` inches.

    ``shared`` names the axes that all panels have in common: "x", "y", "xy".
    """
    if not names:
        refuse("E-DATA", "no panels to draw; expected at least one")
    down = math.ceil(len(names) / across)
    # Rows as full as each other: four panels are two by two.
    across = math.ceil(len(names) / down)
    figure, cells = plt.subplots(
        down,
        across,
        figsize=(WIDTH, height * down + 0.6),
        layout="constrained",
        squeeze=False,
        sharex="x" in shared,
        sharey="y" in shared,
    )
    plt.close(figure)
    panels = list(cells.flat[: len(names)])
    for axes, name in zip(panels, names, strict=True):
        axes.set_title(spoken(name), fontsize=10 if across < 3 else 8.5, pad=5)
    for axes in cells.flat[len(names) :]:
        axes.set_visible(False)
    for axes in panels[-across:]:
        # The lowest of each column; a label of the figure would lie under its legend.
        axes.set_xlabel(folded(xlabel, ACROSS // across - 4), fontsize=9)
        axes.tick_params(labelbottom=True)
    if across > 1:
        # Without the outermost numbers, which would meet those of the next panel.
        for axes in panels:
            axes.xaxis.set_major_locator(MaxNLocator(4, prune="both"))
    figure.supylabel(folded(ylabel), fontsize=9)
    entitle(figure, title)
    return figure, panels


def arrays(
    chart: str, panels: Mapping[str, Series]
) -> tuple[list[dict[str, Cloud]], dict[str, Look]]:
    """Return each panel's series as arrays ``[n, 2]``, and the look of each name."""
    clouds: list[dict[str, Cloud]] = []
    looks: dict[str, Look] = {}
    for title, panel in panels.items():
        clouds.append({})
        for name, series in panel.items():
            cloud = np.asarray(series, dtype=float)
            if cloud.ndim != 2 or cloud.shape[1] != 2:
                shape = f"'{name}' of '{title}' is {cloud.shape}, not [n, 2]"
                refuse("E-SHAPE", f"{chart}: {shape}")
            clouds[-1][name] = cloud
            looks.setdefault(name, look(len(looks)))
    return clouds, looks


def look(place: int) -> Look:
    """Colour and marker of the series at a place: its own pair in every panel."""
    turned = place + place // len(COLOURS)
    colour = COLOURS[place % len(COLOURS)]
    return {"color": colour, "marker": MARKERS[turned % len(MARKERS)]}


def require(chart: str, frame: pd.DataFrame, columns: Sequence[str]) -> None:
    """Refuse a frame without these columns."""
    missing = [column for column in columns if column not in frame]
    if missing:
        there = list(frame.columns)
        refuse("E-KEYS", f"{chart}: no column {missing}; the frame has {there}")


def finished(figure: Figure) -> Figure:
    """Return a figure; warn of what a reader could not read in it (W-FIGURE)."""
    for fault in faults(figure):
        warnings.warn(f"W-FIGURE: {fault}", stacklevel=3)
    return figure


def check(figure: Figure, name: str) -> None:
    """Refuse a figure that a reader cannot read (E-BOOK); ``name`` says which."""
    for fault in faults(figure):
        refuse("E-BOOK", f"figure {name}: {fault}")


def faults(figure: Figure) -> Iterator[str]:
    """Say what cannot be read: NaN, text over text, a series without a point.

    And a legend with a name of the code or of a study, with a series that no panel draws, or with
    more colours than one keeps in mind.
    """
    figure.draw_without_rendering()
    unseen = {id(label) for axes in figure.axes for label in _beyond(axes)}
    texts = [
        text
        for text in figure.findobj(Text)
        if _is_shown(text) and id(text) not in unseen
    ]
    for text in texts:
        if re.search(r"\bnan\b", text.get_text(), re.IGNORECASE):
            yield f"'{text.get_text()}' says NaN; leave out what is missing"
    boxes = [text.get_window_extent().padded(-1) for text in texts]
    for place, box in enumerate(boxes):
        for text, other in zip(texts[:place], boxes, strict=False):
            if box.overlaps(other):
                over = f"'{texts[place].get_text()}' lies over '{text.get_text()}'"
                yield f"{over}; give it fewer ticks or more room"
    for axes in figure.axes:
        drawn = [line.get_xydata() for line in axes.lines]
        drawn += [np.asarray(cloud.get_offsets()) for cloud in axes.collections]
        if any(
            not np.isfinite(np.asarray(points, float)).all(1).any() for points in drawn
        ):
            yield "a series has no point; leave it out, and out of the caption"
    shown = [
        artist
        for axes in figure.axes
        for artist in (*axes.lines, *axes.collections, *axes.patches)
        if artist.get_visible()
    ]
    painted = {colour for artist in shown for colour in _colours(artist)}
    for key in figure.legends:
        for mark, text in zip(key.legend_handles, key.get_texts(), strict=True):
            if _is_coloured(mark) and painted.isdisjoint(_colours(mark)):
                name = text.get_text().partition("\n")[0]
                yield f"the legend has '{name}', which no panel draws"
        coloured = sum(map(_is_coloured, key.legend_handles))
        if coloured > COLOURED:
            more = f"{coloured} coloured series; expected at most {COLOURED}"
            yield f"the legend has {more}: make the others grey, or draw a line for each"
        for text in key.get_texts():
            # Without what a chart puts behind it: "(5 seeds: mean, range)".
            name = re.split(r"\s+\(", text.get_text())[0]
            if name in _studies() or re.search(r"\w[_/]\w", name):
                yield f"the legend says '{name}'; give it a reader's name"


@cache
def _studies() -> frozenset[str]:
    """Name the studies: the protocols that are called neither as a tier nor as a base."""
    notebooks = storage.part(storage.files.PACKAGE.parent, "notebooks")
    protocols = {
        path.suffixes[0].removeprefix(".") for path in notebooks.glob("*.yaml")
    }
    return frozenset(protocols - {*TIERS, *BASES})


def _is_coloured(handle: Artist | None) -> bool:
    """Whether a legend's mark has a colour: neither black, grey nor white."""
    return any(max(colour) - min(colour) > 0.1 for colour in _colours(handle))


def _colours(handle: Artist | None) -> set[tuple[float, ...]]:
    """Return the colours of a mark that are not transparent: red, green and blue."""
    painted: list[Any]
    if isinstance(handle, Line2D):
        face = handle.get_markerfacecolor()
        painted = [handle.get_color(), face, handle.get_markeredgecolor()]
    elif isinstance(handle, (Collection, Patch)):
        painted = [handle.get_facecolor(), handle.get_edgecolor()]
    else:
        return set()
    colours = np.concatenate([to_rgba_array(colour) for colour in painted])
    opaque = colours[:, 3] > 0  # what is hollow has a colour, too
    return {tuple(colour) for colour in colours[opaque, :3].round(3).tolist()}


def _beyond(axes: Axes) -> Iterator[Text]:
    """Yield the labels of ticks that lie beyond the ends of their axis: nothing draws them."""
    for axis in (axes.xaxis, axes.yaxis):
        low, high = sorted(axis.get_view_interval())
        for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
            if not low <= tick.get_loc() <= high:
                yield from (tick.label1, tick.label2)


def _is_shown(text: Text) -> bool:
    """Whether a text is seen, and level or upright: what is tilted has a box that is too large."""
    level = text.get_rotation() % 90 == 0
    return level and text.get_visible() and bool(text.get_text().strip())


def entitle(figure: Figure, title: str) -> None:
    """Put a title at the left above all panels; a second line makes the figure higher.

    A number in it gets the minus that axes have.
    """
    signed = MINUS.sub("−", spoken(title))
    lines = balanced(signed, TITLE)
    figure.set_figheight(figure.get_figheight() + LINE * lines.count("\n"))
    figure.suptitle(lines, x=0.01, ha="left")


def balanced(title: str, characters: int) -> str:
    """Break a title into as few lines as it needs, all of about the same length."""
    breaks = folded(title, characters).count("\n")
    while folded(title, characters - 1).count("\n") == breaks and characters > 2:
        characters -= 1
    return folded(title, characters)


def folded(label: str, characters: int = BESIDE - 4) -> str:
    """Break a label into lines: one that is longer than its axis would meet the next text."""
    return textwrap.fill(label, characters, break_long_words=False)


def legend(figure: Figure, handles: Mapping[str, Artist]) -> None:
    """Put the legend below the axes, and its lines onto the height; one entry needs none."""
    if len(handles) < 2 and not any("\n" in name for name in handles):
        return
    names = [spoken(name) for name in handles]
    folded_names = [name.split("\n") for name in names]
    widest = max(len(max(lines, key=len)) for lines in folded_names)
    tallest = max(map(len, folded_names))
    columns = max(1, min(len(names), ACROSS // (widest + 6)))
    rows = math.ceil(len(names) / columns)
    figure.set_figheight(figure.get_figheight() + LINE * rows * tallest)
    key = figure.legend(
        handles.values(), names, loc="outside lower center", ncols=columns
    )
    for mark in key.legend_handles:
        if isinstance(mark, PathCollection):  # those of a large cloud are specks
            mark.set(sizes=[MARK], alpha=1)


def spoken(name: object) -> str:
    """Write the name of a task or an arm as words: ``intent_json`` is "intent json"."""
    return str(name).replace("_", " ")


def logarithmic(axis: Axis) -> None:
    """Number a logarithmic axis as one reads it, by as many round numbers as it has room for."""
    axis.set_major_locator(Round(axis))
    axis.set_major_formatter("{x:g}")
    axis.minorticks_off()


class Round(LogLocator):
    """Ticks of a logarithmic axis whose labels, in ``{x:g}``, all have room.

    The first of these with two ticks or more that fits: 1, 2, 5, 10; 1, 10, 100; a power of
    ten now and then; and for a short range a few round numbers, evenly apart. Where
    none fits, a single tick is left.
    """

    def __init__(self, axis: Axis) -> None:
        """Number an axis; how long it is, and how large its labels, is asked when it is drawn."""
        super().__init__()
        self.numbered = axis
        self.is_level = isinstance(axis, XAxis)

    def __call__(self) -> list[float]:
        """Return the ticks of the axis as it is now."""
        return self.tick_values(*self.numbered.get_view_interval())

    def tick_values(self, vmin: float, vmax: float) -> list[float]:
        """Return the ticks of an interval of positive numbers."""
        low, high = sorted((vmin, vmax))
        lone: list[float] = []
        for choice in _round_numbers(low, high):
            inside = [tick for tick in choice if self._lies_inside(tick, low, high)]
            if len(inside) >= 2 and self._are_apart(inside, low, high):
                return inside
            lone = lone or inside[len(inside) // 2 :][:1]
        return lone

    def _lies_inside(self, tick: float, low: float, high: float) -> bool:
        """Whether a label keeps clear of those of the other axis and of the next panel."""
        room = self._extent(tick) / (2 if self.is_level else 6)
        return room <= self._place(tick, low, high) <= self._length() - room

    def _are_apart(self, ticks: Sequence[float], low: float, high: float) -> bool:
        for one, other in itertools.pairwise(ticks):
            gap = self._place(other, low, high) - self._place(one, low, high)
            if gap < (self._extent(one) + self._extent(other)) / 2:
                return False
        return True

    def _place(self, tick: float, low: float, high: float) -> float:
        """How far along the axis a tick stands, in points."""
        return self._length() * math.log(tick / low) / math.log(high / low)

    def _length(self) -> float:
        """Length of the axis in points."""
        axes = self.numbered.axes
        box = axes.get_window_extent()
        pixels = box.width if self.is_level else box.height
        return float(72 * pixels / axes.figure.dpi)

    def _extent(self, tick: float) -> float:
        """Points that a label takes along the axis, a gap included."""
        (first,) = self.numbered.get_major_ticks(1)
        size = float(first.label1.get_fontsize())
        across = 0.64 * len(f"{tick:g}") + 0.5  # a digit, in heights of the font
        return size * (across if self.is_level else 1.3)


def _round_numbers(low: float, high: float) -> Iterator[list[float]]:
    """Yield choices of round numbers around an interval, those that a reader likes best first."""
    first = math.floor(math.log10(low))
    last = math.ceil(math.log10(high))
    exponents = range(first, last + 1)
    ones_twos_fives: list[float] = []
    for exponent in exponents:
        power = 10.0**exponent
        ones_twos_fives += [power, 2 * power, 5 * power]
    yield ones_twos_fives
    for step in range(1, len(exponents)):  # every power of ten, every second, ...
        yield [10.0**exponent for exponent in exponents if exponent % step == 0]
    for count in (5, 4, 3, 2, 1):
        evenly = MaxNLocator(count, steps=[1, 2, 5, 10]).tick_values(low, high)
        yield [float(tick) for tick in evenly if tick > 0]


def tilt_where_they_collide(figure: Figure, panels: Sequence[Axes]) -> None:
    """Tilt the horizontal axes' names where side by side two would touch, as they are drawn."""
    figure.draw_without_rendering()
    collide = False
    for axes in panels:
        boxes = [name.get_window_extent() for name in axes.get_xticklabels()]
        for left, right in itertools.pairwise(boxes):
            collide |= left.x1 + APART > right.x0
    for axes in panels if collide else ():
        axes.tick_params(axis="x", rotation=30)
        plt.setp(axes.get_xticklabels(), ha="right", rotation_mode="anchor")
