"""What a run says: its goals, a table to read, a record with its environment, read back."""

from __future__ import annotations

import json
import math
import operator
from collections import defaultdict
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from moebook import results, runtime
from moebook.bench.running import OPS, ROUNDS, STATED, installed, slug
from moebook.errors import Refusal
from moebook.results import Run, Value, store
from moebook.results.store import BENCH

UNITS = {"seconds": "seconds", "wall": "seconds", "ratio": "ratio",
         "memory": "bytes", "kept": "bytes"}  # fmt: skip
COUNTS = {"flops": "count", "traffic": "bytes"}
"""What is recorded of each contender and of each case."""
KINDS: dict[str, tuple[str, Any, Any]] = {
    "faster": ("at least {:g} x as fast", operator.ge, lambda ours, other: other.ratio),
    "within": ("at most {:g} x its time", operator.le, lambda ours, other: 1 / other.ratio),
    "memory": ("at most {:g} x its memory", operator.le, lambda ours, its: ours.kept / its.kept),
    "seconds": ("at most {:g} s", operator.le, lambda ours, other: ours.seconds),
}
"""Of each kind of goal: its wording, on which side of the bound a number is right, and the number
from the lines of ours and the other."""
GOALS = results.read_yaml(Path(__file__).with_name("goals.yaml"))
"""By kind of device: op, case, the contender that it is measured by, kind, and bound."""


def stated(frame: pd.DataFrame) -> bool:
    """Whether goals are stated for the scale, rounds and threads that a run had."""
    had = frame.attrs
    return had["scale"] == STATED[had["device"]] and had["rounds"] >= ROUNDS and had["threads"] == 1


def judge(frame: pd.DataFrame) -> pd.DataFrame:
    """Compare what `running.measure` found with the goals of its device, one row a goal.

    The verdict is ``met``, ``missed`` (also where our op refuses the case; the reason is where our
    time goes), ``not run`` (by the contender) or ``not stated`` (for these settings).
    """
    numbers = frame.astype({"kept": float})  # None is no number
    cases = {key: part.set_index("contender") for key, part in numbers.groupby(["op", "case"])}
    lines = []
    for op, case, against, kind, bound in GOALS[frame.attrs["device"]]:
        if (op, case) in cases:
            value, verdict, reason = _judged(cases[op, case], against, kind, bound)
            if not stated(frame):
                verdict, reason = "not stated", ""
            lines.append([op, case, against, KINDS[kind][0].format(bound), value, verdict, reason])
    columns = ["op", "case", "against", "goal", "measured", "verdict", "reason"]
    return pd.DataFrame(lines, columns=columns)


def _judged(case: pd.DataFrame, against: str, kind: str, bound: float) -> tuple[float, str, str]:
    """Return what was measured, the verdict and the reason."""
    ours, (_, right, measured) = case.loc["ours"], KINDS[kind]
    if pd.isna(ours["seconds"]):
        return math.nan, "missed", str(ours["note"])
    value = float(measured(ours, case.loc[against])) if against in case.index else math.nan
    if math.isnan(value):
        return value, "not run", ""
    if right(value, bound):
        return value, "met", ""
    if kind == "memory" or not isinstance(ours["profile"], dict):
        return value, "missed", ""
    times = 1 / value if kind == "faster" else value
    parts = {name: share * times for name, share in ours["profile"].items()}
    reason = ", ".join(f"{name} {part:.2f}" for name, part in parts.items() if part >= 0.005)
    if against != "floor" and "floor" in case.index:
        reason += f"; the floor alone {times * case.loc['floor', 'ratio']:.2f}"
    return value, "missed", reason


def table(frame: pd.DataFrame) -> str:
    """Return a run as text: a line a contender, its time over ours and the floor's, its goals."""
    goals, case = judge(frame), ["op", "case"]
    numbers = goals["measured"].map(lambda value: "" if pd.isna(value) else f" ({value:.2f})")
    aims = goals.assign(aim=goals["goal"] + ": " + goals["verdict"] + numbers)
    aims = aims.groupby([*case, "against"])["aim"].agg("; ".join)
    floors = frame[frame["contender"] == "floor"].set_index(case)["ratio"].rename("floor")
    lines = frame.join(floors, on=case).join(aims, on=[*case, "contender"])
    absent = ("not run: " + lines["note"]).where(lines["seconds"].isna(), "")
    shown = pd.DataFrame({
        "ms": 1e3 * lines["seconds"], "wall ms": 1e3 * lines["wall"], "ratio": lines["ratio"],
        "x floor": lines["ratio"] / lines["floor"], "extra MB": lines["memory"].astype(float) / 1e6,
    }).map("{:.2f}".format, na_action="ignore")  # fmt: skip
    shown["goal"] = absent + lines["aim"].astype(object).fillna("")
    shown.index = lines["op"] + " / " + lines["case"] + ": " + lines["contender"]
    text = [shown.to_string(na_rep="", max_colwidth=None)]
    missed = goals[goals["verdict"] == "missed"]
    if len(missed):
        text += ["", "Missed goals: where our time goes, in multiples of the other's"]
        text += [f"  {g.op} / {g.case}, {g.against}: {g.reason}" for g in missed.itertuples()]
    counts = goals["verdict"].value_counts()
    parts = [f"{counts.get(verdict, 0)} {verdict}" for verdict in ("met", "missed", "not run")]
    unstated = not len(goals) or "not stated" in counts
    summary = f"{len(goals)} goals: {', '.join(parts)}"
    return "\n".join([*text, "", "no goals are stated for these cases" if unstated else summary])


