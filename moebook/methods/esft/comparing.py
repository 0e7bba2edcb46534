"""How concentrated a task's routing is, and how much two tasks' experts overlap (Fig. 2 and 3)."""

from __future__ import annotations

import torch

from moebook.errors import refuse
from moebook.methods.esft.scoring import Scores


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


def _best(row: torch.Tensor, top: int) -> set[int]:
    return set(row.argsort(descending=True, stable=True)[:top].tolist())
