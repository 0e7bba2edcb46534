"""The experiment of Together: arms on one base that spend one budget.

``setup`` -> `Budgets` -> ``choose_rates`` -> ``run``, ``run_again`` -> ``record``, ``after``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn

from moebook import data, evaluation, together, training
from moebook.data.mixtures import Row
from moebook.errors import located
from moebook.experiments import crafts, needs, rates
from moebook.experiments.arm import Settings, picked
from moebook.experiments.crafts import Bank
from moebook.experiments.experiment import Recorder
from moebook.experiments.rates import Rates
from moebook.experiments.together import Arm, trained_again
from moebook.methods import rocket
from moebook.methods.rocket.loras import Lora, linears, zeros
from moebook.runtime import random_states_kept
from moebook.together import Setup, budget, combining
from moebook.training import History

TIMED = ("step", "token", "peak", "flops")  # what is recorded over the first arm's
WHAT = {
    "full": "full fine-tuning: every weight trains",
    "lora": "LoRA on all linear layers",
    "lora_attention": "LoRA on attention alone",
    "pesc": "PESC: adapters as experts",
    "su": "upcycled: copies of the network behind random routers",
    "trsu": "upcycled, routers start at task centroids",
    "crsu": "upcycled, routers start at cluster centroids",
    "rocket": "Rocket: a mixture of LoRAs that shots choose from a bank",
    "esft": "upcycled, and from half-way only the experts that ESFT chooses",
    "mixlora": "MixLoRA: new LoRAs as experts on query and value projections",
    "smear": "SMEAR: one merged LoRA for each prompt",
    "arrow": "Arrow: a token goes where a LoRA amplifies it most",
    "pesc_trsu": "PESC whose routers start at task centroids",
    "pesc_crsu": "PESC whose routers start at cluster centroids",
    "pesc_bank": "PESC whose adapters start as LoRAs of a bank",
    "pesc_rocket": "PESC whose adapters start as LoRAs that Rocket chooses",
    "pesc_esft": "PESC, and from half-way only the adapters that ESFT chooses",
    "token": "ESFT-Token: experts by their share of the routed slots",
    "gate": "ESFT-Gate: experts by their average gate",
    "random_gate": "as many experts as gate, at random",
}


@dataclass(frozen=True)
class Pool:
    """The rows of a run."""

    train: Mapping[str, list[Row]]  # by task
    valid: list[Row]  # by which rates are chosen
    tested: list[Row]


def rows(settings: Settings) -> Pool:
    """Draw rows; no prompt that tests or validates is among those that train (E-LEAK).

    Nor is one that tests the new task.
    """
    names = settings["tasks"].split(",")
    split = needs.training_split(settings)
    train = {
        name: data.draw([name], split, settings["rows_per_task"], settings["seed"])
        for name in names
    }
    valid: list[Row] = []
    for name in names:
        valid += data.tasks.rows(name, "validation", settings["valid_rows"])
    tested = data.draw(names, settings["test_split"], settings["test_rows"])
    every = [row for part in train.values() for row in part]
    data.refuse_leak(every, tested + valid)
    few, asked = new_rows(settings)
    with located("test rows of the new task"):
        data.refuse_leak([*every, *few], asked)
    return Pool(train, valid, tested)


def setup(
    settings: Settings,
    model: nn.Module,
    tokenizer: Any,
    pool: Pool,
    *,
    sparse: bool,
    bf16: bool,
) -> Setup:
    """Bring together what all arms share: the base, the rows, sizes, and the recipe.

    Rows that are all longer than ``max_length``, of any task or of the new one, are refused.
    """
    sizes = picked(settings, "parameters adapters copies experts top_k shots threshold")
    recipe = picked(settings, "batch schedule warmup clip")
    made = Setup(
        model,
        tokenizer,
        pool.train,
        together.Config(**sizes),
        recipe=recipe | {"bf16": bf16},
        seed=settings["seed"],
        format="deepseek" if sparse else "camel",
        max_length=settings["max_length"],
    )
    few, asked = new_rows(settings)
    sets = {f"training rows of {task}": part for task, part in pool.train.items()}
    for task, part in data.grouped(pool.valid, "task").items():
        sets[f"validation rows of {task}"] = part
    sets["shots of the new task"] = few
    sets["test rows of the new task"] = asked
    needs.refuse_too_long(made.encode, sets)
    return made


def new_rows(settings: Settings) -> tuple[list[Row], list[Row]]:
    """Draw the new task's shots and test rows."""
    new = settings["new"]
    few = data.tasks.rows(new, "train", settings["new_shots"], settings["seed"])
    return few, data.draw([new], "test", settings["test_rows"])


