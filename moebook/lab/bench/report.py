"""What a run says: its goals, a table, a record with its environment, read back."""

from __future__ import annotations

import json
import math
import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from moebook import runtime, storage
from moebook.errors import Refusal
from moebook.lab.bench.running import OPS, ROUNDS, STATED, installed, slug
from moebook.lab.records import Run, Value, store
from moebook.lab.records.store import BENCH

UNITS = {
    "seconds": "seconds",
    "wall": "seconds",
    "ratio": "ratio",
    "memory": "bytes",
    "kept": "bytes",
}
"""What is recorded of each contender."""
COUNTS = {"flops": "count", "traffic": "bytes"}
"""What is recorded of each case."""
WORDINGS = {
    "faster": "at least {:g} x as fast",
    "within": "at most {:g} x its time",
    "memory": "at most {:g} x its memory",
    "seconds": "at most {:g} s",
}
"""The kinds of goals."""
GOALS = storage.read_yaml(Path(__file__).with_name("goals.yaml"))
"""By kind of device: op, case, the contender it is measured by, kind, and bound."""


def stated(frame: pd.DataFrame) -> bool:
    """Whether goals are stated for the scale, rounds and threads that a run had."""
    run = frame.attrs
    at_scale = run["scale"] == STATED[run["device"]]
    return at_scale and run["rounds"] >= ROUNDS and run["threads"] == 1


def judge(frame: pd.DataFrame) -> pd.DataFrame:
    """Compare what `running.measure` found with its device's goals, one row a goal.

    The verdict is ``met``, ``missed`` (also where our op refuses the case; the reason
    is where our time goes), ``not run`` (by the contender) or ``not stated`` (for these
    settings).
    """
    numbers = frame.astype({"kept": float})  # None is no number
    cases = {}
    for key, rows in numbers.groupby(["op", "case"]):
        cases[key] = rows.set_index("contender")
    lines = []
    for op, case, against, kind, bound in GOALS[frame.attrs["device"]]:
        if (op, case) not in cases:
            continue
        value, verdict, reason = _judged(cases[op, case], against, kind, bound)
        if not stated(frame):
            verdict = "not stated"
            reason = ""
        goal = WORDINGS[kind].format(bound)
        lines.append([op, case, against, goal, value, verdict, reason])
    columns = ["op", "case", "against", "goal", "measured", "verdict", "reason"]
    return pd.DataFrame(lines, columns=columns)


def measured(kind: str, ours: pd.Series, other: pd.Series) -> float:
    """The number that a goal of a kind bounds, from the lines of ours and the other."""
    if kind == "faster":
        return float(other.ratio)
    if kind == "within":
        return float(1 / other.ratio)
    if kind == "memory":
        return float(ours.kept / other.kept)
    return float(ours.seconds)


def right(kind: str, value: float, bound: float) -> bool:
    """Whether a number is on the right side of a goal's bound."""
    compare = operator.ge if kind == "faster" else operator.le
    return bool(compare(value, bound))


def _judged(
    case: pd.DataFrame, against: str, kind: str, bound: float
) -> tuple[float, str, str]:
    """Return what was measured, the verdict and the reason."""
    ours = case.loc["ours"]
    if pd.isna(ours["seconds"]):
        return math.nan, "missed", str(ours["note"])
    if against not in case.index:
        return math.nan, "not run", ""
    value = measured(kind, ours, case.loc[against])
    if math.isnan(value):
        return value, "not run", ""
    if right(kind, value, bound):
        return value, "met", ""
    if kind == "memory" or not isinstance(ours["profile"], dict):
        return value, "missed", ""
    # Our time over the other's; a goal in seconds is measured by ours.
    times = {"faster": 1 / value, "within": value, "seconds": 1.0}[kind]
    return value, "missed", _where(case, against, times)


def _where(case: pd.DataFrame, against: str, times: float) -> str:
    """Where our time goes, which is so many times the other's, in multiples of that."""
    parts = []
    for name, share in case.loc["ours", "profile"].items():
        multiple = share * times
        if multiple >= 0.005:  # less would read as 0.00
            parts.append(f"{name} {multiple:.2f}")
    reason = ", ".join(parts)
    if against == "floor" or "floor" not in case.index:
        return reason
    floor = times * case.loc["floor", "ratio"]  # over ours, times ours over the other's
    return reason if math.isnan(floor) else f"{reason}; the floor alone {floor:.2f}"


