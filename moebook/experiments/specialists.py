"""ESFT's experiment: arms tuned for one task at a time, and what each learns and forgets.

``rows`` -> ``encode`` -> ``align`` -> `Specialists` -> ``choose_rates`` -> ``run`` -> ``record``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import product
from typing import Any

import datasets
import numpy as np
import pandas as pd
from accelerate.utils import send_to_device
from torch import nn

from moebook import data, evaluation, runtime, training
from moebook.data import tasks
from moebook.data.mixtures import Row
from moebook.data.tasks import Task
from moebook.errors import refuse
from moebook.experiments import esft as checks
from moebook.experiments import needs, rates
from moebook.experiments.arm import Settings, asked, picked
from moebook.experiments.esft import Arm
from moebook.experiments.experiment import Recorder
from moebook.experiments.rates import Rates
from moebook.methods import esft
from moebook.methods.esft.choose import Selection
from moebook.methods.esft.compare import Front
from moebook.methods.esft.score import Scores
from moebook.models.anatomy import count
from moebook.training import History
from moebook.training.batches import Batches

FORMAT = "deepseek"  # the chat format of the paper's released code
BETAS = (0.9, 0.95)  # of AdamW, as in that code
STEPS = 9  # of the short run that `cost` times; the first one, which warms up, is not counted
WHAT = {
    "fft": "full fine-tuning: every weight trains",
    "lora": "LoRA on attention, dense layers, shared experts and every routed expert",
    "lora_attention": "LoRA on attention alone",
    "token": "ESFT-Token: experts by their share of the routed slots",
    "gate": "ESFT-Gate: experts by their average gate",
    "random_token": "as many experts in each layer as token, at random",
    "random_gate": "as many experts in each layer as gate, at random",
}
# Arms that are compared, the first less the second.
PAIRS = (
    *product(("gate", "token"), ("lora", "lora_attention", "fft")),
    ("gate", "token"),
    ("gate", "random_gate"),
    ("token", "random_token"),
)

Key = tuple[str, str]  # an arm and the task that it is tuned on


def what(arms: Mapping[str, Arm]) -> dict[str, str]:
    """Say in one line what each arm is."""
    texts: dict[str, str] = {}
    for name, arm in arms.items():
        kind = name.partition("-")[0]
        texts[name] = WHAT[kind]
        if arm.group > 1:
            texts[name] += f"; {arm.group} experts share a gate; first task only"
        elif not arm.main:
            sort = "rank" if arm.method == "lora" else "threshold"
            texts[name] += f"; {sort} {arm.size:g}; first task only"
    return texts


@dataclass(frozen=True)
class Pool:
    """The rows of a run, by task."""

    tested: Mapping[str, str]  # by target task what tests it
    general: list[str]  # tasks that must not be forgotten
    alignment: list[str]  # data that keep them
    train: Mapping[str, list[Row]]  # of targets and of alignment data
    asked: list[Row]  # all test rows of embedded tasks and of users' files
    own: Mapping[str, Task] = field(default_factory=dict)  # users' files, by name

    @property
    def kept(self) -> list[Row]:
        """The alignment rows."""
        return [row for name in self.alignment for row in self.train[name]]


def rows(settings: Settings) -> Pool:
    """Draw training rows of targets and of alignment data; name what tests."""
    written = checks.tested(settings)
    tests = list(written.values())
    general = settings["general"].split(",")
    alignment = settings["alignment"].split(",")
    split = settings["test_split"]
    own = tasks.of_files([*written, *tests, *general, *alignment])
    # What it refuses, it refuses now.
    evaluation.load([*tests, *general])
    named = {name: tasks.label(name) for name in [*written, *alignment]}
    drawn = esft.rows(
        [own.get(named[name], name) for name in written],
        [own.get(named[name], name) for name in alignment],
        settings["rows_per_task"],
        split=needs.training_split(settings),
        revisions=settings["revisions"],
        seed=settings["seed"],
    )
    asked: list[Row] = []
    for name in filter(tasks.known, [*tests, *general]):
        available = tasks.find(name).available(split)
        asked += tasks.rows(name, split, available)
    return Pool(
        {tasks.label(target): tasks.label(test) for target, test in written.items()},
        [tasks.label(name) for name in general],
        [tasks.label(name) for name in alignment],
        drawn,
        asked,
        own,
    )


def validation(settings: Settings, pool: Pool, task: str) -> list[Row]:
    """Return the rows by whose loss rates are chosen."""
    found = pool.own.get(task) or tasks.find(task)
    # An embedded task has as many as can be asked for; a user's may have fewer.
    most = min(settings["watched_rows"], found.available("validation"))
    return found.rows("validation", most)


def recipe(settings: Settings, pad_id: int) -> dict[str, Any]:
    """Return how every arm is trained, but for its rate: keywords of `training.fit`."""
    names = "steps batch accumulate optimizer seed weight_decay schedule"
    return picked(settings, names) | {"betas": BETAS, "pad_id": pad_id}


@dataclass(frozen=True)
class Mixes:
    """Encoded rows: of each task alone, of the alignment data, and both mixed."""

    alone: Mapping[str, datasets.Dataset]
    alignment: datasets.Dataset
    mixed: Mapping[str, datasets.Dataset]


def encode(settings: Settings, tokenizer: Any, pool: Pool) -> Mixes:
    """Encode and mix; no test prompt of an embedded task is among the rows (E-LEAK).

    Validation rows that are all longer than ``max_length`` are refused (E-DATA).
    """
    shape = {"format": FORMAT, "max_length": settings["max_length"]}
    if settings["rates"]:
        unseen = {
            f"validation rows of {task}": validation(settings, pool, task)
            for task in pool.tested
        }
        needs.refuse_too_long(
            partial(data.encode, tokenizer=tokenizer, **shape), unseen
        )
    kept = pool.kept
    alignment = data.encode(kept, tokenizer, **shape)
    alone: dict[str, datasets.Dataset] = {}
    mixed: dict[str, datasets.Dataset] = {}
    for task in pool.tested:
        data.refuse_leak(pool.train[task] + kept, pool.asked)
        alone[task] = data.encode(pool.train[task], tokenizer, **shape)
        mixed[task] = esft.mix(
            alone[task], alignment, settings["alignment_share"], settings["seed"]
        )
    return Mixes(alone, alignment, mixed)


def align(
    settings: Settings, model: nn.Module, mixes: Mixes, pad_id: int
) -> History | None:
    """Train the base on alignment rows alone, as the paper does first; None without any steps.

    A threshold that the base's gates cannot reach is refused before (E-RANGE).
    """
    if not settings["align_steps"]:
        return None
    for task, rows in mixes.alone.items():
        _refuse_out_of_reach(settings, model, task, rows, pad_id)
    short = recipe(settings, pad_id) | {"steps": settings["align_steps"]}
    return training.fit(
        model, mixes.alignment, lr=settings["align_lr"], label="alignment", **short
    )


def _refuse_out_of_reach(
    settings: Settings,
    model: nn.Module,
    task: str,
    rows: datasets.Dataset,
    pad_id: int,
) -> None:
    """Refuse a threshold above what the gates of a layer's experts sum to on a task.

    A token's gates are the probabilities of its K chosen experts alone, which sum to less than 1
    where the host does not renormalise them.
    """
    preset = esft.Config.preset(settings["preset"])
    if preset.normalised:
        return
    arms = asked(settings, checks.known(settings)).values()
    swept = [arm.size for arm in arms if arm.method == "gate"]
    threshold = max([settings["p_gate"], *swept])
    samples = esft.samples(
        rows.shard(2, 0),
        count=settings["samples"],
        length=settings["sample_length"],
        pad_id=pad_id,
        seed=settings["seed"],
    )
    for layer, gates in esft.measure(model, samples, preset).gate.items():
        total = float(gates.sum())
        if total < threshold:
            main = threshold == settings["p_gate"]
            where = "p_gate =" if main else "thresholds_gate lists"
            why = f"the gates of layer {layer} sum to {total:.3g} on {task}"
            remedy = "take less, or preset=paper, which takes shares of that sum"
            refuse("E-RANGE", f"{where} {threshold:g}: {why}; {remedy}")


@dataclass(frozen=True)
class Result:
    """What became of an arm on a task."""

    history: History
    trained: int  # weights
    answers: pd.DataFrame  # a row an item of the task's test
    general: pd.DataFrame  # a row an item of the general tasks


@dataclass(frozen=True)
class Specialists:
    """Arms on one sparse base: each is a copy of it, tuned for one task."""

    settings: Settings
    model: nn.Module
    tokenizer: Any
    arms: Mapping[str, Arm]
    pool: Pool
    mixes: Mixes
    drawn: Mapping[str, Any]  # samples by which experts are scored
    scores: Mapping[str, Scores]  # of every expert, by task

    @property
    def first(self) -> str:
        """The task on which sizes vary."""
        return next(iter(self.pool.tested))

    @property
    def main(self) -> list[str]:
        """The arms that run on every task."""
        return [name for name, arm in self.arms.items() if arm.main]

    @property
    def recipe(self) -> dict[str, Any]:
        """How every arm is trained, but for its rate."""
        return recipe(self.settings, self.tokenizer.pad_token_id)

    @cached_property
    def together(self) -> Any:
        """How often experts serve the same token of the first task, layer by layer."""
        return esft.cooccurrence(self.model, self.drawn[self.first])

    @cached_property
    def plan(self) -> dict[Key, dict[str, Any]]:
        """What each arm's method is called with, by arm and task."""
        return checks.plan(
            self.arms,
            self.model,
            self.drawn,
            self.scores,
            self.together,
            preset=self.settings["preset"],
            scale=self.settings["lora_scale"],
            seed=self.settings["seed"],
        )

    @property
    def selections(self) -> dict[Key, Selection]:
        """The experts that arms train, where they choose any."""
        return {
            key: given["selection"]
            for key, given in self.plan.items()
            if "selection" in given
        }

    def start(self, name: str, task: str) -> nn.Module:
        """Return a copy of the base, ready to train as an arm."""
        given = self.plan[name, task]
        return checks.start(self.model, self.arms[name], given, self.together)

    def test(self, model: nn.Module, names: Sequence[str], limit: int) -> Any:
        """Test a model on some tasks: a row an item."""
        on_cpu = next(model.parameters()).device.type == "cpu"
        return evaluation.evaluate(
            model,
            self.tokenizer,
            [self.pool.own.get(name, name) for name in names],
            limit=limit,
            format=FORMAT,
            split=self.settings["test_split"],
            batch_size=200 if on_cpu else 32,
        )

    def test_task(self, model: nn.Module, task: str) -> pd.DataFrame:
        """Test a model on a target task."""
        return self.test(model, [self.pool.tested[task]], self.settings["test_rows"])

    def test_general(self, model: nn.Module) -> pd.DataFrame:
        """Test a model on the tasks that must not be forgotten."""
        return self.test(model, self.pool.general, self.settings["general_rows"])

    def choose_rates(self, run: Recorder) -> Rates:
        """Return each arm's rate: the best of the grid, or its method's parameter.

        Every rate is tried for half of the steps on each of the arm's tasks, and judged on the
        mean over these.
        """
        grid = rates.grid(self.settings)
        if not grid:
            usual = {
                name: self.settings[checks.USUAL_RATES[arm.method]]
                for name, arm in self.arms.items()
            }
            return Rates(usual)
        short = self.recipe | {"steps": -(-self.settings["steps"] // 2)}

        def loss(name: str, rate: float) -> float:
            by_task: list[float] = []
            for task in [task for arm, task in self.plan if arm == name]:
                runtime.seed_everything(self.settings["seed"])
                tuned = self.start(name, task)
                training.fit(tuned, self.mixes.mixed[task], lr=rate, **short)
                by_task.append(self._validate(tuned, task))
                run.record(f"esft/rate/{name}/{rate:g}/{task}", by_task[-1], "nats")
            return float(np.mean(by_task))

        return rates.choose(self.arms, grid, loss)

    def _validate(self, model: nn.Module, task: str) -> float:
        encoded = data.encode(
            validation(self.settings, self.pool, task),
            self.tokenizer,
            format=FORMAT,
            max_length=self.settings["max_length"],
        )
        return training.nats(model, encoded, pad_id=self.tokenizer.pad_token_id)

    def run(self, name: str, task: str, rate: float) -> Result:
        """Tune an arm on a task at its rate; a main one is tested on the way, too."""
        runtime.seed_everything(self.settings["seed"])
        tuned = self.start(name, task)
        parts = self.settings["checkpoints"]
        marks: list[int] = []
        if parts and self.arms[name].main:
            steps = self.settings["steps"]
            marks = [steps * part // parts for part in range(parts + 1)]
        watch = partial(
            self.test,
            names=[self.pool.tested[task], *self.pool.general],
            limit=self.settings["watched_rows"],
        )
        history = training.fit(
            tuned,
            self.mixes.mixed[task],
            lr=rate,
            label=name,
            milestones=[(marks, watch)],
            **self.recipe,
        )
        trained = count(tuned, trained=True)
        return Result(
            history, trained, self.test_task(tuned, task), self.test_general(tuned)
        )


@dataclass(frozen=True)
class Tables:
    """Answers of the base and of each arm over its tasks, each task weighted alike."""

    right: Mapping[str, pd.DataFrame]  # of the tasks that it was tuned on
    kept: Mapping[str, pd.DataFrame]  # of the general tasks


def tables(
    experiment: Specialists,
    base: Mapping[str, pd.DataFrame],
    results: Mapping[Key, Result],
) -> Tables:
    """Join answers by arm; ``base`` are the base's by target task, and its ``general`` ones."""
    general = base["general"]
    answers = {("base", task): base[task] for task in experiment.pool.tested}
    forgot = dict.fromkeys(answers, general)
    for key, result in results.items():
        answers[key] = result.answers
        forgot[key] = result.general
    tests = [*experiment.pool.tested.values(), *experiment.pool.general]
    return Tables(esft.by_arm(answers, tests), esft.by_arm(forgot, tests))


def record(
    run: Recorder,
    experiment: Specialists,
    base: Mapping[str, pd.DataFrame],
    results: Mapping[Key, Result],
    tables: Tables,
) -> None:
    """Keep what arms learnt and forgot: over tasks, and task by task."""
    for (name, task), result in results.items():
        run.curve(f"esft/{name}/loss/{task}", result.history.loss, "nats")
    for name in ["base", *experiment.main]:
        run.scores(f"esft/{name}", tables.right[name], domains=False)
        items = tables.kept[name].score
        run.record(f"esft/{name}/general_accuracy", items.mean(), "share", items)
        nats = tables.kept[name].nll.dropna()
        if len(nats):
            run.record(f"esft/{name}/general_nll", nats.mean(), "nats", nats)

    answers = {("base", task): base[task] for task in experiment.pool.tested}
    answers |= {key: result.answers for key, result in results.items()}
    for (name, task), found in answers.items():
        kept = tables.kept[name]
        items = kept.score[kept.tuned == task]
        place = f"esft/{name}/{task}"
        test = experiment.pool.tested[task]
        right = found.correct
        run.record(f"{place}/general_accuracy", items.mean(), "share", items)
        run.record(f"{place}/{test}/accuracy", right.mean(), "share", right)


def solved(tables: Tables) -> pd.DataFrame:
    """Return accuracy on its test by arm and target task.

    Several targets may share a test, and a test may be a group of benchmarks.
    """
    every = pd.concat(tables.right, names=["arm"])
    return every.pivot_table("correct", "arm", "tuned", sort=False)


def record_lead(
    run: Recorder, experiment: Specialists, counts: pd.DataFrame, solved: pd.DataFrame
) -> None:
    """Keep ESFT-Gate's lead over LoRA on tasks that take few experts, and on the others."""
    several = len(experiment.pool.tested) > 1
    if not several or not {"gate", "lora"} <= set(experiment.arms):
        return
    fewest = counts.loc["gate"].sum(axis=1).sort_values(kind="stable").index
    lead = [100 * (solved[task]["gate"] - solved[task]["lora"]) for task in fewest]
    for name, part in zip(("fewer", "more"), np.array_split(lead, 2), strict=True):
        place = f"esft/lead/{name}_experts/accuracy"
        run.record(place, part.mean(), "percent_points")


def fronts(
    run: Recorder, experiment: Specialists, results: Mapping[Key, Result]
) -> dict[Key, Front]:
    """Record how arms trade general abilities for the task, and what is left at equal accuracy.

    Empty without checkpoints.
    """
    tested = experiment.pool.tested
    front_of: dict[Key, Front] = {}
    for (name, task), result in results.items():
        measured = result.history.milestones[0]
        if measured:
            front = esft.front(measured.values(), tested[task])
            right, left = front
            run.curve(f"esft/{name}/front/{task}", left.mean(axis=1), "share", x=right)
            front_of[name, task] = front
    gaps: dict[str, list[Any]] = {}
    for (one, other), task in product(PAIRS, tested):
        if {(one, task), (other, task)} <= set(front_of):
            first = front_of[one, task]
            second = front_of[other, task]
            gap = 100 * esft.at_equal_accuracy(first, second)
            place = f"esft/equal/{one}_minus_{other}"
            run.record(f"{place}/{task}/general_accuracy", gap.mean(), "percent_points")
            gaps.setdefault(place, []).append(gap)
    for place, by_task in gaps.items():
        run.record(
            f"{place}/general_accuracy",
            np.mean(by_task),
            "percent_points",
            np.ravel(by_task),
        )
    return front_of


def cost(model: nn.Module, train: datasets.Dataset, **recipe: Any) -> dict[str, float]:
    """Train `STEPS` steps of a recipe for `training.fit`; count what one holds (Fig. 4).

    ``time`` is the median step in seconds; in bytes ``peak_memory`` of a step, ``resident``
    (weights, buffers), ``optimizer`` (AdamW's two moments) and ``storage`` (what trains).
    """
    order = Batches(
        train, recipe["batch"], seed=recipe["seed"], pad_id=recipe["pad_id"]
    )
    inputs = send_to_device(order[0], next(model.parameters()).device)
    memory = training.step_memory(model.train(), inputs)
    seconds = training.fit(model, train, **recipe | {"steps": STEPS}).seconds
    return {
        "time": float(np.median(np.diff(seconds))),
        "peak_memory": memory.total,
        "resident": memory.parameters,
        "optimizer": 2 * memory.trained // 3,
        "storage": memory.trained // 3,
    }


def costs(run: Recorder, experiment: Specialists) -> pd.DataFrame:
    """Measure short runs of the main arms on the first task, and record them over ``fft``'s."""
    task = experiment.first
    lines: dict[str, dict[str, float]] = {}
    for name in experiment.main:
        if experiment.arms[name].random:
            continue
        lines[name] = cost(
            experiment.start(name, task),
            experiment.mixes.mixed[task],
            lr=experiment.settings["lr_fft"],
            **experiment.recipe,
        )
    table = pd.DataFrame(lines).T
    if "fft" in table.index:
        ratios = table / table.loc["fft"]
        for name, measure in product(ratios.index[1:], ratios):
            place = f"esft/{name}_over_fft/{measure}"
            run.record(place, ratios.loc[name, measure], "ratio")
    return table


def record_budget(
    run: Recorder, experiment: Specialists, results: Mapping[Key, Result]
) -> None:
    """Keep what arms train, and whether more of it helps on the first task (Fig. 6)."""
    settings = experiment.settings
    whole = count(experiment.model)
    for (name, task), result in results.items():
        run.record(f"esft/{name}/{task}/trained", result.trained / whole, "ratio")
    hits = _hits(experiment, results)
    budget = checks.budget(checks.sweep(settings), checks.usual(settings))
    for place, arm in {"default": "gate", "largest": budget["gate"][-1]}.items():
        if arm in hits:
            right = hits[arm]
            run.record(f"esft/budget/{place}/accuracy", right.mean(), "share", right)
    if {*budget["gate"], *budget["lora"]} <= set(hits):
        leads = [
            100 * (hits[one].mean() - hits[other].mean())
            for one, other in zip(budget["gate"], budget["lora"], strict=True)
        ]
        place = "esft/budget/least_gate_minus_lora/accuracy"
        run.record(place, min(leads), "percent_points")


def record_groups(
    run: Recorder,
    experiment: Specialists,
    results: Mapping[Key, Result],
    counts: pd.DataFrame,
) -> dict[str, float]:
    """Keep what coarser experts change (Fig. 7); return which share of the experts arms train."""
    hits = _hits(experiment, results)
    coarse = f"-g{max(checks.sweep(experiment.settings)['groups'])}"
    experts = experiment.scores[experiment.first].experts
    shares: dict[str, float] = {}
    for (name, task), selection in experiment.selections.items():
        if task == experiment.first:
            shares[name] = selection.count / counts.shape[1] / experts
    for place, arm in {"single": "gate", "largest": f"gate{coarse}"}.items():
        if arm in shares:
            run.record(f"esft/groups/{place}/experts_trained", shares[arm], "share")
    if {"fft", "gate", f"fft{coarse}", f"gate{coarse}"} <= set(hits):
        of_esft = hits[f"gate{coarse}"] - hits["gate"]
        gaps = 100.0 * (of_esft - hits[f"fft{coarse}"] + hits["fft"])
        place = "esft/groups/esft_minus_fft/change"
        run.record(place, gaps.mean(), "percent_points", gaps)
    return shares


def _hits(
    experiment: Specialists, results: Mapping[Key, Result]
) -> dict[str, pd.Series]:
    """Return which test items of the first task each arm gets right."""
    return {
        name: results[name, experiment.first].answers.correct
        for name in experiment.arms
    }
