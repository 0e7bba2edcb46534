"""The rivals' experiment: Rocket and eight methods on one bank, the same rows and steps.

``load_bank`` and `prepare` -> `Contest`: ``choose_rates``, ``run`` -> ``tables``, ``record``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
from torch import nn

from moebook import data, evaluation, runtime, training
from moebook.data import hub
from moebook.data.mixtures import Row
from moebook.experiments import pipeline, rates
from moebook.experiments import rocket as checks
from moebook.experiments.arm import Settings, picked
from moebook.experiments.experiment import Recorder
from moebook.experiments.targets import (
    LONGEST,
    Pool,
    bank_of,
    best_on_test_rows,
    kind,
    own_recipe,
    refuse_unjudged,
)
from moebook.methods import rocket
from moebook.methods.rivals import phatgoose, pi_tuning, table, tuning
from moebook.methods.rocket.case import Case
from moebook.methods.rocket.loras import Lora

WHAT = {
    "base": "the base as it is",
    "source_best": "the LoRA that is best on the test rows, as it is: no method could know it",
    "source_best_sft": "the LoRA that is best on the test rows, tuned",
    "best_by_shots": "the LoRA that is best on the shots, as it is",
    "expert_lora": "a LoRA trained on the target's own whole training set",
    "random": "a LoRA drawn at random, tuned",
    "rocket": "Rocket: a mixture of N LoRAs that shots chose",
    "mixlora": "MixLoRA: new experts on query and value projections, nothing of the bank",
    "lorahub": "LoRAHub: one weight a LoRA, searched without gradients",
    "smear": "SMEAR: one merged LoRA for each prompt",
    "pems": "PEMs: the mean of all LoRAs' factors",
    "poly": "Poly: learnt weights of the LoRAs in each layer",
    "pi_tuning": "pi-tuning: neighbours by Fisher information, with learnt weights",
    "arrow": "Arrow: a token goes where a LoRA amplifies it most",
    "phatgoose": "PHATGOOSE: gates learnt on each LoRA's own rows",
}
VARIANTS = {
    "chosen": "on Rocket's experts alone",
    "shots": "on the shots alone, without open rows",
    "slow": "its mixing weights at Rocket's rate",
    "untuned": "as in its own paper, without training on the target",
}


def what(known: Mapping[str, table.Arm]) -> dict[str, str]:
    """Say in one line what each arm is: a method, or a variant of one."""
    texts: dict[str, str] = {}
    for name, arm in known.items():
        method, _, variant = name.rpartition("_")
        if name in WHAT:
            texts[name] = WHAT[name]
        elif method in WHAT and variant in VARIANTS:
            texts[name] = f"{WHAT[method]}; {VARIANTS[variant]}"
        else:
            texts[name] = f"{WHAT.get(arm.rival, arm.rival)}; settings {arm.preset}"
    return texts


def load_bank(settings: Settings, model: nn.Module, tokenizer: Any) -> dict[str, Lora]:
    """Load the bank that the parameters name, or train one into the folder that they name."""
    own_starts = settings["starts"] == "own"
    return bank_of(settings, model, tokenizer, own_starts=own_starts)


@dataclass(frozen=True)
class Prepared:
    """What arms may see, by target."""

    # The bank without LoRAs that saw the target's rows.
    clean: Mapping[str, Mapping[str, Lora]]
    cases: Mapping[str, Case]  # the shots, and what the bank makes of them
    chosen: Mapping[str, dict[str, Lora]]  # Rocket's experts
    parts: Mapping[str, tuning.Data]  # shots and chosen open rows, encoded
    valid: Mapping[str, Any]  # annotated rows by which rates are chosen, encoded


def prepare(
    settings: Settings,
    model: nn.Module,
    tokenizer: Any,
    bank: Mapping[str, Lora],
    pool: Pool,
    encoder: Any,
) -> Prepared:
    """Let Rocket choose experts and open rows for each target, of a bank without leaks."""
    config = rocket.Config.preset("fixed", **picked(settings, checks.SIZES))
    usual = pipeline.Arm(config=config)  # Rocket as it is
    pad_id = tokenizer.pad_token_id or 0
    encode = partial(data.encode, tokenizer=tokenizer, max_length=LONGEST)

    clean = _without_leaks(bank, pool)
    open_vectors = np.concatenate(list(encoder.blocks(pool.open)))  # [S, D]
    cases: dict[str, Case] = {}
    chosen: dict[str, dict[str, Lora]] = {}
    parts: dict[str, tuning.Data] = {}
    valid: dict[str, Any] = {}
    for target in pool.tested:
        annotated = pool.annotated[target]
        case = rocket.case.score_bank(
            model,
            tokenizer,
            clean[target],
            encoder,
            annotated,
            config,
            task=target,
            seed=settings["seed"],
            own=pool.own,
        )
        cases[target] = case

        # Which LoRA is best on the test rows only a comparison asks, not Rocket itself.
        names = pipeline.experts(case, usual, clean[target], best="")
        chosen[target] = {name: bank[name] for name in names}

        # The shots come first, then the open rows that are near to them.
        tuned_on = pipeline.rows(case, usual, pool.open, open_vectors)
        shots = encode(tuned_on[: config.shots])
        near = encode(tuned_on[config.shots :])
        parts[target] = tuning.Data(shots, near, pad_id=pad_id)

        spare = _not_tuned_on(settings, target, annotated, tuned_on)
        valid[target] = encode(spare[-settings["valid_rows"] :])
    return Prepared(clean, cases, chosen, parts, valid)


def _not_tuned_on(
    settings: Settings,
    target: str,
    annotated: list[Row],
    tuned_on: Iterable[Mapping[str, str]],
) -> list[Row]:
    """Return the annotated rows by which rates are judged, or refuse their lack (E-DATA)."""
    used = {row["prompt"] for row in tuned_on}
    spare = [row for row in annotated if row["prompt"] not in used]
    if not spare:
        why = "their prompts are those of shots and chosen open rows"
        remedy = "take fewer shots or a smaller budget"
        refuse_unjudged(settings, target, len(annotated), f"{why}; {remedy}")
    return spare


def _without_leaks(bank: Mapping[str, Lora], pool: Pool) -> dict[str, dict[str, Lora]]:
    """Return for each target the bank without the LoRAs that saw its rows."""
    clean: dict[str, dict[str, Lora]] = {}
    for target in pool.tested:
        rows = pool.annotated[target] + pool.held_out[target]
        clean[target] = rocket.bank.guarded(bank, rows, task=target)
    return clean


def oracle(
    settings: Settings,
    model: nn.Module,
    tokenizer: Any,
    bank: Mapping[str, Lora],
    pool: Pool,
    prepared: Prepared,
) -> dict[str, str]:
    """Name by target the LoRA that is best on the test rows, ties by likelihood."""
    shown = [pool.asked(target) for target in pool.tested]
    answers = rocket.measure.untuned(
        model, tokenizer, bank, shown, **_scoring(settings)
    )
    joined = pd.concat(answers, names=["lora", "row"]).reset_index("lora")
    return best_on_test_rows(joined, prepared.clean, pool)


def whole(
    settings: Settings, model: nn.Module, tokenizer: Any, pool: Pool
) -> dict[str, Lora]:
    """Train a LoRA on each target's own training set, by the bank's recipe."""
    recipe = own_recipe(settings)
    if settings["source"] == "embedded":
        recipe |= {"epochs": settings["bank_epochs"], "lr": settings["bank_rate"]}
    own = {
        f"whole/{target}": rows[: settings["whole_rows"]]
        for target, rows in pool.annotated.items()
    }
    recipe |= kind(settings, model) | {"seed": settings["seed"]}
    return rocket.bank.train(model, tokenizer, own, **recipe)


def shipped(
    settings: Settings,
    model: nn.Module,
    tokenizer: Any,
    bank: Mapping[str, Lora],
    arms: Mapping[str, table.Arm],
    prepared: Prepared,
) -> table.Shipped:
    """Make what the bank's makers would ship: Fisher information, and a gate for each LoRA.

    Both come of the rows that each LoRA was trained on, and only for rivals that use them.
    """
    most = settings["source_rows"]
    if settings["source"] == "embedded":
        rows: Any = rocket.bank.embedded(most, names=bank)
    else:
        pins = hub.pins(settings["revisions"], known=rocket.bank.SETS)
        rows = {
            name: rocket.bank.source_rows(name, pins.get(name))[:most] for name in bank
        }
    sources = {
        name: data.encode(part, tokenizer, max_length=LONGEST)
        for name, part in rows.items()
    }
    *_, last = prepared.parts.values()
    own = tuning.Data(last.shots, sources=sources, pad_id=tokenizer.pad_token_id or 0)
    rivals = {arm.rival for arm in arms.values()}
    fishers: dict[str, Any] = {}
    if "pi_tuning" in rivals:
        usual = pi_tuning.Config.preset("bank")
        fishers = pi_tuning.fishers(model, bank, own, usual)
    gates: dict[float, Any] = {}
    if "phatgoose" in rivals:
        for rate in rates.grid(settings):
            how = phatgoose.Config.preset(
                "bank", lr=rate, steps=settings["gate_steps"], batch=settings["batch"]
            )
            gates[rate] = phatgoose.gates(model, bank, own, how, seed=settings["seed"])
    return table.Shipped(fishers=fishers, gates=gates)


@dataclass(frozen=True)
class Result:
    """What became of an arm on a target."""

    answers: pd.DataFrame  # a row a test item
    cost: dict[str, float]  # numbers, tokens, bytes, and time over the base's
    weights: Any  # of each LoRA, mean over layers and tokens


@dataclass(frozen=True)
class Contest:
    """Arms on one base and one bank: each is put on the base, tuned, tested, and taken off."""

    settings: Settings
    model: nn.Module
    tokenizer: Any
    arms: Mapping[str, table.Arm]  # that were asked for
    known: Mapping[str, table.Arm]
    pool: Pool
    prepared: Prepared
    shipped: table.Shipped
    oracle: Mapping[str, str]  # the LoRA that is best on the test rows, by target
    # LoRAs of the targets' own training sets; empty without their arm.
    whole: Mapping[str, Lora]

    @property
    def groups(self) -> dict[str, dict[str, Mapping[str, Lora]]]:
        """The LoRAs that an arm may mix, by target and kind of bank."""
        groups: dict[str, dict[str, Mapping[str, Lora]]] = {}
        for target, clean in self.prepared.clean.items():
            groups[target] = {"whole": clean, "chosen": self.prepared.chosen[target]}
            if self.whole:
                name = f"whole/{target}"
                groups[target]["with_target"] = {**clean, name: self.whole[name]}
        return groups

    @property
    def recipe(self) -> dict[str, Any]:
        """How every arm is tuned, but for its rate."""
        names = "steps batch schedule accumulate weight_decay seed"
        return picked(self.settings, names)

    @cached_property
    def observed(self) -> dict[str, Any]:
        """Held-out rows on which weights are measured, in padded batches."""
        return self.pool.batches(self.tokenizer, self.settings["test_rows"])

    def _tuned(self, name: str, target: str, rate: float) -> Any:
        """Put an arm on the base and tune it; whoever asks detaches it."""
        arm = self.known[name]
        named = ""
        if name in ("source_best", "source_best_sft"):
            named = self.oracle[target]
        elif name == "expert_lora":
            named = f"whole/{target}"
        return table.tuned(
            self.model,
            arm,
            self.groups[target][arm.bank],
            self.prepared.parts[target],
            self.shipped,
            **self.recipe,
            lr=rate,
            named=named,
        )

    def _validate(self, target: str) -> float:
        pad_id = self.tokenizer.pad_token_id or 0
        return training.nats(self.model, self.prepared.valid[target], pad_id=pad_id)

    def choose_rates(self) -> pd.DataFrame:
        """Try every rate for every arm that has one: a line an arm, a column a rate.

        Nats per token on the validation rows, the mean over targets; variants take an arm's rate.
        """
        rated = sorted({arm.rated for arm in self.arms.values()} - {""})
        tried = rates.grid(self.settings)
        lines: list[tuple[str, float, str, float]] = []
        for name, rate, target in product(rated, tried, self.pool.tested):
            done = self._tuned(name, target, rate)
            lines.append((name, rate, target, self._validate(target)))
            done.detach()
        columns = ["arm", "lr", "target", "nats"]
        frame = pd.DataFrame(lines, columns=columns)
        return frame.pivot_table("nats", "arm", "lr")

    def rates(self, grid: pd.DataFrame) -> dict[str, float]:
        """Return each arm's rate: the best that was tried for it, or the first."""
        best = grid.idxmin(axis=1).to_dict()
        fallback = rates.grid(self.settings)[0]
        return {name: best.get(arm.rated, fallback) for name, arm in self.arms.items()}

    def test(self, target: str) -> pd.DataFrame:
        """Test the base with what is on it: a row a test item."""
        return evaluation.evaluate(
            self.model,
            self.tokenizer,
            self.pool.asked(target),
            **_scoring(self.settings),
        )

    def run(self, name: str, target: str, rate: float) -> Result:
        """Put an arm on the base, tune it, test it, time it, and take it off again."""
        device = next(self.model.parameters()).device
        with runtime.stopwatch(device) as plain:
            self._validate(target)
        done = self._tuned(name, target, rate)
        answers = self.test(target)
        with runtime.stopwatch(device) as mixed:
            self._validate(target)
        cost = vars(done.cost) | {
            "stored": done.stored,
            "time": mixed.seconds / plain.seconds,
        }
        weights = table.weights(done, self.observed[target][0])
        done.detach()
        return Result(answers, cost, weights)


