"""Tables: how concentrated routing is, how tasks' experts overlap (Fig. 2, 3), who trains what."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, get_args

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from pydantic import AfterValidator, Field
from torch import nn

from moebook.errors import refuse, refuse_unknown, shown
from moebook.evaluation import by_benchmark
from moebook.kernels.dispatch import shapes
from moebook.methods.esft.choose import Selection, select
from moebook.methods.esft.config import Config, Pooling
from moebook.methods.esft.score import Scores
from moebook.models.anatomy import anatomy, count
from moebook.settings import Each, Size, checked, columns

ByTask = Annotated[Mapping[str, Scores], Field(min_length=1)]

# What the paper reads otherwise than the released code: one thing, the other, and both.
CHANGES: dict[str, dict[str, object]] = {
    "within_samples": {"pooling": "samples"},
    "share_of_the_total": {"normalised": True},
    "paper": {"pooling": "samples", "normalised": True},
}


def layers(model: nn.Module) -> pd.DataFrame:
    """Describe a mixture layer by layer; ``width`` is F of the dense MLP or of one expert."""
    lines = []
    for layer in anatomy(model).layers:
        lines.append((layer.kind, layer.width, layer.count, count(layer.block)))
    return pd.DataFrame(
        lines, columns=["kind", "width", "routed experts", "parameters"]
    )


def _check_used(scores: Scores) -> None:
    for layer, row in scores.gate.items():
        if not row.sum() > 0:
            refuse(
                "E-DATA",
                f"layer {layer}: its experts were never used, the scores are 0/0",
            )


def concentration(scores: Scores) -> list[float]:
    """Return the shares of a layer's gate scores ``[E]``, best first, mean over layers (Fig. 2)."""
    _check_used(scores)
    rows = torch.stack([*scores.gate.values()])  # [L, E]
    # Sec. 3.2: gate values over their total; each layer ranks its experts by itself.
    ranked = (rows / rows.sum(1, keepdim=True)).sort(descending=True).values
    return [float(share) for share in ranked.mean(0)]


def half_mass(scores: Scores) -> dict[int, float]:
    """Return, by layer, the least share of experts that hold half of the gate scores (Fig. 2)."""
    _check_used(scores)
    shares = {}
    for layer, row in scores.gate.items():
        reached = row.sort(descending=True).values.cumsum(0)  # [E]
        # The experts whose total stays below half, and the one that reaches it.
        below_half = int((reached < reached[-1] / 2).sum())
        shares[layer] = (below_half + 1) / len(row)
    return shares


@checked
def overlap(first: ByTask, second: ByTask, top: Size) -> pd.DataFrame:
    """Count the best experts by gate that two tasks share, mean over layers (Fig. 3).

    Rows are tasks of the first scores, columns of the second, from other samples; ``top`` is K.
    """
    example = next(iter(first.values()))
    for task, scores in (*first.items(), *second.items()):
        if scores.gate.keys() != example.gate.keys():
            where = f"the scores of '{task}'"
            refuse("E-KEYS", f"{where} are of other layers than the first")
        if scores.experts != example.experts:
            what = f"the scores of '{task}' are of {scores.experts} experts"
            refuse("E-SHAPE", f"{what}, those of the first of {example.experts}")
        if top > scores.experts:
            refuse("E-RANGE", f"top is {top}, expected 1 to {scores.experts} (experts)")

    def best(scores: Scores) -> list[set[int]]:
        """Return each layer's best experts."""
        chosen: list[set[int]] = []
        for layer in sorted(scores.gate):
            order = scores.gate[layer].argsort(descending=True, stable=True)
            chosen.append(set(order[:top].tolist()))
        return chosen

    def shared(one: Scores, other: Scores) -> float:
        """Return how many of their best experts two tasks share, mean over layers."""
        pairs = zip(best(one), best(other), strict=True)
        return float(np.mean([len(a & b) for a, b in pairs]))

    table = pd.DataFrame(index=list(first), columns=list(second), dtype=float)
    for task, scores in first.items():
        table.loc[task] = [shared(scores, other) for other in second.values()]
    return table


