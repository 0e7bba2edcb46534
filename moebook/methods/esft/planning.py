"""The arms: the paper's methods on every task, and on the first task its sweeps (Fig. 6 and 7)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from moebook.methods.esft.config import CHOICES, Config
from moebook.methods.esft.grouping import group
from moebook.methods.esft.scoring import Scores, measure
from moebook.methods.esft.selection import Selection, random_selection, select

Batches = Iterable[Mapping[str, Any]]


@dataclass(frozen=True)
class Arm:
    """One training among those that are compared.

    Attributes:
        method: ``fft``, ``lora``, or the score that chooses experts, ``token`` or ``gate``.
        size: Rank of LoRA or threshold of the score; 1 for full fine-tuning.
        random: Whether as many random experts stand for those that the score chooses.
        group: Experts that share a gate; 1 leaves the model as it is.
        main: Whether it runs on every task; else on the first one.
    """

    method: str
    size: float = 1
    random: bool = False
    group: int = 1
    main: bool = True


def arms(tried: Mapping[str, Iterable[Any]], usual: Mapping[str, float]) -> dict[str, Arm]:
    """Return every arm by name: the main ones, ``gate-0.3`` of a sweep, ``gate-g2`` with groups.

    Args:
        tried: The values of the sweeps, from `sweep`.
        usual: Threshold of ``token`` and ``gate`` and rank of ``lora`` in the main arms.
    """
    found = {"fft": Arm("fft"), "lora": Arm("lora", usual["lora"])}
    for score in CHOICES["score"]:
        found[score] = Arm(score, usual[score])
        found[f"random_{score}"] = Arm(score, usual[score], random=True)
    for method, names in budget(tried, usual).items():
        for name, size in zip(names, tried[method], strict=True):
            found.setdefault(name, Arm(method, size, main=False))
    for size in tried["groups"]:
        found[f"fft-g{size}"] = Arm("fft", group=size, main=False)
        found[f"gate-g{size}"] = Arm("gate", usual["gate"], group=size, main=False)
    return found


def budget(tried: Mapping[str, Iterable[Any]], usual: Mapping[str, float]) -> dict[str, list[str]]:
    """Return the names of the arms by method that Fig. 6 compares, the smallest first.

    A value that a main arm has is that arm: it is not trained twice.

    Args:
        tried: As in `arms`.
        usual: As in `arms`.
    """
    return {
        method: [method if size == value else f"{method}-{size:g}" for size in tried[method]]
        for method, value in usual.items()
    }


def plan(
    arms: Mapping[str, Arm],
    model: nn.Module,
    drawn: Mapping[str, Batches],
    scores: Mapping[str, Scores],
    together: Mapping[int, Tensor],
    *,
    preset: str,
    scale: float,
    seed: int,
) -> dict[tuple[str, str], dict[str, Any]]:
    """Return what each arm's method is called with, for each of its tasks.

    Args:
        arms: Those to run, by name.
        model: The base, which is left as it is.
        drawn: Samples by task, on which grouped experts are measured.
        scores: From `measure` on these samples, by task; the first is the task of the sweeps.
        together: From `cooccurrence`, which decides the groups.
        preset: Of `Config`.
        scale: Of `lora`.
        seed: Decides the random experts, together with score and task.

    Returns:
        Arm and task -> arguments by name: ``rank`` and ``scale`` of `lora`, ``selection`` of
        `specialise`; none of `full`.
    """
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for name, arm in arms.items():
        for task in list(scores) if arm.main else list(scores)[:1]:
            if arm.method == "fft":
                found[name, task] = {}
            elif arm.method == "lora":
                found[name, task] = {"rank": int(arm.size), "scale": scale}
            else:
                config = Config.preset(preset, score=arm.method, threshold=arm.size)
                if arm.group > 1:
                    picked = _grouped(model, drawn[task], config, together, arm.group)
                else:
                    picked = select(scores[task], config)
                if arm.random:
                    label = f"{arm.method}/{task}/{seed}"
                    picked = random_selection(picked, scores[task].experts, label)
                found[name, task] = {"selection": picked}
    return found


def _grouped(
    model: nn.Module, batches: Batches, config: Config, together: Mapping[int, Tensor], size: int
) -> Selection:
    """Choose whole groups of experts, measured on a copy of the model that is bound in groups."""
    bound = deepcopy(model)
    groups = group(bound, together, size)
    return select(measure(bound, batches, config), config, groups=groups)
