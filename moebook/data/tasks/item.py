"""An item: one problem of a task before it is put into words."""

from __future__ import annotations

import json
from dataclasses import dataclass

from moebook.storage import text_digest


@dataclass(frozen=True)
class Item:
    """One underlying problem before it is put into words.

    The last five are of items from a user's file alone, see `own.read`.
    """

    slots: dict[str, str]  #: what the templates are filled with; decides the split
    #: The right answer.
    answer: str
    rationale: str = ""  #: worked solution in words
    choices: tuple[str, ...] = ()  #: answers to choose from, the right one among them
    system: str = ""  #: system message
    domain: str = ""  #: in place of its task's
    split: str = ""  #: train, validation or test
    where: str = ""  #: its file and line


def prompt_digest(prompt: str) -> str:
    """Hash a prompt (sha256); case and spacing do not count."""
    return text_digest(" ".join(prompt.casefold().split()))


def content_hash(name: str, item: Item) -> str:
    """Hash an item's content (sha256 of task and slots), whatever its wording."""
    content = json.dumps([name, item.slots], sort_keys=True, ensure_ascii=False)
    return text_digest(content)
