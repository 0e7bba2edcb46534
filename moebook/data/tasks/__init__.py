"""Fourteen target tasks, five general, six K-shot: exact answers, disjoint splits.

>>> rows("gcd", "test", 200)[0]["prompt"]
'Find the largest number that divides both 150 and 156.'
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

from moebook.data.tasks.item import Item
from moebook.data.tasks.pools import POOLS, general
from moebook.data.tasks.task import SPLITS, TEST, VALIDATION, Task
from moebook.errors import refuse_unknown
from moebook.storage import digest, formed

__all__ = [
    "KNOWN",
    "Item",
    "Task",
    "find",
    "known",
    "majority",
    "rows",
]


def _catalogue(entries: Mapping[str, Any]) -> dict[str, Task]:
    catalogue = {}
    for name, entry in entries.items():
        pool = POOLS.get(name, partial(general, name))
        catalogue[name] = Task(name=name, pool=pool, **entry)
    return catalogue


with formed(Path(__file__).with_name("tasks.yaml")) as _FILE:
    CATALOGUE = _catalogue(_FILE["target"])
    KSHOT = _catalogue(_FILE["kshot"])  # to be met with few annotated rows
    GENERAL = _catalogue(_FILE["general"])  # what the bases know and tuning may forget
KNOWN = CATALOGUE | GENERAL | KSHOT
"""All of them, whatever can be drawn and evaluated by name."""


FILE = ".jsonl"


def is_file(name: str) -> bool:
    """Whether a name is that of a user's file (``*.jsonl``)."""
    return isinstance(name, str) and name.endswith(FILE)


def known(name: str) -> bool:
    """Whether a name is that of an embedded task, or of a user's file."""
    return is_file(name) or (isinstance(name, str) and name in KNOWN)


def find(name: str) -> Task:
    """Look a task up by name, or make one of a user's file.

    E-DATA with the nearest name when there is none, and what `Task.from_jsonl` refuses.
    """
    if is_file(name):
        place = Path(name).expanduser()
        changed = place.stat().st_mtime_ns if place.is_file() else 0
        return _of_file(place, changed)
    refuse_unknown(name, KNOWN, "E-DATA", f"unknown task '{name}':")
    return KNOWN[name]


@cache
def _of_file(place: Path, changed: int) -> Task:
    """Read a user's file once for as long as nobody changes it."""
    return Task.from_jsonl(place)


def label(name: str) -> str:
    """Return what values are kept under: the name of a user's file's task, or the name."""
    return find(name).name if is_file(name) else name


def of_files(names: Iterable[str]) -> dict[str, Task]:
    """Make tasks of the users' files among some names, by the tasks' own names."""
    made = [find(name) for name in names if is_file(name)]
    return {task.name: task for task in made}


def content(names: Iterable[str]) -> list[str]:
    """Return names of tasks, each of a file with the SHA-256 of what it holds."""
    return [
        f"{name}@{digest(Path(name).expanduser())}" if is_file(name) else name
        for name in names
    ]


def rows(name: str, split: str, size: int, seed: int = 0) -> list[dict[str, str]]:
    """Draw rows of a task's split; see `Task.rows`."""
    return find(name).rows(split, size, seed)


def majority(name: str) -> float:
    """Share of test rows with the commonest training answer; see `Task.majority`."""
    return find(name).majority()
