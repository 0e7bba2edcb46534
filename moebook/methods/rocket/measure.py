"""What results come to: rank correlations, averages over targets, cases that experts split on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Annotated, Any

import numpy as np
import pandas as pd
from pydantic import Field
from scipy.stats import spearmanr
from torch import nn

from moebook import evaluation
from moebook.data.tasks import Task
from moebook.errors import refuse, refuse_unknown
from moebook.kernels.dispatch import shapes
from moebook.methods.rocket import apply
from moebook.methods.rocket.case import Case
from moebook.methods.rocket.loras import Lora, attached
from moebook.models.checkpoint import origin
from moebook.settings import Each, checked, columns

Accuracy = Annotated[float, Field(ge=0, le=1)]
# Before and after.
Outcome = Annotated[Each[Accuracy], Field(min_length=2, max_length=2)]
# Tables of `evaluation.evaluate`: items, and those that several evaluations share.
Items = Annotated[pd.DataFrame, columns("task domain", shares="correct", lacking="nll")]
Numbered = Annotated[
    pd.DataFrame, columns("task domain item", shares="correct", lacking="nll")
]
# Whether rationales are read (Figure 8).
KINDS = {
    "bare answers": False,
    "with rationales": True,
}


@checked
def foretold(
    cases: Annotated[Mapping[str, Case], Field(min_length=1)],
    outcomes: Mapping[tuple[str, str], Outcome],
) -> pd.DataFrame:
    """Set perplexities on the shots beside what tuning each LoRA alone came to (Fig. 2, 8).

    ``outcomes`` are the accuracies before and after tuning, by task and LoRA. Returns the same
    index where perplexity is finite: the `KINDS` (nats), ``before``, ``after`` and their ``gain``.
    """
    index = pd.MultiIndex.from_tuples(list(outcomes), names=["task", "lora"])
    tuned = pd.DataFrame(
        list(outcomes.values()), index, ["before", "after"], dtype=float
    )
    nats: dict[str, pd.DataFrame] = {}
    for task, case in cases.items():
        scores = {
            kind: case.scores(len(case.shots), rationales=r)
            for kind, r in KINDS.items()
        }
        nats[task] = pd.DataFrame(
            {kind: part.log_perplexity for kind, part in scores.items()}
        )
    # Only the LoRAs that were tuned.
    joined = pd.concat(nats, names=["task", "lora"]).join(tuned, how="inner")
    return joined.assign(gain=joined.after - joined.before)


@checked
def correlations(frame: pd.DataFrame, one: Each[str], other: Each[str]) -> pd.Series:
    """Correlate columns by rank over each task's LoRAs (Fig. 2, 8); no constant ones."""
    if "task" not in frame.index.names:
        refuse("E-DATA", "frame has no index level 'task', expected one per LoRA's row")
    for name in (*one, *other):
        refuse_unknown(
            name, frame.columns, "E-NAME", f"the frame has no column '{name}';"
        )
        if frame[name].dtype.kind not in "biuf":
            refuse(
                "E-DTYPE", f"column '{name}' is {frame[name].dtype}, expected numbers"
            )
        if not np.isfinite(frame[name]).all():
            refuse("E-NONFINITE", f"column '{name}' holds NaN or infinity")
    ranks: dict[tuple[str, str, str], float] = {}
    for task, part in frame.groupby("task", sort=False):
        for left, right in product(one, other):
            # A constant column has no rank correlation.
            if part[left].nunique() > 1 and part[right].nunique() > 1:
                found = spearmanr(part[left], part[right])
                ranks[left, right, task] = found.statistic
    index = pd.MultiIndex.from_tuples(ranks, names=["of", "with", "task"])
    return pd.Series(list(ranks.values()), index, float)


@checked
def repeated(
    tables: Mapping[str, Annotated[Each[Numbered], Field(min_length=1)]],
) -> dict[str, pd.DataFrame]:
    """Average an arm's evaluations over its tunings, by target, item by item."""
    keys = ["task", "domain", "item"]
    values = ["correct", "nll"]
    means = {}
    for target, evaluations in tables.items():
        first, *others = evaluations
        asked = first[keys].to_numpy()
        if not all(np.array_equal(asked, other[keys].to_numpy()) for other in others):
            refuse(
                "E-DATA",
                f"the evaluations of '{target}' are of other items: ask all the same",
            )
        joined = pd.concat(evaluations)
        means[target] = joined.groupby(keys, sort=False, as_index=False)[values].mean()
    return means


