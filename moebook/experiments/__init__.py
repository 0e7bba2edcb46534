"""Experiments: what each notebook compares, as data; checked, tuned, trained and recorded alike.

``ARMS`` of an experiment's module -> `check` -> `Experiment` -> ``choose_rates`` -> ``run``.
"""

from collections.abc import Callable, Mapping
from typing import Any

from moebook.experiments import (
    banks,
    budgets,
    contest,
    crafts,
    esft,
    pesc,
    pipeline,
    rivals,
    rocket,
    router_init,
    specialists,
    targets,
    together,
)
from moebook.experiments.arm import Arm, asked, described
from moebook.experiments.experiment import Experiment, Recorder, Result, Rows
from moebook.experiments.rates import Rates

CHECKS: dict[str, Callable[[Mapping[str, Any]], Mapping[str, Any]]] = {
    "pesc": pesc.check,
    "router_init": router_init.check,
    "rocket": rocket.check,
    "esft": esft.check,
    "rivals": rivals.check,
    "together": together.check,
    "banks": banks.check,
}
"""Notebook to what refuses, before any work, parameters with which its arms cannot run."""


def check(notebook: str, settings: Mapping[str, Any]) -> None:
    """Refuse parameters with which arms that a notebook is asked for cannot run (E-RANGE)."""
    CHECKS[notebook](settings)
