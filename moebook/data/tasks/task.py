"""A task is a finite pool of items with exact answers; its splits part that pool.

The pool is enumerated once, ordered by a hash of each item's content, and cut: the
first items are the test split, the next the validation split, the rest the train split.
A study that needs more test rows cuts train once more: `fresh` is tested and `rest`
trained on. A seed decides order and wording, never membership, so no seed can move a
test item into training. A user's own file is cut by its prompts (`own.cut`).
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import resources
from pathlib import Path
from typing import Any, Literal, Self

from moebook.data.tasks import own
from moebook.data.tasks.item import Item, content_hash
from moebook.errors import refuse, refuse_unknown
from moebook.settings import Count, Place, checked

TEST = 200  # items in the test split of every task
VALIDATION = 200
# Items that studies with more test rows take out of the train split, at most half.
FRESH = 1000
SPLITS = own.SPLITS


def exact(answer: str) -> str:
    """Collapse spaces and drop a final full stop: the plain exact match.

    Of an answer of stops alone, none is dropped: it is not the empty answer.
    """
    words = " ".join(answer.split())
    return words.removesuffix(".") if words.strip(". ") else words


def first_line(answer: str) -> str:
    """`exact` on the first line, for models that go on talking after the answer."""
    lines = answer.strip().splitlines()
    return exact(lines[0]) if lines else ""


def each_line(answer: str) -> str:
    """`exact` for one line; of several each as it stands, but for blanks at its end.

    Blanks before the first line do not count: a chat format puts one there.
    """
    lines = answer.strip().splitlines()
    if len(lines) < 2:
        return exact(answer)
    return "\n".join(line.rstrip() for line in lines)


def verb(answer: str) -> str:
    """The first word in small letters: summaries are graded by their first verb."""
    return (exact(answer).split() or [""])[0].lower().rstrip(".,:")


def same_json(answer: str) -> str:
    """Write the first line's JSON with sorted keys: order and spaces do not count."""
    line = first_line(answer)
    try:
        return json.dumps(json.loads(line), sort_keys=True)
    except (ValueError, RecursionError):
        return line


