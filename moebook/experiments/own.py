"""Users' own files, where a notebook has the parameter ``mix``."""

from __future__ import annotations

from collections.abc import Iterable

from moebook import data
from moebook.data import tasks
from moebook.data.mixtures import Row
from moebook.data.tasks import SPLITS
from moebook.experiments import needs
from moebook.experiments.arm import Complaints, Settings
from moebook.experiments.experiment import Rows


def complaints(settings: Settings, tested: dict[str, str]) -> Complaints:
    """Complain about files that ``mix`` or the lists of what is tested name."""
    yield from needs.files({"mix": settings["mix"]}, *SPLITS)
    splits = [settings["test_split"]]
    if settings["mix"] == "embedded":  # what is tested has other rows that train
        splits += [needs.training_split(settings), "validation"]
    yield from needs.files(tested, *splits)


def rows(
    settings: Settings, names: Iterable[str], held_out: int, tested: object
) -> Rows:
    """Draw all training rows of the file, so many of its test rows, and validation rows.

    No row of the tasks that are tested may be among the training rows (E-LEAK).
    """
    task = tasks.find(settings["mix"])

    def draw(split: str, most: int) -> list[Row]:
        return task.rows(split, min(most, max(1, task.available(split))))

    train = draw("train", task.available("train"))
    for name in names:
        if tasks.known(name):
            data.refuse_leak(train, _tested(name, settings))
    valid = draw("validation", settings["valid_rows"])
    return Rows(train, draw("test", held_out), valid, tested)


def _tested(name: str, settings: Settings) -> list[Row]:
    """Return all rows of a task's split from which the test draws."""
    task = tasks.find(name)
    return task.rows(settings["test_split"], task.available(settings["test_split"]))
