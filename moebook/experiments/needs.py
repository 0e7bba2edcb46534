"""What is needed of parameters that several notebooks have; each complaint names the parameter."""

from __future__ import annotations

import torch

from moebook.data import tasks
from moebook.errors import nearest
from moebook.experiments.arm import Complaints, Settings, complaint


def embedded_tasks(parameter: str, text: str) -> Complaints:
    """Complain about names in a list of tasks that are neither embedded nor a file's."""
    for name in text.split(","):
        if name and not tasks.known(name):
            why = "mix = 'embedded' trains on embedded tasks and your files (*.jsonl)"
            yield f"{parameter} lists {name!r}: {why}: {nearest(name, tasks.KNOWN)}"


def files(parameters: dict[str, str]) -> Complaints:
    """Complain about users' files that parameters name, and that are no rows or missing."""
    for parameter, text in parameters.items():
        for name in text.split(","):
            if name.endswith(tasks.FILE):
                yield from complaint(f"{parameter} lists {name!r}", tasks.find, name)


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


def more_than_a_step(settings: Settings) -> Complaints:
    """Complain about a training whose only step is that of the warm-up."""
    if settings["steps"] == 1 and settings["warmup"] > 0:
        why = "the only step is that of the warm-up, at rate 0, so nothing is trained"
        yield f"steps = 1: {why}; take 2 or more, or warmup = 0"
