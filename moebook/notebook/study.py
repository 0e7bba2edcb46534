"""Fill pools: each run in a process of its own with one thread, from a frozen copy of the commit.

A run that is in the pool is skipped, one that fails is reported while the others go on, and each is
kept as soon as it has ended: what was finished survives whatever ends the study.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from moebook import cluster, results, runtime
from moebook.errors import Refusal, placed, refuse, told
from moebook.lists import ALL
from moebook.notebook import children, parameters, sources
from moebook.notebook.parameters import Scalar
from moebook.notebook.publish import read_notebook
from moebook.notebook.runner import check_device, run_notebook
from moebook.notebook.sources import Notebook
from moebook.results import Run, store
from moebook.results.store import CLASS, COMMITTED, Pool

CODE = ("moebook", "notebooks", "results/banks", "_config.yml", "requirements.lock")  # is frozen
CHILD = "from moebook.notebook import study; study.child()"
MOST = 1000  # seeds in one call
PLANNED = ("pesc", "router_init", "rocket", "esft", "rivals", "together")  # `plans` know their arms
LOOK = 5.0  # seconds without a run that ended, after which the cluster's nodes are looked at


@dataclass(frozen=True)
class Job:
    """One run to execute: a notebook under a protocol, with parameters that go before its own."""

    notebook: str
    protocol: str
    overrides: Mapping[str, Scalar] = field(default_factory=dict)


Outcome = Path | Refusal  # the executed notebook, or why there is none
Ended = Generator[tuple[Job, Outcome], None, None]


def side_by_side(
    jobs: Sequence[Job], folder: Path, workers: int, places: Mapping[str, str | None] | None = None
) -> Ended:
    """Execute jobs with the code of a project, so many at a time; yield each as it ends.

    However this process ends, they end as well. Where ``places`` has a notebook's name, the run and
    its kernel are forks of the process that listens there (`warm`).
    """
    with children.lifeline() as (waiting, end), ThreadPoolExecutor(workers) as threads:
        futures = {}
        for job in jobs:
            place = (places or {}).get(job.notebook)
            futures[threads.submit(_execute, job, folder, waiting, place)] = job
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
            end()


def _execute(job: Job, folder: Path, waiting: int, place: str | None) -> Outcome:
    try:
        told = json.dumps(vars(job))
        printed = children.run(CHILD, told, folder=folder, waiting=waiting, place=place)
        return Path(printed[-1])
    except Refusal as refusal:
        return refusal


def child() -> None:
    """Execute the job that the command line holds, and print the path of its notebook."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    job = Job(**json.loads(sys.argv[-1]))
    try:
        outcome = run_notebook(job.notebook, job.protocol, job.overrides, folder=Path.cwd())
    except Exception as error:
        print(told(error), file=sys.stderr)
        sys.exit(2)
    if outcome:
        print(outcome.notebook)


def seeds(text: str) -> list[int]:
    """Read ``0-9``, ``3`` or ``0-2,7``; anything else is refused (E-RANGE)."""
    spans = list[range]()
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            refuse("E-RANGE", f"--seeds {text}: '{part}'; expected rising numbers, as in 0-9 or 3")
        spans.append(range(first, last + 1))
    count = sum(map(len, spans))
    if count > MOST:
        reason = f"expected at most {MOST:,} a call, since each is a run of its own, of minutes"
        refuse("E-RANGE", f"--seeds {text} names {count:,} seeds; {reason} or hours")
    numbers = [seed for span in spans for seed in span]
    if twice := [seed for seed in numbers if numbers.count(seed) > 1]:
        refuse("E-RANGE", f"--seeds {text} names seed {twice[0]} twice")
    return numbers


def study(
    name: str, protocol: str, wanted: Sequence[int], *, folder: Path,
    arms: str | None = None, jobs: int | None = None, engine: str = "local", gpus: float = 0,
) -> int:  # fmt: skip
    """Execute the runs that a pool lacks, a progress line each; return how many failed.

    ``arms`` are names with commas between them, or ``all`` (default: the protocol's). ``jobs`` runs
    go at a time (default: cores); the ``engine`` is ``local``, or ``ray`` for the cluster here,
    which gives each run a CPU and so many ``gpus``.
    """
    notebook = sources.find(folder, name)
    tier = notebook.settings(protocol)["tier"]
    kept = [p for p in notebook.protocols
            if p == CLASS or notebook.settings(p)["tier"] in COMMITTED]  # fmt: skip
    if protocol not in kept:
        refuse("E-TIER", f"no pool is kept of '{protocol}' (tier {tier}); use {', '.join(kept)}")
    if pool := store.pool(name, protocol, folder):
        notebook.agrees(pool)
    default = (notebook.defaults | notebook.settings(protocol)).get("arms")
    if arms and default is None:
        refuse("E-RANGE", f"{name} has no arms; leave --arms away")
    asked = None if default is None else arms or str(default)
    every = [_lacking(seed, asked, pool) for seed in wanted]
    todo = [Job(name, protocol, overrides) for overrides in every if overrides]
    _check(notebook, protocol, todo, engine)
    print(f"{name} at {protocol}: {len(wanted)} seeds, {len(todo)} to run", flush=True)
    return _run_all(todo, engine, jobs, gpus, folder) if todo else 0


