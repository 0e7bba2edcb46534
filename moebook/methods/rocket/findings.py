"""What results come to: rank correlations over the bank, averages, cases that experts split on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.stats import spearmanr
from torch import nn

from moebook import evaluation
from moebook.methods.rocket import mixture as mixtures
from moebook.methods.rocket.attachment import attached
from moebook.methods.rocket.loras import Lora
from moebook.methods.rocket.pipeline import Case
from moebook.results.intervals import interval

KINDS = {"bare answers": False, "with rationales": True}
"""Perplexities of the shots by what is read, and whether rationales are (Figure 8)."""
OUTCOMES = ("before", "after")


def untuned(
    model: nn.Module, tokenizer: Any, bank: Mapping[str, Lora], tasks: Sequence[str], *, limit: int
) -> pd.DataFrame:
    """Evaluate the base and each LoRA of the bank as it is (Tables 9, 10).

    Args:
        model: The base, unaltered.
        tokenizer: Its tokenizer.
        bank: LoRAs by name.
        tasks: As in `evaluation.evaluate`.
        limit: At most so many rows a task.

    Returns:
        What `evaluation.evaluate` returns, with a column ``lora``; the first is ``base``.
    """
    found = {"base": evaluation.evaluate(model, tokenizer, tasks, limit=limit)}
    for name, lora in bank.items():
        with attached(model, [lora]):
            found[name] = evaluation.evaluate(model, tokenizer, tasks, limit=limit)
    return pd.concat(found, names=["lora", "row"]).reset_index("lora").reset_index(drop=True)


def best(means: pd.DataFrame, names: Sequence[str], task: str) -> str:
    """Name the LoRA that is best on the test rows, which no method may see ("Source Best").

    Args:
        means: Means of `untuned`: columns ``(correct or nll, task)``, indexed by LoRA.
        names: Whose best is sought; ties go by likelihood.
        task: On which task.
    """
    worth = means.correct[task] - 1e-6 * means.nll[task].fillna(0)
    return str(worth.loc[list(names)].idxmax())


def foretold(
    cases: Mapping[str, Case], outcomes: Mapping[tuple[str, str], Sequence[float]]
) -> pd.DataFrame:
    """Set perplexities on the shots beside what tuning each LoRA alone came to (Fig. 2, 8).

    Args:
        cases: By task.
        outcomes: Accuracy before and after tuning, by task and LoRA.

    Returns:
        Indexed by ``task`` and ``lora``, those of the outcomes whose perplexity is finite: the
        `KINDS` (log-perplexity of all shots, nats), ``before``, ``after`` and their ``gain``.
    """
    index = pd.MultiIndex.from_tuples(list(outcomes), names=["task", "lora"])
    found = pd.DataFrame(list(outcomes.values()), index, OUTCOMES, dtype=float)
    seen = {
        task: pd.DataFrame(
            {
                kind: case.scores(len(case.shots), rationales=told).perplexity
                for kind, told in KINDS.items()
            }
        )
        for task, case in cases.items()
    }
    joined = pd.concat(seen, names=["task", "lora"]).join(found, how="inner")
    return joined.assign(gain=joined.after - joined.before)


def clouds(frame: pd.DataFrame) -> dict[str, dict[str, pd.DataFrame]]:
    """Return panels of points, one of `KINDS` each: perplexity less its task's mean, and outcome.

    Args:
        frame: From `foretold`.
    """
    return {
        kind: {
            task: part[[kind, "after"]] - [part[kind].mean(), 0]
            for task, part in frame.groupby("task", sort=False)
        }
        for kind in KINDS
    }


def correlations(frame: pd.DataFrame, one: Sequence[str], other: Sequence[str]) -> pd.Series:
    """Correlate columns over the LoRAs by rank, within each task (Fig. 2, 8).

    Args:
        frame: One row a LoRA, indexed by ``task`` and more.
        one: Columns of the one side.
        other: Columns of the other.

    Returns:
        Spearman's correlation, indexed by ``of``, ``with`` and ``task``. A task in which a column
        has one value only has no correlation and is left out.
    """
    found = {
        (left, right, task): spearmanr(part[left], part[right]).statistic
        for task, part in frame.groupby("task", sort=False)
        for left in one
        for right in other
        if part[left].nunique() > 1 and part[right].nunique() > 1
    }
    names = ["of", "with", "task"]
    return pd.Series(list(found.values()), pd.MultiIndex.from_tuples(found, names=names), float)


def averaged(ranks: pd.Series) -> pd.DataFrame:
    """Average `correlations` over tasks: ``correlation``, ``95 % from``, ``to``, ``targets``."""
    found = {}
    for pair, part in ranks.groupby(level=["of", "with"]):
        low, high = interval(part.to_numpy()[:, None]) or (np.nan, np.nan)
        found[pair] = [part.mean(), low, high, len(part)]
    return pd.DataFrame(found, index=["correlation", "95 % from", "to", "targets"]).T


def claimed(ranks: pd.Series) -> dict[str, float]:
    """Return the two numbers that the paper's claims are about, those of them that exist.

    Args:
        ranks: From `correlations`, of `KINDS` with ``after`` and ``gain``.

    Returns:
        ``gain_correlation``: of the gain and the perplexity with rationales;
        ``reasoning_minus_plain/correlation``: how much more closely (the lower) the perplexity with
        rationales follows accuracy than that of bare answers.
    """
    means = ranks.groupby(level=["of", "with"]).mean()
    gain = means.get(("with rationales", "gain"))
    bare, told = (means.get((kind, "after")) for kind in KINDS)
    found = {"gain_correlation": gain} if gain is not None else {}
    if bare is not None and told is not None:
        found["reasoning_minus_plain/correlation"] = told - bare
    return {name: float(value) for name, value in found.items()}


def over_targets(tables: Mapping[str, pd.DataFrame], tested: Mapping[str, str]) -> pd.DataFrame:
    """Join an arm's evaluations so that each target counts once, as in the paper's averages.

    Args:
        tables: From `evaluation.evaluate`, by target.
        tested: Target to the task that evaluates it.

    Returns:
        From `evaluation.by_benchmark`, with the target as ``domain``, and ``nll`` weighted as
        ``score`` is: its mean is the mean over targets of the nats a token.
    """
    targets = {tested[target]: target for target in tables}
    found = evaluation.by_benchmark(pd.concat(tables.values(), ignore_index=True), targets)
    weight = found.weight / found.weight[found.nll.notna()].mean()
    return found.assign(nll=found.nll * weight)


def sizes(means: pd.DataFrame, default: Mapping[str, int]) -> pd.DataFrame:
    """Sort arms that differ from ``mixture`` in one number by that number (Tables 4, 6, 7; Fig. 9).

    Args:
        means: One row an arm; arms such as ``shots5``.
        default: What the number is called, such as ``shots``, and what it is in ``mixture``.

    Returns:
        The rows of these arms, indexed by what varies and its value.
    """
    numbered = dict.fromkeys(default.items(), "mixture")
    for arm, kind in [(arm, kind) for arm in means.index for kind in default]:
        if arm.removeprefix(kind).isdigit():
            numbered[kind, int(arm.removeprefix(kind))] = arm
    found = {key: means.loc[arm] for key, arm in numbered.items() if arm in means.index}
    return pd.DataFrame(found, index=means.columns).T.sort_index()


def activation(shares: pd.DataFrame) -> dict[str, npt.NDArray[Any]]:
    """Return each expert's share of a layer's tokens ``[E]``, by layer (Fig. 7).

    Args:
        shares: From `analysis.routing.shares`; a layer's routers are taken together.
    """
    slots = shares.groupby(["layer", "expert"]).slots.sum().unstack()
    even = slots.div(slots.sum(axis=1), axis=0)
    return {f"layer {number}": row.to_numpy() for number, row in even.iterrows()}


def alone(model: nn.Module, tokenizer: Any, task: str, *, limit: int) -> npt.NDArray[np.bool_]:
    """Say which test row each expert of a mixture gets right when it serves every token (Fig. 11).

    Args:
        model: From `mixture.build`.
        tokenizer: Its tokenizer.
        task: As in `evaluation.evaluate`.
        limit: At most so many rows.

    Returns:
        ``[N, S]``.
    """
    found = []
    for expert in mixtures.origin(model).experts:
        with mixtures.only(model, expert):
            found.append(evaluation.evaluate(model, tokenizer, task, limit=limit).correct > 0)
    return np.array(found)


def split_cases(experts: npt.ArrayLike, mixture: npt.ArrayLike) -> dict[str, float]:
    """Sort the test rows by how many experts alone answer them, and count errors (Table 5).

    Args:
        experts: Which expert alone gets which row right ``[N, S]``.
        mixture: Which row the mixture gets right ``[S]``.

    Returns:
        Shares of the rows ``all right``, ``mixed`` (at least one right and one wrong) and ``all
        wrong``; on the mixed ones the error rates of the ``best expert``, the ``mean expert``, the
        ``worst expert`` and the ``mixture``, NaN where no row is mixed.
    """
    right, whole = np.asarray(experts, dtype=bool), np.asarray(mixture, dtype=bool)
    every, some = right.all(axis=0), right.any(axis=0)
    mixed = some & ~every
    errors = 1 - right[:, mixed].mean(axis=1) if mixed.any() else np.full(len(right), np.nan)
    return {
        "all right": float(every.mean()),
        "mixed": float(mixed.mean()),
        "all wrong": float((~some).mean()),
        "best expert": float(errors.min()),
        "mean expert": float(errors.mean()),
        "worst expert": float(errors.max()),
        "mixture": float(1 - whole[mixed].mean()) if mixed.any() else np.nan,
    }


def mixed_errors(cut: pd.DataFrame) -> pd.Series:
    """Return the error rates on the mixed cases of all targets together, empty without any.

    Args:
        cut: From `split_cases`, one row a target.
    """
    some = cut.dropna()
    columns = ["best expert", "mean expert", "worst expert", "mixture"]
    errors = {c: np.average(some[c], weights=some.mixed) for c in columns if len(some)}
    return pd.Series(errors, dtype=float)
