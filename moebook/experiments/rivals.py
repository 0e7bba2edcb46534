"""The rivals' arms and what they need; how each is put on a base `methods.rivals.table` says."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from moebook.experiments import rates
from moebook.experiments.arm import Settings, asked, complaint, refuse_complaints
from moebook.experiments.rocket import bank_size, on_a_bank
from moebook.methods import rocket
from moebook.methods.rivals import table
from moebook.methods.rocket.bank import SOURCES

SIZES = ("shots", "candidates", "experts", "top_k", "budget")
BEYOND = 2  # evaluations above the LoRAs' number that LoRAHub's search takes at least


def known(settings: Settings) -> dict[str, table.Arm]:
    """Return all arms by name; of a bank whose size a folder tells, as if it were the paper's."""
    names = ("rate", "searches", "experts", "top_k")
    size = bank_size(settings) or len(SOURCES)
    return table.arms(size, **{name: settings[name] for name in names})


def check(
    settings: Settings, device: torch.device | None = None
) -> dict[str, table.Arm]:
    """Return the arms asked for, or refuse parameters with which they cannot run (E-RANGE)."""
    every = known(settings)
    arms = asked(settings, every)
    refuse_complaints(_needs(settings, arms, every))
    return arms


def _needs(
    settings: Settings, arms: dict[str, table.Arm], every: dict[str, table.Arm]
) -> Iterator[str]:
    yield from rates.needs(settings, list(arms), list(every), at_least_one=True)
    yield from on_a_bank(settings)
    sizes = {name: settings[name] for name in SIZES}
    yield from complaint("", lambda: rocket.Config.preset("fixed", **sizes))
    searches = settings["searches"]
    for name, arm in arms.items():
        size = settings["experts"] if arm.bank == "chosen" else bank_size(settings)
        if arm.rival == "lorahub" and size and searches < size + BEYOND:
            least = (
                f"the search of {name} over {size} LoRAs takes {size + BEYOND} at least"
            )
            yield f"searches = {searches}: {least}; give more, or leave {name} out of arms"
