"""The goals, as data, and whether a run meets them."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pandas as pd

Comparison = Callable[[float, float], bool]
KINDS: dict[str, tuple[str, Comparison, Callable[[Any, Any], float]]] = {
    "faster": ("at least {:g} x as fast", operator.ge, lambda ours, other: other.ratio),
    "within": ("at most {:g} x its time", operator.le, lambda ours, other: 1 / other.ratio),
    "memory": ("at most {:g} x what it keeps", operator.le, lambda ours, its: ours.kept / its.kept),
    "seconds": ("at most {:g} s", operator.le, lambda ours, other: ours.seconds),
}
"""Of each kind of goal: its wording, on which side of the bound a number is right, and the number,
from the lines of ours and the other. What one keeps are the bytes held for its backward pass."""


@dataclass(frozen=True)
class Goal:
    """What an op is to reach in one case.

    Attributes:
        op, case: The case.
        against: The contender that it is measured by.
        kind: One of `KINDS`.
        bound: See there.
        device: ``"cpu"`` or ``"cuda"``.
    """

    op: str
    case: str
    against: str
    kind: str
    bound: float
    device: str = "cpu"

    def __str__(self) -> str:
        return KINDS[self.kind][0].format(self.bound)


GOALS = (
    Goal("experts", "fine", "eager", "faster", 15),
    Goal("experts", "fine", "grouped_mm", "faster", 1.25),
    Goal("experts", "fine", "floor", "within", 1.25),
    Goal("experts", "coarse", "floor", "within", 1.12),
    Goal("experts", "coarse_bf16", "own float32", "faster", 2),
    Goal("split_experts", "half", "grouped_mm + mask", "faster", 1.5),
    Goal("split_experts", "half", "floor", "within", 1.15),
    Goal("adapters", "step", "published form", "faster", 10),
    Goal("adapters", "step", "grouped_mm", "faster", 2),
    Goal("lora_mixture", "four", "one LoRA of PEFT", "within", 1.1),
    Goal("groups", "eight_of_38", "ours", "seconds", 0.1),
    Goal("nearest", "pool", "semantic_search", "faster", 20),
    Goal("duplicates", "candidates", "the paper's loops", "faster", 30),
    Goal("bank", "bank", "set_adapter, all shots at once", "faster", 3),
    Goal("adapters", "forward", "residual add", "within", 1.5, "cuda"),
    Goal("adapters", "behind_ffn", "frozen FFN alone", "within", 1.06, "cuda"),
    Goal("experts", "fine", "floor", "within", 1 / 0.75, "cuda"),
    Goal("experts", "fine", "grouped_mm", "faster", 1.4, "cuda"),
    Goal("experts", "fine", "grouped_mm", "memory", 0.4, "cuda"),
    Goal("split_experts", "half", "own full gradients", "within", 1.1 * 2.5 / 3, "cuda"),
    Goal("lora_mixture", "four", "frozen layer alone", "within", 1.08, "cuda"),
    Goal("duplicates", "pool", "ours", "seconds", 0.06, "cuda"),
)
"""For one thread of a CPU, and for an H200 in bfloat16."""
STATED = {"cpu": "full", "cuda": "model"}
"""The scale that the goals of each kind of device are stated for."""
ROUNDS = 5
"""The fewest that count for a goal."""


def stated(frame: pd.DataFrame) -> bool:
    """Whether goals are stated for the scale, rounds and threads that a run had."""
    had = frame.attrs
    return had["scale"] == STATED[had["device"]] and had["rounds"] >= ROUNDS and had["threads"] == 1


def judge(frame: pd.DataFrame) -> pd.DataFrame:
    """Compare what `running.measure` found with the goals of its device.

    Returns:
        One row a goal whose op is in the frame: ``op``, ``case``, ``against``, ``goal``,
        ``measured``, ``verdict`` and ``reason``. The verdict is ``met``, ``missed``, or ``not
        run``, where the contender took no part; ``not stated`` where the settings are not those of
        the goals. An op that refuses its case has missed the goal. The reason of a missed goal is
        what our time consists of, and what the floor alone would take, in multiples of the other's.
    """
    kept = frame.astype({"kept": float})  # None is no number
    cases = {key: part.set_index("contender") for key, part in kept.groupby(["op", "case"])}
    lines = []
    for goal in GOALS:
        key = goal.op, goal.case
        if goal.device == frame.attrs["device"] and (key in cases or (goal.op, "") in cases):
            value, verdict, reason = _judged(goal, cases.get(key))
            if not stated(frame):
                verdict, reason = "not stated", ""
            lines.append([*key, goal.against, str(goal), value, verdict, reason])
    columns = ["op", "case", "against", "goal", "measured", "verdict", "reason"]
    return pd.DataFrame(lines, columns=columns)


def _judged(goal: Goal, case: pd.DataFrame | None) -> tuple[float, str, str]:
    """Return what was measured, the verdict and the reason; without a case its op did not run."""
    if case is None:
        return math.nan, "not run", ""
    ours, (_, right, measured) = case.loc["ours"], KINDS[goal.kind]
    if pd.isna(ours["seconds"]):
        return math.nan, "missed", str(ours["note"])
    there = goal.against in case.index
    value = float(measured(ours, case.loc[goal.against])) if there else math.nan
    if math.isnan(value):
        return value, "not run", ""
    if right(value, goal.bound):
        return value, "met", ""
    if goal.kind == "memory" or not isinstance(ours["profile"], dict):
        return value, "missed", ""
    times = 1 / value if goal.kind == "faster" else value
    parts = {name: share * times for name, share in ours["profile"].items()}
    told = ", ".join(f"{name} {part:.2f}" for name, part in parts.items() if part >= 0.005)
    if goal.against != "floor" and "floor" in case.index:
        told += f"; the floor alone {times * case.loc['floor', 'ratio']:.2f}"
    return value, "missed", told