@dataclass(frozen=True)
class Trained:
    """An arm after its training, and what that took."""

    model: nn.Module
    histories: tuple[History, ...]  # of its stages, the bank's left out
    spent: float  # of the budget, in its unit
    count: int  # parameters that trained last
    bank: Bank = field(default_factory=dict)


def train(
    setup: Setup, arm: Arm, *, lr: float, amount: float, kind: budget.Kind = "tokens"
) -> Trained:
    """Make an arm and train it until the amount, of tokens or of FLOPs, is spent."""
    bank: Bank = {}
    spent = 0.0
    if arm.bank:
        bank, spent = _train_bank(setup, arm, lr, amount / 2, kind)
    with random_states_kept():
        torch.manual_seed(setup.seed)
        model = arm.make(setup, deepcopy(setup.base), bank)

    def train_until(up_to: float) -> History:
        nonlocal spent
        price = budget.price(kind, model, setup.batches(setup.encoded), arm.penalty)
        steps, paid = budget.affordable(price, up_to - spent)
        spent += paid
        return setup.fit(model, setup.encoded, lr=lr, steps=steps, penalty=arm.penalty)

    histories: list[History] = []
    if arm.later:
        histories.append(train_until(amount / 2))
        model = arm.later(setup, model)
        # Rows, schedule and optimizer begin anew (see book/together_theory.md).
    histories.append(train_until(amount))
    return Trained(model, tuple(histories), spent, combining.trained(model), bank)


def _train_bank(
    setup: Setup, arm: Arm, lr: float, amount: float, kind: budget.Kind
) -> tuple[Bank, float]:
    """Train a LoRA a task, all for as many steps, until the amount is spent."""
    rank = crafts.bank_rank(setup, arm.bank, chosen=arm.chosen, gates=arm.gates)
    alone = deepcopy(setup.base)
    if kind == "flops":
        config = rocket.Config.preset("fixed", experts=1, top_k=1, lora_dropout=0.0)
        rocket.apply.build(alone, [_blank(setup.base, arm.bank, rank)], config)
    prices = [
        budget.price(kind, alone, setup.batches(setup.encode(rows)), None)
        for rows in setup.rows.values()
    ]
    steps, spent = budget.affordable(
        lambda step: sum(price(step) for price in prices), amount
    )
    bank = rocket.bank.train(
        deepcopy(setup.base),
        setup.tokenizer,
        setup.rows,
        rank=rank,
        alpha=float(rank),
        targets=arm.bank,
        seed=setup.seed,
        format=setup.format,
        max_length=setup.max_length,
        **{**setup.recipe_of(steps), "lr": lr},
    )
    return bank, spent


def _blank(model: nn.Module, targets: Sequence[str], rank: int) -> Lora:
    """Return a LoRA of zeros, which takes the FLOPs of one."""
    return Lora("blank", rank, float(rank), *zeros(linears(model, targets), rank))


@dataclass(frozen=True)
class Result:
    """What became of an arm."""

    trained: Trained
    answers: pd.DataFrame  # a row a test item, each task weighted alike


