"""How long the commands of the README take: ``python -m workshop.times`` in a checkout.

It runs each three times, one after the other, in fresh clones that share our ``.venv``: no time to
install the libraries is measured. The medians go to ``results/times.json``, which README, pages and
notebooks (`moebook.lab.run.pace`) read. Name some of them to measure those alone: ``book``,
``smoke``, ``test``, ``soak``. Nothing else may run meanwhile.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import moebook
from moebook import errors, runtime, storage
from moebook.errors import Refusal, refuse, refuse_unknown
from moebook.lab import records
from moebook.lab.run import children, pace

TIERS = {"book": "cpu", "smoke": "smoke"}  # at which a command executes the notebooks
RUNS = 3  # of each command, whose medians are kept
QUIET = 0.3  # mean number of other programs at work from which nothing is measured


def measure(name: str, folder: Path) -> dict[str, Any]:
    """Run a command in a fresh clone with our ``.venv``; return its time, and each notebook's."""
    with tempfile.TemporaryDirectory() as place:
        clone = Path(place) / "moebook"
        subprocess.run(["git", "clone", "-q", str(folder), str(clone)], check=True)
        (clone / ".venv").symlink_to(folder / ".venv")
        environment = os.environ | {"PYTHONPATH": str(clone)}
        before = spent()
        start = time.perf_counter()
        command = pace.COMMANDS[name]
        done = subprocess.run(command.split(), cwd=clone, env=environment, check=False)
        found: dict[str, Any] = {
            "wall": time.perf_counter() - start,
            "cpu": spent() - before,
        }
        if done.returncode:
            refuse("E-TIMES", f"{command} ended with status {done.returncode}")
        pages = sorted((clone / "book" / "notebooks").glob("*.parquet"))
        runs = [records.runs.read_head(path) for path in pages]
        found["notebooks"] = {run.notebook: run.manifest["cpu_seconds"] for run in runs}
    return found


def spent() -> float:
    """Return the CPU time of all processes that we started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main(names: list[str], folder: Path) -> Path:
    """Measure commands and write the record; that of another release or machine is dropped.

    A notebook's time counts by the pace of its machine: it is measured with the notebooks.
    """
    busy = os.getloadavg()[0]
    if busy > QUIET:
        refuse(
            "E-TIMES",
            f"{busy:.1f} programs are at work here: they would be measured too",
        )
    path = folder / "results" / pace.RECORD
    told = pace.times(folder)
    here = {"version": moebook.__version__, "machine": machine()}
    if any(told.get(name) != fact for name, fact in here.items()):
        told = {**here, "commands": {}, "notebooks": {}}
    for name in names:
        runs = [measure(name, folder) for _ in range(RUNS)]
        if name in TIERS:
            told["pace"] = measured_pace(folder)
            told["notebooks"][TIERS[name]] = medians([run["notebooks"] for run in runs])
        told["commands"][name] = {
            "wall": statistics.median(run["wall"] for run in runs),
            "cpu": statistics.median(run["cpu"] for run in runs),
            "walls": [run["wall"] for run in runs],
            "date": datetime.now(UTC).date().isoformat(),
            "commit": storage.commit(folder),
        }
        storage.write(path, json.dumps(told, indent=1) + "\n")
    return path


def machine() -> dict[str, Any]:
    """Say what the times of a machine depend on."""
    facts = runtime.environment()
    return {part: facts[part] for part in ("cpu", "cores", "memory", "system")}


def medians(runs: list[dict[str, float]]) -> dict[str, float]:
    """Return the median time of each notebook over runs of one command."""
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def measured_pace(folder: Path) -> float:
    """Measure this machine in a process of one thread, as notebooks of the book have."""
    code = "from moebook.lab.run import pace; print(pace.pace(5.0))"
    with children.lifeline() as (waiting, _):
        return float(children.run(code, folder=folder, waiting=waiting)[-1])


if __name__ == "__main__":
    try:
        for name in sys.argv[1:]:
            refuse_unknown(name, pace.COMMANDS, "E-USAGE", f"unknown '{name}':")
        print(main(sys.argv[1:] or list(pace.COMMANDS), storage.checkout()))
    except (Refusal, OSError) as error:
        print(errors.told(error), file=sys.stderr)
        sys.exit(2)
