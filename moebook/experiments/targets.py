"""Rocket's experiment: a bank of LoRAs, targets with K shots, and arms tuned on what they choose.

``rows`` -> `whole` -> `Targets` -> ``tune_alone``, ``choose_rates`` -> ``run`` -> `tables`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NoReturn

import numpy as np
import pandas as pd
from torch import nn

from moebook import data, evaluation, training
from moebook.analysis import routing
from moebook.data import hub, tasks
from moebook.data.mixtures import Row
from moebook.data.tasks import Task
from moebook.errors import refuse
from moebook.experiments import pipeline, rates
from moebook.experiments import rocket as checks
from moebook.experiments.arm import Settings, picked
from moebook.experiments.experiment import Recorder
from moebook.experiments.pipeline import Arm
from moebook.methods import rocket
from moebook.methods.rocket.case import Case
from moebook.methods.rocket.loras import Lora
from moebook.models.checkpoint import fingerprint, origin_or_none
from moebook.training import History, batches

LONGEST = 1024  # tokens of a row
# Nats a token on validation rows by arm, rate, and target (and LoRA, of one tuned alone).
Losses = dict[tuple[str, float, str], float]
# Comparisons of Table 5: what is recorded of the error on mixed cases.
RECORDED = ("mixture", "best expert")
WHAT = {
    "mixture": "Rocket: N LoRAs by three rankings, shots and near open rows",
    "source_best_sft": "the LoRA that is best on the test rows, tuned alone on the same rows",
    "random_lora": "a random LoRA, tuned alone on the same rows",
    "random_experts": "N random LoRAs",
    "experts_by_perplexity": "N LoRAs by perplexity alone",
    "experts_by_accuracy": "N LoRAs by accuracy on the shots alone",
    "experts_without_diversity": "N LoRAs by perplexity and accuracy",
    "experts_normalised": "the three rankings, each brought to [0, 1] first (ours)",
    "experts_identical": "one LoRA N times",
    "shots_only": "no open rows",
    "random_data": "open rows at random",
    "data_with_duplicates": "near open rows, duplicates and all",
    "data_by_kde": "open rows by a kernel of width 10",
    "data_by_narrower_kde": "open rows by a kernel of width 2",
    "data_by_hull": "open rows out of the hull of the shots",
    "data_by_repr_filter": "open rows, duplicates removed as in the authors' filter",
    "data_strictly_deduplicated": "open rows, of which a stricter threshold keeps few",
    "expert_lora": "a LoRA trained on the target's own whole training set",
    "perplexity": "LoRAs of the bank, each tuned alone on the shots",
}
KINDS = {
    "budget": "{} open rows",
    "shots": "{} shots",
    "experts": "{} experts",
    "selected": "{} experts a token",
}


def what(names: Iterable[str]) -> dict[str, str]:
    """Say in one line what each arm is; a name that ends in a number says another size."""
    texts: dict[str, str] = {}
    for name in names:
        kind = name.rstrip("0123456789")
        size = name.removeprefix(kind)
        texts[name] = KINDS[kind].format(size) if size else WHAT[name]
    return texts


@dataclass(frozen=True)
class Pool:
    """The rows of a run, by target where they are a target's."""

    annotated: Mapping[str, list[Row]]  # from which shots are drawn
    held_out: Mapping[str, list[Row]]  # that test it
    open: list[Row]  # the same for all targets
    tested: Mapping[str, str]  # the task that evaluates it
    own: Mapping[str, Task] = field(default_factory=dict)  # users' files, by name

    def asked(self, target: str) -> str | Task:
        """Return what evaluates a target: a user's own task, or the name of another."""
        test = self.tested[target]
        return self.own.get(test, test)

    def spare(self, target: str, shots: Iterable[Mapping[str, str]]) -> list[Row]:
        """Return a target's annotated rows that no arm is tuned on: neither shots nor open rows."""
        used = {row["prompt"] for row in (*shots, *self.open)}
        return [row for row in self.annotated[target] if row["prompt"] not in used]

    def batches(self, tokenizer: Any, most: int) -> dict[str, Any]:
        """Return the first held-out rows of each target, so many, in padded batches."""
        first = {name: part[:most] for name, part in self.held_out.items()}
        return batches.fixed(first, tokenizer, max_length=LONGEST)


