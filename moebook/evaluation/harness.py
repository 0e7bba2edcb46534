"""lm-eval's benchmarks: their data from the hub or a folder, checked before any is run.

Some are ours, in the folder ``tasks``: BoolQ without its passages, the likelihood of
worked solutions (GSM8K) and of programs (MBPP), and HumanEval and MBPP: their files
name functions of `code`, which lm-eval imports for whoever asks for one of the two, and
which have programs judged in a sandbox.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from jinja2 import UndefinedError
from lm_eval import evaluator, utils
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.task import ConfigurableTask, Task
from lm_eval.tasks import TaskManager
from lm_eval.tasks._factory import TaskFactory
from lm_eval.tasks._yaml_loader import load_yaml
from torch import nn

from moebook.data import hub, reading
from moebook.data.tasks import KNOWN
from moebook.data.templates import whole
from moebook.errors import Refusal, nearest, refuse
from moebook.evaluation.benchmarks import PROGRAMS, Line
from moebook.evaluation.model import InMemory, Pair
from moebook.settings import Each, Place, checked

METRICS = ("exact_match", "acc_norm", "acc")
"""The first that a benchmark reports judges it."""
SPLITS = {"training_split", "validation_split", "test_split", "fewshot_split"}
OURS = Path(__file__).with_name("tasks")
utils.env.from_string = functools.lru_cache(utils.env.from_string)
"""lm-eval compiles its templates anew for every row: most of the time of a check."""


class Harness(InMemory, TemplateLM):
    """A model in memory as lm-eval asks it.

    Its requests are put in a ``chat`` format of `data.encode`, or plainly where it is
    "".
    """

    def __init__(
        self, model: nn.Module, tokenizer: Any, batch: int, chat: str = ""
    ) -> None:
        super().__init__(model, tokenizer, batch)
        self._chat = chat

    def _encode_pair(self, context: str, continuation: str) -> Pair:
        """Tokenize a context and what follows, so that each token is of one of them.

        As lm-eval does where the context's tokens begin those of the whole text; blanks
        at its end go to what follows. Where a token spans the border ("th" and "er"),
        lm-eval loses a part of the answer or all of it; here the two are tokenized
        apart.
        """
        if self._chat:
            row = {"prompt": context, "answer": continuation.strip()}
            ((before, scored),) = self.pairs([row], self._chat)
            return before, scored[:-1]
        asked = context.rstrip()
        rest = context[len(asked) :] + continuation
        before = self.tok_encode(asked)
        whole = self.tok_encode(asked + rest)
        scored = whole[len(before) :]
        if whole[: len(before)] != before:
            scored = self.tok_encode(rest, add_special_tokens=False)
            if self.tokenizer.decode(before + scored) != self.tokenizer.decode(whole):
                where = f"{continuation!r} behind {context[-40:]!r}"
                other = "this tokenizer writes other text when it reads it alone"
                spans = f"{where} shares a token with it, and {other}"
                refuse("E-DATA", f"{spans}; put a blank between them")
        return before or [self.prefix_token_id], scored

    def loglikelihood(
        self, requests: list[Instance], **_: Any
    ) -> list[tuple[float, bool]]:
        """Score lm-eval's requests, each with an answer of one token or more."""
        for request in requests:
            context, continuation = request.args
            if not continuation:
                where = f"an answer to '{context[-40:]}'"
                refuse("E-DATA", f"{where} is empty; expected text to score")
        scores: list[tuple[float, bool]] = super().loglikelihood(
            requests, disable_tqdm=True
        )
        return scores

    def _loglikelihood_tokens(
        self, requests: Sequence[Any], **_: Any
    ) -> list[tuple[float, bool]]:
        return self.score([(before, scored) for _, before, scored in requests])

    def loglikelihood_rolling(self, requests: list[Instance], **_: Any) -> list[float]:
        """Not done: a benchmark that scores whole texts has no correct answers."""
        name = requests[0].task_name
        refuse("E-DATA", f"'{name}' scores whole texts; choose one with answers")

    def generate_until(self, requests: list[Instance], **_: Any) -> list[str]:
        """Answer lm-eval's requests greedily."""
        contexts = []
        limits = []
        for request in requests:
            text, settings = request.args
            until = settings.get("until") or []
            stops = (until,) if isinstance(until, str) else tuple(until)
            most = settings.get("max_gen_toks") or settings.get("max_new_tokens") or 256
            limits.append((int(most), stops))
            contexts.append(self._context(text))
        return self.answer(contexts, limits)

    def _context(self, text: str) -> list[int]:
        """Tokenize what is to be answered."""
        if self._chat:
            return self._encode_pair(text, "")[0]
        return self.tok_encode(text)