def tables(
    contest: Contest, results: Mapping[tuple[str, str], Result]
) -> dict[str, pd.DataFrame]:
    """Return every arm's answers over all targets, each of which counts once; last the base's."""
    by_arm: dict[str, dict[str, pd.DataFrame]] = {name: {} for name in contest.arms}
    for (name, target), result in results.items():
        by_arm[name][target] = result.answers
    tested = contest.pool.tested
    by_arm["base"] = {target: contest.test(target) for target in tested}
    return {
        name: rocket.measure.over_targets(part, tested) for name, part in by_arm.items()
    }


def record(
    run: Recorder,
    results: Mapping[tuple[str, str], Result],
    tables: Mapping[str, pd.DataFrame],
) -> pd.DataFrame:
    """Keep scores and costs; return the costs, a line an arm, means over targets."""
    for name, answers in tables.items():
        run.scores(f"rivals/{name}", answers)
    costs = pd.DataFrame({key: result.cost for key, result in results.items()}).T
    spent = costs.rename_axis(["arm", "target"]).groupby("arm", sort=False).mean()
    units = dict.fromkeys(spent.columns, "count")
    units |= {"stored": "bytes", "time": "ratio"}
    for name, column in product(spent.index, units):
        place = f"rivals/{name}/cost/{column}"
        run.record(place, spent.loc[name, column], units[column])
    return spent


def _scoring(settings: Settings) -> dict[str, Any]:
    return {"limit": settings["test_rows"], "split": settings["test_split"]}
