"""How a model runs to be measured or trained: for its likelihood alone, and without dropout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

PLAIN = {
    # Adds a balance loss, which depends on the batching; some families fail with it.
    "output_router_logits": False,
    # Keep tensors of every layer that nobody reads.
    "output_attentions": False,
    "output_hidden_states": False,
    # Else the output is a tuple without names.
    "return_dict": True,
}
"""What a configuration of transformers can ask for, and what we take."""


def settle(model: nn.Module) -> list[tuple[Any, str, Any]]:
    """Set a model's configurations to `PLAIN`; return each change: where, name, value before."""
    configurations: dict[int, Any] = {}  # by identity: modules share theirs
    for module in model.modules():
        configuration = getattr(module, "config", None)
        configurations[id(configuration)] = configuration
    changes = []
    for configuration in configurations.values():
        for name, value in PLAIN.items():
            # Where there is no such name, or no configuration, nothing is to change.
            before = getattr(configuration, name, value)
            if before != value:
                changes.append((configuration, name, before))
                setattr(configuration, name, value)
    return changes


@contextmanager
def plain(model: nn.Module) -> Iterator[None]:
    """Have the loss be the likelihood's alone, whatever the configuration adds to it (`PLAIN`).

    So the loss does not depend on how rows are batched. After the block all is as before.
    """
    changes = settle(model)
    try:
        yield
    finally:
        for configuration, name, before in changes:
            setattr(configuration, name, before)


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Give each module its own mode back after the block: that of training or of evaluation."""
    modes = {module: module.training for module in model.modules()}
    try:
        yield
    finally:
        # By the attribute: ``train()`` would set the modules inside, too.
        for module, training in modes.items():
            module.training = training


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switch dropout off for the length of the block, in a `plain` model.

    Each module gets its own mode back.
    """
    with modes_kept(model):
        model.eval()
        with plain(model):
            yield
