"""Grades by a language model, where an answer can be right in many words (ESFT, Appendix B).

Any endpoint of OpenAI's chat form will do; address, model and key come from the environment. The
paper has GPT-4 give points from 0 to 10 by a few criteria (``judge.yaml``).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import pandas as pd
import requests
from pydantic import Field
from sklearn.metrics import roc_auc_score
from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_random_exponential

from moebook.data import tasks
from moebook.errors import refuse, refuse_unknown
from moebook.results import formed, read_json, write
from moebook.runtime import progress
from moebook.settings import Count, Positive, settings

ADDRESS, MODEL, KEY = "MOEBOOK_JUDGE_URL", "MOEBOOK_JUDGE_MODEL", "MOEBOOK_JUDGE_KEY"
PRICE = "MOEBOOK_JUDGE_PRICE"
with formed(Path(__file__).with_name("judge.yaml")) as _FILE:
    GRADE, PAIR = _FILE["grade"], _FILE["pair"]
    RUBRICS: dict[str, list[str]] = {k: kind["criteria"] for k, kind in _FILE["rubrics"].items()}
    KINDS = {task: k for k, kind in _FILE["rubrics"].items() for task in kind["tasks"]}
LONGEST = 20_000  # characters of an answer that a judge is shown
SIDES = {"first": 1, "second": -1, "equal": 0}
Row = dict[str, str]  # prompt, reference, and what is judged


@settings
class Endpoint:
    """Where the judge is, and what it may cost."""

    address: Annotated[str, Field(pattern=r"^https?://\S+$")]  # up to and without /chat/completions
    model: Annotated[str, Field(min_length=1)]
    key: str = field(default="", repr=False)
    price: tuple[float, float] = (0.0, 0.0)  # of a million tokens, read and written
    # What may be spent, in the price's currency.
    budget: Annotated[float, Field(gt=0, allow_inf_nan=True)] = math.inf
    timeout: Positive = 60.0  # seconds
    attempts: Count = 4
    workers: Count = 8  # requests at once

    @classmethod
    def from_environment(cls, **changes: Any) -> Endpoint:
        """Read address, model, key and price (``read,written``) from the environment."""
        if missing := [name for name in (ADDRESS, MODEL) if not os.environ.get(name)]:
            refuse("E-USAGE", f"{missing[0]} is not set: a judge needs its address and its model")
        text = os.environ.get(PRICE, "0,0")
        try:
            read, written = map(float, text.split(","))
        except ValueError:
            refuse("E-USAGE", f"{PRICE} is '{text}', expected two numbers such as 2.5,10")
        address, key = os.environ[ADDRESS].rstrip("/"), os.environ.get(KEY, "")
        given: dict[str, Any] = {"model": os.environ[MODEL], "price": (read, written), **changes}
        return cls(address=address, key=key, **given)


class Reply(NamedTuple):
    """What a judge said, and the tokens that took: none if it was known."""

    told: dict[str, Any]
    read: int
    written: int


@dataclass
class Judge:
    """A judge that asks each question once: replies are kept in a folder, one file each."""

    endpoint: Endpoint
    folder: Path
    calls: int = 0
    tokens: list[int] = field(default_factory=lambda: [0, 0])  # read, written

    @property
    def cost(self) -> float:
        """What was spent, in the price's currency."""
        pairs = zip(self.tokens, self.endpoint.price, strict=True)
        return sum(count * price for count, price in pairs) / 1e6

    def __str__(self) -> str:
        """Say in a line what was asked and what it took."""
        tokens = "{:,} tokens read, {:,} written".format(*self.tokens)
        asked = f"{self.endpoint.model}: {self.calls} calls, {tokens}, cost {self.cost:.4g}"
        return f"{asked}; replies are kept in {self.folder}"

    def scores(self, kind: str, rows: Sequence[Row]) -> list[float]:
        """Grade ``answer`` of rows with ``prompt`` and ``reference``: mean points, in [0, 1]."""
        criteria = _criteria(kind)

        def check(told: dict[str, Any]) -> bool:
            good = all(type(told.get(name)) in (int, float) for name in criteria)
            return good and all(0 <= told[name] <= 10 for name in criteria)

        told = self._ask([GRADE.format(kind=kind, criteria=", ".join(criteria), **_cut(row))
                          for row in rows], check)  # fmt: skip
        return [float(np.mean([each[name] for name in criteria])) / 10 for each in told]

    def prefers(self, kind: str, rows: Sequence[Row]) -> list[float]:
        """Compare ``one`` and ``other`` of rows: 1 for ``one``, -1 for ``other``, 0 for neither.

        Each pair is shown in both orders, so that a judge that favours a place prefers neither.
        """
        asked = []
        for row in map(_cut, rows):
            sides = row.pop("one"), row.pop("other")
            for first, second in (sides, sides[::-1]):
                shown = {"criteria": ", ".join(_criteria(kind)), "first": first, "second": second}
                asked.append(PAIR.format(kind=kind, **shown, **row))
        told = self._ask(asked, lambda told: told.get("better") in SIDES)
        sides_by_row = np.array([SIDES[each["better"]] for each in told]).reshape(-1, 2)
        return list(((sides_by_row[:, 0] - sides_by_row[:, 1]) / 2).round().astype(float))

    def _ask(
        self, prompts: Sequence[str], check: Callable[[dict[str, Any]], bool]
    ) -> list[dict[str, Any]]:
        """Put all questions, several at once; the first that fails ends it, what is known stays."""
        told: dict[int, dict[str, Any]] = {}
        with ThreadPoolExecutor(self.endpoint.workers) as pool:
            waiting = {pool.submit(self._reply, prompt, check): place
                       for place, prompt in enumerate(prompts)}  # fmt: skip
            try:
                for done in progress(as_completed(waiting), "judging", len(waiting)):
                    reply = done.result()
                    told[waiting[done]] = reply.told
                    self.calls += bool(reply.read)
                    self.tokens = [self.tokens[0] + reply.read, self.tokens[1] + reply.written]
                    if self.cost > self.endpoint.budget and len(told) < len(prompts):
                        spent = f"{self.cost:.4g} spent of {self.endpoint.budget:g}"
                        kept = f"{len(told)} of {len(prompts)} replies are kept in {self.folder}"
                        refuse("E-BUDGET", f"{spent}: {kept}; raise the budget to go on")
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        return [told[place] for place in range(len(prompts))]

    def _reply(self, prompt: str, check: Callable[[dict[str, Any]], bool]) -> Reply:
        """Return what is known of a question, or ask, again where a reply makes no sense."""
        named = hashlib.sha256(f"{self.endpoint.model}\n{prompt}".encode()).hexdigest()
        path = self.folder / f"{named}.json"
        if path.is_file() and check(told := read_json(path)):
            return Reply(told, 0, 0)
        end = self.endpoint
        again = retry_if_exception(_passes)
        wait = wait_random_exponential(multiplier=0.2, max=20)
        try:
            for attempt in Retrying(stop=stop_after_attempt(end.attempts), retry=again, wait=wait,
                                    reraise=True):  # fmt: skip
                with attempt:
                    reply = self._call(prompt, check)
        except requests.RequestException as error:
            where = f"{end.address}, model {end.model}"
            refuse("E-JUDGE", f"{where}: {type(error).__name__}: {error}; replies so far are kept "
                   f"in {self.folder}")  # fmt: skip
        except ValueError as error:
            refuse("E-JUDGE", f"model {end.model} gave no grade in {end.attempts} attempts: "
                   f"{error}; take another model")  # fmt: skip
        write(path, json.dumps(reply.told))
        return reply

    def _call(self, prompt: str, check: Callable[[dict[str, Any]], bool]) -> Reply:
        end = self.endpoint
        head = {"Authorization": f"Bearer {end.key}"} if end.key else {}
        body: Any = {"model": end.model, "temperature": 0,
                "messages": [{"role": "user", "content": prompt}]}  # fmt: skip
        answer = requests.post(
            f"{end.address}/chat/completions", json=body, headers=head, timeout=end.timeout
        )
        answer.raise_for_status()
        try:
            content = answer.json()
            text = content["choices"][0]["message"]["content"]
            usage = content.get("usage") or {}
            tokens = int(usage.get("prompt_tokens", 1)), int(usage.get("completion_tokens", 1))
            told = json.loads(text[text.index("{") : text.rindex("}") + 1])
        except (KeyError, IndexError, TypeError, ValueError, AttributeError):
            raise ValueError(f"it said {answer.text[:200]!r}") from None
        if not isinstance(told, dict) or not check(told):
            raise ValueError(f"it said {text[:200]!r}")
        return Reply(told, *tokens)


