"""What evaluations come to: averages in which each benchmark counts once, paired differences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import pandas as pd

from moebook.errors import refuse
from moebook.results.intervals import interval

MEASURES = {"score": ("accuracy (points)", 100.0), "nll": ("nll (nats)", 1.0)}
"""Column to what a difference of it is called, and the factor that brings it to that unit."""


def by_benchmark(table: pd.DataFrame, domains: Mapping[str, str] | None = None) -> pd.DataFrame:
    """Weigh the items of an evaluation as the papers' averages do.

    The papers print means over benchmarks, whatever their number of items; a benchmark of many
    subjects, as MMLU, is one. An embedded task counts as a benchmark.

    Args:
        table: From `evaluate`, with ``task``, ``domain`` and ``correct``.
        domains: Benchmark to domain; by default a task is its own benchmark and has its own domain.

    Returns:
        A copy with ``benchmark``, the task or what its subject belongs to; ``domain``; ``weight``,
        whose mean is 1 and whose sum is equal over benchmarks; ``score``, ``correct`` times the
        weight, whose mean is the mean of the benchmarks' accuracies; ``domain_score``, the same
        within a domain. Both scores are ``correct`` where all benchmarks have equally many items.

    Raises:
        Refusal: E-DATA for a table without items.
    """
    if table.empty:
        refuse("E-DATA", "no evaluated item: expected a table of evaluation.evaluate with rows")
    known = sorted(domains or (), key=len, reverse=True)
    whole = {
        task: next((name for name in known if f"{task}_".startswith(f"{name}_")), task)
        for task in table.task.unique()
    }
    found = table.assign(benchmark=table.task.map(whole))
    pairs = zip(found.benchmark, found.domain, strict=True)
    found["domain"] = [(domains or {}).get(benchmark, domain) for benchmark, domain in pairs]
    size = found.groupby("benchmark").correct.transform("size")
    inside = found.groupby("domain")
    of_domain = inside.correct.transform("size") / inside.benchmark.transform("nunique")
    found["weight"] = len(found) / found.benchmark.nunique() / size
    found["score"] = found.correct * found.weight
    found["domain_score"] = found.correct * (of_domain / size)
    return found


def paired(
    tables: Mapping[str, pd.DataFrame],
    pairs: Iterable[tuple[str, str]],
    columns: Iterable[str] = tuple(MEASURES),
) -> pd.DataFrame:
    """Compare arms of one run item by item; pairs with an arm that did not run are left out.

    Args:
        tables: From `by_benchmark`, by arm; all over the same items.
        pairs: Arms: the first less the second.
        columns: Of `MEASURES`.

    Returns:
        A line a pair and measure: ``difference``, ``95 % from``, ``to`` (over test items: the luck
        of a training is not in it) and ``half width``, about the smallest difference that would
        have stood out.
    """
    lines = {}
    for one, other in pairs:
        for column in columns if one in tables and other in tables else ():
            name, factor = MEASURES[column]
            gaps = factor * (tables[one][column] - tables[other][column]).dropna().to_numpy(float)
            low, high = (len(gaps) and interval(gaps[None])) or (np.nan, np.nan)
            mean = gaps.mean() if len(gaps) else np.nan
            lines[f"{one} minus {other}", name] = [mean, low, high, (high - low) / 2]
    return pd.DataFrame(lines, index=["difference", "95 % from", "to", "half width"]).T
