"""The choice of a task's experts (Eq. 8), and the published form of an expert configuration."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from moebook import results
from moebook.errors import refuse
from moebook.methods.esft.config import Config
from moebook.methods.esft.files import layer_of, read_json
from moebook.methods.esft.scoring import Scores

Groups = Mapping[int, Sequence[Sequence[int]]]
FLAGS = ("shared_experts", "non_expert_modules", "router")
SLACK = 1e-9
"""What sums of decimal scores may lack by rounding in float64, and still count as p."""


@dataclass(frozen=True)
class Selection:
    """Which experts of each layer train, and what beside them.

    Attributes:
        experts: Decoder layer -> expert numbers, the best first.
        shared_experts, non_expert_modules, router: As in `Config`.

    Raises:
        Refusal: E-DATA for no layer or a layer without experts, E-RANGE for a negative number or an
            expert that stands twice, E-TYPE for what is not a whole number.
    """

    experts: dict[int, tuple[int, ...]]
    shared_experts: bool = False
    non_expert_modules: bool = False
    router: bool = False

    def __post_init__(self) -> None:
        if not self.experts:
            refuse("E-DATA", "the selection names no layer")
        for layer, ids in self.experts.items():
            if not ids:
                refuse("E-DATA", f"layer {layer}: no expert is selected; each layer needs one")
            for expert in ids:
                if not isinstance(expert, int) or isinstance(expert, bool):
                    refuse("E-TYPE", f"layer {layer}: expert {expert!r} is not a whole number")
                if expert < 0:
                    refuse("E-RANGE", f"layer {layer}: expert {expert} is negative")
                if ids.count(expert) > 1:
                    refuse("E-RANGE", f"layer {layer}: expert {expert} stands twice")

    @property
    def count(self) -> int:
        """Selected experts in all layers together."""
        return sum(map(len, self.experts.values()))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the published JSON form, whole or not at all."""
        results.write(Path(path), json.dumps(self.published()))

    def published(self) -> dict[str, object]:
        """Return the published JSON form; ``router`` is our own key and stands only when true."""
        experts = {str(layer): list(ids) for layer, ids in self.experts.items()}
        flags = {name: getattr(self, name) for name in FLAGS if name != "router" or self.router}
        return {"experts": experts, **flags}

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Selection:
        """Read the published JSON form.

        Raises:
            Refusal: E-NOFILE, E-FORMAT, and those of the class.
        """
        found = read_json(Path(path))
        experts = found.get("experts")
        if not {"experts"} <= set(found) <= {"experts", *FLAGS} or not isinstance(experts, dict):
            refuse("E-FORMAT", f"{path}: expected experts (layer -> numbers), {', '.join(FLAGS)}")
        layers = {layer_of(key, Path(path)): ids for key, ids in experts.items()}
        for layer, ids in layers.items():
            if not isinstance(ids, list):
                refuse("E-FORMAT", f"{path}: layer {layer} holds no list of experts")
        flags = {name: value for name, value in found.items() if name != "experts"}
        if not all(isinstance(value, bool) for value in flags.values()):
            refuse("E-FORMAT", f"{path}: {', '.join(flags)} must be true or false")
        return cls({layer: tuple(layers[layer]) for layer in sorted(layers)}, **flags)


def select(scores: Scores, config: Config, *, groups: Groups | None = None) -> Selection:
    """Take the best experts of each layer until their scores reach p (Eq. 8).

    Among equal scores the lower number comes first. Each layer gets at least one expert, since p is
    above 0. A total that misses p only by rounding (of ``decimals``, or in float64) counts as p.

    Args:
        scores: From `measure` or a file.
        config: The settings.
        groups: Layer -> groups of experts, from `group`: then whole groups are taken, the score of
            a group is the sum of its members'.

    Returns:
        The selection, with the three options of the configuration.

    Raises:
        Refusal: E-DATA for a layer whose experts were never used (0/0), E-RANGE where even all
            experts together do not reach p (unnormalised gate scores), E-KEYS for missing groups.
    """
    chosen = {}
    for layer, row in getattr(scores, config.score).items():
        units = [[expert] for expert in range(len(row))] if groups is None else groups.get(layer)
        if units is None or sorted(e for unit in units for e in unit) != list(range(len(row))):
            refuse("E-KEYS", f"layer {layer}: the groups are not a partition of its experts")
        taken = _taken(row, units, config, layer)
        chosen[layer] = tuple(expert for unit in taken for expert in unit)
    return Selection(chosen, **{name: getattr(config, name) for name in FLAGS})


def random_selection(selection: Selection, experts: int, seed: int | str) -> Selection:
    """Replace the experts by random ones, as many in each layer (Table 3).

    Args:
        selection: Gives the counts and the options.
        experts: E, routed experts a layer.
        seed: Any whole number or text.

    Raises:
        Refusal: E-RANGE when a layer of the selection has more experts than the model.
    """
    rng = random.Random(f"esft/random/{seed}")
    drawn = {}
    for layer, ids in selection.experts.items():
        if len(ids) > experts:
            refuse("E-RANGE", f"layer {layer}: {len(ids)} experts selected of {experts}")
        drawn[layer] = tuple(rng.sample(range(experts), len(ids)))
    return Selection(drawn, **{name: getattr(selection, name) for name in FLAGS})


def _taken(
    row: Tensor, units: Sequence[Sequence[int]], config: Config, layer: int
) -> list[Sequence[int]]:
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
