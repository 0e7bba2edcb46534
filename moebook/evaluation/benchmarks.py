"""Evaluation as a table with a row an item: embedded tasks and lm-eval's benchmarks in one call.

lm-eval's have their data from the hub or from a folder, checked before any is run. Some are ours,
in the folder ``tasks``: BoolQ without its passages, the likelihood of worked solutions (GSM8K) and
of programs (MBPP), and HumanEval and MBPP: their files name functions of `code`, which lm-eval
imports for whoever asks for one of the two, and which have programs judged in a sandbox.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Mapping, Sequence
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
METRICS = ("exact_match", "acc_norm", "acc")  # the first that a benchmark reports judges it
SPLITS = {"training_split", "validation_split", "test_split", "fewshot_split"}

with formed(Path(__file__).with_name("cards.yaml")) as _FILE:
    CARDS: dict[str, dict[str, Any]] = _FILE["cards"]
OURS = Path(__file__).with_name("tasks")
COLUMNS = ["task", "domain", "item", "correct", "nll", "nll_sum", "answer", "output",
           "unnormalised", "chance", "asked"]  # fmt: skip
utils.env.from_string = functools.lru_cache(utils.env.from_string)
"""lm-eval compiles its templates anew for every row: most of the time that a check of rows took."""
MEASURES = {"score": ("accuracy (points)", 100.0), "nll": ("nll (nats)", 1.0)}
"""Column to what a difference of it is called, and the factor that brings it to that unit."""


@functools.cache
def _index() -> TaskManager:
    """lm-eval's index of its thousands of task files: seconds to build, so only once."""
    for name in ("tasks._index", "api.task"):  # ours replace two of its own; metrics' defaults
        logging.getLogger(f"lm_eval.{name}").setLevel(logging.ERROR)
    return TaskManager(include_path=str(OURS))


@checked
def load(names: Each[str], data: Place = "") -> dict[str, dict[str, Task]]:
    """Load what is not embedded, by the name asked for, or refuse it before any is run."""
    folder = hub.folder(data)
    for name in {*names} & {*PROGRAMS}:
        load_yaml(OURS / f"{name}.yaml")["metadata"]["ready"]()
    loaded: dict[str, dict[str, Task]] = {}
    for name in (name for name in names if name not in KNOWN):
        if name not in _index().all_tasks:
            refuse("E-DATA", f"unknown task '{name}': {nearest(name, KNOWN)}, or one of lm-eval")
        _refuse_code(name, (_index().task_index[name].cfg or {}).get("unsafe_code"))
        try:
            loaded[name] = _index().load(_local(name, folder) if folder else [name])["tasks"]
        except ImportError as error:
            refuse("E-DEP", f"benchmark '{name}' needs a package: {error}")
        except (OSError, ValueError, RuntimeError) as error:
            reason = str(error).partition("\n")[0]
            lacks = "metric is" if "module script" in reason else "data are"  # evaluate's scripts
            refuse("E-OFFLINE", f"benchmark '{name}': its {lacks} not here ({reason}); connect, or "
                   "give a folder of data sets")  # fmt: skip
    for name, task in chain.from_iterable(members.items() for members in loaded.values()):
        metrics = {} if task.config.process_results else task._metric_fn_list
        if lost := [metric for metric, function in metrics.items() if function is None]:
            refuse("E-OFFLINE", f"benchmark '{name}': its metric '{lost[0]}' is not here; connect")
        _refuse_code(name, getattr(task, "UNSAFE_CODE", False))
        task.set_fewshot_seed(seed=1234)  # lm-eval's default: the same examples as there
    return loaded


def _refuse_code(name: str, unsafe: object) -> None:
    if unsafe:
        refuse("E-SANDBOX", f"benchmark '{name}' runs code that the model wrote, outside of a "
               f"sandbox; take {' or '.join(PROGRAMS)}")  # fmt: skip


