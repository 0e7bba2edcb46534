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
    model: nn.Module,
    steps: Iterable[int],
    measure: Callable[[Any], Any],
    *,
    accumulate: int = 1,
) -> Iterator[dict[int, Any]]:
    """Measure a model at chosen steps of the training that happens while the context is open.

    Steps are counted by the forward passes of ``model`` in training mode. Nothing is kept of the
    model but what is measured, and random numbers drawn by the measurement do not shift those of
    the training: a run with milestones equals the run without, bit for bit. The time they take
    counts in the history's seconds.

    Args:
        model: What `fit` is then called with.
        steps: Steps done when to measure: 0 for the untrained model, up to the last.
        measure: Called with the model; it must leave parameters and mode as it finds them.
        accumulate: Forward passes a step, as `fit` is told.

    Yields:
        Step to what was measured, filled as training goes on; complete after the context.

    Raises:
        Refusal: E-RANGE for a step that the training did not reach, naming both.
    """
    wanted, found, passes, busy = sorted(set(steps)), dict[int, Any](), 0, False

    def look() -> None:
        nonlocal busy
        done, unfinished = divmod(passes, accumulate)
        if done in wanted and done not in found and not unfinished:
            busy = True
            try:
                with torch.random.fork_rng():
                    found[done] = measure(model)
            finally:
                busy = False

    def before(module: nn.Module, *_: Any) -> None:
        nonlocal passes
        if module.training and not busy:
            look()
            passes += 1

    with model.register_forward_pre_hook(before):
        yield found
    look()
    if missed := [step for step in wanted if step not in found]:
        refuse(
            "E-RANGE",
            f"milestone at step {missed[0]}: the training had {passes // accumulate} steps",
        )