@checked
def switches(
    pooled: Mapping[str, Scores],
    thresholds: Annotated[Mapping[str, float], Field(min_length=1)],
) -> pd.DataFrame:
    """Count which experts change when the released settings are changed towards the paper's.

    Scores are given by pooling, thresholds p by score; a line is a score and one of `CHANGES`.
    """
    for pooling in get_args(Pooling):
        refuse_unknown(
            pooling, pooled, "E-KEYS", f"no scores are given for pooling '{pooling}';"
        )
    first, *others = get_args(Pooling)
    for pooling in others:
        if pooled[pooling].gate.keys() != pooled[first].gate.keys():
            where = f"the scores of pooling '{pooling}'"
            refuse("E-KEYS", f"{where} are of other layers than those of '{first}'")
    lines = {}
    for score, threshold in thresholds.items():
        released = Config.preset("released", score=score, threshold=threshold)
        was = select(pooled[released.pooling], released).experts
        for name, change in CHANGES.items():
            config = Config.preset(
                "released", score=score, threshold=threshold, **change
            )
            now = select(pooled[config.pooling], config).experts
            # By layer, how many experts only one of the two selections holds.
            moved = [len(set(was[layer]) ^ set(now[layer])) for layer in was]
            differ = sum(map(bool, moved))
            lines[score, name] = [sum(moved), differ, differ / len(moved)]
    columns = ["experts that differ", "layers that differ", "share of layers"]
    return pd.DataFrame(lines, index=columns).T.rename_axis(["score", "change"])


@checked
def counts(selections: Mapping[tuple[str, str], Selection]) -> pd.DataFrame:
    """Count the selected experts: a line a score and task, a column a layer, by number (Fig. 5).

    Where nothing was selected, as by full fine-tuning, the table is empty.
    """
    lines = {}
    for key, selection in selections.items():
        lines[key] = pd.Series(selection.experts).map(len)
    # Selections have their layers in any order, a published file's as in its JSON.
    return pd.DataFrame(lines).T.sort_index(axis=1)


def _whole(shares: pd.DataFrame) -> pd.DataFrame:
    """Refuse what is not `counts` over E: numbers in [0, 1], one at least."""
    numeric = all(dtype.kind in "biuf" for dtype in shares.dtypes)
    # Texts cannot be compared with numbers.
    inside = numeric and bool(((shares >= 0) & (shares <= 1)).all(axis=None))
    if shares.empty or not inside:
        expected = "expected `counts` over E, which are in [0, 1], one at least"
        refuse("E-RANGE", f"shares: {expected}")
    return shares


@checked
def spread(
    shares: Annotated[pd.DataFrame, AfterValidator(_whole)],
) -> dict[str, NDArray[np.float64]]:
    """Gather which share of the experts trains: by score, and in middle and outer layers (Fig. 5).

    Takes `counts` over E, by score and task. Returns score -> shares of all its tasks and layers;
    ``layers/middle`` and ``layers/outer`` -> the means over a third of the layers and over the
    others.
    """
    gathered = {
        score: part.to_numpy().ravel()
        for score, part in shares.groupby(level=0, sort=False)
    }
    # Where L is no multiple of 3, the first parts get a layer more.
    first, middle, last = np.array_split(np.arange(shares.shape[1]), 3)
    for name, where in {"middle": middle, "outer": np.r_[first, last]}.items():
        part = shares.to_numpy()[:, where]
        # A single layer has no middle: its mean is 0, not 0/0.
        gathered[f"layers/{name}"] = part.sum(1) / max(len(where), 1)
    return gathered


