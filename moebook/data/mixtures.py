"""Mixtures of tasks, free text by domain, and the guard against trained test items."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from moebook.data import tasks
from moebook.data.reading import field as text_field
from moebook.data.tasks.item import prompt_digest
from moebook.data.tasks.task import shipped
from moebook.errors import refuse
from moebook.settings import Count, Each, checked

Row = dict[str, str]
PASSAGES = {  # domain: a file that ships, and the fields of its rows
    # Clauses of licences, as lawyers wrote them.
    "text": ("licence.jsonl", ("clause",)),
    # Functions of Python packages.
    "code": ("docstring.jsonl", ("code",)),
    # Word problems, worked out.
    "mathematics": ("gsm_symbolic.jsonl", ("question", "rationale")),
}


@checked
def mixture(sizes: Mapping[str, int], split: str, seed: int = 0) -> list[Row]:
    """Draw rows of several tasks, so many of each, and shuffle them by the seed.

    >>> rows = mixture({"gcd": 2, "isa": 1}, "train")
    >>> sorted(row["task"] for row in rows)
    ['gcd', 'gcd', 'isa']
    """
    if not sizes:
        expected = "expected at least one, as {'gcd': 200}"
        refuse("E-DATA", f"the mixture names no task; {expected}")
    rows = []
    for name, size in sizes.items():
        rows += tasks.rows(name, split, size, seed)
    random.Random(f"mixture/{split}/{seed}").shuffle(rows)
    return rows


@checked
def draw(names: Each[str], split: str, most: Count, seed: int = 0) -> list[Row]:
    """Draw a `mixture` of up to `most` rows a task, fewer if its split holds fewer."""
    sizes = {}
    for name in names:
        sizes[name] = min(most, tasks.find(name).available(split))
    return mixture(sizes, split, seed)


@checked
def grouped(rows: Iterable[Any], field: str = "domain") -> dict[str, list[Row]]:
    """Sort rows into groups by a field, in the order of its values."""
    groups: dict[str, list[Row]] = {}
    for number, row in enumerate(rows):
        groups.setdefault(_text(row, field, number), []).append(row)
    return dict(sorted(groups.items()))


def hashes(rows: Iterable[Mapping[str, str]]) -> set[str]:
    """Hash each row's prompt (sha256; case and spacing do not count)."""
    if not isinstance(rows, Iterable):
        refuse("E-TYPE", f"rows is a {type(rows).__name__}, expected a list")
    digests = set()
    for number, row in enumerate(rows):
        digests.add(prompt_digest(_text(row, "prompt", number)))
    return digests


def _text(row: Mapping[str, str], name: str, number: int) -> str:
    """Return a field of a row, or refuse a row that lacks it."""
    return text_field(row, name, f"row {number}")


@checked
def hold_out(rows: Sequence[Row], size: Count) -> tuple[list[Row], list[Row]]:
    """Split shuffled rows in those to train on and the first `size`, held out.

    What shares its prompt with a held-out row (MetaMathQA answers some several times)
    is left out.
    """
    held_out = list(rows[:size])
    asked = hashes(held_out)
    train = [row for row in rows[size:] if not hashes([row]) & asked]
    if not train:
        none = f"{size} of {len(rows)} rows held out leave none to train on"
        refuse("E-DATA", f"{none}: lower size")
    return train, held_out


def refuse_leak(
    train: Iterable[Mapping[str, str]], evaluation: Iterable[Mapping[str, str]]
) -> None:
    """Refuse evaluation rows whose prompts were trained on (E-LEAK with the count).

    >>> refuse_leak([{"prompt": "1 + 1 ="}], [{"prompt": "2 + 2 ="}])
    >>> refuse_leak([{"prompt": "1 + 1 ="}], [{"prompt": " 1 + 1 ="}])
    Traceback (most recent call last):
    moebook.errors.Refusal: E-LEAK: 1 of 1 evaluation prompts are among the training prompts...
    """
    held_out = hashes(evaluation)
    shared = hashes(train) & held_out
    if shared:
        leak = f"{len(shared)} of {len(held_out)} evaluation prompts"
        refuse("E-LEAK", f"{leak} are among the training prompts; remove them")


@checked
def passages(size: int, seed: int = 0) -> dict[str, list[str]]:
    """Draw so many texts of each domain, without prompts around them.

    By the templates of prompts even random weights tell tasks apart. No two texts of a
    domain open alike, names and numbers set aside: the word problems' authors made them
    from templates.
    """
    drawn = {}
    for domain, (file, fields) in PASSAGES.items():
        texts: list[str] = []
        for row in shipped(file):
            texts.append(" ".join(row[name] for name in fields))
        random.Random(f"passages/{domain}/{seed}").shuffle(texts)
        by_opening = {opening(text): text for text in texts}
        have = len(by_opening)
        if not 1 <= size <= have:
            expected = f"{size} texts of {domain}, expected 1 to {have}"
            refuse("E-RANGE", f"passages: {expected}")
        drawn[domain] = list(by_opening.values())[:size]
    return drawn


def opening(text: str) -> str:
    """Return how a text begins, with its names and numbers struck out."""
    return re.sub(r"[A-Z]\w*|\d+", "", text)[:40]