@dataclass(frozen=True)
class Budgets:
    """Arms on one base; each may spend the tokens, or the FLOPs, of full fine-tuning."""

    settings: Settings
    setup: Setup
    arms: Mapping[str, Arm]  # that were asked for
    known: Mapping[str, Arm]
    pool: Pool
    root: str  # below which values are recorded

    @cached_property
    def amounts(self) -> dict[str, float]:
        """What full fine-tuning spends in ``steps``: tokens, and FLOPs without the optimizer's."""
        order = self.setup.batches(self.setup.encoded)
        model = self.setup.base.requires_grad_(True)
        amounts: dict[str, float] = {}
        for kind in together.KINDS:
            price = budget.price(kind, model, order, None)
            amounts[kind] = sum(price(step) for step in range(self.settings["steps"]))
        return amounts

    @cached_property
    def valid(self) -> list[Any]:
        """Validation rows, encoded, a set a task."""
        by_task = data.grouped(self.pool.valid, "task").values()
        return [self.setup.encode(part) for part in by_task]

    def test(self, model: nn.Module) -> pd.DataFrame:
        """Test a model on all tasks."""
        answers = evaluation.evaluate(
            model,
            tokenizer=self.setup.tokenizer,
            tasks=self.settings["tasks"].split(","),
            limit=self.settings["test_rows"],
            split=self.settings["test_split"],
            format=self.setup.format,
        )
        return evaluation.by_benchmark(answers)

    def choose_rates(self, run: Recorder) -> Rates:
        """Return each arm's rate: the best of the grid with a share of the tokens, or the one.

        An arm that is trained again alone has its rate chosen as the others have.
        """
        grid = rates.grid(self.settings)
        names = list(dict.fromkeys([*self.arms, *trained_again(self.settings)]))
        if len(grid) == 1:
            return Rates(dict.fromkeys(names, grid[0]))

        def loss(name: str, rate: float) -> float:
            amount = self.settings["rate_share"] * self.amounts["tokens"]
            done = train(self.setup, self.known[name], lr=rate, amount=amount)
            by_task = [
                training.nats(done.model, part, pad_id=self.setup.pad_id)
                for part in self.valid
            ]
            nats = float(np.mean(by_task))
            run.record(f"{self.root}/rate/{name}/{rate:g}", nats, "nats")
            return nats

        return rates.choose(names, grid, loss)

    def run(self, name: str, rate: float, kind: budget.Kind = "tokens") -> Result:
        """Train an arm until the budget of a kind is spent, and test it."""
        amount = self.amounts[kind]
        trained = train(self.setup, self.known[name], lr=rate, amount=amount, kind=kind)
        return Result(trained, self.test(trained.model))

    def run_again(self, name: str, best: Rates) -> Result:
        """Train an arm until the FLOPs are spent, at the rate that `choose_rates` gave it."""
        return self.run(name, best[name], "flops")


def record(run: Recorder, experiment: Budgets, name: str, result: Result) -> None:
    """Keep what became of an arm: its scores, its loss, and what of the budgets it spent."""
    place = f"{experiment.root}/{name}"
    done = result.trained
    run.scores(place, result.answers)
    run.curve(f"{place}/loss", done.histories[-1].loss, "nats")
    off = spent(experiment, name, done)
    run.record(f"{place}/trained", done.count, "count")
    run.record(f"{place}/budget/tokens", off["tokens"], "ratio")
    if experiment.arms[name].sized:
        run.record(f"{place}/budget/parameters", off["parameters"], "ratio")


def spent(experiment: Budgets, name: str, done: Trained) -> dict[str, float]:
    """Return by which share an arm is off its budgets; parameters count where its size is free."""
    off = {"tokens": done.spent / experiment.amounts["tokens"] - 1}
    if experiment.arms[name].sized:
        off["parameters"] = done.count / experiment.settings["parameters"] - 1
    return off


