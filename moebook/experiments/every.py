"""Every arm of every notebook: its name, and what it is in one line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moebook import experiments


def arms(defaults: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """Return what each arm is, by notebook, of which ``defaults`` are the parameters."""
    rocket = defaults["rocket"]
    mixtures = experiments.rocket.arms(
        experiments.rocket.main(rocket), strict=rocket["strict"]
    )
    rivals = experiments.rivals.known(defaults["rivals"])
    specialists = experiments.esft.known(defaults["esft"])
    combined = [
        *experiments.together.arms(sparse=False),
        *experiments.together.arms(sparse=True),
    ]
    start = experiments.router_init.ARMS
    return {
        "pesc": {name: arm.what for name, arm in experiments.pesc.ARMS.items()},
        "router_init": {name: arm.what for name, arm in start.items()},
        "rocket": experiments.targets.what(mixtures),
        "banks": dict(experiments.banks.WHAT),
        "rivals": experiments.contest.what(rivals),
        "esft": experiments.specialists.what(specialists),
        "together": {name: experiments.budgets.WHAT[name] for name in combined},
    }