def _local(name: str, folder: Path) -> list[Any]:
    """Build a task, or a group's or tag's members, as `_Local`."""
    index = _index().task_index
    overrides = {"class": _Local, "dataset_kwargs": {"folder": folder}}
    built = TaskFactory().build(index[name], overrides=overrides, registry=index)
    return built if isinstance(built, list) else [built]


class _Local(ConfigurableTask):
    """A task whose data come from a folder; splits that it does not need are not looked for."""

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
        except Exception as error:  # whatever a template or a function makes of damaged rows
            told = f"{type(error).__name__}: {error}"
            place = f"{self.folder}: {self.at} of {', '.join(self.files)}"
            refuse("E-DATA", f"{place} is not as on the hub ({told}); fetch the files again")

    def doc_to_target(self, doc: Mapping[str, Any], doc_to_target: Any = None) -> Any:
        """Fill in the template of the answer, where 1.0 counts as the 1 that it was on the hub."""
        read = {name: whole(value) for name, value in doc.items()}
        return super().doc_to_target(read, doc_to_target)

    def _check(self, item: Mapping[str, Any]) -> None:
        """Fill a task's templates in; an empty field in a text raises, as does an odd answer.

        A template may ask whether a field is null: the worked answers of MGSM's test rows are.
        """
        given = {name: value for name, value in item.items() if not _missing(value)}
        nulls = dict.fromkeys(item.keys() - given)
        try:
            self._check_filled(given)
        except UndefinedError:
            if self._prints_null({**given, **nulls}):
                raise
            self._check_filled({**given, **nulls})

    def _prints_null(self, item: Mapping[str, Any]) -> bool:
        """Whether the question or the answer holds a null, which a template writes as None."""
        filled = f"{self.doc_to_text(item)} {self.doc_to_target(item)}"
        known = " ".join(str(value) for value in item.values() if value is not None)
        return filled.count("None") > known.count("None")

    def _check_filled(self, item: Mapping[str, Any]) -> None:
        asked = self.doc_to_text(item)
        answer = self.doc_to_target(item)
        if self.config.doc_to_choice is not None:
            options = self.doc_to_choice(item)
            # With many contexts and one ending (WinoGrande), the right one is what is asked.
            self._check_gold(asked if self.multiple_input else answer, options)
        if self.config.task in PROGRAMS:
            self.config.metadata["tests"](self.config.task, item)

    def _check_gold(self, gold: Any, options: Sequence[Any]) -> None:
        """Raise unless an answer, or each of several, is one of the options or its place.

        lm-eval itself takes any other answer for a wrong one, and True for the second option.
        """
        if not all(isinstance(option, str) for option in options):
            raise TypeError(f"the options are {options}, expected texts")
        for each in gold if isinstance(gold, list) and gold else [gold]:
            is_place = type(each) is int and 0 <= each < len(options)
            if not is_place and each not in options:
                raise ValueError(f"answer {gold!r} of {options}; expected its place or its text")
        if self.gold_kind not in (None, type(gold)):
            others = f"{self.gold_kind.__name__} in the items before"
            raise TypeError(f"answer {gold!r} is {type(gold).__name__}, {others}")
        self.gold_kind = type(gold)

    def download(self, *_: Any, **__: Any) -> None:
        """Read the splits' files, each by the project's reader of data of the hub."""
        self.dataset = {}
        for split in {getattr(self.config, kind) for kind in SPLITS} - {None}:
            files = hub.shards(self.folder, str(self.DATASET_PATH), self.DATASET_NAME, split)
            rows = [row for file in files for _, row in hub.local(file)]
            self.files |= {str(path.relative_to(self.folder)): path for path in files}
            self.dataset[split] = Dataset.from_list(rows)
        self.at = "an item" if self.config.process_docs else "item 1"  # which lm-eval tries