def record_again(
    run: Recorder, experiment: Budgets, name: str, result: Result
) -> dict[str, float]:
    """Keep what an arm reached with the FLOPs of full fine-tuning; return a line of the table."""
    place = f"{experiment.root}/{name}"
    run.scores(f"{place}/equal_flops", result.answers, domains=False)
    off = result.trained.spent / experiment.amounts["flops"] - 1
    run.record(f"{place}/budget/flops", off, "ratio")
    steps = sum(len(history.step) for history in result.trained.histories)
    return {
        "steps": steps,
        "off by (%)": 100 * off,
        "share correct": result.answers.score.mean(),
        "nats per token": result.answers.nll.mean(),
    }


def after(
    run: Recorder, experiment: Budgets, best: Rates, results: Mapping[str, Result]
) -> pd.DataFrame:
    """Record what each arm forgot of plain texts, and how it takes up a new task, in nats."""
    settings = experiment.settings
    setup = experiment.setup
    plain = together.texts(
        setup.tokenizer,
        settings["texts"],
        length=settings["max_length"],
        seed=settings["seed"],
    )
    few, ask = map(setup.encode, new_rows(settings))
    lines: dict[str, dict[str, float]] = {}
    for name, result in results.items():
        model = result.trained.model
        lost = together.forgotten(model, setup.base, plain, pad_id=setup.pad_id)
        first, last = together.transfer(
            setup,
            model,
            few,
            ask,
            lr=best[name],
            steps=settings["new_steps"],
            penalty=experiment.arms[name].penalty,
        )
        lines[name] = {"forgotten": lost, "new/before": first, "new/after": last}
        for what, nats in lines[name].items():
            run.record(f"{experiment.root}/{name}/{what}", nats, "nats")
    return pd.DataFrame(lines).T


def costs(
    run: Recorder, experiment: Budgets, results: Mapping[str, Result]
) -> pd.DataFrame:
    """Measure what each arm costs, record it over the first arm's; empty if not ``timed``."""
    if not experiment.settings["timed"]:
        return pd.DataFrame()
    models = {name: result.trained.model for name, result in results.items()}
    penalties = {name: arm.penalty for name, arm in experiment.arms.items()}
    table = together.costs(experiment.setup, models, penalties)
    first = table.iloc[0]
    for name, what in product(table.index, TIMED):
        ratio = table.loc[name, what] / first[what]
        run.record(f"{experiment.root}/{name}/cost/{what}", ratio, "ratio")
    for name in table.index:
        stored = table.loc[name, "stored"]
        run.record(f"{experiment.root}/{name}/stored", stored, "bytes")
    return table


def needed(
    run: Recorder, experiment: Budgets, results: Mapping[str, Result]
) -> dict[str, float]:
    """Record which share of PESC's adapters each task needs, by ESFT's gate score."""
    shares: dict[str, float] = {}
    if "pesc" not in results or experiment.root != "together/dense":
        return shares
    setup = experiment.setup
    config = together.esft.Config(
        score="gate", threshold=experiment.settings["threshold"], normalised=True
    )
    for name, rows in experiment.pool.train.items():
        drawn = together.esft.samples(
            setup.encode(rows), count=16, length=128, pad_id=setup.pad_id
        )
        scores = together.esft.measure(results["pesc"].trained.model, drawn)
        count = together.esft.select(scores, config).count
        shares[name] = count / (len(scores.gate) * experiment.settings["adapters"])
        run.record(f"{experiment.root}/pesc/needed/{name}", shares[name], "share")
    return shares


def explained(
    run: Recorder, experiment: Budgets, results: Mapping[str, Result]
) -> dict[str, float]:
    """Return by LoRA the share of what it reads that an adapter can take over; record the mean."""
    if "pesc_bank" not in results:
        return {}
    bank = results["pesc_bank"].trained.bank
    share = experiment.setup.as_adapters([*bank.values()]).explained.mean(dim=0)
    shares = dict(zip(bank, share.tolist(), strict=True))
    mean = np.mean([*shares.values()])
    run.record(f"{experiment.root}/pesc_bank/explained", mean, "share")
    return shares
