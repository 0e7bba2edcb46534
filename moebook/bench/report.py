"""What a run leaves: a table to read, and a record with the environment it was made in."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd

from moebook import results, runtime
from moebook.bench.goals import judge
from moebook.bench.peers import installed
from moebook.bench.running import find, slug
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
    why = [f"  {row.op} / {row.case}, {row.against}: {row.reason}" for row in missed.itertuples()]
    told = ["", "Missed goals: what our time consists of, in multiples of the other's", *why]
    return "\n".join([*lines, *(told if why else []), "", _summary(goals)])


def _line(row: pd.Series, floor: float, aims: str) -> str:
    name = f"  {row['contender']}"
    if pd.isna(row["seconds"]):
        return f"{name:34}not run: {row['note']}" + (f"  [{aims}]" if aims else "")
    extra = "" if pd.isna(row["memory"]) else f"{row['memory'] / 1e6:.0f}"
    multiple = "" if math.isnan(floor) else f"{row['ratio'] / floor:.2f}"
    numbers = f"{1e3 * row['seconds']:10.2f}{1e3 * row['wall']:10.2f}{row['ratio']:9.2f}"
    return f"{name:34}{numbers}{multiple:>9}{extra:>10}  {aims}".rstrip()


def _summary(goals: pd.DataFrame) -> str:
    counts = goals["verdict"].value_counts()
    parts = [f"{counts.get(verdict, 0)} {verdict}" for verdict in ("met", "missed", "not run")]
    if not len(goals) or "not stated" in counts:
        return "no goals are stated for these cases"
    return f"{len(goals)} goals: {', '.join(parts)}"


def growth_table(frame: pd.DataFrame) -> str:
    """Return a sweep as text: a line a contender and letter, its milliseconds and the exponent."""
    if frame.empty:
        return "How cost grows: nothing ran"
    meanings = {(n, a.letter): a.meaning for n in set(frame["op"]) for a in find(n).axes}
    lines = ["How cost grows: ms at each value of a letter; exponent of the power law, 1 is linear"]
    for (op, letter), part in frame.groupby(["op", "letter"], sort=False):
        seconds = part.pivot(index="contender", columns="value", values="seconds")
        lines.append(f"{op}, {meanings[op, letter]}, {letter} = {', '.join(map(str, seconds))}")
        for name, exponent in part.groupby("contender", sort=False)["exponent"].first().items():
            cells = "".join(f"{1e3 * each:10.2f}" for each in seconds.loc[name])  # nan: not run
            lines.append(f"  {name:32}{cells}   exponent {exponent:.2f}")
    return "\n".join(lines)


def write(
    folder: Path, frame: pd.DataFrame, growth: pd.DataFrame, roof: Mapping[str, float]
) -> Path:
    """Write a whole run to ``results/bench/<cpu or the GPU's name>/``, in place of the last one.

    Args:
        folder: The project.
        frame: From `running.measure`.
        growth: From `running.growth`.
        roof: From `running.ceilings`.
    """
    environment = runtime.environment()
    if frame.attrs["device"] == "cpu":  # of a GPU that is there but was not used
        environment |= {"accelerator": None, "accelerator_memory": None}
    ran, absent = frame[frame["seconds"].notna()], frame[frame["seconds"].isna()]
    gpu = environment["accelerator"]
    lock = results.digest(folder / "requirements.lock")
    run = Run(
        notebook=BENCH,
        protocol=slug(gpu or "cpu").lower(),
        tier="gpu" if gpu else "cpu",
        seed=0,
        values=tuple(_values(frame, growth, roof)),
        code={"lock": lock, "modules": results.loaded()},
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


def _values(
    frame: pd.DataFrame, growth: pd.DataFrame, roof: Mapping[str, float]
) -> Iterator[Value]:
    """Turn each line into values under ``op/case/contender``, a case's counts under ``op/case``."""
    for row in frame[frame["seconds"].notna()].to_dict("records"):
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
