"""The goals, as data, and whether a run meets them."""

from __future__ import annotations

import math
import operator
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

KINDS: dict[str, tuple[str, Any, Any]] = {
    "faster": ("at least {:g} x as fast", operator.ge, lambda ours, other: other.ratio),
    "within": ("at most {:g} x its time", operator.le, lambda ours, other: 1 / other.ratio),
    "memory": ("at most {:g} x what it keeps", operator.le, lambda ours, its: ours.kept / its.kept),
    "seconds": ("at most {:g} s", operator.le, lambda ours, other: ours.seconds),
}
"""Of each kind of goal: its wording, on which side of the bound a number is right, and the number,
from the lines of ours and the other. What one keeps are the bytes held for its backward pass."""


GOALS: dict[str, list[tuple[str, str, str, str, float]]] = yaml.safe_load(
    Path(__file__).with_suffix(".yaml").read_text()
)
"""By kind of device: op, case, the contender that it is measured by, kind, and bound."""
STATED = {"cpu": "full", "cuda": "model"}
"""The scale that the goals of each kind of device are stated for."""
ROUNDS = 5
"""The fewest that count for a goal."""


def stated(frame: pd.DataFrame) -> bool:
    """Whether goals are stated for the scale, rounds and threads that a run had."""
    had = frame.attrs
    return had["scale"] == STATED[had["device"]] and had["rounds"] >= ROUNDS and had["threads"] == 1


def judge(frame: pd.DataFrame) -> pd.DataFrame:
    """Compare what `running.measure` found with the goals of its device, one row a goal.

    The verdict is ``met``, ``missed`` (also where our op refuses the case), ``not run``, where the
    contender took no part, or ``not stated``, where the settings are not those of the goals. The
    reason of a missed goal is what our time consists of, and what the floor alone would take, in
    multiples of the other's.
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
