"""How cost grows: sweeps read back from a record, as curves, and as text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from moebook.bench.running import find
from moebook.results import Record


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
    if frame.empty:
        return "How cost grows: nothing ran"
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
