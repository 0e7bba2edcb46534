"""Panels: several small pictures in one figure, and the series of points that some of them show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from moebook.errors import refuse
from moebook.plotting.theme import WIDTH

Series = Mapping[str, npt.ArrayLike]


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
    figure.supylabel(ylabel, fontsize=10.5)
    figure.suptitle(title, x=0.01, ha="left")
    return figure, list(cells.flat[: len(names)])


def series(
    chart: str, panels: Mapping[str, Series]
) -> tuple[list[dict[str, npt.NDArray[np.float64]]], dict[str, int]]:
    """Return each panel's series as arrays ``[n, 2]``, and the place of each name among all."""
    if not panels:
        refuse("E-DATA", f"{chart}: no panels; expected at least one")
    found = [{name: np.asarray(own[name], dtype=float) for name in own} for own in panels.values()]
    for panel, own in zip(panels, found, strict=True):
        for name, values in own.items():
            if values.ndim != 2 or values.shape[1] != 2:
                refuse("E-SHAPE", f"{chart}: '{name}' of '{panel}' is {values.shape}, not [n, 2]")
    names = dict.fromkeys(name for own in found for name in own)
    return found, {name: place for place, name in enumerate(names)}
