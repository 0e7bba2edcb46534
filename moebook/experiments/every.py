"""Every arm of every notebook: its name, and what it is in one line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moebook.experiments import (
    banks,
    budgets,
    contest,
    esft,
    pesc,
    rivals,
    rocket,
    router_init,
    specialists,
    targets,
    together,
)


def arms(defaults: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """Return what each arm is, by notebook, of which ``defaults`` are the parameters."""
    of_rocket = defaults["rocket"]
    mixtures = rocket.arms(rocket.main(of_rocket), strict=of_rocket["strict"])
    combined = [
        *together.arms(sparse=False),
        *together.arms(sparse=True),
    ]
    return {
        "pesc": {name: arm.what for name, arm in pesc.ARMS.items()},
        "router_init": {name: arm.what for name, arm in router_init.ARMS.items()},
        "rocket": targets.what(mixtures),
        "banks": dict(banks.WHAT),
        "rivals": contest.what(rivals.known(defaults["rivals"])),
        "esft": specialists.what(esft.known(defaults["esft"])),
        "together": {name: budgets.WHAT[name] for name in combined},
    }
