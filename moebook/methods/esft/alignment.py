"""Rows to train on: those of target tasks, and alignment data, which keeps general abilities."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Annotated

from datasets import Dataset as Rows
from datasets import concatenate_datasets
from pydantic import Field

from moebook.data import hub, tasks
from moebook.data.tasks import Task
from moebook.errors import refuse
from moebook.settings import Count, Each, checked


@checked
def rows(
    targets: Each[str | Task],
    alignment: Each[str | Task],
    size: Count,
    *,
    split: str = "train",
    revisions: str = "",
    seed: int,
) -> dict[str, list[dict[str, str]]]:
    """Draw rows of target tasks and of alignment data, ``size`` of each, to train on.

    Each is a `Task` of your own, or a name: of an embedded task, whose ``split`` may be the
    ``rest`` beside fresh test rows, or of a set of the hub, of which twice as many alignment rows
    come. The rows are returned by these names, so different sources of one name are refused, and a
    set of the hub that is a target and alignment data.
    """
    _check_names(tuple(targets), tuple(alignment))
    pins = hub.pins(revisions)
    drawn: dict[str, list[dict[str, str]]] = {}
    for times, sources in ((2, alignment), (1, targets)):
        for source in sources:
            name = source if isinstance(source, str) else source.name
            if isinstance(source, str) and not tasks.known(source):
                most = times * size
                pin = pins.get(name)
                drawn[name] = hub.load(name, revision=pin, size=most, seed=seed)
                continue
            task = tasks.find(source) if isinstance(source, str) else source
            count = min(size, task.available(split))
            drawn[name] = task.rows(split, count, seed)
    return drawn


def _check_names(
    targets: Collection[str | Task], alignment: Collection[str | Task]
) -> None:
    """Refuse sources of one name whose rows would take each other's place."""
    by_name: dict[str, str | Task] = {}
    for source in (*targets, *alignment):
        name = source if isinstance(source, str) else source.name
        if by_name.setdefault(name, source) != source:
            hint = "expected a name each: rename the file of one"
            refuse("E-DATA", f"two sources are called '{name}', {hint}")
    for source in targets:
        on_hub = isinstance(source, str) and not tasks.known(source)
        if on_hub and source in alignment:
            why = "of which other numbers of rows are drawn: take it out of one"
            refuse("E-DATA", f"'{source}' is a target and alignment data, {why}")


@checked
def mix(
    task: Rows,
    alignment: Rows,
    share: Annotated[float, Field(ge=0, lt=1)],
    seed: Annotated[int, Field(ge=0)],
) -> Rows:
    """Mix a task's rows with alignment data, which keeps the general abilities (Sec. 4.3).

    ``share`` is that of alignment rows in the mix: 0.5 in the paper (1:1), 0 as released.
    """
    # With n rows of the task and a of alignment, share = a / (n + a), so
    # a = n share / (1 - share), rounded half up.
    wanted = math.floor(len(task) * share / (1 - share) + 0.5)
    if wanted > len(alignment):
        refuse("E-DATA", f"{wanted} alignment rows needed, {len(alignment)} given")
    drawn = alignment.shuffle(seed=seed).select(range(wanted))
    try:
        mixed = concatenate_datasets([task, drawn])
    except ValueError as error:  # columns of one name and of two types
        both = f"the task's rows and the alignment data do not go together ({error})"
        refuse("E-DATA", f"{both}; encode both alike: see data.encode")
    return mixed.shuffle(seed=seed)
