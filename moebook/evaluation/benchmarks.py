"""Evaluation as a table, a row an item: embedded tasks and lm-eval's benchmarks.

lm-eval's have their data from the hub or from a folder, checked before any is run. Some
are ours, in the folder ``tasks``: BoolQ without its passages, the likelihood of worked
solutions (GSM8K) and of programs (MBPP), and HumanEval and MBPP: their files name
functions of `code`, which lm-eval imports for whoever asks for one of the two, and
which have programs judged in a sandbox.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pandas as pd
from datasets import Dataset
from jinja2 import UndefinedError
from lm_eval import evaluator, utils
from lm_eval.api.task import ConfigurableTask, Task
from lm_eval.tasks import TaskManager
from lm_eval.tasks._factory import TaskFactory
from lm_eval.tasks._yaml_loader import load_yaml
from torch import nn

from moebook.data import hub, tasks
from moebook.data.tasks import KNOWN
from moebook.data.templates import whole
from moebook.errors import Refusal, nearest, refuse
from moebook.evaluation.model import InMemory
from moebook.nn import evaluating
from moebook.results import formed
from moebook.results.intervals import interval
from moebook.settings import Count, Each, Place, checked, columns

PROGRAMS = ("humaneval", "mbpp")  # what a model writes for them runs
# The first that a benchmark reports judges it.
METRICS = (
    "exact_match",
    "acc_norm",
    "acc",
)
SPLITS = {"training_split", "validation_split", "test_split", "fewshot_split"}

with formed(Path(__file__).with_name("cards.yaml")) as _FILE:
    CARDS: dict[str, dict[str, Any]] = _FILE["cards"]
OURS = Path(__file__).with_name("tasks")
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
utils.env.from_string = functools.lru_cache(utils.env.from_string)
"""lm-eval compiles its templates anew for every row: most of the time of a check."""
MEASURES = {"score": ("accuracy (points)", 100.0), "nll": ("nll (nats)", 1.0)}
"""Column to what a difference of it is called, and the factor to that unit."""
Line = tuple[Any, ...]  # of the table, without what was asked for


@functools.cache
def _index() -> TaskManager:
    """lm-eval's index of its thousands of task files: seconds to build, so once."""
    for name in (
        "tasks._index",
        "api.task",
    ):  # ours replace two of its own; metrics' defaults
        logging.getLogger(f"lm_eval.{name}").setLevel(logging.ERROR)
    return TaskManager(include_path=str(OURS))


@checked
def load(names: Each[str], data: Place = "") -> dict[str, dict[str, Task]]:
    """Load what is not embedded, by the name asked for, or refuse before any is run."""
    folder = hub.folder(data)
    for name in PROGRAMS:
        if name in names:
            load_yaml(OURS / f"{name}.yaml")["metadata"]["ready"]()
    loaded = {name: _loaded(name, folder) for name in names if name not in KNOWN}
    for members in loaded.values():
        for name, task in members.items():
            _check(name, task)
            # lm-eval's default: the same examples as there.
            task.set_fewshot_seed(seed=1234)
    return loaded


def _loaded(name: str, folder: Path | None) -> dict[str, Task]:
    """Load a benchmark's tasks, from a folder or as lm-eval does."""
    index = _index()
    if name not in index.all_tasks:
        known = f"{nearest(name, KNOWN)}, or one of lm-eval"
        refuse("E-DATA", f"unknown task '{name}': {known}")
    config = index.task_index[name].cfg or {}
    _refuse_code(name, config.get("unsafe_code"))
    try:
        tasks: dict[str, Task] = index.load(_local(name, folder) if folder else [name])[
            "tasks"
        ]
    except ImportError as error:
        refuse("E-DEP", f"benchmark '{name}' needs a package: {error}")
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        # The library `evaluate` has metrics as scripts on the hub.
        lacks = "metric is" if "module script" in reason else "data are"
        missing = f"benchmark '{name}': its {lacks} not here ({reason})"
        refuse("E-OFFLINE", f"{missing}; connect, or give a folder of data sets")
    return tasks


def _check(name: str, task: Task) -> None:
    """Refuse a task that runs code, or of which a metric could not be loaded."""
    if not task.config.process_results:
        for metric, function in task._metric_fn_list.items():
            if function is None:
                missing = f"benchmark '{name}': its metric '{metric}' is not here"
                refuse("E-OFFLINE", f"{missing}; connect")
    _refuse_code(name, getattr(task, "UNSAFE_CODE", False))


