"""Tables of the comparisons: which share of the experts trains, and each arm's answers together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from moebook.evaluation import by_benchmark
from moebook.methods.esft.selection import Selection


def counts(selections: Mapping[tuple[str, str], Selection]) -> pd.DataFrame:
    """Count the selected experts of each layer (Fig. 5).

    Args:
        selections: By score and task.

    Returns:
        A line a score and task, a column a layer.
    """
    rows = {
        key: {layer: len(ids) for layer, ids in selection.experts.items()}
        for key, selection in selections.items()
    }
    return pd.DataFrame(rows).T


def spread(shares: pd.DataFrame) -> dict[str, NDArray[np.float64]]:
    """Gather which share of the experts trains: by score, and in middle and outer layers (Fig. 5).

    Args:
        shares: `counts` over E, by score and task.

    Returns:
        Score -> shares of all its tasks and layers; ``layers/middle`` and ``layers/outer`` -> the
        means over a third of the layers and over the others, by score and task; 0 where there are
        no such layers.
    """
    found = {score: part.to_numpy().ravel() for score, part in shares.groupby(level=0, sort=False)}
    first, middle, last = np.array_split(np.arange(shares.shape[1]), 3)
    for name, where in {"middle": middle, "outer": np.r_[first, last]}.items():
        part = shares.to_numpy()[:, where]
        found[f"layers/{name}"] = part.sum(1) / max(len(where), 1)
    return found


def by_arm(
    tables: Mapping[tuple[str, str], pd.DataFrame], tests: Iterable[str]
) -> dict[str, pd.DataFrame]:
    """Join each arm's evaluations over the tasks that it was tuned on.

    Args:
        tables: From `evaluation.evaluate`, by arm and task.
        tests: Names that were evaluated, each of them a benchmark.

    Returns:
        Arm -> a table as of `evaluation.by_benchmark`, with the task in ``tuned``.
    """
    parts: dict[str, list[pd.DataFrame]] = {}
    for (arm, task), table in tables.items():
        parts.setdefault(arm, []).append(table.assign(tuned=task))
    names = {name: name for name in tests}
    return {
        arm: by_benchmark(pd.concat(several, ignore_index=True), names)
        for arm, several in parts.items()
    }
