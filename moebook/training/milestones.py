"""Measuring a model while it trains: before the first step, between two, and after the last."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from moebook.errors import refuse


@contextmanager
def milestones(
    model: nn.Module, steps: Iterable[int], measure: Callable[[Any], Any]
) -> Iterator[dict[int, Any]]:
    """Measure a model at chosen steps of the training that happens while the context is open.

    `fit` tells the steps, so those of a run that goes on from a checkpoint are counted from its
    beginning. Nothing is kept of the model but what is measured, and random numbers drawn by the
    measurement do not shift those of the training: a run with milestones equals the run without,
    bit for bit. The time they take counts in the history's seconds.

    Args:
        model: What `fit` is then called with.
        steps: Steps done when to measure: 0 for the untrained model, up to the last.
        measure: Called with the model; it must leave the parameters as it finds them.

    Yields:
        Step to what was measured, filled as training goes on; complete after `fit`.

    Raises:
        Refusal: E-RANGE for a step that the training did not reach, or that lies before the
            checkpoint from which it went on, naming both.
    """
    wanted, found, last = sorted(set(steps)), dict[int, Any](), 0

    def look(done: int) -> None:
        nonlocal last
        last = done
        if missed := [step for step in wanted if step < done and step not in found]:
            refuse(
                "E-RANGE",
                f"milestone at step {missed[0]}: the training goes on from step {done} of a"
                " checkpoint; name an empty folder, or later milestones",
            )
        if done in wanted and done not in found:
            with torch.random.fork_rng():
                found[done] = measure(model)

    others = getattr(model, "milestones", ())
    model.milestones = (*others, look)
    try:
        yield found
    finally:
        model.milestones = others
    if missed := [step for step in wanted if step not in found]:
        refuse("E-RANGE", f"milestone at step {missed[0]}: the training had {last} steps")


def reached(model: nn.Module, step: int) -> None:
    """Tell the open milestones of a model how many steps of its training are done."""
    for look in getattr(model, "milestones", ()):
        look(step)
