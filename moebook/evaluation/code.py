"""HumanEval and MBPP: a model writes programs, their tests judge them, in a sandbox.

HumanEval (Chen et al., 2021) is completed after its prompt, without its last line end,
up to a line that begins something new; MBPP (Austin et al., 2021) after three solved
tasks, numbers 2 to 4 of its prompt split, up to "[DONE]". An item's value is the
unbiased estimate of pass@k from n samples, so that the mean over items and its standard
error are those of the benchmark. Samples are drawn at a temperature from all tokens,
where Chen et al. keep the likeliest 95 %; greedy by default. Tests of MBPP that hand
over objects of the program's own classes fail any program here: only plain values cross
(`sandbox`).
"""

from __future__ import annotations

import ast
import json
import math
import random
import warnings
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import Field

from moebook.errors import extra, refuse
from moebook.evaluation.model import InMemory, Limit
from moebook.evaluation.sandbox import judged
from moebook.models.checkpoint import hashed
from moebook.runtime import cores, progress
from moebook.settings import Count, Size, checked, settings
from moebook.storage import read_json, text_digest, write

with extra("evaluate", "HumanEval and MBPP"):
    from lm_eval.api.task import Task

SHOWN = (2, 3, 4)  # numbers of the solved tasks before one of MBPP's
Programs = list[tuple[str, str]]  # an item's: text and verdict


class Asked(NamedTuple):
    """An item as the model gets it and as its programs are judged."""

    name: str
    prompt: str
    limits: Limit
    tests: dict[str, Any]


@settings
class Sampling:
    """How programs are drawn, and what is estimated from them."""

    samples: Count = 1  # n, programs an item
    temperature: Annotated[float, Field(ge=0)] = 0.0  # 0 takes the likeliest token
    k: Count = 1
    seed: Annotated[int, Field(ge=0)] = 0

    def __post_init__(self) -> None:
        if self.k > self.samples:
            refuse("E-RANGE", f"k is {self.k}, expected 1 to {self.samples} (samples)")
        if self.samples > 1 and self.temperature == 0:
            same = f"temperature is 0: {self.samples} samples would be the same"
            refuse("E-RANGE", f"{same}; take 0.2 for k = 1, 0.8 for more")


GREEDY = Sampling()


@checked
def pass_at(k: Size, samples: Size, passed: Annotated[int, Field(ge=0)]) -> float:
    """Estimate the chance that one of k passes, without bias (Chen et al., Eq. 1)."""
    if k > samples or passed > samples:
        given = f"k is {k}, passed {passed}"
        refuse("E-RANGE", f"{given}, expected at most {samples} (samples)")
    return 1 - math.comb(samples - passed, k) / math.comb(samples, k)