def _passes(error: BaseException) -> bool:
    """Whether another attempt may help: no wrong key, address or model."""
    if isinstance(error, requests.HTTPError) and error.response is not None:
        return error.response.status_code in (408, 409, 429) or error.response.status_code >= 500
    return isinstance(error, (requests.ConnectionError, requests.Timeout, ValueError))


def _criteria(kind: str) -> list[str]:
    refuse_unknown(kind, RUBRICS, "E-NAME", f"no rubric for tasks of kind '{kind}';")
    return RUBRICS[kind]


def _cut(row: Row) -> Row:
    """Cut what a model wrote without end, and close no mark early."""
    return {name: text[:LONGEST].replace("</", "< /") for name, text in row.items()}


def graded(judge: Judge, table: pd.DataFrame) -> pd.DataFrame:
    """Grade what `evaluation.evaluate` found of embedded tasks: its rows with a ``grade``."""
    parts = []
    for name, part in table.groupby("task", sort=False):
        refuse_unknown(str(name), KINDS, "E-NAME", f"no rubric for task '{name}';")
        rows = tasks.rows(str(name), "test", len(part))
        asked = [{"prompt": row["prompt"], "reference": row["answer"], "answer": output}
                 for row, output in zip(rows, part.output, strict=True)]  # fmt: skip
        parts.append(part.assign(grade=judge.scores(KINDS[str(name)], asked)))
    return pd.concat(parts)


def agreement(table: pd.DataFrame) -> pd.DataFrame:
    """Set grades beside exact matches, a line a task.

    ``agreement`` is the chance that a right answer has the higher grade of a right and a wrong one
    (the area under the ROC curve): 1 if grades say what exact match says, 0.5 if they say nothing.
    """
    lines = {}
    for name, part in table.groupby("task", sort=False):
        both = part.correct.nunique() == 2
        area = roc_auc_score(part.correct, part.grade) if both else np.nan
        lines[name] = {"rows": len(part), "exact": part.correct.mean(),
                       "grade": part.grade.mean(), "agreement": area}  # fmt: skip
    return pd.DataFrame.from_dict(lines, orient="index")
