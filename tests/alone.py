"""Run the pages "On your own model" as in an installation of the core alone; run as a program.

Every module of a distribution that the core's dependencies do not bring is hidden, for other
packages too. What needs an extra then has to say so in one line, which this prints.
"""

import importlib
import pkgutil
import sys
import tomllib
import warnings
from contextlib import redirect_stderr
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))[
    "project"
]
OWN = ("moebook", "tests", "recipes", "workshop")


def core() -> set[str]:
    """Return the names of all distributions that the core asks for, directly or through others."""
    found: set[str] = set()
    waiting = [Requirement(text) for text in PROJECT["dependencies"]]
    while waiting:
        need = waiting.pop()
        name = canonicalize_name(need.name)
        if name in found or (need.marker and not need.marker.evaluate({"extra": ""})):
            continue
        try:
            waiting += [Requirement(text) for text in metadata.requires(name) or []]
        except metadata.PackageNotFoundError:  # torch's libraries of another build
            continue
        found.add(name)
    return found


def others(kept: set[str]) -> set[str]:
    """Return the modules of all other distributions."""
    modules = metadata.packages_distributions().items()
    names = set()
    for module, owners in modules:
        if not {canonicalize_name(owner) for owner in owners} & kept:
            names.add(module)
    return names - set(OWN)


class Without:
    """A finder of modules that does not find some."""

    def __init__(self, finder, hidden: set[str]) -> None:
        self.finder = finder
        self.hidden = hidden

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        """Find a module that is not hidden."""
        if name.partition(".")[0] in self.hidden:
            return None
        return self.finder.find_spec(name, path, target)


def told(call, *given, **named) -> None:
    """Print what a call is refused with."""
    from moebook.errors import Refusal

    try:
        call(*given, **named)
    except Refusal as refusal:
        print(refusal)


def main() -> None:
    """Import the core, run the pages, ask for what is not there."""
    hidden = others(core())
    sys.meta_path[:] = [Without(finder, hidden) for finder in sys.meta_path]
    warnings.simplefilter("ignore")
    import moebook

    for module in pkgutil.walk_packages(moebook.__path__, "moebook.", onerror=print):
        name = module.name
        optional = name in ("moebook.evaluation.harness", "moebook.evaluation.code")
        optional = optional or name == "moebook.evaluation.judge" or "_triton" in name
        if not optional and (
            not name.startswith("moebook.lab")
            or name.startswith("moebook.lab.planning")
        ):
            importlib.import_module(name)

    from tests.book import own

    for page in own.PAGES:
        told(own.run, page)

    import torch

    from moebook import cli, models
    from moebook.analysis import clusters
    from moebook.data import tasks
    from moebook.methods import pesc
    from moebook.methods.rivals import lorahub

    with redirect_stderr(sys.stdout):
        assert cli.main(["doctor"]) == 2
    for name in ("moebook.lab.plotting", "moebook.evaluation.judge"):
        told(importlib.import_module, name)
    told(clusters.project, torch.randn(1, 40, 3), "umap")
    told(tasks.rows, "numbers_es", "test", 1)
    told(
        pesc.prepare, models.load("my-model")[0], pesc.Config(host="qlora", lora_rank=4)
    )
    told(lorahub.search, lambda weights: 0.0, 2, lorahub.Config(optimiser="cma"))


if __name__ == "__main__":
    main()
