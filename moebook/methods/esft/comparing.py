"""How concentrated routing is, how tasks' experts overlap (Fig. 2, 3), what a reading changes."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
import torch

from moebook.errors import refuse
from moebook.methods.esft.config import Config
from moebook.methods.esft.scoring import Scores
from moebook.methods.esft.selection import select

CHANGES: dict[str, dict[str, object]] = {
    "within_samples": {"pooling": "samples"},
    "share_of_the_total": {"normalised": True},
    "paper": {"pooling": "samples", "normalised": True},
}
"""What the paper reads otherwise than the released code: one thing, the other, and both."""


def concentration(scores: Scores) -> list[float]:
    """Return the shares of a layer's gate scores, best expert first, averaged over layers (Fig. 2).

    Args:
        scores: From `measure`.

    Returns:
        ``[E]``, falling, with sum 1.
    """
    rows = torch.stack([*scores.gate.values()])
    ranked = (rows / rows.sum(1, keepdim=True)).sort(descending=True).values
    found: list[float] = ranked.mean(0).tolist()
    return found


def half_mass(scores: Scores, kind: str = "gate") -> dict[int, float]:
    """Return, by layer, the least share of experts that hold half of the layer's scores (Fig. 2).

    Args:
        scores: From `measure`.
        kind: ``"gate"`` (the figure) or ``"token"``.

    Returns:
        Layer -> share in (0, 0.5]; 0.5 up to rounding of E / 2 where all experts are alike.
    """
    shares = {}
    for layer, row in getattr(scores, kind).items():
        reached = row.sort(descending=True).values.cumsum(0)
        shares[layer] = (int((reached < reached[-1] / 2).sum()) + 1) / len(row)
    return shares


def shared_top(first: Scores, second: Scores, top: int, kind: str = "gate") -> float:
    """Return how many of the best experts two measurements share, averaged over layers (Fig. 3).

    Args:
        first: Scores on one task.
        second: Scores of the same model on another task, or on another sample of the first.
        top: Experts looked at in each layer, 1 to E; 6 in the figure, its model's K.
        kind: ``"gate"`` or ``"token"``.

    Returns:
        A number from 0 to ``top``.

    Raises:
        Refusal: E-KEYS for scores of different layers, E-SHAPE for another number of experts,
            E-RANGE for ``top`` outside 1 to E.
    """
    if first.token.keys() != second.token.keys():
        refuse("E-KEYS", f"layers {sorted(first.token)} and {sorted(second.token)} differ")
    if first.experts != second.experts:
        refuse("E-SHAPE", f"{first.experts} and {second.experts} experts a layer")
    if not 1 <= top <= first.experts:
        refuse("E-RANGE", f"top is {top}, expected 1 to {first.experts} (experts)")
    shared = [
        len(_best(row, top) & _best(getattr(second, kind)[layer], top))
        for layer, row in getattr(first, kind).items()
    ]
    return sum(shared) / len(shared)


def overlap(first: Mapping[str, Scores], second: Mapping[str, Scores], top: int) -> pd.DataFrame:
    """Compare every task with every task by `shared_top` (Fig. 3).

    Args:
        first: By task, measured on one sample; these are the rows.
        second: By task, measured on another sample; these are the columns.
        top: As in `shared_top`.
    """
    shared = [[shared_top(a, b, top) for b in second.values()] for a in first.values()]
    return pd.DataFrame(shared, index=list(first), columns=list(second))


def switches(pooled: Mapping[str, Scores], thresholds: Mapping[str, float]) -> pd.DataFrame:
    """Count which experts change when the released settings are changed towards the paper's.

    Args:
        pooled: Scores by pooling, ``tokens`` and ``samples``, from `measure` or `replay`.
        thresholds: p by score.

    Returns:
        A line a score and one of `CHANGES`: ``experts that differ``, in all layers together, and
        ``layers that differ``, both counts; ``share of layers``.
    """
    lines = {}
    for score, threshold in thresholds.items():
        released = Config.preset("released", score=score, threshold=threshold)
        was = select(pooled[released.pooling], released).experts
        for name, change in CHANGES.items():
            config = Config.preset("released", score=score, threshold=threshold, **change)
            now = select(pooled[config.pooling], config).experts
            moved = [len(set(was[layer]) ^ set(now[layer])) for layer in was]
            layers = sum(map(bool, moved))
            lines[score, name] = [sum(moved), layers, layers / len(moved)]
    columns = ["experts that differ", "layers that differ", "share of layers"]
    return pd.DataFrame.from_dict(lines, "index", columns=columns).set_index(
        pd.MultiIndex.from_tuples(lines, names=["score", "change"])
    )


def _best(row: torch.Tensor, top: int) -> set[int]:
    return set(row.argsort(descending=True, stable=True)[:top].tolist())
