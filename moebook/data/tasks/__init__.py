"""Fourteen target tasks, five general, six K-shot: exact answers, disjoint splits.

>>> rows("gcd", "test", 200)[0]["prompt"]
'Find the largest number that divides both 150 and 156.'
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from moebook.data.tasks.pools import POOLS, general
from moebook.data.tasks.task import SPLITS, TEST, VALIDATION, Item, Task
from moebook.errors import refuse_unknown
from moebook.results import formed


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
"""All of them: whatever can be drawn and evaluated by name."""


def find(name: str) -> Task:
    """Look a task up by name; E-DATA with the nearest name when there is none."""
    refuse_unknown(name, KNOWN, "E-DATA", f"unknown task '{name}':")
    return KNOWN[name]


def rows(name: str, split: str, size: int, seed: int = 0) -> list[dict[str, str]]:
    """Draw rows of a task's split; see `Task.rows`."""
    return find(name).rows(split, size, seed)


def majority(name: str) -> float:
    """Share of test rows with the commonest training answer; see `Task.majority`."""
    return find(name).majority
