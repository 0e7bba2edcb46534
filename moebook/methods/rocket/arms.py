"""The arms: the pipeline, and the pipeline with one step replaced."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from moebook.methods.rocket import selection
from moebook.methods.rocket.config import Config

OTHERS = ("random", "best")
"""Ways to take experts that look at no ranking: at random, or the one best on the test rows."""
UNMIXED = ("expert_lora", "perplexity")
"""Arms without a mixture: a LoRA of a target's own training set, the bank's LoRAs tuned alone."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """How an arm gets its experts and its data.

    Attributes:
        config: Settings; K of them are the first of the case's shots.
        by: The rankings that choose the experts, or one of `OTHERS`.
        open_data: Whether chosen open data join the shots.
    """

    config: Config
    by: tuple[str, ...] = selection.RANKINGS
    open_data: bool = True


def every(config: Config, *, strict: float) -> dict[str, Arm | None]:
    """Return all arms of the study by name, those left out that the settings do not allow.

    Args:
        config: The settings of the arm ``mixture``.
        strict: The threshold of ``data_strictly_deduplicated``.

    Returns:
        Vanilla comparisons (Table 1), other experts (Table 2), other data (Table 3), then samplers,
        budgets C and thresholds (Figures 9, 10), and other K, N and k (Tables 4, 6, 7), whose names
        end in that number. None stands for those of `UNMIXED`, in which no mixture is tuned.
    """
    arms: dict[str, Arm | None] = {
        "mixture": Arm(config=config),
        "source_best_sft": Arm(config=config, by=("best",)),
        "random_lora": Arm(config=replace(config, experts=1, top_k=1), by=("random",)),
        "random_experts": Arm(config=config, by=("random",)),
        "experts_by_perplexity": Arm(config=config, by=("perplexity",)),
        "experts_by_accuracy": Arm(config=config, by=("accuracy",)),
        "experts_without_diversity": Arm(config=config, by=selection.RANKINGS[:2]),
        "experts_normalised": Arm(config=replace(config, ranking="normalised")),
        "shots_only": Arm(config=config, open_data=False),
    }
    changes = _data(config, strict) | _sizes(config)
    arms |= {name: Arm(config=replace(config, **how)) for name, how in changes.items()}
    return arms | dict.fromkeys(UNMIXED)


def _data(config: Config, strict: float) -> dict[str, dict[str, Any]]:
    """Return what the arms change that draw other open data."""
    return {
        "random_data": {"sampler": "random"},
        "data_with_duplicates": {"duplicates": "keep"},
        "data_by_kde": {"sampler": "kde", "gamma": 10.0},
        "data_by_hull": {"sampler": "hull"},
        "data_by_repr_filter": {"duplicates": "repr"},
        **{f"budget{c}": {"budget": c} for c in (max(1, config.budget // 3), config.budget * 4)},
        "data_strictly_deduplicated": {"threshold": strict},
    }


def _sizes(config: Config) -> dict[str, dict[str, Any]]:
    """Return what the arms change that have another K, N or k, where there are so many."""
    experts = [n for n in (2, 6, 8) if config.top_k <= n <= config.candidates]
    return {
        **{f"shots{n}": {"shots": n} for n in (1, 5, 20) if n < config.shots},
        **{f"experts{n}": {"experts": n} for n in experts},
        **{f"selected{n}": {"top_k": n} for n in (1, 3, 4) if n <= config.experts},
    }
