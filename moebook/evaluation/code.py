"""HumanEval and MBPP: the model writes programs, and their tests judge them, in a sandbox only.

HumanEval (Chen et al., 2021) is completed after its prompt, without its last line end, up to a line
that begins something new; MBPP (Austin et al., 2021) after three solved tasks, numbers 2 to 4 of
its prompt split, up to "[DONE]". An item's value is the unbiased estimate of pass@k from n samples,
so that the mean over items and its standard error are those of the benchmark. Samples are drawn at
a temperature from all tokens, where Chen et al. keep the likeliest 95 %; greedy by default. Tests
of MBPP that hand over objects of the program's own classes fail any program here: only plain values
cross (`sandbox`).
"""

from __future__ import annotations

import ast
import hashlib
import json
import random
import warnings
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from math import comb
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from lm_eval.api.task import Task
from pydantic import Field

from moebook.errors import refuse
from moebook.evaluation.model import InMemory, Limit
from moebook.evaluation.sandbox import judged
from moebook.models.checkpoint import hashed
from moebook.results import read_json, write
from moebook.runtime import cores, progress
from moebook.settings import Count, Size, checked, settings

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
            refuse("E-RANGE", f"temperature is 0: {self.samples} samples would be the same; take "
                   "0.2 for k = 1, 0.8 for more")  # fmt: skip


GREEDY = Sampling()


@checked
def pass_at(k: Size, samples: Size, passed: Annotated[int, Field(ge=0)]) -> float:
    """Estimate the chance that one of k programs passes, without bias (Chen et al., Eq. 1)."""
    if k > samples or passed > samples:
        refuse("E-RANGE", f"k is {k}, passed {passed}, expected at most {samples} (samples)")
    return 1 - comb(samples - passed, k) / comb(samples, k)


def tests(task: str, item: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an item's programs are judged by, as keywords of `sandbox.judged`.

    The helpers that a prompt of HumanEval defines are the judge's own: the program may not change
    what the tests measure with.
    """
    if task == "mbpp":
        if not isinstance(item["test_list"], list):
            raise TypeError("field 'test_list' is no list")
        before, given, parts = "", item["test_setup_code"], item["test_list"]
        solution = ast.parse(item["code"]).body
        own = [node.name for node in solution if isinstance(node, ast.FunctionDef)]
    else:
        before, own = item["prompt"], [item["entry_point"]]
        given, parts = before, [item["test"], f"check({item['entry_point']})"]
    told = "\n".join(parts)
    ast.parse(f"{given}\n{told}")
    return {"before": before, "given": given, "tests": told, "own": own}


@checked
def rows(
    lm: InMemory, tasks: dict[str, Task], limit: int | None,
    *, sampling: Sampling = GREEDY, keep: str | Path = "",
) -> list[tuple[Any, ...]]:  # fmt: skip
    """Have programs written and judged: a row an item, as in `evaluation.evaluate`'s table.

    A folder ``keep`` has a file an item, written when its programs are judged; what is there is not
    asked again, and must be of the same model, asked in the same way.
    """
    ((name, task),) = tasks.items()
    items = list(islice(task.eval_docs, limit))
    examples = task.fewshot_docs() if task.config.num_fewshot else []
    shown = "".join(f"{task.doc_to_text(row)}{row['code']}\n[DONE]\n\n"
                    for row in examples if row["task_id"] in SHOWN)  # fmt: skip
    how = task.config.generation_kwargs
    limits = how["max_gen_toks"], tuple(how["until"])
    asked = [Asked(f"{name}-{number}", shown + task.doc_to_text(item), limits, tests(name, item))
             for number, item in enumerate(items)]  # fmt: skip
    known = _programs(lm, asked, sampling, keep)
    reasons = Counter(verdict for programs in known for _, verdict in programs)
    for reason, count in reasons.items():
        if not reason.startswith(("passed", "failed")):
            told = f"W-CODE: {name}: {count} of {reasons.total()} programs, {reason}"
            warnings.warn(told, stacklevel=4)
    lines = []
    for number, (item, programs) in enumerate(zip(items, known, strict=True)):
        passed = sum(verdict == "passed" for _, verdict in programs)
        value = pass_at(sampling.k, sampling.samples, passed)
        right = item.get("code") or item["canonical_solution"]
        found = name, "benchmark", number, value, np.nan, np.nan, right, programs[0][0]
        lines.append((*found, value, 0.0))
    return lines


def _programs(
    lm: InMemory, asked: list[Asked], sampling: Sampling, keep: str | Path
) -> list[Programs]:
    """Take the programs that are kept; have the others written and judged, some items at a time."""
    start, known = f"{hashed(lm.model.state_dict()) if keep else ''} {sampling}", {}
    digests = {each.name: hashlib.sha256(f"{start} {each}".encode()).hexdigest() for each in asked}
    paths = {name: Path(keep) / f"{name}.json" for name in digests if keep}
    for name in (name for name, path in paths.items() if path.exists()):
        found = read_json(paths[name])
        if found.get("digest") != digests[name]:
            refuse("E-EXISTS", f"{paths[name]} is of another model or other settings; take another "
                   "folder, or delete it")  # fmt: skip
        known[name] = found["programs"]
    rest = [each for each in asked if each.name not in known]
    together = -(-lm.batch // sampling.samples)
    for at in progress(range(0, len(rest), together), "programs"):
        for name, programs in _judged(lm, rest[at : at + together], sampling).items():
            known[name] = programs
            if keep:
                write(paths[name], json.dumps({"digest": digests[name], "programs": programs}))
    return [known[each.name] for each in asked]


def _judged(lm: InMemory, asked: list[Asked], sampling: Sampling) -> dict[str, Programs]:
    """Have the samples of a few items written in one go, and judged side by side."""
    every = [(each, sample) for each in asked for sample in range(sampling.samples)]
    draws = [random.Random(f"{sampling.seed}/{each.name}/{sample}") for each, sample in every]
    contexts, limits = [lm.tok_encode(each.prompt) for each, _ in every], asked[0].limits
    drawn = (sampling.temperature, draws) if sampling.temperature else None
    texts = lm.answer(contexts, [limits] * len(every), drawn)
    found: dict[str, Programs] = {each.name: [] for each in asked}
    with ThreadPoolExecutor(cores()) as pool:
        verdicts = pool.map(lambda text, one: judged(text, **one[0].tests), texts, every)
        for (each, _), text, verdict in zip(every, texts, verdicts, strict=True):
            found[each.name].append((text, verdict))
    return found
