"""What a run leaves: a table to read, a record with its environment, and records read back."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from moebook import results, runtime
from moebook.bench.goals import judge
from moebook.bench.running import OPS, installed, slug
from moebook.errors import Refusal
from moebook.results import Run, Value

BENCH = "bench"
"""Folder of the runs of all ops, one a machine."""
UNITS = {
    "seconds": "seconds", "wall": "seconds", "ratio": "ratio", "memory": "bytes", "kept": "bytes",
}  # fmt: skip
"""What is recorded of each contender."""
COUNTS = {"flops": "count", "traffic": "bytes"}
"""What is recorded of each case: FLOPs of its floor, bytes that must move at least once."""


def table(frame: pd.DataFrame) -> str:
    """Return a run as text: a block a case, a line a contender, and the goals of both.

    A ratio is the contender's time over ours; the multiple is its time over the floor's.
    """
    goals = judge(frame)
    aims = defaultdict(list)
    for goal in goals.itertuples():
        measured = "" if pd.isna(goal.measured) else f" ({goal.measured:.2f})"
        aims[goal.op, goal.case, goal.against].append(f"{goal.goal}: {goal.verdict}{measured}")
    lines = [f"{'':34}{'ms':>10}{'wall ms':>10}{'ratio':>9}{'x floor':>9}{'extra MB':>10}  goal"]
    for (op, case), part in frame.groupby(["op", "case"], sort=False):
        lines.append(f"{op} / {case}")
        floor = part.loc[part["contender"] == "floor", "ratio"].sum() or math.nan
        for _, row in part.iterrows():
            lines.append(_line(row, floor, "; ".join(aims[op, case, row["contender"]])))
    missed = goals[goals["verdict"] == "missed"]
    if len(missed):
        lines += ["", "Missed goals: what our time consists of, in multiples of the other's"]
        lines += [f"  {g.op} / {g.case}, {g.against}: {g.reason}" for g in missed.itertuples()]
    counts = goals["verdict"].value_counts()
    parts = [f"{counts.get(verdict, 0)} {verdict}" for verdict in ("met", "missed", "not run")]
    unstated = not len(goals) or "not stated" in counts
    summary = f"{len(goals)} goals: {', '.join(parts)}"
    return "\n".join([*lines, "", "no goals are stated for these cases" if unstated else summary])


def _line(row: pd.Series, floor: float, aims: str) -> str:
    name = f"  {row['contender']}"
    if pd.isna(row["seconds"]):
        return f"{name:34}not run: {row['note']}" + (f"  [{aims}]" if aims else "")
    extra = "" if pd.isna(row["memory"]) else f"{row['memory'] / 1e6:.0f}"
    multiple = "" if math.isnan(floor) else f"{row['ratio'] / floor:.2f}"
    numbers = f"{1e3 * row['seconds']:10.2f}{1e3 * row['wall']:10.2f}{row['ratio']:9.2f}"
    return f"{name:34}{numbers}{multiple:>9}{extra:>10}  {aims}".rstrip()


def growth_table(frame: pd.DataFrame) -> str:
    """Return a sweep as text: a line a contender and letter, its milliseconds and the exponent."""
    if frame.empty:
        return "How cost grows: nothing ran"
    lines = ["How cost grows: ms at each value of a letter; exponent of the power law, 1 is linear"]
    for (op, letter), part in frame.groupby(["op", "letter"], sort=False):
        meaning = next(what for own, what, _ in OPS[op]["sweep"].values() if own == letter)
        seconds = part.pivot(index="contender", columns="value", values="seconds")
        lines.append(f"{op}, {meaning}, {letter} = {', '.join(map(str, seconds))}")
        for name, exponent in part.groupby("contender", sort=False)["exponent"].first().items():
            cells = "".join(f"{1e3 * each:10.2f}" for each in seconds.loc[name])  # nan: not run
            lines.append(f"  {name:32}{cells}   exponent {exponent:.2f}")
    return "\n".join(lines)


def write(
    folder: Path, frame: pd.DataFrame, growth: pd.DataFrame, roof: Mapping[str, float]
) -> Path:
    """Write what `running` measured to ``results/bench/<cpu or the GPU's name>/`` of a project."""
    environment = runtime.environment()
    if frame.attrs["device"] == "cpu":  # of a GPU that is there but was not used
        environment |= {"accelerator": None, "accelerator_memory": None}
    ran, absent = frame[frame["seconds"].notna()], frame[frame["seconds"].isna()]
    gpu = environment["accelerator"]
    run = Run(
        notebook=BENCH,
        protocol=slug(gpu or "cpu").lower(),
        tier="gpu" if gpu else "cpu",
        seed=0,
        values=tuple(_values(ran, growth, roof)),
        code={"lock": results.digest(folder / "requirements.lock"), "modules": results.loaded()},
        manifest={
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "parameters": frame.attrs,
            "environment": environment,
            "commit": results.commit(folder),
            "peers": installed()["version"].to_dict(),
            "goals": json.loads(judge(frame).to_json(orient="records")),
            "profiles": ran.set_index(ran["op"] + "/" + ran["case"])["profile"].dropna().to_dict(),
            "absent": absent[["op", "case", "contender", "note"]].to_dict("records"),
        },
    )
    path = folder / "results" / BENCH / run.protocol / "0.parquet"
    results.write_run(path, run)
    return path


