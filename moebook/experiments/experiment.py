"""An experiment: arms that differ in nothing but how they treat the base."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
import pandas as pd
from datasets import Dataset
from torch import nn

from moebook import data, evaluation, runtime
from moebook.data.mixtures import Row
from moebook.errors import refuse
from moebook.experiments import rates
from moebook.experiments.arm import Arm, Settings, picked
from moebook.experiments.rates import Rates
from moebook.models.anatomy import count
from moebook.training import History, fit, nats, recompute, widen
from moebook.training.loop import Milestones


class Recorder(Protocol):
    """What keeps measured values: the run of a notebook, or what stands in for it."""

    def record(
        self, name: str, value: float, unit: str, items: Iterable[float] | None = None
    ) -> None:
        """Keep a number, the mean of its items if it has any."""

    def curve(
        self, name: str, y: Iterable[float], unit: str, x: Iterable[float] | None = None
    ) -> None:
        """Keep a line, a height a step, or a height at each ``x``."""

    def scores(self, name: str, table: pd.DataFrame, *, domains: bool = True) -> None:
        """Keep accuracy and likelihood of a table with a row a test item, also by domain."""


class Test(Protocol):
    """How a trained model is tested: the same way for every arm."""

    def __call__(self, model: nn.Module, limit: int) -> pd.DataFrame:
        """Return a row a test item, of so many rows a task."""


@dataclass(frozen=True)
class Rows:
    """What arms are trained and tested on, and how their rates are chosen."""

    train: list[Row]
    held_out: list[Row]  # on which routing is measured; never trained on
    valid: list[Row]  # by which learning rates are chosen
    tested: Any  # of the test: its rows, or its tasks' names and their number of rows


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
        return count(self.model, trained=True)


@dataclass(frozen=True)
class Experiment:
    """Arms on one base: the same rows in the same order, as many steps, the same test."""

    settings: Settings  # the notebook's parameters
    arms: Mapping[str, Arm]
    load: Callable[[], nn.Module]  # returns a fresh base at each call
    train_rows: Dataset  # encoded
    valid_rows: Sequence[Dataset]  # encoded, a set a task, by which rates are chosen
    recipe: Mapping[str, Any]  # of `fit`, but for the rate
    test: Test
    # By arm that was made: the dtypes of what it trains, which are those of all others.
    precisions: dict[str, str] = field(default_factory=dict)

    def make(self, arm: Arm) -> nn.Module:
        """Make a fresh base into an arm's model, ready to train.

        All that is drawn for it follows from the seed, whichever arms ran before it.
        """
        runtime.seed_everything(self.settings["seed"])
        model = arm.make(self.load(), self.settings)
        if self.settings.get("checkpointing"):
            recompute(model)
        self._check_precision(arm.name, model)
        return model

    def fit(
        self, arm: Arm, model: nn.Module, rate: float, milestones: Milestones = ()
    ) -> History:
        """Train an arm's model by the recipe, at its rate."""
        recipe = {**self.recipe, **arm.recipe(self.settings)}
        return fit(
            model,
            self.train_rows,
            lr=rate,
            penalty=arm.penalty,
            milestones=milestones,
            label=arm.name,
            **recipe,
        )

    def _check_precision(self, name: str, model: nn.Module) -> None:
        """Refuse an arm whose weights train in another precision than those before it (E-DTYPE).

        Arms in 16 and 32 bits differ by how many of their small steps are lost. `fit` makes what
        trains float32 or wider; so only an arm that brings a wider dtype of its own is refused.
        """
        widen(model)
        trained = {str(part.dtype) for part in model.parameters() if part.requires_grad}
        precision = " and ".join(
            sorted(dtype.removeprefix("torch.") for dtype in trained)
        )
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
        by_task = [
            nats(model, rows, pad_id=pad_id) for rows in self.valid_rows if len(rows)
        ]
        return float(np.mean(by_task))

    def choose_rates(self) -> Rates:
        """Return each arm's learning rate: the best of the grid, or the one it was given.

        Every arm tries every rate of the parameter ``rates``, each by a training of its own of
        ``rate_steps`` under the same schedule, and is judged on the validation rows.
        """
        grid = rates.grid(self.settings)
        if not grid:
            return rates.given(self.settings, self.arms)

        trial = {**self.recipe, "steps": self.settings["rate_steps"]}

        def loss(name: str, rate: float) -> float:
            arm = self.arms[name]
            model = self.make(arm)
            label = f"{name}, {rate}"
            fit(
                model,
                self.train_rows,
                lr=rate,
                penalty=arm.penalty,
                label=label,
                **trial,
            )
            return self.validate(model)

        return rates.choose(self.arms, grid, loss)

    def run(self, arm: Arm, rate: float) -> Result:
        """Make an arm, train it at its rate, and test it."""
        model = self.make(arm)
        history = self.fit(arm, model, rate)
        answers = self.test(model, limit=self.settings["test_rows"])
        return Result(arm, rate, model, history, answers)


def asking(settings: Settings, tokenizer: Any, names: Sequence[str]) -> Test:
    """Return what asks a model the tasks of these names, as the parameters say."""
    return partial(
        evaluation.evaluate,
        tokenizer=tokenizer,
        tasks=names,
        split=settings["test_split"],
        data=settings["data_folder"],
        chat=settings["chat"],
    )


def of_rows(
    settings: Settings,
    arms: Mapping[str, Arm],
    rows: Rows,
    load: Callable[[], nn.Module],
    tokenizer: Any,
    test: Test,
    **how: Any,
) -> Experiment:
    """Encode the rows, and train by the parameters of these names and ``how``."""
    names = "steps batch schedule warmup clip accumulate optimizer seed"
    recipe = picked(settings, names)
    encode = partial(
        data.encode, tokenizer=tokenizer, max_length=settings["max_length"]
    )
    return Experiment(
        settings=settings,
        arms=arms,
        load=load,
        train_rows=encode(rows.train),
        valid_rows=[encode(part) for part in data.grouped(rows.valid, "task").values()],
        recipe=recipe | {"pad_id": tokenizer.pad_token_id, **how},
        test=test,
    )