def _check(notebook: Notebook, protocol: str, todo: Sequence[Job], engine: str) -> None:
    """Refuse at once, before a commit is frozen, what every run would be refused for."""
    for job in todo:
        parameters.check(notebook.parameters, job.overrides, f"{notebook.name} at {protocol}")
    settings = notebook.defaults | notebook.settings(protocol)
    if engine == "local":  # a cluster's nodes may have other devices
        check_device(settings)
    if notebook.name in PLANNED:
        from moebook.notebook import plans  # with torch and all methods

        for asked in {str(job.overrides["arms"]) for job in todo}:
            plans.check_arms(notebook.name, settings | {"arms": asked})


def _lacking(seed: int, arms: str | None, pool: Pool | None) -> dict[str, Any]:
    """Return the overrides of the run that is missing of a seed; empty where none is."""
    runs = [run for run in pool.runs if run.seed == seed] if pool else []
    if arms is None or not runs:
        return {} if runs else {"seed": seed} | ({} if arms is None else {"arms": arms})
    have = {arm for run in runs for arm in run.arms}
    known = [arm for run in runs for arm in run.manifest.get("known_arms", run.arms)]
    asked = dict.fromkeys(known if arms == ALL else arms.split(","))
    rest = ",".join(arm for arm in asked if arm not in have)
    return {"seed": seed, "arms": rest} if rest else {}


def _run_all(todo: Sequence[Job], engine: str, jobs: int | None, gpus: float, folder: Path) -> int:
    """Execute jobs, add each run to its pool, a progress line each; return how many failed."""
    copy, failed, start = freeze(folder), 0, time.monotonic()
    workers = min(jobs or runtime.cores(), len(todo))
    running = side_by_side(todo, copy, workers) if engine == "local" else _on_ray(todo, copy, gpus)
    with closing(running) as ended:
        for number, (job, outcome) in enumerate(ended, start=1):
            left = (time.monotonic() - start) / number * (len(todo) - number) / 60
            ahead = f"{number} of {len(todo)}" + (f", about {left:.0f} min left" if left else "")
            line, good = _take_in(outcome, copy, folder)
            failed += not good
            print(f"seed {job.overrides['seed']}: {line} ({ahead})", flush=True)
    return failed


def _on_ray(todo: Sequence[Job], copy: Path, gpus: float) -> Ended:
    """Execute jobs as tasks of the Ray cluster; one whose node dies is run again elsewhere.

    Ray names a task's GPUs in ``CUDA_VISIBLE_DEVICES``. Where no node is left that could run them,
    the jobs that are left fail.
    """
    with cluster.joined(gpus, working_dir=str(copy), excludes=["runs"]) as ray:
        task = ray.remote(num_cpus=1, num_gpus=gpus or None, max_retries=5)(_task)
        waiting = {task.remote(job): job for job in todo}
        while waiting:
            done, _ = ray.wait(list(waiting), timeout=LOOK)
            if not done and (lack := cluster.lacking(ray, gpus)):  # nodes have gone
                yield from ((job, Refusal("E-CLUSTER", lack)) for job in waiting.values())
                return
            for each in done:
                job = waiting.pop(each)
                try:
                    path = copy / "runs" / "cluster" / f"{job.overrides['seed']}.parquet"
                    results.write(path, ray.get(each))
                    yield job, path
                except Refusal as refusal:
                    yield job, Refusal(refusal.code, refusal.message)
                except ray.exceptions.RayError as error:
                    yield job, Refusal("E-CLUSTER", str(error).strip().splitlines()[-1])