def tests(task: str, item: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an item's programs are judged by, as keywords of `sandbox.judged`.

    The helpers that a prompt of HumanEval defines are the judge's own: the program may
    not change what the tests measure with.
    """
    if task == "mbpp":
        if not isinstance(item["test_list"], list):
            raise TypeError("field 'test_list' is no list")
        if not isinstance(item["test_setup_code"], str):
            raise TypeError("field 'test_setup_code' is no text")
        before = ""
        given = item["test_setup_code"]
        asserts = "\n".join(item["test_list"])
        _refuse_untested("test_list", asserts)
        own = _functions(item["code"])
    else:
        before = given = item["prompt"]
        own = [item["entry_point"]]
        asserts = f"{item['test']}\ncheck({item['entry_point']})"
        _refuse_untested("test", item["test"])
        if "check" not in _functions(item["test"]):
            raise ValueError("field 'test' defines no function check")
        if item["entry_point"] not in _functions(item["prompt"]):
            raise ValueError("field 'prompt' does not define the 'entry_point'")
    # Damaged tests are told here, not as a failure of the program.
    _parsed(f"{given}\n{asserts}")
    return {"before": before, "given": given, "tests": asserts, "own": own}


def _refuse_untested(field: str, text: str) -> None:
    """Refuse tests without an assert (ValueError)."""
    if not any(isinstance(node, ast.Assert) for node in ast.walk(_parsed(text))):
        raise ValueError(f"field '{field}' has no test: any program would pass")


def _functions(text: str) -> list[str]:
    """Return the names of the functions that a module defines at its top."""
    return [
        node.name for node in _parsed(text).body if isinstance(node, ast.FunctionDef)
    ]


def _parsed(text: str) -> ast.Module:
    """Parse Python. What it warns of is its author's business."""
    with warnings.catch_warnings(action="ignore"):
        return ast.parse(text)


@checked
def rows(
    lm: InMemory,
    tasks: dict[str, Task],
    limit: int | None,
    *,
    sampling: Sampling = GREEDY,
    keep: str | Path = "",
) -> list[tuple[Any, ...]]:
    """Have programs written and judged: a row an item, as in `evaluate`'s table.

    A folder ``keep`` has a file an item, written when its programs are judged; what is
    there is not asked again, whatever ``k``, and must be of the same model, asked in the
    same way.
    """
    ((name, task),) = tasks.items()
    items = list(islice(task.eval_docs, limit))
    solved = _solved(task)
    how = task.config.generation_kwargs
    limits = how["max_gen_toks"], tuple(how["until"])
    asked = []
    for number, item in enumerate(items):
        prompt = solved + task.doc_to_text(item)
        asked.append(Asked(f"{name}-{number}", prompt, limits, tests(name, item)))
    answers = _programs(lm, asked, sampling, keep)
    _warn(name, answers)
    lines = []
    for number, (item, programs) in enumerate(zip(items, answers, strict=True)):
        passed = sum(verdict == "passed" for _, verdict in programs)
        value = pass_at(sampling.k, sampling.samples, passed)
        right = item.get("code") or item["canonical_solution"]
        text, _ = programs[0]
        # Nothing is scored, and chance gets nothing.
        nll = nats = np.nan
        lines.append(
            (name, "benchmark", number, value, nll, nats, right, text, value, 0.0)
        )
    return lines


def _solved(task: Task) -> str:
    """The solved tasks that stand before one of MBPP's; HumanEval has none."""
    text = ""
    if task.config.num_fewshot:
        for row in task.fewshot_docs():
            if row["task_id"] in SHOWN:
                text += f"{task.doc_to_text(row)}{row['code']}\n[DONE]\n\n"
    return text


def _warn(name: str, answers: list[Programs]) -> None:
    """Warn of programs that were neither right nor wrong, by what happened to them."""
    verdicts: Counter[str] = Counter()
    for programs in answers:
        verdicts.update(verdict for _, verdict in programs)
    for verdict, count in verdicts.items():
        if not verdict.startswith(("passed", "failed")):
            share = f"{count} of {verdicts.total()} programs, {verdict}"
            warnings.warn(f"W-CODE: {name}: {share}", stacklevel=5)


def _programs(
    lm: InMemory, asked: list[Asked], sampling: Sampling, keep: str | Path
) -> list[Programs]:
    """Take the programs that are kept; have the others written and judged."""
    model = hashed(lm.model.state_dict()) if keep else ""
    how = replace(sampling, k=1)  # which the estimate alone is about
    digests = {}
    programs: dict[str, Programs] = {}
    for item in asked:
        question = f"{model} {how} {item}"
        digests[item.name] = text_digest(question)
        path = Path(keep) / f"{item.name}.json"
        if keep and path.exists():
            file = read_json(path)
            if file.get("digest") != digests[item.name]:
                other = f"{path} is of another model or other settings"
                refuse("E-EXISTS", f"{other}; take another folder, or delete it")
            programs[item.name] = file["programs"]
    missing = [item for item in asked if item.name not in programs]
    # Items whose samples fill a batch.
    together = math.ceil(lm.batch / sampling.samples)
    for start in progress(range(0, len(missing), together), "programs"):
        judged_now = _judged(lm, missing[start : start + together], sampling)
        programs |= judged_now
        if keep:
            for name, of_item in judged_now.items():
                file = {"digest": digests[name], "programs": of_item}
                write(Path(keep) / f"{name}.json", json.dumps(file))
    return [programs[item.name] for item in asked]


def _judged(
    lm: InMemory, asked: list[Asked], sampling: Sampling
) -> dict[str, Programs]:
    """Have the samples of a few items written in one go, and judged side by side."""
    items = []  # each as often as it is sampled
    draws = []
    for item in asked:
        for sample in range(sampling.samples):
            items.append(item)
            draws.append(random.Random(f"{sampling.seed}/{item.name}/{sample}"))
    contexts = [lm.tok_encode(item.prompt) for item in items]
    limits = [item.limits for item in items]
    drawn = (sampling.temperature, draws) if sampling.temperature else None
    texts = lm.answer(contexts, limits, drawn)

    def judge(text: str, item: Asked) -> str:
        return judged(text, **item.tests)

    programs: dict[str, Programs] = {item.name: [] for item in asked}
    with ThreadPoolExecutor(cores()) as pool:
        verdicts = pool.map(judge, texts, items)
        for item, text, verdict in zip(items, texts, verdicts, strict=True):
            programs[item.name].append((text, verdict))
    return programs
