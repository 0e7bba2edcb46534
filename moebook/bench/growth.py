"""How cost grows: each op over a sweep of three letters, everything else as in the small case."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from moebook import runtime
from moebook.bench.case import ROLES
from moebook.bench.running import find, measured, present
from moebook.results import Record


def roles(names: Iterable[str] | None = None) -> pd.DataFrame:
    """List which letter of each op varies in which of the `ROLES`, and what it counts there."""
    rows = {
        name: [f"{axis.letter}: {axis.meaning}" for axis in op.axes]
        for name, op in present(names)[0].items()
    }
    return pd.DataFrame.from_dict(rows, orient="index", columns=list(ROLES))


def growth(
    names: Iterable[str] | None = None,
    *,
    device: str = "auto",
    rounds: int = 1,
    budget: float = 0.5,
    points: int | None = None,
) -> pd.DataFrame:
    """Measure each op at several sizes.

    Args:
        names: Ops; all by default.
        device: As `running.measure` takes it.
        rounds: Counted rounds a point.
        budget: Seconds a contender may spend on a point.
        points: Most points a letter, the smallest first; all by default.

    Returns:
        What `running.measure` returns, with ``letter``, ``value`` and ``exponent``: of the power
        law through the first and the last point of the contender's seconds (1 is linear).
    """
    place = runtime.resolve_device(device)
    todo = [
        (name, letter, value, letters)
        for name, op in present(names)[0].items()
        for letter, value, letters in op.swept(points)
    ]
    lines: list[dict[str, Any]] = []
    for name, letter, value, letters in runtime.progress(todo, "sweep", len(todo)):
        found = measured(name, f"{letter}={value}", letters, place, rounds, budget)
        lines += [{**line, "letter": letter, "value": value} for line in found]
    frame = pd.DataFrame(lines)
    frame = frame[frame["seconds"].notna()].reset_index(drop=True)
    frame.attrs["device"] = place.type
    keys = ["op", "letter", "contender"]
    slopes = {key: _exponent(part) for key, part in frame.groupby(keys)}
    frame["exponent"] = [slopes[tuple(key)] for key in frame[keys].to_numpy()]
    return frame


def regrown(records: Mapping[str, Record]) -> pd.DataFrame:
    """Read sweeps back: ``machine``, ``op``, ``letter``, ``value``, ``contender``, ``seconds``."""
    found = [
        (machine, *match.groups(), value.value)
        for machine, record in records.items()
        for value in record.values
        if (match := re.fullmatch(r"(\w+)/growth/(\w+)=(\d+)/(\w+)", value.name))
    ]
    names = ["machine", "op", "letter", "value", "contender", "seconds"]
    return pd.DataFrame(found, columns=names).astype({"value": int})


def curves(frame: pd.DataFrame) -> dict[str, dict[str, np.ndarray[Any, Any]]]:
    """Return a panel for each op and letter: points (value, ms) of ours, floor, fastest other.

    Left out is what does a part of the work only: a frozen layer alone.
    """
    panels: dict[str, dict[str, np.ndarray[Any, Any]]] = {}
    whole = frame[~frame["contender"].str.endswith("alone")]
    for (op, letter), part in whole.groupby(["op", "letter"], sort=False):
        who = part["contender"].where(part["contender"].isin(["ours", "floor"]), "fastest other")
        least = part.groupby([who, "value"], sort=False)["seconds"].min().sort_index() * 1e3
        panels[f"{op}, {letter}"] = {
            name: least[name].reset_index().to_numpy()
            for name in ("ours", "floor", "fastest other") if name in least
        }  # fmt: skip
    return panels


def growth_table(frame: pd.DataFrame) -> str:
    """Return a sweep as text: a line a contender and letter, its milliseconds and the exponent."""
    meanings = {(n, a.letter): a.meaning for n in set(frame["op"]) for a in find(n).axes}
    lines = ["How cost grows: ms at each value of a letter; exponent of the power law, 1 is linear"]
    for (op, letter), part in frame.groupby(["op", "letter"], sort=False):
        values = sorted(set(part["value"]))
        lines.append(f"{op}, {meanings[op, letter]}, {letter} = {', '.join(map(str, values))}")
        for name, own in part.groupby("contender", sort=False):
            own = own.sort_values("value")
            cells = "".join(f"{1e3 * seconds:10.2f}" for seconds in own["seconds"])
            lines.append(f"  {name:32}{cells}   exponent {own['exponent'].iloc[0]:.2f}")
    return "\n".join(lines)


def _exponent(part: pd.DataFrame) -> float:
    points = part.sort_values("value")[["value", "seconds"]].to_numpy()
    (low, first), (high, last) = points[0], points[-1]
    return math.nan if low == high else math.log(last / first) / math.log(high / low)