def table(frame: pd.DataFrame) -> str:
    """Return a run as text: a line a contender, beside ours and the floor; goals."""
    goals = judge(frame)
    shown = _shown(frame, goals)
    text = [shown.to_string(na_rep="", max_colwidth=None)]
    missed = goals[(goals["verdict"] == "missed") & (goals["reason"] != "")]
    if len(missed):
        text.append("")
        text.append("Missed goals: where our time goes, in multiples of the other's")
    for goal in missed.itertuples():
        text.append(f"  {goal.op} / {goal.case}, {goal.against}: {goal.reason}")
    text.append("")
    counts = goals["verdict"].value_counts()
    if goals.empty:
        text.append("no goals are stated for these cases")
    elif "not stated" in counts:
        scale = STATED[frame.attrs["device"]]
        settings = f"at scale {scale}, in {ROUNDS} rounds or more, on one thread"
        text.append(f"goals are stated for other settings: {settings}")
    else:
        verdicts = ("met", "missed", "not run")
        parts = [f"{counts.get(verdict, 0)} {verdict}" for verdict in verdicts]
        text.append(f"{len(goals)} goals: {', '.join(parts)}")
    return "\n".join(text)


def _shown(frame: pd.DataFrame, goals: pd.DataFrame) -> pd.DataFrame:
    """The table's numbers as text, and behind them the contender's goals."""
    case = ["op", "case"]
    floors = frame[frame["contender"] == "floor"].set_index(case)["ratio"]
    measured = goals["measured"]
    values = measured.map(" ({:.2f})".format).where(measured.notna(), "")
    aims = goals.assign(aim=goals["goal"] + ": " + goals["verdict"] + values)
    aims = aims.groupby([*case, "against"])["aim"].agg("; ".join)
    lines = frame.join(floors.rename("floor"), on=case)
    lines = lines.join(aims, on=[*case, "contender"])

    columns = {
        "ms": 1e3 * lines["seconds"],
        "wall ms": 1e3 * lines["wall"],
        "ratio": lines["ratio"],
        "x floor": lines["ratio"] / lines["floor"],
        "extra MB": lines["memory"].astype(float) / 1e6,
    }
    shown = pd.DataFrame(columns).map("{:.2f}".format, na_action="ignore")
    absent = ("not run: " + lines["note"]).where(lines["seconds"].isna(), "")
    aim = lines["aim"].astype(object).fillna("")
    both = zip(absent, aim, strict=True)
    shown["goal"] = ["; ".join(filter(None, texts)) for texts in both]
    shown.index = lines["op"] + " / " + lines["case"] + ": " + lines["contender"]
    return shown


def growth_table(frame: pd.DataFrame) -> str:
    """Return a sweep as text: milliseconds by contender and letter, the exponent."""
    if frame.empty:
        return "How cost grows: nothing ran"
    title = (
        "How cost grows: ms at each value of a letter, then the exponent (1 is linear)"
    )
    lines = [title]
    for (op, letter), rows in frame.groupby(["op", "letter"], sort=False):
        meanings = {axis[0]: axis[1] for axis in OPS[op]["sweep"].values()}
        times = rows.pivot(index="contender", columns="value", values="seconds") * 1e3
        values = ", ".join(map(str, times))
        lines.append(f"{op}, {meanings[letter]}, {letter} = {values}")
        times["exponent"] = rows.groupby("contender")["exponent"].first()
        number = "{:.2f}".format
        lines.append(
            times.to_string(header=False, index_names=False, float_format=number)
        )
    return "\n".join(lines)


def write(
    folder: Path, frame: pd.DataFrame, growth: pd.DataFrame, roof: Mapping[str, float]
) -> Path:
    """Write what `running` measured to ``results/bench/<cpu or GPU's name>/``."""
    environment = runtime.environment()
    if frame.attrs["device"] == "cpu":  # a GPU that is there was not used
        environment |= {"accelerator": None, "accelerator_memory": None}
    gpu = environment["accelerator"]
    took_part = frame["seconds"].notna()
    ran = frame[took_part]
    absent = frame.loc[~took_part, ["op", "case", "contender", "note"]]
    profiles = ran.set_index(ran["op"] + "/" + ran["case"])["profile"].dropna()
    lock = storage.digest(folder / "requirements.lock")
    run = Run(
        notebook=BENCH,
        protocol=slug(gpu or "cpu").lower(),
        tier="gpu" if gpu else "cpu",
        seed=0,
        values=tuple(_values(ran, growth, roof)),
        code={"lock": lock, "modules": storage.files.loaded()},
        manifest={
            "date": runtime.now(),
            "parameters": frame.attrs,
            "environment": environment,
            "commit": storage.commit(folder),
            "peers": installed()["version"].to_dict(),
            "goals": json.loads(judge(frame).to_json(orient="records")),
            "profiles": profiles.to_dict(),
            "absent": absent.to_dict("records"),
        },
    )
    path = folder / "results" / BENCH / run.protocol / "0.parquet"
    store.keep(run, path, folder)
    return path


