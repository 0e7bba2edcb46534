"""Grades by a model, where an answer can be right in many words (ESFT, Appendix B).

Any endpoint of OpenAI's chat form will do; address, model and key come from the
environment. The paper has GPT-4 give points from 0 to 10 by a few criteria
(``judge.yaml``).
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import pandas as pd
from pydantic import Field, SkipValidation
from sklearn.metrics import roc_auc_score

from moebook.data import tasks
from moebook.errors import Refusal, extra, refuse, refuse_unknown, shown
from moebook.runtime import progress
from moebook.settings import Count, Positive, checked, columns, settings
from moebook.storage import formed, read_json, text_digest, write

with extra("evaluate", "grading by a model"):
    import httpx2
    from tenacity import (
        Retrying,
        retry_if_exception,
        stop_after_attempt,
        wait_random_exponential,
    )

ADDRESS = "MOEBOOK_JUDGE_URL"
MODEL = "MOEBOOK_JUDGE_MODEL"
KEY = "MOEBOOK_JUDGE_KEY"
PRICE = "MOEBOOK_JUDGE_PRICE"
with formed(Path(__file__).with_name("judge.yaml")) as _FILE:
    GRADE = _FILE["grade"]
    PAIR = _FILE["pair"]
    RUBRICS: dict[str, list[str]] = {}  # criteria by kind of task
    KIND_OF: dict[str, str] = {}  # of a task
    for _kind, _rubric in _FILE["rubrics"].items():
        RUBRICS[_kind] = _rubric["criteria"]
        KIND_OF |= dict.fromkeys(_rubric["tasks"], _kind)
LONGEST = 20_000  # characters of an answer that a judge is shown
# What a reply that is not of the expected form raises where it is read.
SHAPELESS = (KeyError, IndexError, TypeError, ValueError, RecursionError)
# Errors of a connection after which another attempt may help.
PASSING = (
    httpx2.NetworkError,
    httpx2.ProxyError,
    httpx2.RemoteProtocolError,
    TimeoutError,
)
SHOWN = 300  # characters of what a server says to its refusal of a question
SIDES = {"first": 1, "second": -1, "equal": 0}
Row = dict[str, str]  # prompt, reference, and what is judged


@settings
class Endpoint:
    """Where the judge is, and what it may cost."""

    address: str  # up to and without /chat/completions
    model: Annotated[str, Field(min_length=1)]
    key: str = field(default="", repr=False)
    price: tuple[float, float] = (0.0, 0.0)  # of a million tokens, read and written
    # What may be spent, in the price's currency.
    budget: Annotated[float, Field(gt=0, allow_inf_nan=True)] = math.inf
    # Seconds for a whole call, from connecting to the last byte.
    timeout: Positive = 60.0
    attempts: Count = 4
    workers: Count = 8  # requests at once

    def __post_init__(self) -> None:
        # Whatever may be secret is not shown.
        if "@" in self.address:
            fix = "leave it out, and give a key if one is needed"
            refuse("E-RANGE", f"address names a user or a password (user@host): {fix}")
        if not _is_address(self.address):
            expected = "expected http://host:port/v1 or the like, a port up to 65535"
            refuse("E-RANGE", f"address is {shown(self.address)}, {expected}")
        if not re.fullmatch("[!-~]*", self.key):
            fix = "copy it again"
            refuse("E-RANGE", f"key holds a space or a letter beyond ASCII: {fix}")

    @classmethod
    def from_environment(cls, **changes: Any) -> Endpoint:
        """Read address, model, key and price from the environment."""
        for name in (ADDRESS, MODEL):
            if not os.environ.get(name):
                needs = "a judge needs its address and its model"
                refuse("E-USAGE", f"{name} is not set: {needs}")
        text = os.environ.get(PRICE, "0,0")
        try:
            read, written = map(float, text.split(","))
        except ValueError:
            expected = "expected two numbers such as 2.5,10"
            refuse("E-USAGE", f"{PRICE} is '{text}', {expected}")
        given: dict[str, Any] = {
            "model": os.environ[MODEL],
            "price": (read, written),
            **changes,
        }
        address = os.environ[ADDRESS].rstrip("/")
        return cls(address=address, key=os.environ.get(KEY, ""), **given)


def _is_address(address: str) -> bool:
    """Whether a client can ask there: a host, and no port beyond the last one."""
    try:
        port = httpx2.URL(address).port
    except httpx2.InvalidURL:
        return False
    known = port is None or 0 < port < 2**16
    return known and re.fullmatch(r"https?://\S+", address) is not None


class Reply(NamedTuple):
    """What a judge said to a question, and what its calls took: none if it was known."""

    said: dict[str, Any]
    # Of each call that was answered, also without a grade: tokens read and written, or
    # None where the judge did not say.
    took: Sequence[tuple[int, int] | None] = ()
    problem: Refusal | None = None  # why there is no grade


@dataclass
class Judge:
    """A judge that asks a question once: replies are kept in a folder, a file each."""

    endpoint: Endpoint
    folder: Path
    calls: int = 0
    uncounted: int = 0  # calls of which the judge did not say how many tokens they took
    tokens: list[int] = field(default_factory=lambda: [0, 0])  # read, written

    @property
    def cost(self) -> float:
        """What was spent, in the price's currency."""
        read, written = self.tokens
        read_price, written_price = self.endpoint.price
        return (read * read_price + written * written_price) / 1e6

    def __str__(self) -> str:
        """Say in a line what was asked and what it took."""
        kept = f"replies are kept in {self.folder}"
        return f"{self.endpoint.model}: {self._spent()}; {kept}"

    def _spent(self) -> str:
        calls = f"{self.calls} calls"
        if self.uncounted:
            calls += f" ({self.uncounted} without a count of tokens)"
        tokens = "{:,} tokens read, {:,} written".format(*self.tokens)
        return f"{calls}, {tokens}, cost {self.cost:.4g}"

    def scores(self, kind: str, rows: Sequence[Row]) -> list[float]:
        """Grade ``answer`` of rows by prompt and reference: mean points, in [0, 1]."""
        criteria = _criteria(kind)

        def check(said: dict[str, Any]) -> bool:
            for name in criteria:
                points: Any = said.get(name)
                if type(points) not in (int, float) or not 0 <= points <= 10:
                    return False
            return True

        prompts = []
        for row in rows:
            listed = ", ".join(criteria)
            prompts.append(GRADE.format(kind=kind, criteria=listed, **_cut(row)))
        scores = []
        for said in self._ask(prompts, check):
            points = [said[name] for name in criteria]
            scores.append(float(np.mean(points)) / 10)
        return scores

    def prefers(self, kind: str, rows: Sequence[Row]) -> list[float]:
        """Compare ``one`` and ``other`` of rows: 1 and -1 where they win, else 0.

        Each pair is shown in both orders, so that a judge that favours a place prefers
        neither.
        """
        criteria = ", ".join(_criteria(kind))
        prompts = []
        for row in rows:
            row = _cut(row)
            sides = row.pop("one"), row.pop("other")
            for first, second in (sides, reversed(sides)):
                shown = {"criteria": criteria, "first": first, "second": second}
                prompts.append(PAIR.format(kind=kind, **shown, **row))
        replies = self._ask(prompts, lambda said: said.get("better") in SIDES)
        places = [SIDES[said["better"]] for said in replies]
        # By row: as shown, and in the other order, where the first is ``other``.
        as_shown, turned = np.array(places).reshape(-1, 2).T
        return list(((as_shown - turned) / 2).round().astype(float))

    def _ask(
        self, prompts: Sequence[str], check: Callable[[dict[str, Any]], bool]
    ) -> list[dict[str, Any]]:
        """Ask all, several at once; the first that fails ends it; replies stay."""
        replies: dict[int, dict[str, Any]] = {}
        with ThreadPoolExecutor(self.endpoint.workers) as pool:
            waiting = {}
            for place, prompt in enumerate(prompts):
                waiting[pool.submit(self._reply, prompt, check)] = place
            try:
                for done in progress(as_completed(waiting), "judging", len(waiting)):
                    reply = done.result()
                    self._count(reply)
                    if reply.problem:
                        code, message = reply.problem.code, reply.problem.message
                        refuse(code, f"{message}; so far {self._spent()}")
                    replies[waiting[done]] = reply.said
                    self._check_budget(reply, len(replies), len(prompts))
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        return [replies[place] for place in range(len(prompts))]

    def _count(self, reply: Reply) -> None:
        """Add what a reply took."""
        self.calls += len(reply.took)
        for tokens in reply.took:
            if tokens is None:
                self.uncounted += 1
            else:
                read, written = tokens
                self.tokens = [self.tokens[0] + read, self.tokens[1] + written]

    def _check_budget(self, reply: Reply, known: int, wanted: int) -> None:
        """Refuse to go on beyond the budget, or with one that nobody can hold."""
        budget = self.endpoint.budget
        if known == wanted or math.isinf(budget):
            return
        kept = f"{known} of {wanted} replies are kept in {self.folder}"
        if None in reply.took:
            lacks = (
                "a reply does not say how many tokens it took, so no budget can be held"
            )
            refuse("E-BUDGET", f"{lacks}: {kept}; give no budget to go on")
        if self.cost > budget:
            spent = f"{self.cost:.4g} spent of {budget:g}"
            refuse("E-BUDGET", f"{spent}: {kept}; raise the budget to go on")

    def _reply(self, prompt: str, check: Callable[[dict[str, Any]], bool]) -> Reply:
        """Return what is known of a question, or ask; again if a reply has no sense."""
        end = self.endpoint
        name = text_digest(f"{end.model}\n{prompt}")
        path = self.folder / f"{name}.json"
        if path.is_file():
            said = read_json(path)
            if check(said):
                return Reply(said)
        attempts = Retrying(
            stop=stop_after_attempt(end.attempts),
            retry=retry_if_exception(_passes),
            wait=wait_random_exponential(multiplier=0.2, max=20),
            reraise=True,
        )
        took: list[tuple[int, int] | None] = []
        try:
            said = attempts(self._call, prompt, check, took)
        except (httpx2.HTTPError, httpx2.InvalidURL, TimeoutError) as error:
            where = f"{end.address}, model {end.model}"
            kept = f"replies so far are kept in {self.folder}"
            problem = Refusal("E-JUDGE", f"{where}: {_reason(error)}; {kept}")
            return Reply({}, took, problem)
        except ValueError as error:
            tried = f"model {end.model} gave no grade in {end.attempts} attempts"
            problem = Refusal("E-JUDGE", f"{tried}: {error}; take another model")
            return Reply({}, took, problem)
        write(path, json.dumps(said))
        return Reply(said, took)

    def _call(
        self,
        prompt: str,
        check: Callable[[dict[str, Any]], bool],
        took: list[tuple[int, int] | None],
    ) -> dict[str, Any]:
        """Ask once, and add what it took; a reply without a grade is a ValueError."""
        answer = asyncio.run(self._post(prompt))
        answer.raise_for_status()
        took.append(_tokens(answer))
        try:
            content = answer.json()
            text = content["choices"][0]["message"]["content"]
            said = json.loads(text[text.index("{") : text.rindex("}") + 1])
        except (*SHAPELESS, AttributeError):
            raise ValueError(f"it said {answer.text[:200]!r}") from None
        if not isinstance(said, dict) or not check(said):
            raise ValueError(f"it said {text[:200]!r}")
        return said

    async def _post(self, prompt: str) -> httpx2.Response:
        """Put a question; TimeoutError where the whole answer is not there in time.

        The client's own timeouts end a wait for the next bytes, which a trickle never
        lets pass; cancelling the task ends all of it.
        """
        end = self.endpoint
        head = {"Authorization": f"Bearer {end.key}"} if end.key else {}
        message = {"role": "user", "content": prompt}
        body = {"model": end.model, "temperature": 0, "messages": [message]}
        url = f"{end.address}/chat/completions"
        async with (
            asyncio.timeout(end.timeout),
            httpx2.AsyncClient(timeout=None, follow_redirects=True) as client,
        ):
            return await client.post(url, json=body, headers=head)


