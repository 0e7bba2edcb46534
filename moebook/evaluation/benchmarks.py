"""lm-eval's benchmarks, with data from the hub or from a folder, checked before any is run.

Three are ours, in the folder ``tasks``: BoolQ without its passages, and the likelihood of
worked solutions (GSM8K) and of programs (MBPP).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from lm_eval import evaluator
from lm_eval.api.task import ConfigurableTask, Task
from lm_eval.tasks import TaskManager
from lm_eval.tasks._factory import TaskFactory

from moebook.data import hub
from moebook.data.tasks import KNOWN
from moebook.errors import Refusal, nearest, refuse
from moebook.evaluation.model import InMemory
from moebook.results import formed

METRICS = ("exact_match", "acc_norm", "acc")  # the first that a benchmark reports judges it
SPLITS = {"training_split", "validation_split", "test_split", "fewshot_split"}

with formed(Path(__file__).with_name("cards.yaml")) as _FILE:
    CARDS: dict[str, dict[str, Any]] = _FILE["cards"]
OURS = Path(__file__).with_name("tasks")


@functools.cache
def _index() -> TaskManager:
    """lm-eval's index of its thousands of task files: seconds to build, so only once."""
    return TaskManager(include_path=str(OURS))


def load(names: list[str], data: str | Path = "") -> dict[str, dict[str, Task]]:
    """Load lm-eval's tasks by the name asked for; refuse those that would run code."""
    folder = hub.folder(data)
    loaded: dict[str, dict[str, Task]] = {}
    for name in names:
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
        refuse("E-SANDBOX", f"benchmark '{name}' runs code that the model wrote; not done here")


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
        where = f"benchmark '{config['task']}' from {self.folder}"
        try:
            super().__init__(config=config | dict.fromkeys(SPLITS - needed))
            examples = self.fewshot_docs() if config.get("num_fewshot") else []
            for number, item in enumerate(chain(self.eval_docs, examples), start=1):
                where = f"{self.folder}: item {number} of {', '.join(self.files)}"
                self._check({key: value for key, value in item.items() if value is not None})
        except (Refusal, ImportError):
            raise
        except Exception as error:  # whatever a template or a function makes of damaged rows
            told = f"{type(error).__name__}: {error}"
            refuse("E-DATA", f"{where} is not as on the hub ({told}); fetch the files again")

    def _check(self, item: Mapping[str, Any]) -> None:
        """Fill a task's templates in; a field that is missing raises, as does an odd answer."""
        self.doc_to_text(item)
        answer = self.doc_to_target(item)
        options = self.doc_to_choice(item) if self.config.doc_to_choice is not None else []
        odd = isinstance(answer, int) and options and not 0 <= answer < len(options)
        if odd or not all(isinstance(option, str) for option in options):
            raise ValueError(f"answer {answer} of {options}")

    def download(self, *_: Any, **__: Any) -> None:
        """Read the splits' files, each by the project's reader of data of the hub."""
        self.dataset = {}
        for split in {getattr(self.config, kind) for kind in SPLITS} - {None}:
            files = hub.shards(self.folder, str(self.DATASET_PATH), self.DATASET_NAME, split)
            rows = [row for file in files for _, row in hub.local(file)]
            self.dataset[split] = Dataset.from_list(rows)
            self.files |= {str(path.relative_to(self.folder)): path for path in files}


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
    answer, output, chance = str(target), str(scores[0]), 0.0
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
