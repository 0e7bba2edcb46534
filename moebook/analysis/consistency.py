"""Do tokens keep their experts while a model trains? Router-initialisation Sec. 5.3.3."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations, pairwise

import pandas as pd
import torch
from torch import Tensor, nn

from moebook.analysis.routers import decisions, routed
from moebook.errors import nearest, refuse

OVER = ("pairs", "successive", "joint")


def activated(model: nn.Module, batches: Iterable[Mapping[str, Tensor]]) -> Tensor:
    """Record which experts each real token activates: ``[L, T, E]``, boolean, on the CPU.

    Args:
        model: A routed model, as it is at one checkpoint.
        batches: The same held-out text at every checkpoint.

    Raises:
        Refusal: E-MODEL when the model has no routers; E-DATA when there are no tokens; E-SHAPE
            when its layers differ in their number of experts.
    """
    parts = []
    for batch in batches:
        found = decisions(model, batch)
        if len({each.logits.shape[1] for each in found}) > 1:
            refuse("E-SHAPE", "layers differ in their number of experts: compare them one by one")
        hot = [torch.zeros_like(each.logits, dtype=torch.bool) for each in found]
        parts.append(
            torch.stack([h.scatter(1, each.ids, True) for h, each in zip(hot, found, strict=True)])
        )
    if not parts or not sum(part.shape[1] for part in parts):
        refuse("E-DATA", f"no tokens for the {len(routed(model))} routers: give at least one batch")
    return torch.cat(parts, dim=1)


def consistency(checkpoints: Sequence[Tensor], *, over: str = "pairs") -> pd.DataFrame:
    """Compare the experts that tokens activate at several checkpoints by the Jaccard index.

    For a token and layer, ``|A and B| / |A or B|`` of the sets of activated experts; averaged over
    tokens. "The overlap of activated experts for each input token across checkpoints" leaves open
    which checkpoints are compared. With K = 1 the index of two is 1 or 0, so the mean is the share
    of tokens that kept their expert; two unrelated uniform routings give 1/E.

    Args:
        checkpoints: At least two of `activated`, in the order of training (the paper: at the
            start, a third, two thirds and the end).
        over: ``"pairs"`` averages over all pairs of checkpoints; ``"successive"`` over neighbours;
            ``"joint"`` takes the intersection over the union of all of them at once.

    Returns:
        One row a layer: ``layer`` (its place among the sparse ones) and ``consistency`` in [0, 1].

    Raises:
        Refusal: E-DATA for fewer than two; E-SHAPE when their shapes differ; E-CHOICE.
    """
    if over not in OVER:
        refuse("E-CHOICE", f"over is {over!r}; {nearest(over, OVER)}")
    if len(checkpoints) < 2:
        refuse("E-DATA", f"{len(checkpoints)} checkpoints: consistency compares at least two")
    shapes = {tuple(each.shape) for each in checkpoints}
    if len(shapes) > 1:
        refuse("E-SHAPE", f"checkpoints differ in [L, T, E]: {sorted(shapes)}; use the same text")
    groups: dict[str, Iterable[Sequence[Tensor]]] = {
        "pairs": combinations(checkpoints, 2),
        "successive": pairwise(checkpoints),
        "joint": [checkpoints],
    }
    scores = torch.stack([_jaccard(torch.stack([*group])) for group in groups[over]]).mean(0)
    return pd.DataFrame({"layer": range(len(scores)), "consistency": scores.tolist()})


def overall(watched: Mapping[int, Tensor], steps: Iterable[int]) -> float:
    """Average `consistency` over layers, of the checkpoints after some steps (Table 6).

    Args:
        watched: Step to `activated`.
        steps: At least two of them.
    """
    return float(consistency([watched[step] for step in steps]).consistency.mean())


def _jaccard(group: Tensor) -> Tensor:
    """Return the mean index over tokens by layer ``[L]`` of sets ``[checkpoints, L, T, E]``."""
    shared, either = group.all(0).sum(-1), group.any(0).sum(-1)
    return (shared.double() / either).mean(-1)