def _refuse_code(name: str, unsafe: object) -> None:
    if unsafe:
        runs = (
            f"benchmark '{name}' runs code that the model wrote, outside of a sandbox"
        )
        refuse("E-SANDBOX", f"{runs}; take {' or '.join(PROGRAMS)}")


def _local(name: str, folder: Path) -> list[Any]:
    """Build a task, or a group's or tag's members, as `_Local`."""
    index = _index().task_index
    overrides = {"class": _Local, "dataset_kwargs": {"folder": folder}}
    built = TaskFactory().build(index[name], overrides=overrides, registry=index)
    return built if isinstance(built, list) else [built]


class _Local(ConfigurableTask):
    """A task whose data come from a folder; other splits than it needs are not read."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        config = {key: value for key, value in config.items() if key != "class"}
        self.folder: Path = config.pop("dataset_kwargs")["folder"]
        tested = "test_split" if config.get("test_split") else "validation_split"
        shown = "fewshot_split" if config.get("fewshot_split") else "training_split"
        needed = {tested, shown} if config.get("num_fewshot") else {tested}
        self.files: dict[str, Path] = {}  # that were read, by their place in the folder
        self.at = "an item"
        self.gold_kind: type | None = None  # of the answers that were checked
        try:
            super().__init__(config=config | dict.fromkeys(SPLITS - needed))
            examples = self.fewshot_docs() if config.get("num_fewshot") else []
            for number, item in enumerate(chain(self.eval_docs, examples), start=1):
                self.at = f"item {number}"
                self._check(item)
        except (Refusal, ImportError):
            raise
        except Exception as error:  # whatever a template or a function makes of damage
            at = f"{self.folder}: {self.at} of {', '.join(self.files)}"
            why = f"{type(error).__name__}: {error}"
            refuse(
                "E-DATA", f"{at} is not as on the hub ({why}); fetch the files again"
            )

    def doc_to_target(self, doc: Mapping[str, Any], doc_to_target: Any = None) -> Any:
        """Fill in the template of the answer, where 1.0 counts as the hub's 1."""
        as_on_hub = {name: whole(value) for name, value in doc.items()}
        return super().doc_to_target(as_on_hub, doc_to_target)

    def _check(self, item: Mapping[str, Any]) -> None:
        """Fill a task's templates in; an empty field or an odd answer raises.

        A template may ask whether a field is null: the worked answers of MGSM's test
        rows are.
        """
        given = {name: value for name, value in item.items() if not _missing(value)}
        nulls = dict.fromkeys(item.keys() - given)
        try:
            self._check_filled(given)
        except UndefinedError:
            with_nulls = {**given, **nulls}
            if self._prints_null(with_nulls):
                raise
            self._check_filled(with_nulls)

    def _prints_null(self, item: Mapping[str, Any]) -> bool:
        """Whether question or answer hold a null, which a template writes as None."""
        filled = f"{self.doc_to_text(item)} {self.doc_to_target(item)}"
        known = " ".join(str(value) for value in item.values() if value is not None)
        return filled.count("None") > known.count("None")

    def _check_filled(self, item: Mapping[str, Any]) -> None:
        asked = self.doc_to_text(item)
        answer = self.doc_to_target(item)
        if self.config.doc_to_choice is not None:
            options = self.doc_to_choice(item)
            # With many contexts and one ending (WinoGrande), the right one is what is
            # asked.
            self._check_gold(asked if self.multiple_input else answer, options)
        if self.config.task in PROGRAMS:
            self.config.metadata["tests"](self.config.task, item)

    def _check_gold(self, gold: Any, options: Sequence[Any]) -> None:
        """Raise unless an answer, or each of several, is an option or its place.

        lm-eval itself takes any other answer for a wrong one, and True for the second
        option.
        """
        if not all(isinstance(option, str) for option in options):
            raise TypeError(f"the options are {options}, expected texts")
        answers = gold if isinstance(gold, list) and gold else [gold]
        for answer in answers:
            is_place = type(answer) is int and 0 <= answer < len(options)
            if not is_place and answer not in options:
                expected = "expected its place or its text"
                raise ValueError(f"answer {gold!r} of {options}; {expected}")
        if self.gold_kind not in (None, type(gold)):
            others = f"{self.gold_kind.__name__} in the items before"
            raise TypeError(f"answer {gold!r} is {type(gold).__name__}, {others}")
        self.gold_kind = type(gold)

    def download(self, *_: Any, **__: Any) -> None:
        """Read the splits' files, each by the project's reader of data of the hub."""
        self.dataset = {}
        splits = {getattr(self.config, kind) for kind in SPLITS}
        for split in splits - {None}:
            rows = []
            for file in hub.shards(
                self.folder, str(self.DATASET_PATH), self.DATASET_NAME, split
            ):
                rows += [row for _, row in hub.local(file)]
                self.files[str(file.relative_to(self.folder))] = file
            self.dataset[split] = Dataset.from_list(rows)
        # lm-eval tries the first one.
        self.at = "an item" if self.config.process_docs else "item 1"


