"""Tables with one row an item: embedded tasks and the hub's benchmarks in one call; comparisons."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from torch import nn

from moebook.data import IGNORED, encode, tasks
from moebook.data.tasks import KNOWN
from moebook.errors import nearest, refuse
from moebook.evaluation import benchmarks
from moebook.evaluation.model import InMemory
from moebook.nn import evaluating
from moebook.results.intervals import interval
from moebook.settings import Count, checked

COLUMNS = ["task", "domain", "item", "correct", "nll", "nll_sum", "answer", "output",
           "unnormalised", "chance", "asked"]  # fmt: skip
MEASURES = {"score": ("accuracy (points)", 100.0), "nll": ("nll (nats)", 1.0)}
"""Column to what a difference of it is called, and the factor that brings it to that unit."""


@checked
def evaluate(
    model: nn.Module,
    tokenizer: Any,
    tasks: str | Sequence[str],
    *,
    limit: Count | None = 200,
    split: str = "test",
    format: str = "camel",
    batch_size: Count = 32,
    data: str | Path = "",
) -> pd.DataFrame:
    """Evaluate a model on embedded tasks and on lm-eval's benchmarks, by name.

    An embedded task counts an item as correct when greedy generation equals the gold answer after
    the task's normalisation; its likelihood is that of the gold answer with the end token, and
    items are tokenized as training rows are. A benchmark counts as lm-eval does: exact match, else
    accuracy by likelihood normalised by length, else plain accuracy. A group stands for its
    members; ``split`` and chat ``format`` are of embedded tasks alone; ``data`` is a folder of the
    benchmarks' data sets (`benchmarks`), in whose name ``$NAME`` stands in the environment, or "".

    Returns:
        One row an item: ``task``; ``domain`` (``benchmark`` for the hub's); ``item``, its number;
        ``correct``, 0 or 1; ``nll``, the gold answer's nats a token; ``nll_sum``, its nats in all
        (both NaN where a benchmark only generates); ``answer``, the gold one; ``output``, the
        model's text or the number of its choice; ``unnormalised``, `correct` before likelihoods are
        divided by length; ``chance``, what guessing gets; ``asked``, the name or group asked for.
        Its ``attrs["files"]`` are the files below ``data`` that were read, by name.
    """
    names = list(dict.fromkeys([tasks] if isinstance(tasks, str) else tasks))
    if not names:
        refuse("E-DATA", f"no task to evaluate on; {nearest('', KNOWN)}")
    loaded = benchmarks.load([name for name in names if name not in KNOWN], data)
    with evaluating(model):
        lm = InMemory(model, tokenizer, batch_size)
        rows = _embedded(lm, [name for name in names if name in KNOWN], limit, split, format)
        for name, members in loaded.items():
            rows += [(*row, name) for row in benchmarks.rows(lm, members, limit)]
    rows.sort(key=lambda row: names.index(row[-1]))
    table = pd.DataFrame(rows, columns=COLUMNS)
    read = [getattr(task, "files", {}) for each in loaded.values() for task in each.values()]
    table.attrs["files"] = {name: path for files in read for name, path in files.items()}
    return table


def summary(table: pd.DataFrame, base: str = "") -> pd.DataFrame:
    """Put what `evaluate` found beside chance and beside the scores of the base's model card.

    A line a name asked for, in which a group's tasks count equally: accuracy, the same of
    likelihoods normalised by length (where the benchmark has it), its standard error over items,
    chance, rows, and the published score, NaN where `cards.yaml` has none.
    """
    cards = benchmarks.CARDS.items()
    names = {name: card for key, card in cards for name in (key, card["repository"])}
    scores = names.get(base.partition("@")[0], {}).get("scores", {})
    lines = {}
    for name, part in table.groupby("asked", sort=False):
        tasks = part.groupby("task")
        means = tasks[["unnormalised", "correct", "chance"]].mean().mean()
        error = (tasks.correct.sem() ** 2).sum(min_count=1) ** 0.5 / tasks.ngroups
        lines[name] = [*means[:2], error, means.chance, len(part), scores.get(name, np.nan) / 100]
    columns = ["accuracy", "normalised", "standard error", "chance", "rows", "published"]
    return pd.DataFrame.from_dict(lines, orient="index", columns=columns)


def by_benchmark(table: pd.DataFrame, domains: Mapping[str, str] | None = None) -> pd.DataFrame:
    """Weigh the items of `evaluate`'s table as the papers' averages do: benchmarks count equally.

    ``domains`` maps benchmarks, whose subjects (as MMLU's) count as one, to domains; any other task
    is its own. Returns a copy with ``benchmark``; ``domain``; ``weight``, whose mean is 1 and whose
    sum is equal over benchmarks; ``score``, ``correct`` times the weight, whose mean is that of the
    benchmarks' accuracies; ``domain_score``, the same within a domain.
    """
    if table.empty:
        refuse("E-DATA", "no evaluated item: expected a table of evaluation.evaluate with rows")
    domains = domains or {}
    longest = sorted(domains, key=len, reverse=True)
    benchmarks = {
        task: next((name for name in longest if f"{task}_".startswith(f"{name}_")), task)
        for task in table.task.unique()
    }
    items = table.assign(benchmark=table.task.map(benchmarks))
    named = dict(zip(items.benchmark, items.domain, strict=True))
    items["domain"] = items.benchmark.map(named | dict(domains))
    size = items.groupby("benchmark").correct.transform("size")
    inside = items.groupby("domain")
    of_domain = inside.correct.transform("size") / inside.benchmark.transform("nunique")
    items["weight"] = len(items) / items.benchmark.nunique() / size
    items["score"] = items.correct * items.weight
    items["domain_score"] = items.correct * (of_domain / size)
    return items


def paired(
    tables: Mapping[str, pd.DataFrame],
    pairs: Iterable[tuple[str, str]],
    columns: Iterable[str] = tuple(MEASURES),
) -> pd.DataFrame:
    """Compare arms of one run item by item, for each pair the first arm less the second.

    ``tables`` are from `by_benchmark`, by arm, over the same items. Returns a line for each measure
    of a pair that ran: ``difference``, ``95 % from``, ``to`` (over test items, not trainings) and
    ``half width``, about the smallest difference that would have stood out.
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


def _embedded(
    lm: InMemory, names: list[str], limit: int | None, split: str, format: str
) -> list[tuple[Any, ...]]:
    items, pairs, limits, table = [], [], [], []
    for name in names:
        task = tasks.find(name)
        chance = task.majority()  # reads the whole train split: not once an item
        available = task.available(split)
        drawn = tasks.rows(name, split, min(limit or available, available))
        encoded = encode(drawn, lm.tokenizer, format=format, max_length=sys.maxsize)
        for number, (row, ids) in enumerate(zip(drawn, encoded, strict=True)):
            border = ids["labels"].count(IGNORED)
            items.append((task, chance, number, row["answer"]))
            pairs.append((ids["input_ids"][:border], ids["input_ids"][border:]))
            limits.append((task.max_new_tokens, ()))
    results = zip(items, lm.examine(pairs, limits), pairs, strict=True)
    for (task, chance, number, answer), (text, nats), (_, scored) in results:
        correct = int(task.normalise(text) == task.normalise(answer))
        nll = -nats / len(scored)
        found = task.name, task.domain, number, correct, nll, -nats, answer, text
        table.append((*found, correct, chance, task.name))
    return table
