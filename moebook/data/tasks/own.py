r"""A user's own rows: a JSON-lines file becomes items, and these become splits.

The schema, an object a line::

    {"prompt": "Which team?\n\nMy card was charged twice.", "answer": "billing"}
    {"prompt": "2 + 2 =", "answer": "4", "choices": ["3", "4"], "split": "test"}

``prompt`` and ``answer`` are texts. With ``choices``, two texts or more, ``answer`` is
one of them or its place, counted from 0. ``system`` (a system message), ``rationale``
(a worked solution) and ``domain`` are texts, and may be missing. ``split`` (train,
validation or test) stands in every row or in none. Other fields are left alone,
unless one looks like a misspelt field of these that the row lacks.

A refusal names file, line and field, and never what a row holds.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from moebook.data.reading import clean, field, local
from moebook.data.tasks.item import Item, prompt_digest
from moebook.errors import refuse

SPLITS = ("train", "validation", "test")
OPTIONAL = ("system", "rationale", "domain", "split")
FIELDS = ("prompt", "answer", "choices", *OPTIONAL)
PART = 5  # one prompt in five is tested on, one in five chooses the learning rate


def read(path: Path) -> list[Item]:
    """Read a file of the schema above; E-DATA with file and line where it is another."""
    if path.suffix != ".jsonl":
        expected = "expected JSON lines in a file named *.jsonl"
        refuse("E-DATA", f"{path}: {expected}")
    if path.is_dir():
        refuse("E-NOFILE", f"{path} is a folder, expected a file of JSON lines")
    if not path.is_file():
        refuse("E-NOFILE", f"{path}: no such file; expected JSON lines")
    items = [_item(row, where) for where, row in local(path)]
    _check_splits(items)
    return items


def _item(row: Mapping[str, Any], where: str) -> Item:
    _refuse_misspelt(row, where)
    prompt = _text(row, "prompt", where)
    choices = _choices(row, where)
    answer = _chosen(row, choices, where) if choices else _text(row, "answer", where)
    optional = {
        name: field(row, name, where, default="") for name in OPTIONAL if name in row
    }
    if optional.get("split", "") not in ("", *SPLITS):
        known = ", ".join(SPLITS)
        refuse("E-DATA", f"{where}: field 'split' is none of {known}")
    return Item({"prompt": prompt}, answer, choices=choices, where=where, **optional)


def _refuse_misspelt(row: Mapping[str, Any], where: str) -> None:
    """Refuse a field that is nearly one of the schema which the row lacks.

    Beside that one it is another (answers), and so is one named after it (system_id).
    """
    for name in row:
        for near in difflib.get_close_matches(name.lower(), FIELDS, n=1, cutoff=0.8):
            if near not in row and not name.lower().startswith(f"{near}_"):
                refuse(
                    "E-DATA", f"{where}: unknown field '{name}'; did you mean '{near}'?"
                )


def _text(row: Mapping[str, Any], name: str, where: str) -> str:
    text = field(row, name, where)
    if not text.strip():
        refuse("E-DATA", f"{where}: field '{name}' is blank, expected text")
    return text


def _choices(row: Mapping[str, Any], where: str) -> tuple[str, ...]:
    if row.get("choices") is None:
        return ()
    choices = row["choices"]
    at = f"{where}: field 'choices'"
    if not isinstance(choices, list) or len(choices) < 2:
        refuse("E-DATA", f"{at} is no list of two texts or more")
    for choice in choices:
        if not clean(choice, "choices", where).strip():
            refuse("E-DATA", f"{at} holds a blank text")
    if len(set(choices)) < len(choices):
        refuse("E-DATA", f"{at} holds a text twice")
    return tuple(choices)


def _chosen(row: Mapping[str, Any], choices: Sequence[str], where: str) -> str:
    answer = row.get("answer")
    if type(answer) is int and 0 <= answer < len(choices):
        return choices[answer]
    if isinstance(answer, str) and answer in choices:
        return answer
    expected = f"expected one of the {len(choices)} choices, or its place from 0"
    refuse("E-DATA", f"{where}: field 'answer' is none of the choices; {expected}")


def _check_splits(items: Iterable[Item]) -> None:
    """Refuse splits that stand in some rows alone, and a prompt that is in two."""
    first: dict[str, Item] = {}
    start = None
    for item in items:
        start = start or item
        if bool(item.split) != bool(start.split):
            says = "names a split" if item.split else "names no split"
            every = "every row or none"
            refuse(
                "E-DATA",
                f"{item.where}: {says}, unlike {start.where}; expected {every}",
            )
        met = first.setdefault(asked(item), item)
        if met.split != item.split:
            leak = f"this prompt is in split {met.split} too ({met.where})"
            refuse("E-LEAK", f"{item.where}: {leak}; leave one of the two out")


def asked(item: Item) -> str:
    """Hash what an item asks; case and spacing do not count."""
    return prompt_digest(item.slots["prompt"])


def cut(items: Iterable[Item], most: int) -> dict[str, tuple[Item, ...]]:
    """Part a file's items in test, validation (at most so many prompts) and train.

    Where no row names its split, a hash of the prompts decides: one in five is tested
    on, one in five validated on. Items that ask the same stay together, and neither the
    file's name nor the order of its lines moves one.
    """
    parts: dict[str, list[Item]] = {split: [] for split in SPLITS}
    ordered = sorted(items, key=asked)
    prompts = list(dict.fromkeys(asked(item) for item in ordered))
    size = min(most, len(prompts) // PART)
    tested = set(prompts[:size])
    validated = set(prompts[size : 2 * size])
    for item in ordered:
        prompt = asked(item)
        if item.split:
            split = item.split
        elif prompt in tested:
            split = "test"
        else:
            split = "validation" if prompt in validated else "train"
        parts[split].append(item)
    return {split: tuple(part) for split, part in parts.items()}