def _passes(error: BaseException) -> bool:
    """Whether another attempt may help: no wrong key, address or model."""
    if isinstance(error, httpx2.HTTPStatusError):
        status = error.response.status_code
        return status in (408, 409, 429) or status >= 500
    return isinstance(error, (*PASSING, ValueError))


def _reason(error: Exception) -> str:
    """Say in a line why a call failed, with the beginning of what the server says to it."""
    if isinstance(error, httpx2.HTTPStatusError):
        response = error.response
        text = " ".join(response.text.split())
        said = f"{text[:SHOWN]}..." if len(text) > SHOWN else text or "without a word"
        return f"HTTPError: {response.status_code} {response.reason_phrase}: {said}"
    if isinstance(error, TimeoutError):
        return "TimeoutError: the whole answer was not there in time"
    return f"{type(error).__name__}: {error}"


def _tokens(answer: httpx2.Response) -> tuple[int, int] | None:
    """The tokens read and written that an answer's usage tells; None if it does not."""
    try:
        usage = answer.json()["usage"]
        read = usage["prompt_tokens"]
        written = usage["completion_tokens"]
    except SHAPELESS:
        return None
    if type(read) is int and type(written) is int and min(read, written) >= 0:
        return read, written
    return None


def _criteria(kind: str) -> list[str]:
    refuse_unknown(kind, RUBRICS, "E-NAME", f"no rubric for tasks of kind '{kind}';")
    return RUBRICS[kind]


