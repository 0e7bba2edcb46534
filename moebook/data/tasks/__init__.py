"""Fourteen target tasks, five general and four K-shot ones: exact answers, disjoint splits.

>>> rows("gcd", "test", 200)[0]["prompt"]
'Find the largest number that divides both 150 and 156.'
"""

from __future__ import annotations

from moebook.data.tasks import (
    code,
    common_sense,
    general,
    kshot,
    language,
    mathematics,
    translation,
)
from moebook.data.tasks.task import SPLITS, TEST, VALIDATION, Item, Task
from moebook.errors import nearest, refuse

__all__ = [
    "CATALOGUE",
    "GENERAL",
    "KNOWN",
    "KSHOT",
    "SPLITS",
    "TEST",
    "VALIDATION",
    "Item",
    "Task",
    "find",
    "majority",
    "rows",
]

CATALOGUE: dict[str, Task] = {
    task.name: task
    for module in (mathematics, code, common_sense, translation, language)
    for task in module.TASKS
}
KSHOT: dict[str, Task] = {task.name: task for task in kshot.TASKS}
"""Tasks to be met with a few annotated rows only; near to targets, never inside them."""
GENERAL: dict[str, Task] = {task.name: task for task in general.TASKS}
"""What the embedded bases know before any tuning: no target, but what tuning may forget."""
KNOWN: dict[str, Task] = CATALOGUE | GENERAL | KSHOT
"""All of them: whatever can be drawn and evaluated by name."""


def find(name: str) -> Task:
    """Look a task up by name; E-DATA with the nearest name when there is none."""
    if name not in KNOWN:
        refuse("E-DATA", f"unknown task '{name}': {nearest(name, KNOWN)}")
    return KNOWN[name]


def rows(name: str, split: str, size: int, seed: int = 0) -> list[dict[str, str]]:
    """Draw rows of a task's split; see `Task.rows`."""
    return find(name).rows(split, size, seed)


def majority(name: str) -> float:
    """Share of test rows that the commonest training answer gets right; see `Task.majority`."""
    return find(name).majority()