def _values(
    ran: pd.DataFrame, growth: pd.DataFrame, roof: Mapping[str, float]
) -> Iterator[Value]:
    """Values as ``op/case/contender/..``, a case's counts as ``op/case/..``."""
    for row in ran.to_dict("records"):
        if row["contender"] == "ours":
            case = f"{row['op']}/{row['case']}"
            for column, unit in COUNTS.items():
                yield Value(f"{case}/{column}", float(row[column]), unit)
        for column, unit in UNITS.items():
            if not pd.isna(row[column]):
                yield Value(f"{row['key']}/{column}", float(row[column]), unit)
    for row in growth.to_dict("records"):
        name = f"{row['op']}/growth/{row['case']}/{slug(row['contender'])}"
        yield Value(name, float(row["seconds"]), "seconds")
    for name, value in roof.items():
        yield Value(f"roof/{name}", value, "number")


def recorded(start: Path | None = None) -> dict[str, Run]:
    """Read the committed runs by machine (``cpu``, a GPU's); none outside a project."""
    try:
        pools = store.pools(BENCH, storage.root(start))
    except Refusal as refusal:
        if refusal.code != "E-PATH":
            raise
        return {}
    return {machine: pool.runs[0] for machine, pool in pools.items()}


def remeasured(records: Mapping[str, Run], names: Iterable[str] = ()) -> pd.DataFrame:
    """Read runs back: a line a contender, with machine and recorded values.

    In a record contenders are slugs, since they are parts of values' names; those that are
    slugs of ``names`` are called by these again.
    """
    name_of = {slug(name): name for name in names}
    cases: defaultdict[tuple[str, ...], dict[str, float]] = defaultdict(dict)
    contenders: defaultdict[tuple[str, ...], dict[str, float]] = defaultdict(dict)
    for machine, record in records.items():
        for value in record.values:
            *key, column = value.name.split("/")
            if column in UNITS:
                contenders[machine, *key][column] = value.value
            elif column in COUNTS:
                cases[machine, *key][column] = value.value
    lines = []
    for (machine, op, case, contender), measured in contenders.items():
        who = {"machine": machine, "op": op, "case": case}
        who["contender"] = name_of.get(contender, contender)
        lines.append({**who, **cases[machine, op, case], **measured})
    columns = ["machine", "op", "case", "contender", *UNITS, *COUNTS]
    return pd.DataFrame(lines, columns=columns)


def regrown(records: Mapping[str, Run]) -> pd.DataFrame:
    """Read sweeps back: machine, op, letter, value, contender and seconds by point."""
    lines = []
    for machine, record in records.items():
        for value in record.values:
            lines.append((machine, value.name, value.value))
    frame = pd.DataFrame(lines, columns=["machine", "name", "seconds"])
    name = r"^(?P<op>\w+)/growth/(?P<letter>\w+)=(?P<value>\d+)/(?P<contender>\w+)$"
    parts = frame.pop("name").str.extract(name)
    return frame.join(parts).dropna(ignore_index=True).astype({"value": int})


def reached(frame: pd.DataFrame) -> dict[str, tuple[float, float]]:
    """What our ops of products reach: FLOPs a byte that must move, and a second.

    By op and case, named as a legend names them.
    """
    ours = frame[(frame["contender"] == "ours") & (frame["flops"] > 0)]
    ours = ours[~ours["case"].str.endswith("bf16")]  # not in the roof's number format
    points = {}
    for row in ours.itertuples():
        a_byte = row.flops / row.traffic
        name = f"{row.op}, {row.case}".replace("_", " ")
        points[name] = (a_byte, row.flops / row.seconds)
    return points


Points = np.ndarray[Any, Any]  # value and milliseconds, [points, 2]


def told(panels: Mapping[str, Mapping[str, Points]]) -> str:
    """Say in how many of the panels of `curves` ours is the fastest at the largest size.

    A panel in which ours and the fastest other end at different sizes does not count.
    """
    leads = []
    for panel in panels.values():
        if {"ours", "fastest other"} <= panel.keys():
            size, ours = panel["ours"][-1]
            others_size, other = panel["fastest other"][-1]
            if size == others_size:
                leads.append(ours <= other)
    counts = f"{sum(leads)} of {len(leads)}"
    return f"At the largest size ours is the fastest in {counts} sweeps"


def curves(frame: pd.DataFrame) -> dict[str, dict[str, Points]]:
    """Return a panel for each op and letter: ours, the floor and the fastest other."""
    panels: dict[str, dict[str, Points]] = {}
    # Contenders "alone" do a part of the work only.
    whole = frame[~frame["contender"].str.endswith("alone")]
    for (op, letter), rows in whole.groupby(["op", "letter"], sort=False):
        named = rows["contender"].isin(["ours", "floor"])
        who = rows["contender"].where(named, "fastest other")
        least = rows.groupby([who, "value"])["seconds"].min() * 1e3
        panel = panels[f"{op}, {letter}"] = {}
        for name in ("ours", "floor", "fastest other"):
            if name in least:
                panel[name] = least[name].reset_index().to_numpy()
    return panels
