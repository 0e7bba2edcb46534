"""What needs an accelerator: each call runs a part of it and goes on where the last one stopped.

``gpu.yaml`` lists the steps and their commands. What ended well is not run again, what ran out of
time goes on in the next call, what failed comes again after all others. Records are written to
``results/gpu/<step>.json``, on a CPU to ``runs/gpu/``; a step without its file runs anew.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from moebook import runtime, storage
from moebook.errors import Refusal, refuse
from moebook.lab.pages import pages

MODULES = {
    "moebook": "moebook.cli",
    "pytest": "pytest",  # what a command's first word runs
    "accelerate": "accelerate.commands.accelerate_cli",
}
GRACE = 20  # seconds that a command has to end when its time is up
LEAST = 10  # seconds left under which none is started


def main(arguments: Sequence[str] | None = None) -> int:
    """Run commands until the time is up; 0 when all are done, 1 when some are left, 2 refused."""
    parser = argparse.ArgumentParser(prog="python -m recipes.gpu")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument(
        "--minutes", type=float, default=9, help="that this call may take"
    )
    parser.add_argument("--list", action="store_true", help="say what has run on a GPU")
    options = parser.parse_args(arguments)
    try:
        folder = storage.root()
        if options.list:
            print(pages.accelerated(folder), end="")
            return 0
        least = (GRACE + LEAST) / 60
        if not options.minutes > least:
            why = f"a command gets {LEAST} s at least, and {GRACE} s to end"
            expected = f"expected more than {least:g}: {why}"
            refuse("E-USAGE", f"--minutes {options.minutes:g}: {expected}")
        runtime.resolve_device(options.device)
        with storage.locked(folder / "runs" / "gpu.lock"):
            return _run(
                folder, options.device, time.monotonic() + 60 * options.minutes - GRACE
            )
    except Refusal as refusal:
        print(refusal, file=sys.stderr)
        return 2


def _run(folder: Path, device: str, end: float) -> int:
    """Run what is not done, in order, until a time; return 1 if anything is left."""
    place = folder / ("runs" if device == "cpu" else "results") / "gpu"
    for name, command, code in todo(folder, device, place):
        left = end - time.monotonic()
        if left < LEAST:
            break
        print(f"{name}: {command}", flush=True)
        facts = _here(folder, device) | {"code": storage.files.code(folder / code)}
        start = time.monotonic()
        facts["exit"] = attempt(command, device, left)
        facts["seconds"] = time.monotonic() - start
        print(f"{name}: {keep(place / f'{name}.json', command, facts)}", flush=True)
    rest = len(todo(folder, device, place))
    print(f"{rest} commands are left")
    return min(rest, 1)


def todo(folder: Path, device: str, place: Path) -> list[tuple[str, str, str]]:
    """List step, command and code of what has not ended well; last what failed or starts anew."""
    left = []
    for name, step in storage.read_yaml(folder / "recipes" / "gpu.yaml").items():
        told = _told(place / f"{name}.json")
        for command in step.get("on_cpu" if device == "cpu" else "", step["commands"]):
            ended = told.get(command, {}).get("exit")
            if ended != 0:
                behind = command in told and (
                    ended is not None or "start" in step["goes_on"]
                )
                left.append((behind, (name, command, step["code"])))
    return [each for _, each in sorted(left, key=lambda pair: pair[0])]


def attempt(command: str, device: str, seconds: float) -> int | None:
    """Run a command for so long; return its exit status, None when it was stopped."""
    first, *rest = shlex.split(command)
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    words = [sys.executable, "-m", MODULES[first], *rest]
    with subprocess.Popen(words, env=os.environ | hidden) as process:
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.terminate()  # our commands then end what they started
            try:
                process.wait(GRACE)
            except subprocess.TimeoutExpired:
                pass  # it ends by the next line
            finally:
                process.kill()
            return None


def keep(path: Path, command: str, facts: dict[str, Any]) -> str:
    """Put what became of a command into its step's record, seconds of all calls; say it."""
    told = _told(path)
    facts["seconds"] = round(
        facts["seconds"] + told.get(command, {}).get("seconds", 0), 1
    )
    storage.write(
        path, json.dumps(told | {command: facts}, indent=1, sort_keys=True) + "\n"
    )
    became = {0: "done", None: "stopped, to be continued"}
    return f"{became.get(facts['exit'], 'failed')}, {facts['seconds']} s in all"


def _told(path: Path) -> dict[str, Any]:
    return storage.read_json(path) if path.is_file() else {}


def _here(folder: Path, device: str) -> dict[str, Any]:
    machine = runtime.environment()
    return {
        "device": machine["cpu"] if device == "cpu" else machine["accelerator"],
        "torch": machine["versions"]["torch"],
        "commit": storage.commit(folder),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


if __name__ == "__main__":
    sys.exit(main())