@functools.cache
def _index() -> TaskManager:
    """lm-eval's index of its thousands of task files: seconds to build, so once."""
    # Else it warns that ours replace two of its own, and of metrics' defaults.
    for name in ("tasks._index", "api.task"):
        logging.getLogger(f"lm_eval.{name}").setLevel(logging.ERROR)
    return TaskManager(include_path=str(OURS))


@checked
def load(names: Each[str], data: Place = "") -> dict[str, dict[str, Task]]:
    """Load benchmarks by the name asked for, or refuse before any is run."""
    folder = hub.folder(data)
    for name in PROGRAMS:
        if name in names:
            load_yaml(OURS / f"{name}.yaml")["metadata"]["ready"]()
    loaded = {name: _loaded(name, folder) for name in names}
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
    except (Refusal, MemoryError):
        raise
    except Exception as error:  # whatever lm-eval's own files and code are broken by
        reason = f"{type(error).__name__}: {error}"
        cannot = f"lm-eval cannot make benchmark '{name}' ({reason})"
        refuse("E-DATA", f"{cannot}; take another one")
    return tasks


def _check(name: str, task: Task) -> None:
    """Refuse a task that runs code, counts no answer as right, or lacks a metric here."""
    metrics = {entry["metric"] for entry in task.config.metric_list or ()}
    rolling = task.OUTPUT_TYPE == "loglikelihood_rolling"
    if rolling or (metrics and not metrics.intersection(METRICS)):
        measures = f"one that measures {', '.join(METRICS[:-1])} or {METRICS[-1]}"
        counts = "does not count an answer as right or wrong"
        refuse("E-DATA", f"benchmark '{name}' {counts}; expected {measures}")
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


def _refuse_made_by_code(config: Mapping[str, Any]) -> None:
    """Refuse a task whose file names a class of lm-eval's, for which `_Local` stands in."""
    file = config["metadata"]["config_source"]
    if file != "inline" and "class" in load_yaml(file, resolve_func=False):
        made = f"benchmark '{config['task']}' is made by code of lm-eval"
        take = "let lm-eval fetch it, or take another one"
        refuse("E-DATA", f"{made}; it cannot be read from a folder: {take}")


class _Local(ConfigurableTask):
    """A task whose data come from a folder; other splits than it needs are not read."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        _refuse_made_by_code(config)
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
            for kind, items in (("item", self.eval_docs), ("example", examples)):
                for number, item in enumerate(items, start=1):
                    self.at = f"{kind} {number}"
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
        for split in sorted(splits - {None}):
            rows = []
            for file in hub.shards(
                self.folder, str(self.DATASET_PATH), self.DATASET_NAME, split
            ):
                rows += [row for _, row in reading.local(file)]
                self.files[str(file.relative_to(self.folder))] = file
            self.dataset[split] = Dataset.from_list(rows)
        # lm-eval tries the first one.
        self.at = "an item" if self.config.process_docs else "item 1"


def _missing(value: object) -> bool:
    """Whether a field is empty: null, or the NaN that pandas writes in its place."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def rows(lm: Harness, tasks: dict[str, Task], limit: int | None) -> list[Line]:
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


def _row(task: str, sample: dict[str, Any], lm: Harness) -> Line:
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
