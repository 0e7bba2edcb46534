"""What is needed of parameters that several notebooks have; each complaint names the parameter."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from moebook.data import tasks
from moebook.errors import Refusal, located, nearest
from moebook.experiments.arm import Complaints, Settings
from moebook.training.recipe import Recipe

WARMUP = Recipe().warmup  # where a notebook has no such parameter


def embedded_tasks(parameter: str, text: str, asked: str) -> Complaints:
    """Complain about names in a list of tasks that are neither embedded nor a file's.

    ``asked`` is the parameter that asks for these, with its value.
    """
    for name in text.split(","):
        if name and not tasks.known(name):
            why = f"{asked} takes embedded tasks and your files (*.jsonl)"
            yield f"{parameter} lists {name!r}: {why}: {nearest(name, tasks.KNOWN)}"


def files(lists: dict[str, str], *splits: str) -> Complaints:
    """Complain about users' files in lists by parameter.

    A file is missing or holds no rows of the schema, has none in one of the ``splits``,
    or gives its task the name that another file's has.
    """
    first: dict[str, str] = {}
    for parameter, text in lists.items():
        for name in filter(tasks.is_file, text.split(",")):
            where = f"{parameter} lists {name!r}"
            try:
                task = tasks.find(name)
                for split in splits:
                    task.refuse_empty(split)
            except Refusal as refusal:
                yield f"{where}: {refusal.message}"
                continue
            other = first.setdefault(task.name, name)
            if other != name:
                yield _alike(parameter, name, other)


def apart(lists: dict[str, str]) -> Complaints:
    """Complain about two users' files in lists by parameter whose tasks have one name.

    One file may stand in several lists. Of files that cannot be read `files` complains.
    """
    first: dict[str, str] = {}
    for parameter, text in lists.items():
        for name in filter(tasks.is_file, text.split(",")):
            try:
                task = tasks.find(name)
            except Refusal:
                continue
            other = first.setdefault(task.name, name)
            if tasks.find(other).source != task.source:
                yield _alike(parameter, name, other)


def _alike(parameter: str, name: str, other: str) -> str:
    """Complain about a file whose task has the name of another file's."""
    both = f"its task is called {tasks.label(name)}, as that of {other!r} is"
    return f"{parameter} lists {name!r}: {both}; rename one of the files"


def named(lists: dict[str, str]) -> Complaints:
    """Complain about empty names, and about those that stand twice, in lists by parameter."""
    first: dict[str, str] = {}
    for parameter, text in lists.items():
        for name in text.split(","):
            if not name.strip():
                yield f"{parameter} = {text!r} holds an empty name: give names with commas between"
            elif first.get(name) == parameter:
                yield f"{parameter} lists {name!r} twice: name each once"
            elif name in first:
                yield f"{parameter} lists {name!r}, and so does {first[name]}: name each once"
            first.setdefault(name, parameter)


def optimizer(settings: Settings, device: torch.device | None) -> Complaints:
    """Complain about a paged optimizer where the training's device is known and is no GPU."""
    wanted = settings["optimizer"]
    if wanted != "adamw" and device is not None and device.type == "cpu":
        yield f"optimizer = {wanted!r}: it needs a GPU, and this run is on the CPU; take adamw"


def more_than_a_step(
    settings: Settings, parameter: str, *, of: str = "", part: int = 1
) -> Complaints:
    """Complain about a training whose only step is that of the warm-up.

    The parameter holds its steps, or ``part`` times as many, of which it makes a part, rounded
    down; ``of`` says whose training it is.
    """
    if settings[parameter] // part > 1 or settings.get("warmup", WARMUP) == 0:
        return
    why = f"the only step{of} is that of the warm-up, at rate 0, so nothing is trained"
    remedy = f"take {2 * part} or more"
    if "warmup" in settings:
        remedy += ", or warmup = 0"
    yield f"{parameter} = {settings[parameter]}: {why}; {remedy}"


def training_split(settings: Settings) -> str:
    """Return the split that embedded training rows come from, beside the test rows."""
    return "train" if settings["test_split"] == "test" else "rest"


def available(settings: Settings, names: Iterable[str]) -> dict[str, int]:
    """Return how many training rows each task among ``names`` has.

    Left out are sets of the hub, and what cannot be read, of which others complain.
    """
    split = training_split(settings)
    counts: dict[str, int] = {}
    for name in filter(tasks.known, names):
        with suppress(Refusal):
            counts[name] = tasks.find(name).available(split)
    return counts


def drawn(settings: Settings, names: Iterable[str]) -> dict[str, int]:
    """Return how many of these rows are drawn, by task."""
    most = settings["rows_per_task"]
    return {name: min(most, have) for name, have in available(settings, names).items()}


def refuse_too_long(
    encode: Callable[[Sequence[Any]], object], sets: Mapping[str, Sequence[Any]]
) -> None:
    """Refuse a set of rows of which ``encode`` leaves none, before anything trains (E-DATA).

    Rows that are left out of a set are told where the set is used.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, rows in sets.items():
            with located(name):
                encode(rows)