def _missing(value: object) -> bool:
    """Whether a field is empty: null, or the NaN that pandas writes in its place."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def rows(lm: InMemory, tasks: dict[str, Task], limit: int | None) -> list[Line]:
    """Run lm-eval's engine (its ``simple_evaluate`` would seed all generators anew)."""
    wanted: Any = {"tasks": tasks, "groups": {}}
    results: Any = evaluator.evaluate(lm, wanted, limit=limit, bootstrap_iters=0)
    lines = []
    for task in tasks:
        samples = results["samples"][task]
        for sample in samples:
            # The first way to read an answer; some benchmarks list several.
            if sample["filter"] == samples[0]["filter"]:
                lines.append(_row(task, sample, lm))
    return lines


def _row(task: str, sample: dict[str, Any], lm: InMemory) -> Line:
    """One item of the table; a gold answer is known where the choices were scored."""
    scores = sample["filtered_resps"]
    target = sample["target"]
    nll = nats = np.nan
    chance = 0.0
    answer = str(target)
    output = str(sample["resps"][0][0])  # as the model wrote it, before any filter
    if isinstance(scores[0], tuple):
        choices = range(len(scores))
        output = str(max(choices, key=lambda choice: scores[choice][0]))
        gold = 0
        if len(scores) > 1:
            gold = target
            chance = 1 / len(scores)
        if isinstance(gold, int) and gold in choices:
            context, text = sample["arguments"][gold]
            if context:
                _, scored = lm._encode_pair(context, text)
            else:
                scored = lm.tok_encode(text, False)
            answer = text.strip()
            nats = -scores[gold][0]
            nll = nats / len(scored)
    metric = next(metric for metric in METRICS if metric in sample)
    correct = int(sample[metric])
    plain = int(sample.get("acc", correct))
    item = sample["doc_id"]
    return task, "benchmark", item, correct, nll, nats, answer, output, plain, chance