def _missing(value: object) -> bool:
    """Whether a field is empty: null, or the NaN that pandas writes in its place."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def rows(lm: InMemory, tasks: dict[str, Task], limit: int | None) -> list[tuple[Any, ...]]:
    """Run lm-eval's engine (its ``simple_evaluate`` would seed all random generators anew)."""
    wanted: Any = {"tasks": tasks, "groups": {}}
    results: Any = evaluator.evaluate(lm, wanted, limit=limit, bootstrap_iters=0)
    return [
        _row(task, sample, lm)
        for task, samples in ((task, results["samples"][task]) for task in tasks)
        for sample in samples  # of the first way to read an answer; some benchmarks list several
        if sample["filter"] == samples[0]["filter"]
    ]


def _row(task: str, sample: dict[str, Any], lm: InMemory) -> tuple[Any, ...]:
    """One item of the table; a gold answer is known where the choices were scored."""
    scores, target = sample["filtered_resps"], sample["target"]
    nll = nats = np.nan
    answer, chance = str(target), 0.0
    output = str(sample["resps"][0][0])  # the text as the model wrote it, before any filter
    if isinstance(scores[0], tuple):
        output = str(max(range(len(scores)), key=lambda choice: scores[choice][0]))
        chance = 1 / len(scores) if len(scores) > 1 else 0.0
        gold = target if len(scores) > 1 else 0
        if isinstance(gold, int) and 0 <= gold < len(scores):
            context, text = sample["arguments"][gold]
            answer, nats = text.strip(), -scores[gold][0]
            scored = lm._encode_pair(context, text)[1] if context else lm.tok_encode(text, False)
            nll = nats / len(scored)
    correct = int(next(sample[metric] for metric in METRICS if metric in sample))
    plain = int(sample.get("acc", correct))
    return task, "benchmark", sample["doc_id"], correct, nll, nats, answer, output, plain, chance


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

    An embedded task counts an item as correct when greedy generation equals the gold answer after
    the task's normalisation; its likelihood is that of the gold answer with the end token, and
    items are tokenized as training rows are. A benchmark counts as lm-eval does: exact match, else
    accuracy by likelihood normalised by length, else plain accuracy. A group stands for its
    members; ``split`` is of embedded tasks alone. They are asked in the chat ``format``, and with
    ``chat`` benchmarks are, too, for a model trained on such rows; programs never. ``data`` is a
    folder of the benchmarks' data sets, in whose name ``$NAME`` stands in the environment, or "".
    ``programs`` are ``sampling`` and ``keep`` of `code.rows`, of HumanEval and MBPP alone.

    Returns:
        One row an item: ``task``; ``domain`` (``benchmark`` for the hub's); ``item``, its number;
        ``correct``, 0 or 1, or pass@k; ``nll``, the gold answer's nats a token; ``nll_sum``, its
        nats in all (both NaN where a benchmark only generates); ``answer``, the gold one;
        ``output``, the model's text or the number of its choice; ``unnormalised``, `correct` before
        likelihoods are divided by length; ``chance``, what guessing gets; ``asked``, the name or
        group asked for.
        Its ``attrs["files"]`` are the files below ``data`` that were read, by name.
    """
    names = list(dict.fromkeys([tasks] if isinstance(tasks, str) else tasks))
    if not names:
        refuse("E-DATA", f"no task to evaluate on; {nearest('', KNOWN)}")
    if programs and not {*names} & {*PROGRAMS}:
        refuse("E-USAGE", f"only {' and '.join(PROGRAMS)} sample programs and keep them")
    loaded = load(names, data)
    with evaluating(model):
        lm = InMemory(model, tokenizer, batch_size, format if chat else "")
        lines = _embedded(lm, [name for name in names if name in KNOWN], limit, split, format)
        for name, members in loaded.items():
            run = members[name].config.metadata["rows"] if name in PROGRAMS else rows
            made = run(lm, members, limit, **programs if name in PROGRAMS else {})
            lines += [(*row, name) for row in made]
    lines.sort(key=lambda line: names.index(line[-1]))
    table = pd.DataFrame(lines, columns=COLUMNS)
    read = [getattr(task, "files", {}) for each in loaded.values() for task in each.values()]
    table.attrs["files"] = {name: path for files in read for name, path in files.items()}
    return table


@checked
def summary(
    table: Annotated[pd.DataFrame, columns("task asked", shares="correct unnormalised chance")],
    base: str = "",
) -> pd.DataFrame:
    """Put what `evaluate` found beside chance and beside the scores of the base's model card.

    A line a name asked for, in which a group's tasks count equally: accuracy, the same of
    likelihoods normalised by length (where the benchmark has it), its standard error over items,
    chance, rows, and the published score, NaN where `cards.yaml` has none.
    """
    names = {name: card for key, card in CARDS.items() for name in (key, card["repository"])}
    scores = names.get(base.partition("@")[0], {}).get("scores", {})
    lines = {}
    for name, part in table.groupby("asked", sort=False):
        tasks = part.groupby("task")
        means = tasks[["unnormalised", "correct", "chance"]].mean().mean()
        error = (tasks.correct.sem() ** 2).sum(min_count=1) ** 0.5 / tasks.ngroups
        lines[name] = [*means[:2], error, means.chance, len(part), scores.get(name, np.nan) / 100]
    columns = ["accuracy", "normalised", "its standard error", "chance", "rows", "published"]
    return pd.DataFrame.from_dict(lines, orient="index", columns=columns)


@checked
def by_benchmark(
    table: Annotated[pd.DataFrame, columns("task domain", shares="correct")],
    domains: Mapping[str, str] | None = None,
) -> pd.DataFrame:
    """Weigh the items of `evaluate`'s table as the papers' averages do: benchmarks count equally.

    ``domains`` maps benchmarks, whose subjects (as MMLU's) count as one, to domains; any other task
    is its own. Returns a copy with ``benchmark``; ``domain``; ``weight``, whose mean is 1 and whose
    sum is equal over benchmarks; ``score``, ``correct`` times the weight, whose mean is that of the
    benchmarks' accuracies; ``domain_score``, the same within a domain.
    """
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


@checked
def paired(
    tables: Mapping[
        str, Annotated[pd.DataFrame, columns("task", numbers="item score", lacking="nll")]
    ],
    pairs: Each[tuple[str, str]],
    columns: Each[Literal["score", "nll"]] = ("score", "nll"),
) -> pd.DataFrame:
    """Compare arms of one run item by item, for each pair the first arm less the second.

    ``tables`` are from `by_benchmark`, by arm, over the same items. Returns a line for each measure
    of a pair that ran: ``difference``, ``95 % from``, ``to`` (over test items, not trainings) and
    ``half width``, about the smallest difference that would have stood out.
    """
    lines = {}
    for one, other in pairs:
        if one not in tables or other not in tables:
            continue
        items = [tables[arm][["task", "item"]].to_numpy() for arm in (one, other)]
        if not np.array_equal(*items):
            refuse("E-DATA", f"{one} and {other} were evaluated on other items: compare the same")
        for column in columns:
            name, factor = MEASURES[column]
            gaps = tables[one][column].to_numpy(float) - tables[other][column].to_numpy(float)
            gaps = factor * gaps[~np.isnan(gaps)]
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
        available = task.available(split)
        drawn = tasks.rows(name, split, min(limit or available, available))
        items += [(task, number, row["answer"]) for number, row in enumerate(drawn)]
        pairs += lm.pairs(drawn, format)
        limits += [(task.max_new_tokens, ())] * len(drawn)
    results = zip(items, lm.examine(pairs, limits), pairs, strict=True)
    for (task, number, answer), (text, nats), (_, scored) in results:
        correct = int(task.normalise(text) == task.normalise(answer))
        found = task.name, task.domain, number, correct, -nats / len(scored), -nats, answer, text
        table.append((*found, correct, task.majority, task.name))
    return table
