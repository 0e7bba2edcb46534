"""The goals, as data, and whether a run meets them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pandas as pd

from moebook.bench.profiling import told

SAID = {
    "faster": "at least {:g} x as fast",
    "within": "at most {:g} x its time",
    "memory": "at most {:g} x what it keeps",
    "seconds": "at most {:g} s",
}


@dataclass(frozen=True)
class Goal:
    """What an op is to reach in one case.

    Attributes:
        op, case: The case.
        against: The contender that it is measured by.
        kind: ``"faster"``: at least ``bound`` times as fast; ``"within"``: at most ``bound`` times
            its seconds; ``"memory"``: at most ``bound`` of the bytes that it keeps for its backward
            pass; ``"seconds"``: at most ``bound`` seconds (of ours).
        bound: See ``kind``.
        device: ``"cpu"`` or ``"cuda"``.
    """

    op: str
    case: str
    against: str
    kind: str
    bound: float
    device: str = "cpu"

    def __str__(self) -> str:
        return SAID[self.kind].format(self.bound)

    def reached(self, ours: pd.Series, theirs: pd.Series) -> float:
        """Return the number that the bound is compared with; NaN where it was not measured."""
        if self.kind == "seconds":
            return float(ours["seconds"])
        if self.kind == "memory":
            mine, other = ours["kept"], theirs["kept"]
            return math.nan if pd.isna(mine) or not other else float(mine) / float(other)
        ratio = float(theirs["ratio"])
        return ratio if self.kind == "faster" else 1 / ratio

    def met(self, value: float) -> bool:
        """Whether a number is on the right side of the bound."""
        return value >= self.bound if self.kind == "faster" else value <= self.bound


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


def judge(frame: pd.DataFrame) -> pd.DataFrame:
    """Compare what `running.measure` found with the goals of its device.

    Returns:
        One row a goal whose op is in the frame: ``op``, ``case``, ``against``, ``goal``,
        ``measured``, ``verdict`` and ``reason``. The verdict is ``met``, ``missed``, or ``not
        run``, where the contender took no part; ``not stated`` where the sizes are not those of the
        goals. An op that refuses its case has missed the goal. The reason of a missed goal is what
        our time consists of, and what the floor alone would take, in multiples of the other's.
    """
    device = frame.attrs["device"]
    stated = frame.attrs["scale"] == STATED[device]
    cases = {key: part.set_index("contender") for key, part in frame.groupby(["op", "case"])}
    lines = []
    for goal in GOALS:
        if goal.device == device and (goal.op, goal.case) in cases:
            case = cases[goal.op, goal.case]
            value, verdict = _verdict(goal, case)
            shown = verdict if stated else "not stated"
            reason = _reason(goal, case, value) if shown == "missed" else ""
            lines.append([goal.op, goal.case, goal.against, str(goal), value, shown, reason])
    columns = ["op", "case", "against", "goal", "measured", "verdict", "reason"]
    return pd.DataFrame(lines, columns=columns)


def _verdict(goal: Goal, case: pd.DataFrame) -> tuple[float, str]:
    ours, value = case.loc["ours"], math.nan
    if pd.isna(ours["seconds"]):
        return value, "missed"
    if goal.against in case.index:
        value = goal.reached(ours, case.loc[goal.against])
    if math.isnan(value):
        return value, "not run"
    return value, "met" if goal.met(value) else "missed"


def _reason(goal: Goal, case: pd.DataFrame, value: float) -> str:
    ours = case.loc["ours"]
    if pd.isna(ours["seconds"]):
        return str(ours["note"])
    if goal.kind == "memory" or not isinstance(ours["profile"], dict):
        return ""
    times = 1 / value if goal.kind == "faster" else value
    parts = told(ours["profile"], times)
    if goal.against == "floor" or "floor" not in case.index:
        return parts
    return f"{parts}; the floor alone {times * case.loc['floor', 'ratio']:.2f}"
