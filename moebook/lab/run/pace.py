"""What a run will take on this machine: what it took where it is on record, by the pace of both.

``results/times.json`` has the CPU time of every notebook of the book and the `pace` of the machine
that executed it; ``python -m workshop.times`` measures both.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from moebook import storage
from moebook.errors import Refusal
from moebook.lab.run import sources
from moebook.lab.run.parameters import Parameter
from moebook.lab.run.sources import Notebook

RECORD = "times.json"
COMMANDS = {  # whose times are on record
    "book": "make book",
    "smoke": "make book TIER=smoke",
    "test": "make test",
    "soak": "make soak",
}
SAME = ("seed", "device")  # parameters that change no time on a CPU
LONG = 90  # seconds from which minutes are told


def pace(seconds: float = 1.0) -> float:
    """Measure how many steps of a small network this machine takes a second, over some seconds.

    A step is one of nano's FFNs over a batch, forward and backward, as most of the book's time is.
    No random state but its own is touched.
    """
    import torch

    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(1024, 128, generator=draw)
    up, down = (
        torch.randn(128, 384, generator=draw, requires_grad=True) for _ in range(2)
    )
    steps = 0
    start = time.perf_counter()
    while (spent := time.perf_counter() - start) < seconds:
        hidden = torch.nn.functional.silu(rows @ up)
        torch.autograd.grad((hidden @ down.T).square().mean(), (up, down))
        steps += 1
    return steps / spent


def expected(declared: Mapping[str, Parameter], given: Mapping[str, Any]) -> str | None:
    """Say what a notebook with these parameters will take here; None where nothing is known.

    It is found by the names of its parameters. Only times of a CPU are on record, and only of the
    tiers at which the book is executed. What cannot be read is not known: it stops no notebook.
    """
    import torch

    tier = given["tier"]
    try:
        folder = storage.root()  # there is none around somebody's own notebook
        notebook = _declaring(declared.keys(), folder)
        if notebook is None or torch.cuda.is_available():
            return None
        with storage.formed(_record(folder)):
            recorded = times(folder)
            spent = float(recorded["notebooks"][tier][notebook.name])
            steps = spent * float(recorded["pace"])
        usual = notebook.defaults | notebook.settings(tier)
    except Refusal:
        return None
    here = about(steps / pace())
    changed = [
        name for name in usual if name not in SAME and given[name] != usual[name]
    ]
    if not changed:
        return f"This will take {here} on this machine."
    names = ", ".join(changed)
    return f"At tier {tier} this takes {here} on this machine; here {names} differ."


def _declaring(names: Collection[str], folder: Path) -> Notebook | None:
    """Find the notebook that declares parameters of these names; None where several do."""
    every = sources.notebooks(folder).values()
    declaring = [one for one in every if one.parameters.keys() == {*names}]
    return declaring[0] if len(declaring) == 1 else None


def cost(notebook: str, tier: str, folder: Path) -> float:
    """Return the CPU seconds of a notebook at a tier that are on record; 0 where none are."""
    with storage.formed(_record(folder)):
        taken = times(folder).get("notebooks", {}).get(tier, {})
        return float(taken.get(notebook, 0.0))


def times(folder: Path) -> dict[str, Any]:
    """Read what was measured for a release; empty where nothing is on record."""
    path = _record(folder)
    return storage.read_json(path) if path.is_file() else {}


def _record(folder: Path) -> Path:
    return storage.part(folder, "results") / RECORD


def about(seconds: float) -> str:
    """Write a time that is not exact: ``about 40 seconds``, ``about 3 minutes``."""
    if seconds < LONG:
        return f"about {max(10, round(seconds, -1)):.0f} seconds"
    return f"about {round(seconds / 60)} minutes"
