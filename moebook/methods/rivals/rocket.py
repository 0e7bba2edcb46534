"""Rocket's own row in its rivals' form: the chosen LoRAs, routed token by token, all trained."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from moebook.methods.rivals import tuning
from moebook.methods.rivals.tuning import Data, Tuned
from moebook.methods.rocket import apply
from moebook.methods.rocket.bank import Bank
from moebook.methods.rocket.config import Config
from moebook.models.checkpoint import origin
from moebook.runtime import random_states_kept
from moebook.settings import Seed, checked

__all__ = ["attach", "tuned"]


@checked
def attach(model: nn.Module, bank: Bank, config: Config, *, seed: Seed = 0) -> Tuned:
    """Put the mixture of a bank's N LoRAs on the base."""
    # The seed draws the gates; the caller's random state stays as it is.
    with random_states_kept():
        torch.manual_seed(seed)
        apply.build(model, list(bank.values()), config)
    made_from = origin(model, apply.Origin)
    return Tuned(model, cast(Any, made_from), learning=made_from.learning)


@checked
def tuned(
    model: nn.Module,
    bank: Bank,
    data: Data,
    config: Config,
    *,
    seed: Seed = 0,
    **recipe: Any,
) -> Tuned:
    """Put the mixture of a bank's N LoRAs on the base, and train its experts and gates."""
    made = attach(model, bank, config, seed=seed)
    return tuning.fit(made, data, seed=seed, **recipe)