@checked
def evaluate(
    model: nn.Module,
    tokenizer: Any,
    tasks: str | Sequence[str],
    *,
    limit: Count | None = 200,
    split: str = "test",
    format: str = "camel",
    chat: bool = False,
    batch_size: Count = 32,
    data: Place = "",
    **programs: Any,
) -> pd.DataFrame:
    """Evaluate a model on embedded tasks and on lm-eval's benchmarks, by name.

    An embedded task counts an item as correct when greedy generation equals the gold
    answer after the task's normalisation; its likelihood is that of the gold answer
    with the end token, and items are tokenized as training rows are. A benchmark counts
    as lm-eval does: exact match, else accuracy by likelihood normalised by length, else
    plain accuracy. A group stands for its members; ``split`` is of embedded tasks
    alone. They are asked in the chat ``format``, and with ``chat`` benchmarks are, too,
    for a model trained on such rows; programs never. ``data`` is a folder of the
    benchmarks' data sets, in whose name ``$NAME`` stands in the environment, or "".
    ``programs`` are ``sampling`` and ``keep`` of `code.rows`, of HumanEval and MBPP
    alone.

    Returns:
        One row an item: ``task``; ``domain`` (``benchmark`` for the hub's); ``item``,
        its number; ``correct``, 0 or 1, or pass@k; ``nll``, the gold answer's nats a
        token; ``nll_sum``, its nats in all (both NaN where a benchmark only generates);
        ``answer``, the gold one; ``output``, the model's text or the number of its
        choice; ``unnormalised``, `correct` before likelihoods are divided by length;
        ``chance``, what guessing gets; ``asked``, the name or group asked for. Its
        ``attrs["files"]`` are the files below ``data`` that were read, by name.
    """
    names = list(dict.fromkeys([tasks] if isinstance(tasks, str) else tasks))
    if not names:
        refuse("E-DATA", f"no task to evaluate on; {nearest('', KNOWN)}")
    if programs and not any(name in PROGRAMS for name in names):
        which = " and ".join(PROGRAMS)
        refuse("E-USAGE", f"only {which} sample programs and keep them")
    loaded = load(names, data)
    files: dict[str, Path] = {}
    with evaluating(model):
        lm = InMemory(model, tokenizer, batch_size, format if chat else "")
        embedded = [name for name in names if name in KNOWN]
        lines = _embedded(lm, embedded, limit, split, format)
        for name, members in loaded.items():
            if name in PROGRAMS:
                run = members[name].config.metadata["rows"]
                of_name = run(lm, members, limit, **programs)
            else:
                of_name = rows(lm, members, limit)
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

    A line a name asked for, in which a group's tasks count equally: accuracy, the same
    of likelihoods normalised by length (where the benchmark has it), its standard error
    over items, chance, rows, and the published score, NaN where `cards.yaml` has none.
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
        squares = (tasks.correct.sem() ** 2).sum(min_count=1)
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
    own = dict(zip(items.benchmark, items.domain, strict=True))
    items["domain"] = items.benchmark.map(own | domains)

    # The same sum of weights for each benchmark, of all and of those in its domain.
    size = items.groupby("benchmark").correct.transform("size")
    of_domain = items.groupby("domain")
    fair = of_domain.correct.transform("size") / of_domain.benchmark.transform(
        "nunique"
    )
    items["weight"] = len(items) / items.benchmark.nunique() / size
    items["score"] = items.correct * items.weight
    items["domain_score"] = items.correct * (fair / size)
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
    items, not trainings) and ``half width``, about the smallest difference that would
    have stood out.
    """
    lines = {}
    for one, other in pairs:
        if one not in tables or other not in tables:
            continue
        first, second = tables[one], tables[other]
        items = ["task", "item"]
        if not np.array_equal(first[items].to_numpy(), second[items].to_numpy()):
            differ = f"{one} and {other} were evaluated on other items"
            refuse("E-DATA", f"{differ}: compare the same")
        for column in columns:
            name, factor = MEASURES[column]
            gaps = first[column].to_numpy(float) - second[column].to_numpy(float)
            gaps = factor * gaps[~np.isnan(gaps)]
            lines[f"{one} minus {other}", name] = _line(gaps)
    return pd.DataFrame(lines, index=["difference", "95 % from", "to", "half width"]).T


def _line(gaps: np.ndarray) -> list[float]:
    """The mean difference, its interval, and half of that; NaN where there is none."""
    if not len(gaps):
        return [np.nan] * 4
    low, high = interval(gaps[None]) or (np.nan, np.nan)
    return [gaps.mean(), low, high, (high - low) / 2]


def _embedded(
    lm: InMemory, names: list[str], limit: int | None, split: str, format: str
) -> list[Line]:
    """Ask embedded tasks: greedy answers, and the likelihood of the gold ones."""
    items = []
    pairs = []
    limits = []
    for name in names:
        task = tasks.find(name)
        available = task.available(split)
        rows = tasks.rows(name, split, min(limit or available, available))
        items += [(task, number, row["answer"]) for number, row in enumerate(rows)]
        pairs += lm.pairs(rows, format)
        limits += [(task.max_new_tokens, ())] * len(rows)
    # All tasks at once: rows of several make fuller batches.
    results = lm.examine(pairs, limits)
    lines = []
    for (task, number, answer), (_, scored), (text, score) in zip(
        items, pairs, results, strict=True
    ):
        correct = int(task.normalise(text) == task.normalise(answer))
        counts = (number, correct, -score / len(scored), -score)
        texts = (answer, text)
        guess = (correct, task.majority, task.name)
        lines.append((task.name, task.domain, *counts, *texts, *guess))
    return lines
