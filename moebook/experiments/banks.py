"""Why Rocket's lead hangs on its bank: banks of two kinds, and experts chosen in several ways.

Banks differ by the seed of their training and by one thing alone: whether their LoRAs start from
one first A, as PEFT's do under one seed, or from an A each. A run has one bank of either kind, on
the same rows, and the same draws of shots; so a seed is a bank, and banks are what varies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn

from moebook.data import tasks
from moebook.errors import nearest
from moebook.experiments import needs, pipeline
from moebook.experiments.arm import (
    Complaints,
    Settings,
    asked,
    complaint,
    picked,
    refuse_complaints,
)
from moebook.experiments.experiment import Recorder
from moebook.experiments.pipeline import Arm
from moebook.experiments.rocket import (
    SIZES,
    annotated,
    bank_training,
    encoder_there,
    too_few,
)
from moebook.methods import rocket
from moebook.methods.rocket.augment import Encoder
from moebook.methods.rocket.bank import Bank, Row
from moebook.methods.rocket.case import Case
from moebook.methods.rocket.loras import Lora

# Kind of bank to whether each of its LoRAs starts from an A of its own.
KINDS = {
    "shared": False,
    "own": True,
}
OTHER = {"shared": "own", "own": "shared"}
WHAT = {
    "own_choice": "those that Algorithm 1 takes from this bank",
    "exchanged": "those of the same names that Algorithm 1 took from the other bank",
    "answers_only": "by Algorithm 1, with the perplexity of the answers alone",
    "accuracy_alone": "by the accuracy on the shots alone",
    "forced": "own_choice, with the LoRA that solves most shots in the last one's place",
    "rotated": "own_choice from the shared bank, each LoRA with other factors of its product",
}
"""Arm to the experts that it takes, in one line."""
DRAWS = 1000  # most draws of the shots; seeds of one run begin at as many times its own
Cases = Mapping[str, Case]  # what the shots say of each kind's bank
# Names the experts that an arm takes from the bank of a kind.
Choice = Callable[[Cases, str, Bank, rocket.Config], tuple[str, ...]]


def main(settings: Settings) -> rocket.Config:
    """Return the settings of the mixture, which all arms share."""
    return rocket.Config(**picked(settings, SIZES))


def solver(case: Case, bank: Bank) -> str:
    """Name the LoRA that answers most shots exactly; of equal ones the one of least perplexity."""
    names = list(bank)
    solved = case.solved.loc[names].mean(axis=1)
    nats = case.plain.loc[names].mean(axis=1)
    order = pd.DataFrame({"solved": -solved, "nats": nats})
    return str(order.sort_values(["solved", "nats"], kind="stable").index[0])


def _by(**changes: Any) -> Choice:
    """Choose by Algorithm 1 as an arm of Rocket with these ``changes`` does."""

    def chosen(
        cases: Cases, kind: str, bank: Bank, config: rocket.Config
    ) -> tuple[str, ...]:
        arm = Arm(config=config, **changes)
        return pipeline.selected(cases[kind], arm, bank).experts

    return chosen


def _forced(
    cases: Cases, kind: str, bank: Bank, config: rocket.Config
) -> tuple[str, ...]:
    """Put the LoRA that solves most shots in the last one's place, unless it is chosen."""
    usual = _by()(cases, kind, bank, config)
    best = solver(cases[kind], bank)
    return usual if best in usual else (*usual[:-1], best)


def _exchanged(
    cases: Cases, kind: str, bank: Bank, config: rocket.Config
) -> tuple[str, ...]:
    """Take what Algorithm 1 chose from the bank of the other kind."""
    return _by()(cases, OTHER[kind], bank, config)


CHOICES: dict[str, Choice] = {
    "own_choice": _by(),
    "exchanged": _exchanged,
    "answers_only": _by(rationales=False),
    "accuracy_alone": _by(by=("accuracy",)),
    "forced": _forced,
    "rotated": _by(),
}
"""How an arm chooses; ``rotated`` chooses as ``own_choice`` and trains turned factors."""
ROTATED = "rotated"
WHERE = {ROTATED: ("shared",)}  # of banks of own As there is nothing to take away


def kinds(arm: str) -> tuple[str, ...]:
    """Return the kinds of banks that an arm is tried on."""
    return WHERE.get(arm, tuple(KINDS))


def check(settings: Settings) -> dict[str, Choice]:
    """Return the arms asked for, or refuse parameters with which they cannot run (E-RANGE)."""
    arms = asked(settings, CHOICES)
    refuse_complaints(_needs(settings))
    return arms


def _needs(settings: Settings) -> Complaints:
    yield from complaint("", main, settings)
    yield from needs.named({"targets": settings["targets"]})
    yield from _targets(settings)
    names = members(settings)
    if settings["members"]:
        yield from needs.named({"members": settings["members"]})
        for name in names:
            if name not in rocket.bank.EMBEDDED:
                close = nearest(name, rocket.bank.EMBEDDED)
                yield f"members lists {name!r}: banks are made of embedded tasks: {close}"
    yield from bank_training(settings)
    yield from too_few(settings, names)
    yield from encoder_there(settings)


def _targets(settings: Settings) -> Complaints:
    """Complain about targets that are not embedded, or have fewer rows than shots."""
    for name in settings["targets"].split(","):
        if name and name not in tasks.KNOWN:
            yield f"targets lists {name!r}: {nearest(name, tasks.KNOWN)}"
    for name, count in annotated({**settings, "source": "embedded"}).items():
        if settings["shots"] > count:
            why = f"{name} has {count} annotated rows"
            yield f"shots = {settings['shots']}: {why}; take 1 to {count}"


