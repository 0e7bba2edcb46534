"""The mode of a model: put into evaluation for a while, and given back as it came."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switch dropout off for the length of the block; gradients are left as they are.

    Every module gets its own mode back: one that was in evaluation inside a training model is in
    evaluation again.
    """
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
