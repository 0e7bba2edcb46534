"""Experiments: what each notebook compares, as data; checked, tuned, trained and recorded alike.

``ARMS`` of an experiment's module -> `check` -> `Experiment` -> ``choose_rates`` -> ``run``.
"""

from collections.abc import Mapping
from typing import Any

from moebook.experiments import pesc, router_init
from moebook.experiments.arm import Arm, asked
from moebook.experiments.experiment import Experiment, Recorder, Result, Rows
from moebook.experiments.rates import Rates

CHECKS = {"pesc": pesc.check, "router_init": router_init.check}
"""Notebook to what refuses, before any work, parameters with which its arms cannot run."""


def check(notebook: str, settings: Mapping[str, Any]) -> None:
    """Refuse parameters with which arms that a notebook is asked for cannot run (E-RANGE)."""
    CHECKS[notebook](settings)