def rows(settings: Settings) -> Pool:
    """Draw annotated, test and open rows; no open row is a test row (E-LEAK)."""
    written = settings["targets"].split(",")
    names = [tasks.label(name) for name in written]
    own = tasks.of_files(written)
    source = settings["source"]
    # The rivals' notebook has no folder of the hub's data sets.
    folder = settings.get("data_folder", "")
    pins = hub.pins(settings["revisions"], folder, rocket.bank.SETS)
    annotated, held_out = rocket.bank.targets(
        [own.get(name, name) for name in names], source, pins, settings["test_split"]
    )
    pool = rocket.bank.open_data(
        settings["pool_sets"], settings["pool_rows"], source, pins
    )
    benchmarks = settings["benchmarks"]
    tested = checks.tested(names, benchmarks.split(",") if benchmarks else [])
    others = [test for test in tested.values() if test not in own]
    evaluation.load(others, folder)  # what it refuses, it refuses now
    for target in names:
        data.refuse_leak(pool, held_out[target])
    return Pool(annotated, held_out, pool, tested, own)


def load_bank(settings: Settings, model: nn.Module, tokenizer: Any) -> dict[str, Lora]:
    """Load the bank that the parameters name, or train one into the folder that they name."""
    pins = hub.pins(settings["revisions"], settings["data_folder"], rocket.bank.SETS)
    rank = settings["bank_rank"]
    sizes = {"rank": rank, "alpha": float(rank)}
    return bank_of(settings, model, tokenizer, pins=pins, **sizes)


def bank_of(
    settings: Settings, model: nn.Module, tokenizer: Any, **changes: Any
) -> dict[str, Lora]:
    """Load the bank of Rocket's notebook or the rivals', or train it with ``changes``."""
    names = settings["members"]
    recipe: dict[str, Any] = {}
    if checks.makes_bank(settings):  # else they have no effect, which is told (W-IDLE)
        recipe |= {"rows": settings["bank_rows"], "epochs": settings["bank_epochs"]}
        recipe |= {"lr": settings["bank_rate"], **changes}
    return rocket.bank.load(
        model,
        tokenizer,
        settings["bank_folder"],
        names=names.split(",") if names else (),
        **recipe,
    )


def kind(settings: Settings, model: nn.Module) -> dict[str, Any]:
    """Return rank and layers of the bank's LoRAs, which those of the targets' own sets share.

    They are told by the bank's folder, once it is filled: a stranger's may differ from ours.
    """
    if not settings["bank_folder"]:
        return {}
    first = rocket.loras.folders(settings["bank_folder"])[0]
    lora = rocket.loras.read(first, model, fingerprint(model))
    return {"rank": lora.rank, "targets": lora.targets}


def several(settings: Settings) -> list[float]:
    """Return the learning rates to choose from; none where only one is given."""
    tried = rates.grid(settings)
    return tried if len(tried) > 1 else []


def grid(losses: Losses) -> pd.DataFrame:
    """Average losses over targets: a line an arm, a column a rate; empty without any."""
    levels = pd.MultiIndex.from_tuples(losses, names=["arm", "lr", "target"])
    column = pd.Series(list(losses.values()), levels, dtype=float)
    return column.groupby(["arm", "lr"], sort=False).mean().unstack()


def _check_judged(settings: Settings, pool: Pool) -> None:
    """Refuse a target of which no row is left to judge rates by (E-DATA)."""
    for target, annotated in pool.annotated.items():
        shots = rocket.score.draw(annotated, settings["shots"], settings["seed"])
        if not pool.spare(target, shots):
            why = "their prompts are those of shots and open rows"
            remedy = "take fewer shots or pool_rows, or one rate alone"
            refuse_unjudged(settings, target, len(annotated), f"{why}; {remedy}")


