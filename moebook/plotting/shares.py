"""Shares of tokens: heat maps of experts by domain, and stacked loads by layer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from moebook.errors import refuse
from moebook.plotting.panels import grid, single
from moebook.plotting.theme import COLOURS, DARK_COLOURS, HATCHES, INK, tilt_when_long


def heatmap(
    panels: Mapping[str, npt.ArrayLike],
    *,
    rows: Sequence[str],
    columns: Sequence[str],
    label: str,
    xlabel: str = "",
    ylabel: str = "",
    title: str = "",
) -> Figure:
    """Draw one heat map a panel (a layer, say) on one colour scale, so that panels compare.

    Args:
        panels: Panel's title to its values ``[len(rows), len(columns)]``.
        rows: Names of the rows, such as domains.
        columns: Names of the columns, such as experts.
        label: What the colours mean, with the unit, such as ``share of tokens``.
        xlabel: What the columns are.
        ylabel: What the rows are.
        title: What the figure shows.

    Raises:
        Refusal: E-DATA without a panel, E-SHAPE when a panel's shape is not rows by columns.
    """
    tables = {name: np.asarray(values, dtype=float) for name, values in panels.items()}
    if not tables:
        refuse("E-DATA", "heatmap: no panels; expected at least one")
    for name, table in tables.items():
        if table.shape != (len(rows), len(columns)):
            refuse(
                "E-SHAPE",
                f"heatmap: panel '{name}' is {table.shape}; expected {(len(rows), len(columns))}",
            )
    across = min(len(tables), 4 if len(columns) <= 8 else 2)
    height = max(1.9, 0.34 * len(rows) + 0.8)
    figure, cells = grid(list(tables), across, height, xlabel, ylabel, title)
    low = min(0.0, *(float(np.nanmin(table)) for table in tables.values()))
    high = max(float(np.nanmax(table)) for table in tables.values())
    numbers = len(rows) * len(columns) * len(tables) <= 200
    for index, (axes, table) in enumerate(zip(cells, tables.values(), strict=True)):
        image = axes.imshow(table, vmin=low, vmax=high, aspect="auto")
        axes.set_xticks(range(len(columns)), columns)
        tilt_when_long(axes, columns, across)
        axes.set_yticks(range(len(rows)), rows if index % across == 0 else [""] * len(rows))
        axes.tick_params(length=0)
        axes.grid(False)
        axes.spines[:].set_visible(False)
        if numbers:
            _write_cells(axes, table, low + 0.6 * (high - low), size=6.5 if across > 2 else 8)
    figure.colorbar(image, ax=figure.axes, label=label, shrink=0.9, pad=0.015, aspect=30)
    return figure


def loads(
    shares: Mapping[str, npt.ArrayLike],
    *,
    xlabel: str = "share of routed tokens (in the bars: expert)",
    title: str = "",
) -> Figure:
    """Draw one stacked bar a row (a layer, say): which share of the tokens each expert serves.

    The number in a segment is its expert's. Dotted lines mark where the borders would lie if every
    expert served the same share.

    Args:
        shares: Row's name to the experts' shares ``[E]``; each row sums to 1.
        xlabel: Label of the horizontal axis with its unit.
        title: What the figure shows.

    Raises:
        Refusal: E-SHAPE when rows differ in length, E-RANGE when a row does not sum to 1.
    """
    table = {name: np.asarray(row, dtype=float) for name, row in shares.items()}
    experts = len(next(iter(table.values())))
    for name, row in table.items():
        if row.shape != (experts,):
            refuse("E-SHAPE", f"loads: row '{name}' is {row.shape}; expected {(experts,)}")
        if not np.isclose(row.sum(), 1.0, atol=1e-3):
            refuse("E-RANGE", f"loads: row '{name}' sums to {row.sum():.4g}; expected 1")
    figure, axes = single(max(2.0, 0.34 * len(table) + 1.1))
    heights, left = np.stack(list(table.values())), np.zeros(len(table))
    for expert in range(experts):
        colour = COLOURS[expert % len(COLOURS)]
        patches = axes.barh(
            list(table),
            heights[:, expert],
            left=left,
            color=colour,
            hatch=HATCHES[expert // len(COLOURS) % len(HATCHES)],
            edgecolor="white",
        )
        # Numbers in the bars spare the reader the way to a legend; slivers stay empty.
        names = [str(expert) if share > 0.022 else "" for share in heights[:, expert]]
        box = {"facecolor": colour, "edgecolor": "none", "pad": 1.0}
        axes.bar_label(
            patches,
            names,
            label_type="center",
            fontsize=8.5,
            color="white" if colour in DARK_COLOURS else INK,
            bbox=box,
        )
        left += heights[:, expert]
    for border in np.arange(1, experts) / experts:
        axes.axvline(border, color=INK, ls=":", lw=0.9)
    axes.invert_yaxis()
    axes.grid(False)
    axes.set(xlabel=xlabel, title=title, xlim=(0, 1))
    axes.margins(y=0.02)
    return figure


def _write_cells(axes: Axes, table: npt.NDArray[Any], border: float, *, size: float) -> None:
    """Write each cell's number, dark on light and white on dark."""
    for (row, column), number in np.ndenumerate(table):
        axes.text(
            column,
            row,
            re.sub(r"^(-?)0\.", r"\1.", f"{number:.2f}"),
            ha="center",
            va="center",
            fontsize=size,
            color="white" if number > border else INK,
        )
