"""Which experts train: the best until their scores reach p (ESFT Eq. 8), or random ones."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from moebook.errors import refuse
from moebook.methods.esft.config import Config
from moebook.methods.esft.published import from_json
from moebook.methods.esft.score import Scores
from moebook.settings import Size, checked, settings

Group = tuple[int, ...]
Expert = Annotated[int, Field(ge=0)]
# JSON has lists.
Experts = Annotated[tuple[Expert, ...], Field(min_length=1, strict=False)]
# What sums of decimal scores may lack by rounding, and still count as p.
ROUNDING = 1e-9


@settings
class Selection:
    """Which experts of each layer train, the best first, at least one a layer; and what beside."""

    #: Numbers of those that train, by layer.
    experts: Annotated[dict[int, Experts], Field(min_length=1)]
    #: Whether they train too.
    shared_experts: bool = False
    #: Whether all else trains too.
    non_expert_modules: bool = False
    #: Whether the routers train too.
    router: bool = False
    #: Layers that the scores passed over.
    left_out: Annotated[tuple[Expert, ...], Field(strict=False)] = ()

    def __post_init__(self) -> None:
        for layer, ids in self.experts.items():
            if len(set(ids)) < len(ids):
                refuse("E-RANGE", f"layer {layer}: an expert stands twice in {ids}")

    @property
    def count(self) -> int:
        """Selected experts in all layers together."""
        return sum(len(ids) for ids in self.experts.values())

    def published(self) -> dict[str, object]:
        """Return the published JSON form; our own keys, the last two, stand only when needed."""
        form: dict[str, object] = {
            "experts": {str(layer): list(ids) for layer, ids in self.experts.items()},
            "shared_experts": self.shared_experts,
            "non_expert_modules": self.non_expert_modules,
        }
        if self.router:
            form["router"] = True
        if self.left_out:
            form["left_out"] = self.left_out
        return form

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Selection:
        """Read the published JSON form."""
        return from_json(cls, path)


def select(
    scores: Scores,
    config: Config,
    *,
    groups: Mapping[int, Sequence[Group]] | None = None,
) -> Selection:
    """Take the best experts of each layer until their scores reach p (Eq. 8).

    Among equal scores the lower number comes first; each layer gets at least one expert. A total
    that misses p by rounding (of ``decimals``, or in float64) counts as p, one that misses it by
    more is refused. With ``groups`` by layer, whole groups are taken by their members' sums.

    >>> shares = {0: torch.tensor([0.5, 0.1, 0.4])}
    >>> scores = Scores(token=shares, gate=shares)
    >>> dict(select(scores, Config(threshold=0.9)).experts)
    {0: (0, 2)}
    """
    rows = scores.token if config.score == "token" else scores.gate
    if groups is not None:
        _check_groups(groups, rows)
    experts = {}
    for layer, row in rows.items():
        # Without groups each expert is chosen by itself.
        units: Sequence[tuple[int, ...]] = [(expert,) for expert in range(len(row))]
        if groups is not None:
            units = groups[layer]
        experts[layer] = tuple(chain.from_iterable(_best(row, units, config, layer)))
    return Selection(
        experts=experts,
        shared_experts=config.shared_experts,
        non_expert_modules=config.non_expert_modules,
        router=config.router,
        left_out=scores.left_out,
    )


def _check_groups(
    groups: Mapping[int, Sequence[Group]], rows: Mapping[int, Tensor]
) -> None:
    """Refuse groups that do not hold each expert of each layer once."""
    for layer, row in rows.items():
        members = sorted(chain.from_iterable(groups.get(layer, ())))
        if members != list(range(len(row))):
            wanted = f"0 to {len(row) - 1}, each once"
            refuse(
                "E-KEYS",
                f"groups of layer {layer} hold experts {members}, expected {wanted}",
            )


def _best(
    row: Tensor, units: Sequence[Group], config: Config, layer: int
) -> list[Group]:
    """Return the best units of a layer whose scores ``row [E]`` reach p together (Eq. 8)."""
    scores = _shares(row, config, layer)
    of_unit = torch.stack([scores[list(unit)].sum() for unit in units])  # [units]
    # Stable, since rounding makes ties: of equals the lower number comes first.
    order = of_unit.argsort(descending=True, stable=True)
    reached = of_unit[order].cumsum(0)  # by the best, the best two, and so on

    # What sums of decimals may lack: each of the E may have lost half a unit.
    lost = 0.0
    if config.decimals is not None:
        lost = len(row) * 0.5 * 10.0**-config.decimals
    if reached[-1] < config.threshold - ROUNDING - lost:
        best = f"all {config.score} scores together are {float(reached[-1]):.4f}"
        refuse(
            "E-RANGE",
            f"layer {layer}: {best}, below p = {config.threshold}: normalise them",
        )
    # One unit more than there are totals below p, since the next one reaches it. Where
    # even the last total misses p by rounding, all are taken.
    below = int((reached < config.threshold - ROUNDING).sum())
    count = min(below + 1, len(order))
    return [units[unit] for unit in order[:count].tolist()]


def _shares(row: Tensor, config: Config, layer: int) -> Tensor:
    """Return the scores ``[E]`` as p is compared with them: normalised, rounded, or as they are."""
    total = float(row.sum())
    if total <= 0:
        hint = f"leave it out: Scores.load(path, without=[{layer}])"
        refuse(
            "E-DATA",
            f"layer {layer}: its experts were never used, the scores are 0/0; {hint}",
        )
    # In the paper p is a share of the layer's total; the released code does not divide.
    scores = row / total if config.normalised else row
    if config.decimals is None:
        return scores
    rounded = [round(score, config.decimals) for score in scores.tolist()]
    return torch.tensor(rounded, dtype=torch.float64)


@checked
def random_selection(selection: Selection, experts: Size, seed: int | str) -> Selection:
    """Replace the experts by random ones of ``experts`` (E), as many in each layer (Table 3)."""
    rng = random.Random(f"esft/random/{seed}")
    most = max(len(ids) for ids in selection.experts.values())
    if most > experts:
        refuse(
            "E-RANGE", f"experts is {experts}, but a layer of the selection has {most}"
        )
    drawn = {}
    for layer, ids in selection.experts.items():
        drawn[layer] = tuple(rng.sample(range(experts), len(ids)))
    return replace(selection, experts=drawn)
