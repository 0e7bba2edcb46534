"""A task is a finite pool of items with exact answers; its splits part that pool.

The pool is enumerated once, ordered by a hash of each item's content, and cut: the
first items are the test split, the next the validation split, the rest the train split.
A study that needs more test rows cuts train once more: `fresh` is tested and `rest`
trained on. A seed decides order and wording, never membership, so no seed can move a
test item into training.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import resources
from typing import Any

from moebook.errors import refuse, refuse_unknown
from moebook.settings import checked

TEST = 200  # items in the test split of every task
VALIDATION = 200
# Items that studies with more test rows take out of the train split, at most half.
FRESH = 1000
SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class Item:
    """One underlying problem before it is put into words."""

    slots: dict[str, str]  # what the templates are filled with; decides the split
    answer: str
    rationale: str = ""  # worked solution in words


def exact(answer: str) -> str:
    """Collapse spaces and drop a final full stop: the plain exact match."""
    return " ".join(answer.split()).removesuffix(".")


def first_line(answer: str) -> str:
    """`exact` on the first line, for models that go on talking after the answer."""
    lines = answer.strip().splitlines()
    return exact(lines[0]) if lines else ""


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
COMPARE = {"first_line": first_line, "verb": verb, "same_json": same_json}


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task: its source, licence (SPDX), items, wordings, and how answers compare."""

    name: str
    domain: str  # mathematics, code, common_sense, translation, language or general
    description: str
    source: str
    licence: str
    templates: Sequence[str]  # wordings with {slots}; a row draws one
    pool: Pool  # enumerates all items; must be deterministic
    max_new_tokens: int  # enough for every answer, of 2,048 byte pairs
    # Of COMPARE: how answers are read before they are compared.
    compare: str = "first_line"
    rationales: bool = False  # whether items carry a worked solution

    @property
    def normalise(self) -> Callable[[str], str]:
        """Applied to gold and generated answers before they are compared."""
        return COMPARE[self.compare]

    @cached_property
    def _splits(self) -> dict[str, tuple[Item, ...]]:
        """Order the pool by the hash of its content and cut it."""
        items = sorted(self.pool(), key=lambda item: content_hash(self.name, item))
        train = tuple(items[TEST + VALIDATION :])
        fresh = min(FRESH, len(train) // 2)
        return {
            "test": tuple(items[:TEST]),
            "validation": tuple(items[TEST : TEST + VALIDATION]),
            "train": train,
            "fresh": train[:fresh],
            "rest": train[fresh:],
        }

    def items(self, split: str) -> tuple[Item, ...]:
        """The items of a split; E-DATA for an unknown one."""
        refuse_unknown(split, self._splits, "E-DATA", f"unknown split '{split}':")
        return self._splits[split]

    def available(self, split: str) -> int:
        """Count the items of a split."""
        return len(self.items(split))

    @checked
    def rows(self, split: str, size: int, seed: int = 0) -> list[dict[str, str]]:
        """Draw `size` rows of a split without replacement, by the seed.

        A prefix of any longer draw with this seed: task, domain, prompt, answer and any
        rationale.
        """
        items = list(self.items(split))
        have = len(items)
        if not 1 <= size <= have:
            need = f"have {have} rows, need {size}; ask for 1 to {have}"
            refuse("E-DATA", f"{self.name}/{split}: {need}")
        rng = random.Random(f"{self.name}/{split}/{seed}")
        rng.shuffle(items)
        return [self._row(item, rng.choice(self.templates)) for item in items[:size]]

    @cached_property
    def majority(self) -> float:
        """Share of test rows, in [0, 1], that have the commonest training answer."""
        answers = Counter(self.normalise(item.answer) for item in self.items("train"))
        best = min(answers, key=lambda answer: (-answers[answer], answer))
        test = self.items("test")
        return sum(self.normalise(item.answer) == best for item in test) / len(test)

    def _row(self, item: Item, template: str) -> dict[str, str]:
        row = {
            "task": self.name,
            "domain": self.domain,
            "prompt": template.format_map(item.slots),
            "answer": item.answer,
        }
        if self.rationales:
            row["rationale"] = item.rationale
        return row


def content_hash(name: str, item: Item) -> str:
    """Hash an item's content (sha256 of task and slots), whatever its wording."""
    content = json.dumps([name, item.slots], sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(content.encode()).hexdigest()


@cache
def shipped(name: str) -> list[dict[str, Any]]:
    """Read the rows of a JSONL file that ships with the package (see SOURCES.md)."""
    text = resources.files("moebook.data").joinpath(name).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]
