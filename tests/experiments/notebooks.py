"""The parameters of the project's notebooks, as a run has them."""

from functools import cache
from pathlib import Path

from moebook.lab.run import parameters, sources

ROOT = Path(__file__).resolve().parents[2]


@cache
def notebook(name):
    """Read a notebook of the project, once."""
    return sources.find(ROOT, name)


def given(name, protocol="smoke", **changes):
    """Return the parameters of a notebook at a protocol, with some changed."""
    # Rates are read again by experiments, wherever the parameters come from.
    declared = {one: value for one, value in changes.items() if one != "rates"}
    parameters.check(notebook(name).parameters, declared, "-p")
    return notebook(name).defaults | notebook(name).settings(protocol) | changes
