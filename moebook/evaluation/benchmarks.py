"""Evaluation as a table, a row an item: embedded tasks, your own, lm-eval's benchmarks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import pandas as pd
from torch import nn

from moebook.data import hub, tasks
from moebook.data.tasks import KNOWN, Item, Task
from moebook.errors import extra, nearest, refuse
from moebook.evaluation.model import InMemory, Pair
from moebook.intervals import interval
from moebook.nn import evaluating
from moebook.settings import Count, Each, Place, checked, columns
from moebook.storage import formed

PROGRAMS = ("humaneval", "mbpp")  # what a model writes for them runs

with formed(Path(__file__).with_name("cards.yaml")) as _FILE:
    CARDS: dict[str, dict[str, Any]] = _FILE["cards"]
COLUMNS = [
    "task",
    "domain",
    "item",
    "correct",
    "nll",
    "nll_sum",
    "answer",
    "output",
    "unnormalised",
    "chance",
    "asked",
]
MEASURES = {
    "score": ("accuracy (points)", 100.0, 100.0),
    "nll": ("nll (nats)", 1.0, np.inf),
}
"""Column to what a difference of it is called, the factor to that unit, and the largest one."""
Line = tuple[Any, ...]  # of the table, without what was asked for


class Drawn(NamedTuple):
    """An item as it was drawn."""

    asked: str  # the name asked for
    task: Task
    split: str
    number: int  # in the draw
    item: Item
    row: dict[str, str]


@checked
def load(names: Each[str], data: Place = "") -> dict[str, dict[str, Any]]:
    """Load lm-eval's benchmarks among the names, or refuse before any is run.

    Of embedded tasks nothing is to be loaded; users' files are read, which refuses bad
    ones.
    """
    hub.folder(data)
    for name in names:
        if tasks.known(name):
            tasks.find(name)
    benchmarks = [name for name in names if not tasks.known(name)]
    if not benchmarks:
        return {}
    with extra("evaluate", f"benchmark '{benchmarks[0]}' of lm-eval"):
        from moebook.evaluation import harness
    return harness.load(benchmarks, data)


@checked
def evaluate(
    model: nn.Module,
    tokenizer: Any,
    tasks: str | Task | Each[str | Task],
    *,
    limit: Count | None = 200,
    split: str = "test",
    format: str = "camel",
    chat: bool = False,
    batch_size: Count = 32,
    data: Place = "",
    sampling: Any = None,
    keep: Place = "",
) -> pd.DataFrame:
    """Evaluate a model on embedded tasks and lm-eval's benchmarks, by name, or on your own.

    Your own is a `Task` (`Task.from_jsonl`) or a file's name, ``*.jsonl``. An embedded
    task or your own counts an item as correct when greedy generation equals the gold
    answer after the task's normalisation. Its likelihood is that of the gold answer
    with the end token. Items are tokenized as training rows are. An item with
    choices counts as a benchmark's does: the likeliest choice, without the end token,
    by likelihoods that are divided by their texts' length. A benchmark counts
    as lm-eval does: exact match, else accuracy by likelihood normalised by length, else
    plain accuracy. A group stands for its members; ``split`` is of tasks that are no
    benchmarks, ``all`` for every row of your file. Of each task ``limit`` items are
    asked at most, with None all of them. They are asked in the chat
    ``format``. With ``chat`` benchmarks are, too, for a model trained on such rows;
    programs never. ``data`` is a folder of the
    benchmarks' data sets, in whose name ``$NAME`` stands in the environment, or "".
    ``sampling`` and ``keep`` are those of `code.rows`, of HumanEval and MBPP alone.

    >>> from moebook import models
    >>> table = evaluate(*models.load("nano"), "gcd", limit=2)
    >>> table[["task", "item", "chance"]].shape
    (2, 3)

    Returns:
        One row an item, with ``task``; ``domain`` (``benchmark`` for the hub's); ``item``,
        its number; ``correct``, 0 or 1, or pass@k; ``nll``, the gold answer's nats a
        token; ``nll_sum``, its nats in all (both NaN where a benchmark only generates,
        or names its right option by a text);
        ``answer``, the gold one; ``output``, the model's text or the number of its
        choice; ``unnormalised``, `correct` before likelihoods are divided by length;
        ``chance``, what guessing gets; ``asked``, the name or group asked for. Its
        ``attrs["files"]`` are the files below ``data`` that were read, by name.
    """
    wanted = _by_name([tasks] if isinstance(tasks, str | Task) else tasks)
    names = list(wanted)
    if not names:
        refuse("E-DATA", f"no task to evaluate on; {nearest('', KNOWN)}")
    programs: dict[str, Any] = {}
    if sampling is not None:
        programs["sampling"] = sampling
    if keep:
        programs["keep"] = keep
    if programs and not any(name in PROGRAMS for name in names):
        which = " and ".join(PROGRAMS)
        refuse("E-USAGE", f"only {which} sample programs and keep them")
    loaded = load([name for name, task in wanted.items() if task is None], data)
    files: dict[str, Path] = {}
    with evaluating(model):
        ours = InMemory(model, tokenizer, batch_size)
        known = {name: task for name, task in wanted.items() if task is not None}
        lines = _asked(ours, known, limit, split, format)
        if loaded:
            from moebook.evaluation import harness

            lm = harness.Harness(model, tokenizer, batch_size, format if chat else "")
        for name, members in loaded.items():
            if name in PROGRAMS:
                run = members[name].config.metadata["rows"]
                of_name = run(lm, members, limit, **programs)
            else:
                of_name = harness.rows(lm, members, limit)
            lines += [(*line, name) for line in of_name]
    lines.sort(key=lambda line: names.index(line[-1]))
    for members in loaded.values():
        for task in members.values():
            files |= getattr(task, "files", {})
    table = pd.DataFrame(lines, columns=COLUMNS)
    table.attrs["files"] = files
    return table


@checked
def summary(
    table: Annotated[
        pd.DataFrame, columns("task asked", shares="correct unnormalised chance")
    ],
    base: str = "",
) -> pd.DataFrame:
    """Put what `evaluate` found beside chance and the scores of the base's model card.

    A line for each name asked for, in which a group's tasks count equally. It has the
    accuracy, the accuracy by likelihoods normalised by length (where the benchmark has
    it), chance, rows, and the published score, NaN where `cards.yaml` has none. The
    standard error is the normalised accuracy's over items, NaN where a task has one.
    """
    published = {}
    repository = base.partition("@")[0]
    for name, card in CARDS.items():
        if repository in (name, card["repository"]):
            published = card.get("scores", {})
    lines = {}
    for name, items in table.groupby("asked", sort=False):
        tasks = items.groupby("task")
        means = tasks[["unnormalised", "correct", "chance"]].mean().mean()
        squares = (tasks.correct.sem() ** 2).sum(skipna=False)  # one row has no error
        lines[name] = [
            means.unnormalised,
            means.correct,
            squares**0.5 / tasks.ngroups,
            means.chance,
            len(items),
            published.get(name, np.nan) / 100,
        ]
    columns = [
        "accuracy",
        "normalised",
        "its standard error",
        "chance",
        "rows",
        "published",
    ]
    return pd.DataFrame.from_dict(lines, orient="index", columns=columns)


@checked
def by_benchmark(
    table: Annotated[pd.DataFrame, columns("task domain", shares="correct")],
    domains: Mapping[str, str] | None = None,
) -> pd.DataFrame:
    """Weigh items as the papers' averages do: benchmarks count equally.

    ``domains`` maps benchmarks, whose subjects (as MMLU's) count as one, to domains;
    any other task is its own. Returns a copy with ``benchmark``; ``domain``;
    ``weight``, whose mean is 1 and whose sum is equal over benchmarks; ``score``,
    ``correct`` times the weight, whose mean is that of the benchmarks' accuracies;
    ``domain_score``, the same within a domain.
    """
    domains = dict(domains or {})
    benchmarks = {task: _benchmark(task, domains) for task in table.task.unique()}
    items = table.assign(benchmark=table.task.map(benchmarks))
    pairs = zip(items.benchmark, items.domain, strict=True)
    items["domain"] = [domains.get(benchmark, own) for benchmark, own in pairs]

    # The same sum of weights for each benchmark, of all and of those in its domain.
    size = items.groupby("benchmark").correct.transform("size")
    size_there = items.groupby(["domain", "benchmark"]).correct.transform("size")
    of_domain = items.groupby("domain")
    benchmarks_there = of_domain.benchmark.transform("nunique")
    fair = of_domain.correct.transform("size") / benchmarks_there
    items["weight"] = len(items) / items.benchmark.nunique() / size
    items["score"] = items.correct * items.weight
    items["domain_score"] = items.correct * (fair / size_there)
    return items


def _benchmark(task: str, benchmarks: Iterable[str]) -> str:
    """The benchmark, with the longest name, of which a task is a subject, or itself."""
    for name in sorted(benchmarks, key=len, reverse=True):
        if f"{task}_".startswith(f"{name}_"):
            return name
    return task


@checked
def paired(
    tables: Mapping[
        str,
        Annotated[pd.DataFrame, columns("task", numbers="item score", lacking="nll")],
    ],
    pairs: Each[tuple[str, str]],
    columns: Each[Literal["score", "nll"]] = ("score", "nll"),
) -> pd.DataFrame:
    """Compare arms of a run item by item, for each pair the first less the second.

    ``tables`` are from `by_benchmark`, by arm, over the same items. Returns a line for
    each measure of a pair that ran: ``difference``, ``95 % from``, ``to`` (over test
    items, not trainings; of shares within 100 points) and ``half width``, about the
    smallest difference that would have stood out.
    """
    lines = {}
    for one, other in pairs:
        if one not in tables or other not in tables:
            continue
        first = tables[one]
        second = tables[other]
        items = ["task", "item"]
        if not np.array_equal(first[items].to_numpy(), second[items].to_numpy()):
            differ = f"{one} and {other} were evaluated on other items"
            refuse("E-DATA", f"{differ}: compare the same")
        for column in columns:
            name, factor, most = MEASURES[column]
            gaps = first[column].to_numpy(float) - second[column].to_numpy(float)
            gaps = factor * gaps[~np.isnan(gaps)]
            lines[f"{one} minus {other}", name] = _line(gaps, most)
    return pd.DataFrame(lines, index=["difference", "95 % from", "to", "half width"]).T


def _line(gaps: np.ndarray, most: float) -> list[float]:
    """The mean difference, its interval, and half of that; NaN where there is none.

    The interval is cut at the largest difference that there is; half of it is of the whole.
    """
    if not len(gaps):
        return [np.nan] * 4
    ends = interval(gaps[None]) or (np.nan, np.nan)
    half = (ends[1] - ends[0]) / 2
    low, high = np.clip(ends, -most, most)
    return [gaps.mean(), low, high, half]


def _by_name(given: Iterable[str | Task]) -> dict[str, Task | None]:
    """Return tasks by what was asked for; None for a benchmark, which lm-eval finds."""
    wanted: dict[str, Task | None] = {}
    sources: dict[str, str] = {}
    for one in given:
        if isinstance(one, str) and not tasks.known(one):
            wanted[one] = None
            continue
        task = tasks.find(one) if isinstance(one, str) else one
        source = sources.setdefault(task.name, task.source)
        if source != task.source:
            same = f"{source} and {task.source}: both are task '{task.name}'"
            refuse("E-DATA", f"{same}; rename one of the files")
        name = one if isinstance(one, str) else task.name
        if wanted.setdefault(name, task) is not task:
            fix = "ask for them one after the other, or rename a file"
            refuse(
                "E-DATA", f"two tasks with other settings are called '{name}'; {fix}"
            )
    return wanted


def _asked(
    lm: InMemory, asked: Mapping[str, Task], limit: int | None, split: str, format: str
) -> list[Line]:
    """Ask embedded tasks and users' own: each item is answered, or its choice made."""
    written: list[Drawn] = []
    chosen: list[Drawn] = []
    for name, task in asked.items():
        available = task.available(split)
        drawn = task.draw(split, min(limit or available, available))
        for number, (item, row) in enumerate(drawn):
            kind = chosen if item.choices else written
            kind.append(Drawn(name, task, split, number, item, row))
    return _answered(lm, written, format) + _chosen(lm, chosen, format)


def _answered(lm: InMemory, drawn: Sequence[Drawn], format: str) -> list[Line]:
    """Write greedy answers, and measure the likelihood of the gold ones."""
    if not drawn:
        return []
    pairs = lm.pairs([one.row for one in drawn], format)
    _check_lengths(lm, drawn, pairs)
    limits = [(one.task.limit(one.split), ()) for one in drawn]
    chances = {one.asked: one.task.majority(one.split) for one in drawn}
    # All tasks at once: rows of several make fuller batches.
    results = lm.examine(pairs, limits)
    lines = []
    for one, (_, scored), (text, score) in zip(drawn, pairs, results, strict=True):
        task = one.task
        answer = one.row["answer"]
        correct = int(task.normalise(text) == task.normalise(answer))
        counts = (one.number, correct, -score / len(scored), -score)
        texts = (answer, text)
        guess = (correct, chances[one.asked], one.asked)
        lines.append((task.name, one.row["domain"], *counts, *texts, *guess))
    return lines


def _chosen(lm: InMemory, drawn: Sequence[Drawn], format: str) -> list[Line]:
    """Choose the likeliest of each item's choices, as lm-eval does."""
    if not drawn:
        return []
    rows = []
    asked = []  # the item of each row
    for one in drawn:
        for choice in one.item.choices:
            rows.append(one.row | {"answer": choice})
            asked.append(one)
    # The end token is no part of a choice.
    pairs = [(before, scored[:-1]) for before, scored in lm.pairs(rows, format)]
    _check_lengths(lm, asked, pairs)
    results = zip(pairs, lm.score(pairs), strict=True)
    lines = []
    for one in drawn:
        of_item = [next(results) for _ in one.item.choices]
        tokens = [len(scored) for (_, scored), _ in of_item]
        scores = np.array([score for _, (score, _) in of_item])
        lines.append(_choice(one, tokens, scores))
    return lines


def _check_lengths(lm: InMemory, drawn: Sequence[Drawn], pairs: Sequence[Pair]) -> None:
    """Refuse an answer longer than the model, by its item's place (E-RANGE)."""
    for one, (_, scored) in zip(drawn, pairs, strict=True):
        place = one.item.where or f"{one.task.name}, item {one.number}"
        lm.refuse_longer(scored, place)


def _choice(one: Drawn, tokens: Sequence[int], scores: np.ndarray) -> Line:
    """One item of the table, of its choices' lengths in tokens and log-probabilities."""
    choices = one.item.choices
    gold = choices.index(one.item.answer)
    likeliest = int(scores.argmax())
    by_length = scores / [len(choice) for choice in choices]
    correct = int(by_length.argmax() == gold)
    counts = (one.number, correct, -scores[gold] / tokens[gold], -scores[gold])
    texts = (one.item.answer, str(likeliest))
    guess = (int(likeliest == gold), 1 / len(choices), one.asked)
    return (one.task.name, one.row["domain"], *counts, *texts, *guess)