def refuse_unjudged(settings: Settings, target: str, count: int, why: str) -> NoReturn:
    """Refuse a target of whose annotated rows none is left to judge rates by (E-DATA)."""
    where = f"valid_rows = {settings['valid_rows']}"
    none = f"none of {target}'s {count} annotated rows is left to judge rates by"
    refuse("E-DATA", f"{where}: {none}: {why}")


def own_recipe(settings: Settings) -> dict[str, Any]:
    """Return how a LoRA on a target's own set is trained: as the shipped bank's, or the paper's."""
    recipe: dict[str, Any] = dict(rocket.bank.TABLE_12)
    return recipe | rocket.bank.RECIPE if settings["source"] == "embedded" else recipe


def whole(
    settings: Settings,
    model: nn.Module,
    tokenizer: Any,
    pool: Pool,
    arms: Collection[str],
) -> tuple[dict[str, Lora], Losses]:
    """Train a LoRA on each target's own training set, by the bank's recipe.

    With several rates, and the arm ``expert_lora``, one at each, without the last validation rows,
    by which the best is chosen. Nothing was trained on a target before: first it is asked whether
    the other arms have rows to choose a rate by.
    """
    if several(settings) and {*arms} != {"expert_lora"}:
        _check_judged(settings, pool)
    tried = several(settings) if "expert_lora" in arms else []
    last = settings["valid_rows"] if tried else 0
    own = {
        target: part[: len(part) - last][: settings["whole_rows"]]
        for target, part in pool.annotated.items()
    }
    recipe = own_recipe(settings) | picked(settings, "accumulate optimizer seed")
    recipe |= kind(settings, model)
    if not tried:
        return rocket.bank.train(model, tokenizer, own, **recipe), {}

    made = {
        rate: rocket.bank.train(model, tokenizer, own, **recipe | {"lr": rate})
        for rate in tried
    }
    losses: Losses = {}
    for rate in tried:
        for target, part in pool.annotated.items():
            unseen = data.encode(part[-last:], tokenizer, max_length=LONGEST)
            with rocket.loras.attached(model, [made[rate][target]]):
                nats = training.nats(model, unseen, pad_id=tokenizer.pad_token_id or 0)
            losses["expert_lora", rate, target] = nats
    best = grid(losses).loc["expert_lora"].idxmin()
    return made[best], losses


@dataclass(frozen=True)
class Result:
    """What became of an arm on a target."""

    history: History  # of its first tuning
    answers: list[pd.DataFrame]  # of each tuning, a row a test item
    # Of the mixture's first tuning: who serves which tokens, and who alone gets which rows right.
    shares: pd.DataFrame | None = None
    single: np.ndarray | None = None


@contextmanager
def _taken_off(model: nn.Module) -> Iterator[None]:
    """Take off the mixture that a block puts on the base, however the block ends."""
    try:
        yield
    finally:
        if origin_or_none(model, rocket.apply.Origin):
            rocket.apply.remove(model)