@checked
def by_arm(
    tables: Annotated[
        Mapping[tuple[str, str], Annotated[pd.DataFrame, columns("task domain")]],
        Field(min_length=1),
    ],
    tests: Each[str],
) -> dict[str, pd.DataFrame]:
    """Join each arm's evaluations over the tasks it was ``tuned`` on, each test a benchmark."""
    for key, table in tables.items():
        taken = {"arm", "tuned"} & {*table.columns, *table.index.names}
        if taken:
            where = f"tables: that of {shown(key)}"
            has = f"has a column '{min(taken)}' already"
            refuse("E-DATA", f"{where} {has}: give evaluations as they were asked")
    names = {name: name for name in tests}
    table = pd.concat(dict(tables), names=["arm", "tuned"]).reset_index("tuned")
    by = table.groupby("arm", sort=False)
    return {arm: by_benchmark(part.reset_index(drop=True), names) for arm, part in by}


Front = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Accuracy ``[S]`` on the target, scores ``[S, I]`` of general items: base first, then steps."""


@checked
def front(
    tables: Annotated[
        Each[Annotated[pd.DataFrame, columns("task domain asked", shares="correct")]],
        Field(min_length=1),
    ],
    target: str,
) -> Front:
    """Read a `Front` off evaluations on a ``target`` and on general tasks, which count equally."""
    solved = []
    general = []
    for table in tables:
        refuse_unknown(target, set(table.asked), "E-NAME", f"'{target}' was not asked;")
        solved.append(table[table.asked == target].correct.mean())
        rest = table[table.asked != target]
        general.append(by_benchmark(rest, {name: name for name in rest.asked}).score)
    if len({len(scores) for scores in general}) > 1:
        refuse("E-DATA", "the evaluations are of other general items: ask all the same")
    return np.array(solved), np.array(general)


@checked
def at_equal_accuracy(one: Front, other: Front) -> NDArray[np.float64]:
    """Return what one arm keeps of the general items ``[I]`` less what another keeps.

    Both are read at the highest target accuracy that both reach, on lines between the Pareto-best
    of their checkpoints: who learns less of the target has no lead from that.
    """
    _check_fronts(one, other)
    level = min(one[0].max(), other[0].max())
    return _at(one, level) - _at(other, level)


def _check_fronts(one: Front, other: Front) -> None:
    """Refuse what `front` cannot have given, and fronts of other items."""
    for name, (solved, scores) in {"one": one, "other": other}.items():
        both = {
            f"{name}, accuracy": (solved, "S", "real"),
            "scores": (scores, "S I", "real"),
        }
        shapes("at_equal_accuracy", both, empty="")
        if not (np.isfinite(solved).all() and np.isfinite(scores).all()):
            refuse("E-NONFINITE", f"at_equal_accuracy: {name} holds NaN or infinity")
        if solved.min() < 0 or solved.max() > 1:
            where = f"at_equal_accuracy: accuracies of {name}"
            refuse("E-RANGE", f"{where} lie outside [0, 1], expected shares")
    if one[1].shape[1] != other[1].shape[1]:
        items = f"{one[1].shape[1]} and {other[1].shape[1]}"
        refuse(
            "E-SHAPE", f"at_equal_accuracy: {items} general items, expected the same"
        )


def _at(front: Front, level: float) -> NDArray[np.float64]:
    """Return the scores ``[I]`` of a front where its accuracy on the target is ``level``."""
    solved, scores = front
    best = _pareto(solved, scores.mean(axis=1))
    # The level lies between two checkpoints, each with one share for all items.
    shares = [np.interp(level, solved[best], unit) for unit in np.eye(len(best))]
    kept: NDArray[np.float64] = np.array(shares) @ scores[best]
    return kept


def _pareto(solved: NDArray[np.float64], kept: NDArray[np.float64]) -> list[int]:
    """Return the checkpoints by rising accuracy that none which solves as much outdoes."""
    best = []
    for checkpoint in np.argsort(solved, kind="stable").tolist():
        as_good = solved >= solved[checkpoint]
        if kept[checkpoint] >= kept[as_good].max():
            best.append(checkpoint)
    return best
