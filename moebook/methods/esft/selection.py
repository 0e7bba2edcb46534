"""The choice of a task's experts (Eq. 8), and the published form of an expert configuration."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from moebook import results
from moebook.errors import refuse
from moebook.methods.esft.config import Config, from_json
from moebook.methods.esft.scoring import Scores
from moebook.settings import settings

Group = tuple[int, ...]
Expert = Annotated[int, Field(ge=0)]
Experts = Annotated[tuple[Expert, ...], Field(min_length=1, strict=False)]  # JSON has lists
FLAGS = ("shared_experts", "non_expert_modules", "router")
SLACK = 1e-9
"""What sums of decimal scores may lack by rounding in float64, and still count as p."""


@settings
class Selection:
    """Which experts of each layer train, and what beside them.

    Attributes:
        experts: Decoder layer -> expert numbers, the best first; at least one a layer.
        shared_experts, non_expert_modules, router: As in `Config`.
    """

    experts: Annotated[dict[int, Experts], Field(min_length=1)]
    shared_experts: bool = False
    non_expert_modules: bool = False
    router: bool = False

    def __post_init__(self) -> None:
        for layer, ids in self.experts.items():
            if len(set(ids)) < len(ids):
                refuse("E-RANGE", f"layer {layer}: an expert stands twice in {ids}")

    @property
    def count(self) -> int:
        """Selected experts in all layers together."""
        return sum(map(len, self.experts.values()))

    def published(self) -> dict[str, object]:
        """Return the published JSON form; ``router`` is our own key and stands only when true."""
        flags = {name: getattr(self, name) for name in FLAGS if name != "router" or self.router}
        return {"experts": {str(n): list(ids) for n, ids in self.experts.items()}, **flags}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the published JSON form, whole or not at all."""
        results.write(Path(path), json.dumps(self.published()))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Selection:
        """Read the published JSON form."""
        return from_json(cls, path)


def select(
    scores: Scores, config: Config, *, groups: Mapping[int, Sequence[Group]] | None = None
) -> Selection:
    """Take the best experts of each layer until their scores reach p (Eq. 8).

    Among equal scores the lower number comes first. Each layer gets at least one expert, since p is
    above 0. A total that misses p only by rounding (of ``decimals``, or in float64) counts as p;
    one that misses it by more (unnormalised gate scores) is refused.

    Args:
        scores: From `measure` or a file.
        config: The settings; the selection takes over its three options.
        groups: Layer -> groups of experts, from `group`: then whole groups are taken, the score of
            a group is the sum of its members'.
    """
    experts = {}
    for layer, row in getattr(scores, config.score).items():
        units = [(expert,) for expert in range(len(row))] if groups is None else groups[layer]
        experts[layer] = tuple(e for unit in _taken(row, units, config, layer) for e in unit)
    return Selection(experts=experts, **{name: getattr(config, name) for name in FLAGS})


def random_selection(selection: Selection, experts: int, seed: int | str) -> Selection:
    """Replace the experts by random ones of ``experts`` (E), as many in each layer (Table 3)."""
    rng = random.Random(f"esft/random/{seed}")
    drawn = {
        layer: tuple(rng.sample(range(experts), len(ids)))
        for layer, ids in selection.experts.items()
    }
    return Selection(experts=drawn, **{name: getattr(selection, name) for name in FLAGS})


def _taken(row: Tensor, units: Sequence[Group], config: Config, layer: int) -> list[Group]:
    """Return the best units of a layer whose scores ``row [E]`` reach p together."""
    total = float(row.sum())
    if total <= 0:
        refuse("E-DATA", f"layer {layer}: its experts were never used, the scores are 0/0")
    values = row / total if config.normalised else row
    slack = SLACK
    if config.decimals is not None:
        values = torch.tensor([round(value, config.decimals) for value in values.tolist()]).double()
        slack += len(row) * 0.5 * 10.0**-config.decimals
    merged = torch.stack([values[list(unit)].sum() for unit in units])
    order = merged.argsort(descending=True, stable=True)
    reached = merged[order].cumsum(0)
    if reached[-1] < config.threshold - slack:
        refuse(
            "E-RANGE",
            f"layer {layer}: all {config.score} scores together are {float(reached[-1]):.4f} and"
            f" never reach p = {config.threshold}; use normalised scores or a smaller p",
        )
    count = min(int((reached < config.threshold - SLACK).sum()) + 1, len(order))
    return [units[unit] for unit in order[:count].tolist()]