def members(settings: Settings) -> list[str]:
    """Name the sets of which a bank's LoRAs are made."""
    return (
        settings["members"].split(",") if settings["members"] else rocket.bank.EMBEDDED
    )


def make(
    settings: Settings, model: nn.Module, tokenizer: Any
) -> dict[str, dict[str, Lora]]:
    """Train a bank of each kind by the shipped bank's recipe, from the run's seed.

    Banks of two seeds share no first A: the LoRAs of one that has its own add their places.
    """
    banks = {}
    for kind, own_starts in KINDS.items():
        banks[kind] = rocket.bank.make(
            model,
            tokenizer,
            members(settings),
            rows=settings["bank_rows"],
            epochs=settings["bank_epochs"],
            seed=settings["seed"] * DRAWS,
            own_starts=own_starts,
        )
    return banks


def likeness(bank: Bank) -> float:
    """Return the mean correlation of the A of two LoRAs: near 1 where they began as one."""
    rows = []
    for lora in bank.values():
        rows.append(torch.cat([down.flatten() for down in lora.down.values()]))
    others = ~torch.eye(len(bank), dtype=torch.bool)
    return float(torch.corrcoef(torch.stack(rows))[others].mean())


def score(
    settings: Settings,
    model: nn.Module,
    tokenizer: Any,
    banks: Mapping[str, Bank],
    encoder: Encoder,
    rows: Sequence[Row],
    task: str,
    draw: int,
) -> dict[str, Case]:
    """Draw K shots of a target and score both banks on the same ones."""
    shots_seed = settings["seed"] * DRAWS + draw
    config = main(settings)
    cases = {}
    for kind, bank in banks.items():
        cases[kind] = rocket.case.score_bank(
            model, tokenizer, bank, encoder, rows, config, task=task, seed=shots_seed
        )
    return cases


def choose(
    settings: Settings, arm: str, kind: str, cases: Cases, banks: Mapping[str, Bank]
) -> tuple[str, ...]:
    """Name the experts that an arm takes from the bank of a kind."""
    return CHOICES[arm](cases, kind, banks[kind], main(settings))


def factors(
    settings: Settings, arm: str, bank: Bank, chosen: Sequence[str]
) -> list[Lora]:
    """Return the chosen LoRAs as an arm trains them."""
    loras = [bank[name] for name in chosen]
    if arm != ROTATED:
        return loras
    first = settings["seed"] * DRAWS
    places = {name: place for place, name in enumerate(bank)}
    return [rocket.loras.rotated(lora, first + places[lora.name]) for lora in loras]


def rankings(case: Case, bank: Bank, config: rocket.Config) -> pd.DataFrame:
    """Return the three rankings of a bank's LoRAs, and what they rank by; 1 is the best.

    R_D ranks groups; of a LoRA it is the best rank of a group of candidates with it, and missing
    where it is no candidate. ``R_answers`` ranks by the perplexity of the answers alone. A LoRA
    without a finite perplexity has no rank.
    """
    arm = Arm(config=config)
    selection = pipeline.selected(case, arm, bank)
    bare = pipeline.selected(case, replace(arm, rationales=False), bank)
    table = selection.candidates.reindex(list(bank))
    table["R_answers"] = bare.candidates["R_P"]
    # A line for each member of a group.
    by_member = selection.groups.explode("members").groupby("members")
    table["R_D"] = by_member["R_D"].min().reindex(table.index)
    columns = ["log_perplexity", "accuracy", "R_P", "R_A", "R_D", "R_answers"]
    return table[columns]


RIGHT = "right answers"
UNITS = {"log_perplexity": "nats", "accuracy": "share"}  # else a count


def record_rankings(
    run: Recorder, kind: str, task: str, draw: int, table: pd.DataFrame
) -> None:
    """Keep `rankings` of a draw, a line each over the bank's LoRAs; 0 where one is missing."""
    for column, line in table.items():
        name = f"banks/{kind}/{task}/{draw}/{column}"
        run.curve(name, line.fillna(0).astype(float), UNITS.get(str(column), "count"))


def record_choice(
    run: Recorder,
    arm: str,
    kind: str,
    task: str,
    draw: int,
    chosen: Sequence[str],
    bank: Bank,
) -> None:
    """Keep which of the bank's LoRAs an arm took in a draw: 1 for a chosen one, else 0."""
    taken = [float(name in chosen) for name in bank]
    run.curve(f"banks/{kind}/{task}/{draw}/chosen/{arm}", taken, "count")


def shares(
    taken: Mapping[str, Sequence[Sequence[float]]],
    accuracy: Mapping[str, float],
    names: Sequence[str],
) -> pd.DataFrame:
    """Set what each arm chose above what that came to: a column an arm, a row a LoRA.

    ``taken`` are by arm lines over the LoRAs ``names`` with 1 for a chosen one; a share is their
    mean. The last row, `RIGHT`, is the accuracy that the arm reached.
    """
    columns = {}
    for arm, lines in taken.items():
        columns[arm] = [*np.mean(lines, axis=0), accuracy[arm]]
    return pd.DataFrame(columns, index=[*names, RIGHT])


def over_draws(tables: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Average evaluations of a target over the draws of its shots, item by item."""
    return rocket.measure.repeated({"": list(tables)})[""]
