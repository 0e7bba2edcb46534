"""Recorded runs read back, and as points for figures, as runs of today are."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from moebook import results
from moebook.bench.report import BENCH, COUNTS, UNITS
from moebook.results import Run


def recorded(start: Path | None = None) -> dict[str, Run]:
    """Read the committed runs by the machine's name: ``cpu`` and those of GPUs.

    Args:
        start: Where to look for the project, from there upwards; the working directory by default.
            Without a project there are no runs.

    Raises:
        Refusal: E-RUN for a file that is no run, or was altered.
    """
    begin = (start or Path.cwd()).resolve()
    folders = [folder for folder in (begin, *begin.parents) if (folder / "_config.yml").is_file()]
    pools = results.pools(BENCH, folders[0]) if folders else {}
    return {machine: pool.runs[0] for machine, pool in pools.items()}


def remeasured(records: Mapping[str, Run]) -> pd.DataFrame:
    """Read runs back: a line a contender, by its slug, with the machine and what is recorded."""
    found: defaultdict[tuple[str, ...], dict[str, float]] = defaultdict(dict)
    for machine, record in records.items():
        for value in record.values:
            *key, column = value.name.split("/")
            if column in UNITS or column in COUNTS:
                found[machine, *key][column] = value.value
    names = ("machine", "op", "case", "contender")
    lines = [
        dict(zip(names, key, strict=True), **found.get(key[:3], {}), **costs)
        for key, costs in found.items()
        if len(key) == len(names)
    ]
    return pd.DataFrame(lines, columns=[*names, *UNITS, *COUNTS])


def regrown(records: Mapping[str, Run]) -> pd.DataFrame:
    """Read sweeps back: ``machine``, ``op``, ``letter``, ``value``, ``contender``, ``seconds``."""
    found = [
        (machine, *match.groups(), value.value)
        for machine, record in records.items()
        for value in record.values
        if (match := re.fullmatch(r"(\w+)/growth/(\w+)=(\d+)/(\w+)", value.name))
    ]
    names = ["machine", "op", "letter", "value", "contender", "seconds"]
    return pd.DataFrame(found, columns=names).astype({"value": int})


def reached(frame: pd.DataFrame) -> dict[str, tuple[float, float]]:
    """Return what our ops made of products reach: FLOPs for each byte that must move, and a second.

    A case in another number format than the machine's roof is left out.
    """
    ours = frame[(frame["contender"] == "ours") & (frame["flops"] > 0)]
    return {
        f"{row.op}, {row.case}": (row.flops / row.traffic, row.flops / row.seconds)
        for row in ours.itertuples()
        if not row.case.endswith("bf16")
    }


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