Pool = Callable[[], Iterable[Item]]
Compare = Literal["first_line", "each_line", "exact", "verb", "same_json"]
COMPARE: dict[str, Callable[[str], str]] = {
    "first_line": first_line,
    "each_line": each_line,
    "exact": exact,
    "verb": verb,
    "same_json": same_json,
}
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task: its source, licence (SPDX), items, wordings, and how answers compare."""

    #: What it is called.
    name: str
    domain: str  #: mathematics, code, common_sense, translation, language or general
    #: What is asked, in a sentence.
    description: str
    #: Where its items come from.
    source: str
    #: The licence of that source, by its SPDX name.
    licence: str
    templates: Sequence[str]  #: wordings with {slots}; a row draws one
    pool: Pool  #: enumerates all items; must be deterministic
    max_new_tokens: int  #: enough for every answer, of 2,048 byte pairs
    #: How answers are read before they are compared, a key of ``COMPARE``.
    compare: str = "first_line"
    rationales: bool = False  #: whether items carry a worked solution
    shipped: bool = True  #: whether the package ships it; else it is a user's file
    #: Whether a split's longest answer ends answers to it, in place of max_new_tokens.
    by_split: bool = False

    @classmethod
    @checked
    def from_jsonl(
        cls,
        path: Place,
        *,
        compare: Compare | None = None,
        max_new_tokens: Count | None = None,
    ) -> Self:
        r"""Make a task of your own file, JSON lines with ``prompt`` and ``answer``.

        A row may have ``choices``, of which the likeliest counts; ``split``, or a hash
        of the prompts cuts the file; ``system``, ``rationale`` and ``domain``
        (`moebook.data.tasks.own` has the schema). The task's name is ``own_`` and the
        file's. ``compare`` says how answers are read before they are compared: their
        first lines, or, where an answer in the file has several, line by line. Answers
        of a model end after ``max_new_tokens``; without it, after as many as the
        longest answer of the split that is asked has bytes, and one (`limit`).

        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> file = Path(folder.name, "teams.jsonl")
        >>> row = '{"prompt": "My card was charged twice.", "answer": "billing"}\n'
        >>> _ = file.write_text(row)
        >>> task = Task.from_jsonl(file)
        >>> task.name, task.available("all"), task.max_new_tokens
        ('own_teams', 1, 8)
        >>> folder.cleanup()

        Raises:
            Refusal: E-DATA with file and line for a row of another form; E-NOFILE;
                E-LEAK for a prompt in two splits; E-PATH for a name of other letters
                than A-Z, a-z, 0-9, ``_``, ``-`` and ``.``.
        """
        place = Path(path)
        if not NAME.fullmatch(place.stem):
            letters = "expected a name of letters, digits, _, - and ."
            refuse("E-PATH", f"{place}: {letters}, which names values; rename the file")
        items = own.read(place)
        several = any(len(item.answer.strip().splitlines()) > 1 for item in items)
        way = compare or ("each_line" if several else "first_line")
        return cls(
            name=f"own_{place.stem}",
            domain="own",
            description="Rows of the user's own file.",
            source=str(place),
            licence="",
            templates=("{prompt}",),
            pool=lambda: items,
            max_new_tokens=max_new_tokens or _longest(items) + 1,
            compare=way,
            rationales=any(item.rationale for item in items),
            shipped=False,
            by_split=max_new_tokens is None,
        )

    @property
    def normalise(self) -> Callable[[str], str]:
        """Applied to gold and generated answers before they are compared."""
        return COMPARE[self.compare]

    @cached_property
    def _splits(self) -> dict[str, tuple[Item, ...]]:
        """Order the pool by the hash of its content and cut it."""
        if self.shipped:
            items = sorted(self.pool(), key=lambda item: content_hash(self.name, item))
            cut = {
                "test": tuple(items[:TEST]),
                "validation": tuple(items[TEST : TEST + VALIDATION]),
                "train": tuple(items[TEST + VALIDATION :]),
            }
        else:
            cut = own.cut(self.pool(), TEST)
        train = cut["train"]
        fresh = min(FRESH, len(train) // 2)
        every = (*cut["test"], *cut["validation"], *train)
        return cut | {"fresh": train[:fresh], "rest": train[fresh:], "all": every}

    def items(self, split: str) -> tuple[Item, ...]:
        """The items of a split; E-DATA for an unknown one."""
        refuse_unknown(split, self._splits, "E-DATA", f"unknown split '{split}':")
        return self._splits[split]

    def limit(self, split: str) -> int:
        """Return the most new tokens of an answer to a row of a split."""
        if self.by_split:
            return _longest(self.items(split)) + 1
        return self.max_new_tokens

    def available(self, split: str) -> int:
        """Count the items of a split."""
        return len(self.items(split))

    def refuse_empty(self, split: str) -> None:
        """Refuse a split without a row, as a user's file may have (E-DATA)."""
        if self.available(split):
            return
        wanted = f'rows "split": "{split}"'
        if split in ("fresh", "rest"):  # parts of train, which no row may name
            wanted = 'two or more rows "split": "train"'
        if not any(item.split for item in self.items("all")):
            wanted = f"{own.PART} prompts or more, or {wanted}"
        refuse("E-DATA", f"{self.source}: no row is of split '{split}'; give {wanted}")

    @checked
    def rows(self, split: str, size: int, seed: int = 0) -> list[dict[str, str]]:
        """Draw ``size`` rows of a split without replacement, by the seed.

        With the same seed, a smaller size gives the first of these rows. A row has its
        task, domain, prompt and answer; a rationale, which may be empty, where the task
        has any; and a system text if it has one. Splits are train, validation, test and
        all. Train is divided once more, into ``fresh`` (half of it, at most 1,000 rows)
        and ``rest`` (the others).
        """
        return [row for _, row in self.draw(split, size, seed)]

    def draw(
        self, split: str, size: int, seed: int = 0
    ) -> list[tuple[Item, dict[str, str]]]:
        """Draw rows as `rows` does, each behind its item."""
        self.refuse_empty(split)
        items = list(self.items(split))
        have = len(items)
        if not 1 <= size <= have:
            need = f"have {have} rows, need {size}; ask for 1 to {have}"
            refuse("E-DATA", f"{self.name}/{split}: {need}")
        rng = random.Random(f"{self.name}/{split}/{seed}")
        rng.shuffle(items)
        drawn = []
        for item in items[:size]:
            template = rng.choice(self.templates)
            drawn.append((item, self._row(item, template)))
        return drawn

    def majority(self, split: str = "test") -> float:
        """Share of a split's rows, in [0, 1], that have the commonest training answer.

        It is 0 where a user's file has no rows of one of the two.
        """
        asked = self.items(split)
        if self._commonest is None or not asked:
            return 0.0
        right = [self.normalise(item.answer) == self._commonest for item in asked]
        return sum(right) / len(right)

    @cached_property
    def _commonest(self) -> str | None:
        """The commonest training answer, normalised; None without a training row."""
        answers = Counter(self.normalise(item.answer) for item in self.items("train"))
        return min(answers, key=lambda answer: (-answers[answer], answer), default=None)

    def _row(self, item: Item, template: str) -> dict[str, str]:
        row = {
            "task": self.name,
            "domain": item.domain or self.domain,
            "prompt": template.format_map(item.slots),
            "answer": item.answer,
        }
        if self.rationales:
            row["rationale"] = item.rationale
        if item.system:
            row["system"] = item.system
        return row


def _longest(items: Iterable[Item]) -> int:
    """Count the bytes of the longest answer; a token has one at least."""
    return max((len(item.answer.encode()) for item in items), default=0)


@cache
def shipped(name: str) -> list[dict[str, Any]]:
    """Read the rows of a JSONL file that ships with the package (see SOURCES.md)."""
    text = resources.files("moebook.data").joinpath(name).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]