@checked
def over_targets(
    tables: Annotated[Mapping[str, Items], Field(min_length=1)],
    tested: Mapping[str, str],
) -> pd.DataFrame:
    """Join an arm's evaluations, by target, so that each counts once, as in the paper's averages.

    ``tested`` is by target the task that evaluates it. Returns `evaluation.by_benchmark`, with the
    target as ``domain`` and ``nll`` (nats a token) weighted as ``score`` is, over the items that
    have nats.
    """
    targets: dict[str, str] = {}
    for target in tables:
        refuse_unknown(
            target, tested, "E-KEYS", f"nothing is said to test target '{target}';"
        )
        test = tested[target]
        if test in targets:
            both = f"targets '{targets[test]}' and '{target}'"
            refuse("E-KEYS", f"'{test}' tests {both}, expected a test each")
        targets[test] = target
        for task in tables[target].task.unique():
            # A subject of a benchmark begins with the benchmark's name.
            if not f"{task}_".startswith(f"{test}_"):
                refuse(
                    "E-DATA",
                    f"target '{target}' has rows of '{task}', '{test}' tests it",
                )
    whole = pd.concat(tables.values(), ignore_index=True)
    joined = evaluation.by_benchmark(whole, targets)
    counted = [target for target, table in tables.items() for _ in range(len(table))]
    astray = (joined.domain != counted).to_numpy()
    if astray.any():
        first = int(astray.argmax())
        one = f"'{whole.task[first]}' of target '{counted[first]}'"
        other = f"rows of target '{joined.domain[first]}'"
        refuse("E-KEYS", f"rows of {one} count as {other}, expected tests apart")
    # Not all items have nats. Those that do stand for all of their target.
    there = joined.nll.notna()
    weight = joined.weight / there.groupby(joined.domain).transform("mean")
    # Brought to mean 1 again, where a target has none at all.
    weight /= weight[there].mean()
    return joined.assign(nll=joined.nll * weight)


def untuned(
    model: nn.Module,
    tokenizer: Any,
    bank: Mapping[str, Lora],
    tasks: str | Task | Sequence[str | Task],
    **how: Any,
) -> dict[str, pd.DataFrame]:
    """Return, by name, what `evaluation.evaluate` says of the base under each LoRA of a bank."""
    tables = {}
    for name, lora in bank.items():
        with attached(model, [lora]):
            tables[name] = evaluation.evaluate(model, tokenizer, tasks, **how)
    return tables


def alone(model: nn.Module, tokenizer: Any, task: str | Task, **how: Any) -> np.ndarray:
    """Say which test row ``[N, S]`` each expert gets right when it serves every token (Fig. 11)."""
    right = []
    for expert in origin(model, apply.Origin).experts:
        with apply.only(model, expert):
            right.append(evaluation.evaluate(model, tokenizer, task, **how).correct > 0)
    return np.array(right)


def split_cases(experts: np.ndarray, mixture: np.ndarray) -> dict[str, float]:
    """Sort the test rows by how many experts alone answer them, and count errors (Table 5).

    Which rows each expert alone ``[N, S]`` and the mixture ``[S]`` get right gives the shares that
    are ``all right``, ``mixed`` and ``all wrong``, and on mixed ones the error rates, else NaN.
    """
    answers = {"experts": (np.asarray(experts), "N S", "real")}
    answers["mixture"] = (np.asarray(mixture), "S", "real")
    shapes("split_cases", answers, empty="")
    for name, (values, *_) in answers.items():
        if not np.isin(values, (0, 1)).all():
            refuse("E-RANGE", f"{name} holds other values than 0 (wrong) and 1 (right)")
    right = np.asarray(experts, dtype=bool)  # [N, S]
    whole = np.asarray(mixture, dtype=bool)  # [S]
    every = right.all(axis=0)  # [S]
    anyone = right.any(axis=0)
    # Table 5: at least one expert succeeds, and at least one fails.
    mixed = anyone & ~every
    # Error rates on mixed rows, of each expert alone [N] and of the mixture.
    errors = np.full(len(right), np.nan)
    of_mixture = np.nan
    if mixed.any():
        errors = 1 - right[:, mixed].mean(axis=1)
        of_mixture = float(1 - whole[mixed].mean())
    return {
        "all right": float(every.mean()),
        "mixed": float(mixed.mean()),
        "all wrong": float((~anyone).mean()),
        "best expert": float(errors.min()),
        "mean expert": float(errors.mean()),
        "worst expert": float(errors.max()),
        "mixture": of_mixture,
    }
