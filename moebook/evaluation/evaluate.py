"""One call for the embedded tasks and the hub's benchmarks: a table with one row an item."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pandas as pd
from lm_eval import evaluator
from lm_eval.api.task import Task
from lm_eval.tasks import TaskManager
from torch import nn

from moebook.data.tasks import KNOWN
from moebook.errors import nearest, refuse
from moebook.evaluation.embedded import Embedded
from moebook.evaluation.model import InMemory
from moebook.nn import evaluating

METRICS = ("exact_match", "acc_norm", "acc")
"""What counts as correct: the first of these that a task reports."""

SHOTS_SEED = 1234  # lm-eval's own default, so that few-shot benchmarks see the same examples


def evaluate(
    model: nn.Module,
    tokenizer: Any,
    tasks: str | Sequence[str],
    *,
    limit: int | None = 200,
    split: str = "test",
    format: str = "camel",
    batch_size: int = 32,
) -> pd.DataFrame:
    """Evaluate a model on embedded tasks and on lm-eval's benchmarks, by name.

    An embedded task counts an item as correct when greedy generation equals the gold answer after
    the task's normalisation; its likelihood is that of the gold answer with the end token, as it
    is trained on. A benchmark counts as lm-eval does: exact match, else accuracy by likelihood
    normalised by length, else plain accuracy.

    lm-eval's engine is called and not its ``simple_evaluate``, which besides seeds all random
    generators anew and asks the machine for its description in subprocesses.

    Args:
        model: A causal language model of transformers, altered or wrapped as one likes.
        tokenizer: Its tokenizer.
        tasks: Names of `data.tasks` or of lm-eval; a group stands for its members.
        limit: At most so many items a task; None takes all.
        split: train, validation or test, of the embedded tasks; benchmarks have their own.
        format: Chat format of the embedded tasks, a key of `data.encoding.FORMATS`.
        batch_size: B, sequences a forward pass.

    Returns:
        One row an item: ``task``; ``domain`` (``benchmark`` for the hub's); ``item``, its number;
        ``correct``, 0 or 1; ``nll``, the gold answer's nats a token; ``nll_sum``, its nats in all
        (both NaN where a benchmark only generates); ``answer``, the gold one; ``output``, the
        model's text or the number of its choice.

    Raises:
        Refusal: ``E-DATA`` for an unknown task, split or format, ``E-RANGE`` for a limit or batch
            below 1, ``E-OFFLINE`` for a benchmark whose data are not here and cannot be fetched,
            ``E-SANDBOX`` for one that runs code written by the model.
    """
    for name, value in {"limit": limit, "batch_size": batch_size}.items():
        if value is not None and value < 1:
            refuse("E-RANGE", f"{name} = {value}: expected at least 1")
    names = list(dict.fromkeys([tasks] if isinstance(tasks, str) else tasks))
    if not names:
        refuse("E-DATA", f"no task to evaluate on; {nearest('', KNOWN)}")
    wanted: dict[str, Task] = _benchmarks([name for name in names if name not in KNOWN])
    wanted |= {
        name: Embedded(name, tokenizer, split=split, size=limit, format=format)
        for name in names
        if name in KNOWN
    }
    with evaluating(model):
        lm = InMemory(model, tokenizer, batch_size)
        results: Any = evaluator.evaluate(
            lm, {"tasks": wanted, "groups": {}}, limit=limit, bootstrap_iters=0
        )
    table = pd.DataFrame(
        [_row(task, sample, lm) for task in wanted for sample in _first(results["samples"][task])]
    )
    order = {name: place for place, name in enumerate(names)}
    return table.sort_values("task", key=lambda t: t.map(order), kind="stable", ignore_index=True)


@functools.cache
def _index() -> TaskManager:
    """lm-eval's index of its thousands of task files: seconds to build, so only once."""
    return TaskManager()


def _benchmarks(names: list[str]) -> dict[str, Task]:
    """Load lm-eval's tasks, refusing unknown names, absent data and code to be run."""
    if not names:
        return {}
    manager = _index()
    found: dict[str, Task] = {}
    for name in names:
        if name not in manager.all_tasks:
            refuse("E-DATA", f"unknown task '{name}': {nearest(name, KNOWN)}, or one of lm-eval")
        try:
            found |= manager.load([name])["tasks"]
        except (OSError, ValueError, RuntimeError) as error:
            reason = str(error).partition("\n")[0]
            refuse(
                "E-OFFLINE", f"benchmark '{name}': its data are not here ({reason}); connect once"
            )
    for name, task in found.items():
        if getattr(task, "UNSAFE_CODE", False):
            refuse("E-SANDBOX", f"benchmark '{name}' runs code that the model wrote; not done here")
        task.set_fewshot_seed(seed=SHOTS_SEED)
    return found


def _first(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The samples of a task's first way to read an answer; some benchmarks list several."""
    return [sample for sample in samples if sample["filter"] == samples[0]["filter"]]


def _row(task: str, sample: dict[str, Any], lm: InMemory) -> dict[str, Any]:
    """One item of the table from one of lm-eval's samples."""
    gold, nats, output = _gold(sample)
    tokens = len(lm.pair(sample["doc"], *gold)[1]) if gold else 1
    correct = next(sample[metric] for metric in METRICS if metric in sample)
    return {
        "task": task,
        "domain": KNOWN[task].domain if task in KNOWN else "benchmark",
        "item": sample["doc_id"],
        "correct": int(correct),
        "nll": nats / tokens,
        "nll_sum": nats,
        "answer": gold[1].strip() if gold else str(sample["target"]),
        "output": output,
    }


def _gold(sample: dict[str, Any]) -> tuple[tuple[str, str] | None, float, str]:
    """Context and text of the gold answer, its nats, and what the model answered."""
    asked, got = sample["arguments"], sample["filtered_resps"]
    if "nll_sum" in sample:  # an embedded task: generated, then scored
        return asked[1], sample["nll_sum"], got[0]
    scored = isinstance(got[0], tuple)
    if not scored:
        return None, float("nan"), str(got[0])
    best = max(range(len(got)), key=lambda choice: got[choice][0])
    target = sample["target"] if len(got) > 1 else 0
    if not isinstance(target, int) or not 0 <= target < len(got):
        return None, float("nan"), str(best)
    return asked[target], -got[target][0], str(best)
