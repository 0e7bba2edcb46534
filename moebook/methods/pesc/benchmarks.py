"""The paper's groups of benchmarks (Table 3), and averages in which each benchmark counts once."""

from __future__ import annotations

import pandas as pd

from moebook.errors import refuse

GROUPS = {
    "mathematics": ("gsm8k", "hendrycks_math"),
    "common_sense": ("piqa", "hellaswag", "winogrande", "arc_easy", "arc_challenge"),
    "knowledge": ("nq_open", "triviaqa"),
    "mmlu": ("mmlu",),
}
"""lm-eval's names of ten of the twelve benchmarks (Tables 7, 8, 10, 11), by the paper's group.

The group of code, HumanEval and MBPP, is missing: they run code that the model wrote. MATH is
lm-eval's `hendrycks_math`; its `minerva_math` has the paper's 4 shots, but needs further packages.
"""


def by_benchmark(table: pd.DataFrame) -> pd.DataFrame:
    """Put the items of an evaluation into the paper's groups, and weigh them as its averages do.

    The paper prints means over benchmarks, whatever their number of items; a benchmark of many
    subjects, as MMLU, is one. An embedded task keeps its domain and counts as a benchmark.

    Args:
        table: From `evaluation.evaluate`, with ``task``, ``domain`` and ``correct``.

    Returns:
        A copy with the paper's group as ``domain``; ``benchmark``, the task or what its subject
        belongs to; ``score``, whose mean over the table is the mean of the benchmarks' accuracies;
        ``domain_score``, the same within a domain. Both are ``correct`` where all benchmarks have
        equally many items.

    Raises:
        Refusal: E-DATA for a table without items.
    """
    if table.empty:
        refuse("E-DATA", "no evaluated item: expected a table of evaluation.evaluate with rows")
    group = {name: domain for domain, names in GROUPS.items() for name in names}
    whole = {
        task: next((name for name in group if f"{task}_".startswith(f"{name}_")), task)
        for task in table.task.unique()
    }
    found = table.assign(benchmark=table.task.map(whole))
    found["domain"] = found.benchmark.map(group).fillna(found.domain)
    size = found.groupby("benchmark").correct.transform("size")
    inside = found.groupby("domain")
    of_domain = inside.correct.transform("size") / inside.benchmark.transform("nunique")
    found["score"] = found.correct * (len(found) / found.benchmark.nunique() / size)
    found["domain_score"] = found.correct * (of_domain / size)
    return found


def root(base: str, mix: str) -> str:
    """Name under which a run's values are kept: each base and mixture of Table 2 has its own.

    Args:
        base: Name of the dense base, as `models.load` takes it; its commit does not count.
        mix: Training data.

    Returns:
        ``pesc``, with ``/13b`` or ``/34b`` for a base of that size, and ``/pro`` for the larger
        mixture, IDAE-720K.
    """
    name = base.partition("@")[0].lower()
    size = next((f"/{size}" for size in ("13b", "34b") if size in name), "")
    return "pesc" + size + ("/pro" if mix == "idae-720k" else "")
