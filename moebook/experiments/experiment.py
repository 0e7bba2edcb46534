"""An experiment: arms that differ in nothing but how they treat the base."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import pandas as pd
from datasets import Dataset
from torch import nn

from moebook import lists, runtime
from moebook.errors import refuse
from moebook.experiments import rates
from moebook.experiments.arm import Arm, Settings
from moebook.experiments.rates import Rates
from moebook.training import History, fit, nats, recompute, widen


class Recorder(Protocol):
    """What keeps measured values: the run of a notebook, or what stands in for it."""

    def record(
        self, name: str, value: float, unit: str, items: Iterable[float] | None = None
    ) -> None:
        """Keep a number, the mean of its items if it has any."""

    def curve(self, name: str, y: Iterable[float], unit: str) -> None:
        """Keep a line, a height a step."""

    def scores(self, name: str, table: pd.DataFrame) -> None:
        """Keep accuracy and likelihood of a table with a row a test item."""


@dataclass(frozen=True)
class Result:
    """What became of an arm."""

    arm: Arm
    rate: float  # its learning rate
    model: nn.Module  # as it was trained
    history: History  # of its training, a line a step
    answers: pd.DataFrame  # a row a test item

    @property
    def trained(self) -> int:
        """How many parameters it trained."""
        return sum(part.numel() for part in self.model.parameters() if part.requires_grad)


@dataclass(frozen=True)
class Experiment:
    """Arms on one base: the same rows in the same order, as many steps, the same test."""

    settings: Settings  # the notebook's parameters
    arms: Mapping[str, Arm]
    load: Callable[[], nn.Module]  # returns a fresh base at each call
    train_rows: Dataset  # encoded
    valid_rows: Sequence[Dataset]  # encoded, a set a task, by which rates are chosen
    recipe: Mapping[str, Any]  # of `fit`, but for the rate
    test: Callable[[nn.Module], pd.DataFrame]  # a trained model -> a row a test item
    # By arm that has trained: the dtypes of what it trained, which are those of all others.
    precisions: dict[str, str] = field(default_factory=dict)

    def train(
        self, arm: Arm, rate: float, *, steps: int | None = None, label: str = ""
    ) -> tuple[nn.Module, History]:
        """Make an arm of a fresh base and train it; so many ``steps``, else the recipe's."""
        recipe = dict(self.recipe)
        if steps is not None:
            recipe["steps"] = steps
        # All that is drawn for an arm follows from the seed, whichever arms ran before it.
        runtime.seed_everything(self.settings["seed"])
        model = arm.make(self.load(), self.settings)
        if self.settings["checkpointing"]:
            recompute(model)
        self._check_precision(arm.name, model)
        label = label or arm.name
        history = fit(model, self.train_rows, lr=rate, penalty=arm.penalty, label=label, **recipe)
        return model, history

    def _check_precision(self, name: str, model: nn.Module) -> None:
        """Refuse an arm whose weights train in another precision than those before it (E-DTYPE).

        Arms in 16 and 32 bits differ by how many of their small steps are lost. `fit` makes what
        trains float32 or wider; so only an arm that brings a wider dtype of its own is refused.
        """
        widen(model)
        trained = {str(part.dtype) for part in model.parameters() if part.requires_grad}
        precision = " and ".join(sorted(dtype.removeprefix("torch.") for dtype in trained))
        for other, before in self.precisions.items():
            if before != precision:
                refuse(
                    "E-DTYPE",
                    f"{name} trains in {precision}, {other} in {before}: what trains is in one "
                    "precision in all arms that are compared",
                )
        self.precisions[name] = precision

    def validate(self, model: nn.Module) -> float:
        """Return nats per answer token on the validation rows, the mean over tasks."""
        pad_id = self.recipe["pad_id"]
        by_task = [nats(model, rows, pad_id=pad_id) for rows in self.valid_rows if len(rows)]
        return float(np.mean(by_task))

    def choose_rates(self) -> Rates:
        """Return each arm's learning rate: the best of the grid, or the one it was given.

        Every arm tries every rate of the parameter ``rates``, each by a training of its own of
        ``rate_steps`` under the same schedule, and is judged on the validation rows.
        """
        grid = lists.rates("rates", self.settings["rates"])
        if not grid:
            return rates.given(self.settings, self.arms)

        def loss(arm: str, rate: float) -> float:
            steps = self.settings["rate_steps"]
            label = f"{arm}, {rate}"
            model, _ = self.train(self.arms[arm], rate, steps=steps, label=label)
            return self.validate(model)

        return rates.choose(self.arms, grid, loss)

    def run(self, arm: Arm, rate: float) -> Result:
        """Make an arm, train it at its rate, and test it."""
        model, history = self.train(arm, rate)
        return Result(arm, rate, model, history, self.test(model))