@dataclass(frozen=True)
class Targets:
    """Arms on one base and one bank: each is put on the base, tuned, tested, and taken off."""

    settings: Settings
    model: nn.Module
    tokenizer: Any
    bank: Mapping[str, Lora]
    arms: Mapping[str, Arm | None]  # that were asked for; None chooses nothing
    pool: Pool
    vectors: np.ndarray  # embeddings of the open rows
    cases: Mapping[str, Case]  # the shots, and what the bank makes of them
    # The bank without LoRAs that saw the target's rows.
    clean: Mapping[str, Mapping[str, Lora]]
    best: Mapping[str, str]  # the LoRA that is best on the test rows

    @property
    def mixed(self) -> dict[str, Arm]:
        """The arms that choose experts and rows."""
        return {name: arm for name, arm in self.arms.items() if arm}

    @property
    def pad_id(self) -> int:
        """The token that pads rows."""
        return self.tokenizer.pad_token_id or 0

    @property
    def recipe(self) -> dict[str, Any]:
        """How an arm is tuned, but for its rate and its seed: keywords of `training.fit`."""
        length = "epochs" if self.settings["epochs"] else "steps"
        names = f"batch schedule accumulate optimizer weight_decay {length}"
        return picked(self.settings, names)

    @cached_property
    def valid(self) -> dict[str, Any]:
        """Annotated rows that are neither shots nor open rows, encoded: by these rates are chosen.

        So no arm is judged by a row that it was tuned on, whichever open rows it takes.
        """
        encoded: dict[str, Any] = {}
        for target, case in self.cases.items():
            spare = self.pool.spare(target, case.shots)
            last = spare[-self.settings["valid_rows"] :]
            encoded[target] = data.encode(last, self.tokenizer, max_length=LONGEST)
        return encoded

    @cached_property
    def observed(self) -> dict[str, Any]:
        """Held-out rows on which the routing is measured, in padded batches."""
        return self.pool.batches(self.tokenizer, self.settings["test_rows"])

    def experts(self, target: str, name: str) -> tuple[str, ...]:
        """Name the LoRAs that an arm starts from."""
        return pipeline.experts(
            self.cases[target],
            self.mixed[name],
            self.clean[target],
            best=self.best[target],
        )

    def rows(self, target: str, name: str) -> Sequence[Mapping[str, str]]:
        """Return the shots and the open rows that an arm is tuned on."""
        case = self.cases[target]
        return pipeline.rows(case, self.mixed[name], self.pool.open, self.vectors)

    def test(self, target: str) -> pd.DataFrame:
        """Test the base with what is on it: a row a test item."""
        return evaluation.evaluate(
            self.model, self.tokenizer, self.pool.asked(target), **how(self.settings)
        )

    @contextmanager
    def tuned(
        self, target: str, name: str, rate: float, turn: int = 0
    ) -> Iterator[History]:
        """Put an arm's mixture on the base and tune it; it is taken off again after the block."""
        with _taken_off(self.model):
            yield pipeline.tune(
                self.model,
                self.tokenizer,
                [self.bank[expert] for expert in self.experts(target, name)],
                self.rows(target, name),
                self.mixed[name].config,
                **self.recipe,
                lr=rate,
                seed=self.settings["seed"] + 1_000_001 * turn,
            )

    @contextmanager
    def tuned_alone(self, target: str, lora: str, rate: float) -> Iterator[History]:
        """Put one LoRA on the base and tune it on the shots, for half as many steps."""
        recipe = self.recipe
        if "steps" in recipe:
            recipe["steps"] = max(1, recipe["steps"] // 2)
        with _taken_off(self.model):
            yield pipeline.tune(
                self.model,
                self.tokenizer,
                [self.bank[lora]],
                self.cases[target].shots,
                checks.main(self.settings),
                **recipe,
                lr=rate,
                seed=self.settings["seed"],
            )

    def tune_alone(self) -> tuple[dict[tuple[str, str], float], Losses]:
        """Tune the bank's first LoRAs one at a time: accuracy by target and LoRA, losses by rate.

        Nothing is done without the arm ``perplexity``.
        """
        pairs: list[tuple[str, str]] = []
        if "perplexity" in self.arms:
            for target, clean in self.clean.items():
                first = list(clean)[: self.settings["tuned"]]
                pairs += [(target, lora) for lora in first]
        losses: Losses = {}
        for target, lora in pairs:
            for rate in several(self.settings):
                with self.tuned_alone(target, lora, rate):
                    loss = self._validate(target)
                losses["perplexity", rate, f"{target}/{lora}"] = loss
        rate = rates.grid(self.settings)[0]
        if losses:
            rate = grid(losses).loc["perplexity"].idxmin()
        accuracies: dict[tuple[str, str], float] = {}
        for target, lora in pairs:
            with self.tuned_alone(target, lora, rate):
                accuracies[target, lora] = self.test(target).correct.mean()
        return accuracies, losses

    def choose_rates(self) -> Losses:
        """Try every rate for every arm on every target, if there are several."""
        losses: Losses = {}
        for target in self.cases:
            for name in self.mixed:
                for rate in several(self.settings):
                    with self.tuned(target, name, rate):
                        losses[name, rate, target] = self._validate(target)
        return losses

    def _validate(self, target: str) -> float:
        return training.nats(self.model, self.valid[target], pad_id=self.pad_id)

    def run(self, target: str, name: str, rate: float) -> Result:
        """Tune an arm on a target at its rate, test it, and take it off the base again.

        The mixture, with which every arm is compared, is tuned ``repeats`` times.
        """
        answers: list[pd.DataFrame] = []
        with self.tuned(target, name, rate) as first:
            answers.append(self.test(target))
            shares = single = None
            if name == "mixture":
                shares = routing.shares(self.model, {target: self.observed[target]})
                single = rocket.measure.alone(
                    self.model,
                    self.tokenizer,
                    self.pool.asked(target),
                    **how(self.settings),
                )
        more = self.settings["repeats"] if name == "mixture" else 1
        for turn in range(1, more):
            with self.tuned(target, name, rate, turn):
                answers.append(self.test(target))
        return Result(first, answers, shares, single)


def how(settings: Settings) -> dict[str, Any]:
    """Return how everything is tested: keywords of `evaluation.evaluate`."""
    return {
        "limit": settings["test_rows"],
        "data": settings["data_folder"],
        "chat": True,
        "split": settings["test_split"],
    }


def untuned(
    settings: Settings,
    model: nn.Module,
    tokenizer: Any,
    bank: Mapping[str, Lora],
    pool: Pool,
) -> pd.DataFrame:
    """Test the base, and the base under each LoRA of the bank, on every target."""
    shown = [pool.asked(target) for target in pool.tested]
    answers = {"base": evaluation.evaluate(model, tokenizer, shown, **how(settings))}
    answers |= rocket.measure.untuned(model, tokenizer, bank, shown, **how(settings))
    return pd.concat(answers, names=["lora", "row"]).reset_index("lora")


def best_on_test_rows(
    answers: pd.DataFrame, clean: Mapping[str, Mapping[str, Lora]], pool: Pool
) -> dict[str, str]:
    """Name by target the LoRA with the best test accuracy, ties by likelihood."""
    # A target's test may be a group of benchmarks, whose members are the tasks.
    means = answers.groupby(["lora", "asked"], sort=False)[["correct", "nll"]].mean()
    table = means.unstack()
    worth = table.correct - 1e-6 * table.nll.fillna(0)
    return {
        target: worth.loc[list(clean[target]), pool.tested[target]].idxmax()
        for target in clean
    }


def tables(
    targets: Targets,
    results: Mapping[tuple[str, str], Result],
    untuned: pd.DataFrame,
    whole: Mapping[str, Lora],
) -> dict[str, pd.DataFrame]:
    """Return every arm's answers over all targets, each of which counts once.

    ``base`` and ``source_best``, the best LoRA as it was, are part of every run.
    """
    pool = targets.pool
    by_arm: dict[str, dict[str, Any]] = {}
    for (target, name), result in results.items():
        by_arm.setdefault(name, {})[target] = result.answers
    answers = {name: rocket.measure.repeated(part) for name, part in by_arm.items()}
    parts = dict(list(untuned.groupby(["lora", "asked"])))
    answers["base"] = {
        target: parts["base", test] for target, test in pool.tested.items()
    }
    answers["source_best"] = {
        target: parts[targets.best[target], test]
        for target, test in pool.tested.items()
    }
    if "expert_lora" in targets.arms:
        by_target: dict[str, pd.DataFrame] = {}
        for target in pool.tested:
            by_target |= rocket.measure.untuned(
                targets.model,
                targets.tokenizer,
                {target: whole[target]},
                pool.asked(target),
                **how(targets.settings),
            )
        answers["expert_lora"] = by_target
    over = partial(rocket.measure.over_targets, tested=pool.tested)
    return {name: over(part) for name, part in answers.items()}


def record(
    run: Recorder,
    targets: Targets,
    results: Mapping[tuple[str, str], Result],
    tables: Mapping[str, pd.DataFrame],
) -> None:
    """Keep scores of all arms, and of the mixture its losses, its routing and its mixed cases."""
    for name, table in tables.items():
        run.scores(f"rocket/{name}", table)
    for (target, name), result in results.items():
        if name == "mixture":
            run.curve(f"rocket/mixture/loss/{target}", result.history.loss, "nats")
    shares = [result.shares for result in results.values() if result.shares is not None]
    if shares:
        evenness = [routing.load(part).entropy.mean() for part in shares]
        run.record("rocket/activation/entropy", np.mean(evenness), "share")

    if "mixture" not in tables:
        return
    scores = {name: 100 * table.score.mean() for name, table in tables.items()}
    usual = scores["mixture"]
    settings = targets.settings
    names = settings["targets"].split(",")
    if settings["benchmarks"] and set(names) == set(rocket.bank.QUESTIONS):
        average = tables["mixture"].score.mean()
        run.record("rocket/mixture/benchmark_average", average, "share")
    if {"shots1", "shots5"} <= scores.keys():
        late = usual - scores["shots5"]
        early = scores["shots5"] - scores["shots1"]
        run.record(
            "rocket/shots/late_minus_early/accuracy", late - early, "percent_points"
        )
    largest = scores.get(f"budget{4 * settings['budget']}")
    if largest is not None:
        lead = usual - largest
        run.record(
            "rocket/budget/default_minus_largest/accuracy", lead, "percent_points"
        )
    rows = {
        target: len(result.answers[0])
        for (target, _), result in results.items()
        if result.single is not None
    }
    errors = mixed_errors(mixed_cases(results), rows)
    for name in RECORDED:
        if name in errors:
            place = f"rocket/{name.replace(' ', '_')}/mixed_cases_error"
            run.record(place, errors[name], "share")


def mixed_cases(results: Mapping[tuple[str, str], Result]) -> pd.DataFrame:
    """Sort each target's test rows by how many experts alone answer them (Table 5)."""
    lines = {
        target: rocket.measure.split_cases(result.single, result.answers[0].correct > 0)
        for (target, _), result in results.items()
        if result.single is not None
    }
    return pd.DataFrame(lines).T


def mixed_errors(cases: pd.DataFrame, rows: Mapping[str, int]) -> dict[str, float]:
    """Return the error rates on all mixed cases together; empty where there are none.

    The cases are shares of a target's test ``rows``.
    """
    some = cases.dropna()
    if not len(some):
        return {}
    counts = [share * rows[target] for target, share in some.mixed.items()]
    return {
        name: float(np.average(some[name], weights=counts))
        for name in cases.columns[3:]
    }


def record_foretold(run: Recorder, paired: pd.DataFrame) -> None:
    """Keep how well perplexity on the shots foretells what tuning a LoRA alone comes to."""
    if not len(paired):
        return
    run.record("rocket/random_lora_on_shots/accuracy", paired.after.mean(), "share")
    kinds = list(rocket.measure.KINDS)
    ranks = rocket.measure.correlations(paired, kinds, ["after", "gain"])
    means = ranks.groupby(level=["of", "with"]).mean()
    every = pd.MultiIndex.from_product([kinds, ["after", "gain"]])
    plain, _, reasoned, gain = means.reindex(every)
    claimed = {
        "gain_correlation": gain,
        "reasoning_minus_plain/correlation": reasoned - plain,
    }
    for name, value in claimed.items():
        if np.isfinite(value):
            run.record(f"rocket/perplexity/{name}", value, "ratio")
