"""Parameters that a reader changed and that do nothing in this run: one warning names them all.

Each experiment's ``idle`` yields names of parameters, with spaces between, and why they do nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator

from moebook.data import tasks
from moebook.experiments import rates
from moebook.experiments.arm import Settings

Idle = Iterator[tuple[str, str]]


def warn(changed: Iterable[str], idle: Iterable[tuple[str, str]]) -> None:
    """Warn of those of the changed parameters that do nothing (W-IDLE)."""
    candidates = list(changed)
    lines: list[str] = []
    for names, why in idle:
        idle_names = [name for name in names.split() if name in candidates]
        if idle_names:
            lines.append(f"{', '.join(idle_names)} ({why})")
    if lines:
        message = f"W-IDLE: changed without effect in this run: {'; '.join(lines)}"
        warnings.warn(message, stacklevel=3)


def of_rates(settings: Settings, usual: str, trial: str) -> Idle:
    """Tell what a search for rates, or its lack, leaves without effect.

    ``usual`` parameters hold the rates of arms without a search, ``trial`` ones are of it.
    """
    grid = rates.grid(settings)
    if grid:
        yield usual, "every arm takes its rate from rates"
    elif settings.get("fixed_rates"):
        yield usual, "fixed_rates has every arm's rate"
    if not grid:
        yield trial, "rates is empty, so none is tried"


def of_mix(settings: Settings, tested: str) -> Idle:
    """Tell what has no effect by where the rows come from; ``tested`` lists what is tested."""
    if settings["mix"] == "embedded":
        yield from of_rows("revisions data_folder chat", tested)
    else:
        yield "rows_per_task", "mix says which rows there are"


def of_rows(names: str, text: str) -> Idle:
    """Tell what has no effect where a text lists no set of the hub."""
    if all(tasks.known(name) for name in text.split(",") if name):
        yield names, "embedded tasks and your files take nothing from the hub"
