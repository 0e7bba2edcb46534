"""Tables with one row an item: embedded tasks and the hub's benchmarks in one call; comparisons."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from lm_eval import evaluator
from lm_eval.api.task import Task
from lm_eval.tasks import TaskManager
from torch import nn

from moebook.data import IGNORED, encode, tasks
from moebook.data.tasks import KNOWN
from moebook.errors import nearest, refuse
from moebook.evaluation.model import InMemory
from moebook.nn import evaluating
from moebook.results.intervals import interval
from moebook.settings import Count, checked

COLUMNS = ["task", "domain", "item", "correct", "nll", "nll_sum", "answer", "output"]
METRICS = ("exact_match", "acc_norm", "acc")
"""What counts as correct in a benchmark: the first of these that it reports."""
MEASURES = {"score": ("accuracy (points)", 100.0), "nll": ("nll (nats)", 1.0)}
"""Column to what a difference of it is called, and the factor that brings it to that unit."""
Row = tuple[str, str, int, int, float, float, str, str]


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
) -> pd.DataFrame:
    """Evaluate a model on embedded tasks and on lm-eval's benchmarks, by name.

    An embedded task counts an item as correct when greedy generation equals the gold answer after
    the task's normalisation; its likelihood is that of the gold answer with the end token, and
    items are tokenized as training rows are. A benchmark counts as lm-eval does: exact match, else
    accuracy by likelihood normalised by length, else plain accuracy.

    Args:
        model: A causal language model of transformers, altered or wrapped as one likes.
        tokenizer: Its tokenizer.
        tasks: Names of `data.tasks` or of lm-eval; a group stands for its members.
        limit: Most items a task; None takes all.
        split: train, validation or test; benchmarks have their own.
        format: Chat format of the embedded tasks.
        batch_size: B, sequences a forward pass.

    Returns:
        One row an item: ``task``; ``domain`` (``benchmark`` for the hub's); ``item``, its number;
        ``correct``, 0 or 1; ``nll``, the gold answer's nats a token; ``nll_sum``, its nats in all
        (both NaN where a benchmark only generates); ``answer``, the gold one; ``output``, the
        model's text or the number of its choice.
    """
    names = list(dict.fromkeys([tasks] if isinstance(tasks, str) else tasks))
    if not names:
        refuse("E-DATA", f"no task to evaluate on; {nearest('', KNOWN)}")
    benchmarks = _benchmarks([name for name in names if name not in KNOWN])
    with evaluating(model):
        lm = InMemory(model, tokenizer, batch_size)
        rows = _embedded(lm, [name for name in names if name in KNOWN], limit, split, format)
        rows += _benchmark_rows(lm, benchmarks, limit) if benchmarks else []
    rows.sort(key=lambda row: names.index(row[0]) if row[0] in names else len(names))
    return pd.DataFrame(rows, columns=COLUMNS)


def by_benchmark(table: pd.DataFrame, domains: Mapping[str, str] | None = None) -> pd.DataFrame:
    """Weigh the items of `evaluate`'s table as the papers' averages do: benchmarks count equally.

    ``domains`` maps benchmarks, whose subjects (as MMLU's) count as one, to domains; any other task
    is its own benchmark and keeps its domain.

    Returns:
        A copy with ``benchmark``; ``domain``; ``weight``, whose mean is 1 and whose sum is equal
        over benchmarks; ``score``, ``correct`` times the weight, whose mean is the mean of the
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

    ``tables`` are from `by_benchmark`, by arm, over the same items; pairs with an arm that did not
    run are left out.

    Returns:
        A line a pair and measure: ``difference``, ``95 % from``, ``to`` (over test items, not over
        trainings) and ``half width``, about the smallest difference that would have stood out.
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
) -> list[Row]:
    items, pairs, limits, table = [], [], [], []
    for name in names:
        task = tasks.find(name)
        available = task.available(split)
        drawn = tasks.rows(name, split, min(limit or available, available))
        encoded = encode(drawn, lm.tokenizer, format=format, max_length=sys.maxsize)
        for number, (row, ids) in enumerate(zip(drawn, encoded, strict=True)):
            border = ids["labels"].count(IGNORED)
            items.append((task, number, row["answer"]))
            pairs.append((ids["input_ids"][:border], ids["input_ids"][border:]))
            limits.append((task.max_new_tokens, ()))
    texts = lm.answer([context for context, _ in pairs], limits)
    results = zip(items, texts, lm.score(pairs), pairs, strict=True)
    for (task, number, answer), text, (nats, _), (_, scored) in results:
        correct = int(task.normalise(text) == task.normalise(answer))
        nll = -nats / len(scored)
        table.append((task.name, task.domain, number, correct, nll, -nats, answer, text))
    return table


@functools.cache
def _index() -> TaskManager:
    """lm-eval's index of its thousands of task files: seconds to build, so only once."""
    return TaskManager()


def _benchmarks(names: list[str]) -> dict[str, Task]:
    """Load lm-eval's tasks; refuse those that would run code."""
    loaded: dict[str, Task] = {}
    for name in names:
        if name not in _index().all_tasks:
            refuse("E-DATA", f"unknown task '{name}': {nearest(name, KNOWN)}, or one of lm-eval")
        try:
            loaded |= _index().load([name])["tasks"]
        except ImportError as error:
            refuse("E-DEP", f"benchmark '{name}' needs a package: {error}")
        except (OSError, ValueError, RuntimeError) as error:
            reason = str(error).partition("\n")[0]
            lacks = "metric is" if "module script" in reason else "data are"  # evaluate's scripts
            refuse("E-OFFLINE", f"benchmark '{name}': its {lacks} not here ({reason}); connect")
    for name, task in loaded.items():
        metrics = {} if task.config.process_results else task._metric_fn_list
        if lost := [metric for metric, function in metrics.items() if function is None]:
            refuse("E-OFFLINE", f"benchmark '{name}': its metric '{lost[0]}' is not here; connect")
        if getattr(task, "UNSAFE_CODE", False):
            refuse("E-SANDBOX", f"benchmark '{name}' runs code that the model wrote; not done here")
        task.set_fewshot_seed(seed=1234)  # lm-eval's default: the same examples as there
    return loaded


def _benchmark_rows(lm: InMemory, benchmarks: dict[str, Task], limit: int | None) -> list[Row]:
    """Run lm-eval's engine (its ``simple_evaluate`` would seed all random generators anew)."""
    wanted: Any = {"tasks": benchmarks, "groups": {}}
    results: Any = evaluator.evaluate(lm, wanted, limit=limit, bootstrap_iters=0)
    return [
        _row(task, sample, lm)
        for task, samples in ((task, results["samples"][task]) for task in benchmarks)
        for sample in samples  # of the first way to read an answer; some benchmarks list several
        if sample["filter"] == samples[0]["filter"]
    ]


def _row(task: str, sample: dict[str, Any], lm: InMemory) -> Row:
    """One item of the table; a gold answer is known where the choices were scored."""
    scores, target = sample["filtered_resps"], sample["target"]
    nll = nats = np.nan
    answer, output = str(target), str(scores[0])
    if isinstance(scores[0], tuple):
        output = str(max(range(len(scores)), key=lambda choice: scores[choice][0]))
        gold = target if len(scores) > 1 else 0
        if isinstance(gold, int) and 0 <= gold < len(scores):
            context, text = sample["arguments"][gold]
            answer, nats = text.strip(), -scores[gold][0]
            scored = lm._encode_pair(context, text)[1] if context else lm.tok_encode(text, False)
            nll = nats / len(scored)
    correct = int(next(sample[metric] for metric in METRICS if metric in sample))
    return task, "benchmark", sample["doc_id"], correct, nll, nats, answer, output