def _cut(row: Row) -> Row:
    """Cut what a model wrote without end, and close no mark early."""
    return {name: text[:LONGEST].replace("</", "< /") for name, text in row.items()}


@checked
def graded(
    judge: SkipValidation[Judge],
    table: Annotated[pd.DataFrame, columns("task answer output")],
) -> pd.DataFrame:
    """Grade what `evaluate` found of embedded tasks' test rows: the table with a ``grade``.

    A table of other rows, whose answers belong to other questions, is refused (E-DATA), and
    nothing is asked before the whole table is known to be good.
    """
    groups = table.groupby("task", sort=False)
    asked: dict[str, list[Row]] = {}
    for name, of_task in groups:
        refuse_unknown(str(name), KIND_OF, "E-NAME", f"no rubric for task '{name}';")
        asked[name] = []
        rows = tasks.rows(str(name), "test", len(of_task))
        if [row["answer"] for row in rows] != list(of_task.answer):
            other = f"the answers of {name} are not those of its first test rows"
            fix = "give all rows of a table that was evaluated with split='test'"
            refuse("E-DATA", f"{other}; {fix}")
        for row, output in zip(rows, of_task.output, strict=True):
            if not isinstance(output, str):
                wrong = f"an output of {name} is {shown(output)}, expected a text"
                fix = "read a file of them with dtype=str"
                refuse("E-DATA", f"{wrong}; {fix}")
            question = {"prompt": row["prompt"], "reference": row["answer"]}
            asked[name].append({**question, "answer": output})
    grades = np.empty(len(table))
    places = groups.indices
    for name, questions in asked.items():
        grades[places[name]] = judge.scores(KIND_OF[name], questions)
    return table.assign(grade=grades)


@checked
def agreement(
    table: Annotated[pd.DataFrame, columns("task", shares="correct grade")],
) -> pd.DataFrame:
    """Set grades beside exact matches, a line a task.

    ``agreement`` is the chance that a right answer has the higher grade of a right and
    a wrong one (the area under the ROC curve): 1 if grades say what exact match says,
    0.5 if they say nothing.
    """
    if not table.correct.isin([0, 1]).all():
        partly = "an answer is partly correct, expected 0 or 1 in all rows"
        refuse("E-RANGE", f"agreement: {partly}")
    lines = {}
    for name, of_task in table.groupby("task", sort=False):
        correct = of_task.correct
        grade = of_task.grade
        both = correct.nunique() == 2
        lines[name] = {
            "rows": len(of_task),
            "exact": correct.mean(),
            "grade": grade.mean(),
            "agreement": roc_auc_score(correct, grade) if both else np.nan,
        }
    return pd.DataFrame.from_dict(lines, orient="index")