def growth_table(frame: pd.DataFrame) -> str:
    """Return a sweep as text: a line a contender and letter, its milliseconds and the exponent."""
    if frame.empty:
        return "How cost grows: nothing ran"
    lines = ["How cost grows: ms at each value of a letter, then the exponent (1 is linear)"]
    for (op, letter), part in frame.groupby(["op", "letter"], sort=False):
        meaning = next(what for own, what, _ in OPS[op]["sweep"].values() if own == letter)
        times = part.pivot(index="contender", columns="value", values="seconds").mul(1e3)
        lines.append(f"{op}, {meaning}, {letter} = {', '.join(map(str, times))}")
        times["exponent"] = part.groupby("contender")["exponent"].first()
        lines.append(times.to_string(header=False, index_names=False, float_format="{:.2f}".format))
    return "\n".join(lines)


def write(
    folder: Path, frame: pd.DataFrame, growth: pd.DataFrame, roof: Mapping[str, float]
) -> Path:
    """Write what `running` measured to ``results/bench/<cpu or the GPU's name>/`` of a project."""
    environment, took_part = runtime.environment(), frame["seconds"].notna()
    if frame.attrs["device"] == "cpu":  # of a GPU that is there but was not used
        environment |= {"accelerator": None, "accelerator_memory": None}
    ran, gpu = frame[took_part], environment["accelerator"]
    lock = results.digest(folder / "requirements.lock")
    run = Run(
        notebook=BENCH,
        protocol=slug(gpu or "cpu").lower(),
        tier="gpu" if gpu else "cpu",
        seed=0,
        values=tuple(_values(ran, growth, roof)),
        code={"lock": lock, "modules": results.files.loaded()},
        manifest={
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "parameters": frame.attrs,
            "environment": environment,
            "commit": results.commit(folder),
            "peers": installed()["version"].to_dict(),
            "goals": json.loads(judge(frame).to_json(orient="records")),
            "profiles": ran.set_index(ran["op"] + "/" + ran["case"])["profile"].dropna().to_dict(),
            "absent": frame.loc[~took_part, ["op", "case", "contender", "note"]].to_dict("records"),
        },
    )
    path = folder / "results" / BENCH / run.protocol / "0.parquet"
    store.keep(run, path, folder)
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
        pools = store.pools(BENCH, results.root(start))
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
    values = [(who, each.name, each.value) for who, r in records.items() for each in r.values]
    frame = pd.DataFrame(values, columns=["machine", "name", "seconds"])
    pattern = r"^(?P<op>\w+)/growth/(?P<letter>\w+)=(?P<value>\d+)/(?P<contender>\w+)$"
    frame = frame.join(frame.pop("name").str.extract(pattern)).dropna(ignore_index=True)
    return frame.astype({"value": int})


def reached(frame: pd.DataFrame) -> dict[str, tuple[float, float]]:
    """Return what our ops made of products reach: FLOPs a byte that must move, and a second."""
    ours = frame[(frame["contender"] == "ours") & (frame["flops"] > 0)]
    ours = ours[~ours["case"].str.endswith("bf16")]  # another number format than the roof's
    points = zip(ours["flops"] / ours["traffic"], ours["flops"] / ours["seconds"], strict=True)
    return dict(zip(ours["op"] + ", " + ours["case"], points, strict=True))


def curves(frame: pd.DataFrame) -> dict[str, dict[str, np.ndarray[Any, Any]]]:
    """Return a panel for each op and letter: points (value, ms) of ours, floor, fastest other."""
    panels: dict[str, dict[str, np.ndarray[Any, Any]]] = {}
    whole = frame[~frame["contender"].str.endswith("alone")]  # those do a part of the work only
    for (op, letter), part in whole.groupby(["op", "letter"], sort=False):
        who = part["contender"].where(part["contender"].isin(["ours", "floor"]), "fastest other")
        least = part.groupby([who, "value"], sort=False)["seconds"].min().sort_index() * 1e3
        there = [name for name in ("ours", "floor", "fastest other") if name in least]
        panels[f"{op}, {letter}"] = {name: least[name].reset_index().to_numpy() for name in there}
    return panels
