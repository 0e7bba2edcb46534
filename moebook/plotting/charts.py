"""Charts along one axis: curves over training steps and grouped bars, both with intervals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from moebook.errors import refuse
from moebook.plotting.panels import single
from moebook.plotting.theme import COLOURS, HATCHES, INK, MARKERS, legend_below, tilt_when_long
from moebook.results.intervals import interval


def curves(
    series: Mapping[str, npt.ArrayLike],
    *,
    steps: npt.ArrayLike,
    xlabel: str,
    ylabel: str,
    title: str = "",
    window: int = 1,
) -> Figure:
    """Draw one line a series over training, with a band from the lowest seed to the highest.

    The band is the range and no confidence interval: with three seeds nothing finer is honest.

    Args:
        series: Name to values ``[S, T]`` (seeds by points) or ``[T]`` for a single seed.
        steps: The ``T`` horizontal positions, in the unit that `xlabel` names.
        xlabel: Label of the horizontal axis with its unit, such as ``optimizer steps``.
        ylabel: Label of the vertical axis with its unit, such as ``loss (nats per token)``.
        title: What the figure shows, in words that also make sense read aloud.
        window: Points of a centred moving average; 1 draws the values as they are.

    Raises:
        Refusal: E-SHAPE when a series and `steps` differ in length, E-RANGE for a bad `window`.
    """
    positions = np.asarray(steps, dtype=float)
    if not 1 <= window <= len(positions):
        refuse(
            "E-RANGE",
            f"curves: window is {window}; expected 1 to {len(positions)} points",
        )
    figure, axes = single(3.6)
    every = max(1, len(positions) // 8)
    for index, (name, values) in enumerate(series.items()):
        seeds = np.atleast_2d(np.asarray(values, dtype=float))
        if seeds.shape[1] != len(positions):
            found = f"series '{name}' has {seeds.shape[1]} points; steps has {len(positions)}"
            refuse("E-SHAPE", f"curves: {found}")
        seeds = np.stack([_moving_average(row, window) for row in seeds])
        several = f" (mean and range of {len(seeds)} seeds)" if len(seeds) > 1 else ""
        axes.plot(
            positions,
            seeds.mean(axis=0),
            color=COLOURS[index % len(COLOURS)],
            label=f"{name}{several}",
            marker=MARKERS[index % len(MARKERS)],
            markevery=(index * every // len(series), every),
            markersize=5,
        )
        if several:
            low, high, colour = seeds.min(axis=0), seeds.max(axis=0), axes.lines[-1].get_color()
            axes.fill_between(positions, low, high, color=colour, alpha=0.18, lw=0)
    axes.set(xlabel=xlabel, ylabel=ylabel, title=title)
    axes.legend()
    return figure


def bars(
    frame: pd.DataFrame,
    *,
    group: str,
    series: str,
    ylabel: str,
    title: str = "",
    chance: float | None = None,
) -> Figure:
    """Draw grouped bars with their intervals; the number stands on each bar while there is room.

    Args:
        frame: One row a bar: the columns that `group` and `series` name, `value` (the bar's
            height), and `low` and `high`, the interval's ends in the same unit; where they are
            missing numbers there is no whisker.
        group: Column whose values stand along the horizontal axis, in order of appearance.
        series: Column whose values are the colours, in order of appearance.
        ylabel: Label of the vertical axis with its unit.
        title: What the figure shows.
        chance: Height of a dashed line for guessing, or None for no line.

    Raises:
        Refusal: E-KEYS when a column is missing.
    """
    missing = [column for column in (group, series, "value", "low", "high") if column not in frame]
    if missing:
        refuse("E-KEYS", f"bars: no column {missing}; the frame has {list(frame.columns)}")
    groups, names = list(dict.fromkeys(frame[group])), list(dict.fromkeys(frame[series]))
    figure, axes = single(3.6)
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        rows = frame[frame[series] == name].set_index(group).reindex(groups)
        places = np.arange(len(groups)) + (index - (len(names) - 1) / 2) * width
        heights, below, above = _whiskers(rows)
        axes.bar(
            places,
            heights,
            width * 0.92,
            yerr=np.stack([below, above]) if np.any(below + above) else None,
            color=COLOURS[index % len(COLOURS)],
            hatch=HATCHES[index // len(COLOURS) % len(HATCHES)],
            edgecolor="white",
            ecolor=INK,
            capsize=3,
            label=str(name),
        )
        if len(groups) * len(names) <= 16:
            _write_heights(axes, places, heights, heights + above, 8.5 if len(names) < 5 else 7)
    axes.set_xticks(range(len(groups)), [str(each) for each in groups])
    tilt_when_long(axes, groups)
    axes.set(ylabel=ylabel, title=title)
    if chance is not None:
        axes.axhline(chance, color=INK, ls=(0, (4, 3)), lw=1, label="chance")
    legend_below(figure, axes)
    return figure


def accuracies(
    tables: Mapping[str, pd.DataFrame],
    *,
    by: str,
    column: str = "correct",
    series: str = "arm",
    title: str = "",
) -> Figure:
    """Draw `bars` of accuracy, one for each arm in each group, with intervals over test items.

    Args:
        tables: Evaluations of one run, by arm.
        by: Column that groups items, such as ``domain`` or ``task``.
        column: Column whose mean is the accuracy.
        series: What the arms are called.
        title: What the figure shows.
    """
    rows = []
    for arm, table in tables.items():
        for group, items in table.groupby(by, sort=False)[column]:
            low, high = interval(items.to_numpy(float)[None]) or (np.nan, np.nan)
            rows.append([group, arm, items.mean(), low, high])
    frame = pd.DataFrame(rows, columns=[by, series, "value", "low", "high"])
    label = "accuracy (share of exact matches)"
    return bars(frame, group=by, series=series, ylabel=label, title=title)


def _moving_average(values: npt.NDArray[Any], window: int) -> npt.NDArray[Any]:
    """Average over a centred window that shrinks at both ends, so that no point is invented."""
    ones = np.ones(window)
    return np.convolve(values, ones, "same") / np.convolve(np.ones_like(values), ones, "same")


def _whiskers(rows: pd.DataFrame) -> tuple[npt.NDArray[Any], ...]:
    """Return the bars' heights and how far their intervals reach below and above them."""
    heights = rows["value"].to_numpy(float)
    below = np.nan_to_num(heights - rows["low"].to_numpy(float))
    return heights, below, np.nan_to_num(rows["high"].to_numpy(float) - heights)


def _write_heights(
    axes: Axes,
    places: npt.NDArray[Any],
    heights: npt.NDArray[Any],
    tops: npt.NDArray[Any],
    size: float,
) -> None:
    """Write each bar's height above its whisker, in letters of `size` points."""
    for place, height, top in zip(places, heights, tops, strict=True):
        if np.isfinite(height):
            axes.annotate(
                f"{height:#.3g}",
                (place, top),
                xytext=(0, 3),
                textcoords="offset points",
                ha="center",
                fontsize=size,
            )
