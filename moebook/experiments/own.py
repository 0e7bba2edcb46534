"""Rows by the parameter ``mix``: embedded tasks, a mixture of the hub, or a user's own file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from moebook import data
from moebook.data import hub, tasks
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
    settings: Settings, names: Sequence[str], held_out: int, tested: object
) -> Rows:
    """Draw the rows, the same in all runs, whatever the seed; none held out is trained on.

    ``held_out`` rows measure routing. ``tested`` says what tests, where ``mix`` does not train on
    the tasks ``names`` themselves.
    """
    if tasks.is_file(settings["mix"]):
        return _of_file(settings, names, held_out, tested)
    if settings["mix"] == "embedded":
        split = settings["test_split"]
        train = data.draw(
            names, needs.training_split(settings), settings["rows_per_task"]
        )
        unseen = data.draw(names, split, held_out)
        valid = data.draw(names, "validation", settings["valid_rows"])
        tested = data.draw(names, split, settings["test_rows"])
    else:
        pins = hub.pins(settings["revisions"], settings["data_folder"])
        mixed = hub.mixture(hub.MIXTURES[settings["mix"]], pins)
        train, unseen = data.hold_out(mixed, held_out)
        valid = unseen[: settings["valid_rows"]]
    data.refuse_leak(train, unseen)
    return Rows(train, unseen, valid, tested)


def _of_file(
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