def _values(ran: pd.DataFrame, growth: pd.DataFrame, roof: Mapping[str, float]) -> Iterator[Value]:
    """Turn each line into values under ``op/case/contender``, a case's counts under ``op/case``."""
    for row in ran.to_dict("records"):
        if row["contender"] == "ours":
            for column, unit in COUNTS.items():
                yield Value(f"{row['op']}/{row['case']}/{column}", float(row[column]), unit)
        for column, unit in UNITS.items():
            if not pd.isna(row[column]):
                yield Value(f"{row['key']}/{column}", float(row[column]), unit)
    for row in growth.to_dict("records"):
        name = f"{row['op']}/growth/{row['case']}/{slug(row['contender'])}"
        yield Value(name, float(row["seconds"]), "seconds")
    yield from (Value(f"roof/{name}", value, "number") for name, value in roof.items())


def recorded(start: Path | None = None) -> dict[str, Run]:
    """Read the committed runs by the machine's name (``cpu``, a GPU's); none outside a project."""
    try:
        pools = results.pools(BENCH, results.root(start))
    except Refusal as refusal:
        if refusal.code != "E-PATH":
            raise
        return {}
    return {machine: pool.runs[0] for machine, pool in pools.items()}


def remeasured(records: Mapping[str, Run]) -> pd.DataFrame:
    """Read runs back: a line a contender, by its slug, with the machine and what is recorded."""
    names = ["machine", "op", "case", "contender"]
    costs: defaultdict[tuple[str, ...], dict[str, float]] = defaultdict(dict)
    for machine, record in records.items():
        for value in record.values:
            *key, column = value.name.split("/")
            if column in UNITS or column in COUNTS:
                costs[machine, *key][column] = value.value
    lines = [[*key, {**costs[key[:3]], **costs[key]}] for key in list(costs) if len(key) == 4]
    frame = pd.DataFrame([numbers for *_, numbers in lines], columns=[*UNITS, *COUNTS])
    return pd.concat([pd.DataFrame([key for *key, _ in lines], columns=names), frame], axis=1)


def regrown(records: Mapping[str, Run]) -> pd.DataFrame:
    """Read sweeps back: ``machine``, ``op``, ``letter``, ``value``, ``contender``, ``seconds``."""
    lines = [
        (machine, *match.groups(), value.value)
        for machine, record in records.items()
        for value in record.values
        if (match := re.fullmatch(r"(\w+)/growth/(\w+)=(\d+)/(\w+)", value.name))
    ]
    names = ["machine", "op", "letter", "value", "contender", "seconds"]
    return pd.DataFrame(lines, columns=names).astype({"value": int})


def reached(frame: pd.DataFrame) -> dict[str, tuple[float, float]]:
    """Return what our ops made of products reach: FLOPs for each byte that must move, and a second.

    A case in another number format than the machine's roof is left out.
    """
    ours = frame[(frame["contender"] == "ours") & (frame["flops"] > 0)]
    ours = ours[~ours["case"].str.endswith("bf16")]
    points = zip(ours["flops"] / ours["traffic"], ours["flops"] / ours["seconds"], strict=True)
    return dict(zip(ours["op"] + ", " + ours["case"], points, strict=True))


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
