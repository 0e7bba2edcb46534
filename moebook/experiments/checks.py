"""The ``check`` of an experiment: the arms asked for, or all that they lack in one line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic

import torch

from moebook.experiments import effects
from moebook.experiments.arm import (
    Complaints,
    Kind,
    Settings,
    asked,
    refuse_complaints,
)
from moebook.experiments.effects import Idle


@dataclass(frozen=True)
class Check(Generic[Kind]):
    """Looks at a notebook's parameters before any work; nothing is loaded for it."""

    # All arms by name: which there are the parameters may say.
    known: Callable[[Settings], Mapping[str, Kind]]
    # What is to be complained of, from the parameters, the arms asked for, all arms, the device.
    needs: Callable[..., Complaints]
    # Which parameters do nothing for the arms asked for.
    idle: Callable[[Settings, Any], Idle]

    def __call__(
        self,
        settings: Settings,
        device: torch.device | None = None,
        changed: Iterable[str] = (),
    ) -> dict[str, Kind]:
        """Return the arms asked for, or refuse parameters with which they cannot run (E-RANGE).

        Where the training's ``device`` is known, what needs a GPU counts. W-IDLE tells which of
        the ``changed`` parameters do nothing here.
        """
        every = self.known(settings)
        arms = asked(settings, every)
        refuse_complaints(self.needs(settings, arms, every, device))
        effects.warn(changed, self.idle(settings, arms))
        return arms