def _task(job: Job) -> bytes:
    """What a task does on its node: the same process as here, in the copy that Ray brought."""
    ((_, outcome),) = side_by_side([job], Path.cwd(), 1)
    if isinstance(outcome, Refusal):
        raise outcome
    return outcome.with_suffix(".parquet").read_bytes()


def _take_in(outcome: Outcome, copy: Path, folder: Path) -> tuple[str, bool]:
    """Add a finished run to its pool; say in a line what became of it, and whether it is there."""
    try:
        if isinstance(outcome, Refusal):
            raise outcome
        run = results.read_run(outcome.with_suffix(".parquet"))
        path = add(run, folder)
    except Exception as error:  # whatever it is, the other runs go on
        here = str(copy.relative_to(folder) / "runs" / "failed")
        return f"failed: {str(told(error)).replace('runs/failed', here)}", False
    spent = run.manifest["seconds"]
    return f"{spent:.0f} s, {len(run.values)} values in {path.relative_to(folder)}", True


def add(run: Run, folder: Path) -> Path:
    """Put a run into its pool and return its file; one that does not belong there is refused."""
    place = folder / "results" / run.notebook / run.protocol
    with results.locked(folder / "runs" / f"{run.notebook}-{run.protocol}.lock", wait=True):
        results.sweep(place)
        pool = store.pool(run.notebook, run.protocol, folder)
        Pool(run.notebook, run.protocol, (*(pool.runs if pool else ()), run))
        names = [f"{run.seed}.parquet", *(f"{run.seed}.{part}.parquet" for part in range(2, 1000))]
        path = next(place / name for name in names if not (place / name).exists())
        store.keep(run, path, folder)
    return path


def add_notebook(path: Path, folder: Path) -> tuple[Run, Path]:
    """Take in an executed notebook, such as plain papermill leaves it, as a run of its protocol."""
    run = read_notebook(path, folder)
    if "date" not in run.manifest:
        refuse("E-RUN", f"{path.name} does not say when it was executed; give papermill's output")
    notebook = sources.find(folder, run.notebook)
    designs = {protocol: notebook.design(protocol) for protocol in notebook.protocols}
    fits = [p for p, design in designs.items() if design == run.settings]
    if not fits or run.tier not in COMMITTED:
        near = [p for p, design in designs.items() if design["tier"] == run.tier] or ["cpu"]
        other = designs.get(near[0], {})
        odd = [f"{k} = {v!r}, not {other.get(k)!r}" for k, v in run.settings.items()
               if other.get(k) != v] or [f"tier {run.tier} has no pool"]  # fmt: skip
        refuse("E-PROTOCOL", f"{path.name} is of no protocol; beside '{near[0]}' {odd[0]}")
    run = replace(run, protocol=fits[0])
    return run, add(run, folder)


def freeze(folder: Path) -> Path:
    """Export the commit into ``runs/frozen/<commit>``, so that one can go on writing meanwhile."""
    commit = results.commit(folder)
    if commit is None:
        refuse("E-GIT", f"{folder} has no git commit to freeze; a study runs committed code")
    if (folder / results.files.FROZEN).is_file():
        return folder  # a frozen copy itself
    if commit["dirty"]:
        print("uncommitted changes of the code are not part of this study", flush=True)
    place: Path = folder / "runs" / "frozen" / commit["id"][:12]
    with results.locked(place.with_name("frozen.lock"), wait=True):
        for left in place.parent.glob(".stage-*"):  # by a study that was killed
            shutil.rmtree(left)
        if place.is_dir():
            return place
        with tempfile.TemporaryDirectory(prefix=".stage-", dir=place.parent) as temporary:
            code = Path(temporary) / "code"
            with placed(place):
                _export(folder, commit["id"], code)
            results.write(code / results.files.FROZEN, commit["id"])
            code.rename(place)
    return place


def _export(folder: Path, commit: str, code: Path) -> None:
    """Write a commit's files, as git gives them, into a new folder."""
    names = [name for name in CODE if (folder / name).exists()]
    command = ["git", "-C", str(folder), "archive", commit, "--", *names]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as git:
        assert git.stdout and git.stderr  # for mypy: they are pipes
        damage = ""
        try:
            with tarfile.open(fileobj=git.stdout, mode="r|") as archive:
                archive.extractall(code, filter="data")
        except tarfile.TarError as error:  # also where git ended early, and says why itself
            damage = str(error)
        git.stdout.close()
        said = git.stderr.read().decode(errors="replace").strip()
    if git.returncode or damage:
        refuse("E-GIT", f"git archive: {said or damage or f'it {children.ending(git.returncode)}'}")
