"""What a run leaves: a table to read, and a record with the environment it was made in."""

from __future__ import annotations

import hashlib
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
from moebook.bench.running import slug
from moebook.errors import refuse
from moebook.results import Record, Value

RUN = "kernels"
"""Name of the record's notebook: the one that shows it, whose hashes tell what it depends on."""

UNITS = {
    "seconds": "seconds",
    "wall": "seconds",
    "ratio": "ratio",
    "memory": "bytes",
    "kept": "bytes",
}
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


def write(
    folder: Path,
    frame: pd.DataFrame,
    growth: pd.DataFrame,
    roof: Mapping[str, float],
) -> Path:
    """Write the record of a whole run to ``results/bench/<cpu or the GPU's name>/``.

    The manifest goes last and holds the record's hash, so that half a pair is never taken for one.

    Args:
        folder: The project.
        frame: From `running.measure`.
        growth: From `running.growth`.
        roof: From `running.ceilings`.
    """
    environment = runtime.environment()
    ran, absent = frame[frame["seconds"].notna()], frame[frame["seconds"].isna()]
    gpu = environment["accelerator"] if frame.attrs["device"] == "cuda" else None
    values = list(_values(frame))
    values += [
        Value(
            f"{row['op']}/growth/{row['letter']}={row['value']}/{slug(row['contender'])}",
            float(row["seconds"]),
            "seconds",
        )
        for row in growth.to_dict("records")
    ]
    values += [Value(f"roof/{name}", value, "number") for name, value in roof.items()]
    record = Record(RUN, "gpu" if gpu else "cpu", tuple(values))
    text = record.to_text()
    hashes = results.current(RUN, folder, accelerator=gpu is not None)
    manifest = {
        "notebook": RUN,
        "tier": record.scale,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hashes": {**hashes, "record": hashlib.sha256(text.encode()).hexdigest()},
        "parameters": frame.attrs,
        "environment": environment,
        "commit": results.commit(folder),
        "peers": installed()["version"].to_dict(),
        "goals": json.loads(judge(frame).to_json(orient="records")),
        "profiles": (ran.set_index(ran["op"] + "/" + ran["case"])["profile"].dropna()).to_dict(),
        "absent": absent[["op", "case", "contender", "note"]].to_dict("records"),
    }
    place = folder / "results" / "bench" / slug(gpu or "cpu").lower()
    results.write(place / "record.json", text)
    results.write(place / "manifest.json", json.dumps(manifest, indent=1) + "\n")
    return place / "record.json"


def recorded(start: Path | None = None) -> dict[str, Record]:
    """Read the committed runs by the machine's name: ``cpu`` and those of GPUs.

    Args:
        start: Where to look for the project, from there upwards; the working directory by default.
            Without a project there are no runs.

    Raises:
        Refusal: E-RECORD for a record that is not its manifest's.
    """
    begin, found = (start or Path.cwd()).resolve(), {}
    folders = [folder for folder in (begin, *begin.parents) if (folder / "_config.yml").is_file()]
    for path in sorted(path for f in folders[:1] for path in f.glob("results/bench/*/record.json")):
        record = results.read(path)
        if record.manifest.get("hashes", {}).get("record") != results.digest(path):
            refuse("E-RECORD", f"{path} is not the record of its manifest; run moebook bench")
        found[path.parent.name] = record
    return found


def remeasured(records: Mapping[str, Record]) -> pd.DataFrame:
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


def _values(frame: pd.DataFrame) -> Iterator[Value]:
    """Turn each measured line into values under ``op/case/contender``, counts under ``op/case``."""
    for row in frame[frame["seconds"].notna()].to_dict("records"):
        if row["contender"] == "ours":
            for column, unit in COUNTS.items():
                yield Value(f"{row['op']}/{row['case']}/{column}", float(row[column]), unit)
        for column, unit in UNITS.items():
            if not pd.isna(row[column]):
                yield Value(f"{row['key']}/{column}", float(row[column]), unit)
