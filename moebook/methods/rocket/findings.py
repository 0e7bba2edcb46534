"""What results come to: rank correlations over the bank, and the cases that experts split on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.stats import spearmanr
from torch import nn

from moebook import evaluation
from moebook.methods.rocket import mixture as mixtures


def correlations(frame: pd.DataFrame, one: Sequence[str], other: Sequence[str]) -> pd.Series:
    """Correlate columns over the LoRAs by rank, within each task and draw (Fig. 2, 8).

    Args:
        frame: One row a LoRA, indexed by ``task``, ``seed`` and more.
        one: Columns of the one side.
        other: Columns of the other.

    Returns:
        Spearman's correlation, indexed by ``of``, ``with``, ``task`` and ``seed``. A task and draw
        in which a column has one value only has no correlation and is left out.
    """
    found = {
        (left, right, *key): spearmanr(part[left], part[right]).statistic
        for key, part in frame.groupby(["task", "seed"], sort=False)
        for left in one
        for right in other
        if part[left].nunique() > 1 and part[right].nunique() > 1
    }
    names = ["of", "with", "task", "seed"]
    return pd.Series(list(found.values()), pd.MultiIndex.from_tuples(found, names=names), float)


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
