"""Fill pools: each run in a process of its own, from a frozen copy of the commit.

A run that is in the pool is skipped, one that fails is reported while the others go on, and each is
kept as soon as it has ended: what was finished survives whatever ends the study.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from moebook import results
from moebook.errors import Refusal, nearest, refuse
from moebook.notebook import processes, publish, runner, sources
from moebook.notebook.processes import Job
from moebook.notebook.session import ALL, injected
from moebook.results import COMMITTED, Pool, Run

CODE = ("moebook", "notebooks", "_config.yml", "requirements.lock")
"""What a frozen copy holds."""

Ended = Generator[tuple[Job, Path | Refusal], None, None]


def seeds(text: str) -> list[int]:
    """Read ``0-9``, ``3`` or ``0-2,7``.

    Raises:
        Refusal: ``E-RANGE`` for anything else, a range that runs backwards, or a seed given twice.
    """
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,7})(?:-(\d{1,7}))?", part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            refuse("E-RANGE", f"--seeds {text}: '{part}'; expected rising numbers, as in 0-9 or 3")
        found += range(first, last + 1)
    if twice := [seed for seed in found if found.count(seed) > 1]:
        refuse("E-RANGE", f"--seeds {text} names seed {twice[0]} twice")
    return found


def study(
    name: str,
    protocol: str,
    wanted: Sequence[int],
    *,
    arms: str | None = None,
    jobs: int | None = None,
    engine: str = "local",
    folder: Path | None = None,
) -> int:
    """Execute the runs that a pool lacks, a progress line each; return how many failed.

    Args:
        name: Short name of the notebook, such as ``pesc``.
        protocol: One of its protocols whose tier is committed, such as ``nano``.
        wanted: Seeds.
        arms: Names with commas between them, or ``all``; the protocol's by default.
        jobs: Runs at a time; as many as there are cores by default. A cluster decides by itself.
        engine: ``local``, or ``ray`` for the cluster that this machine belongs to.
        folder: The project; found from the working directory by default.

    Raises:
        Refusal: ``E-TIER`` for a protocol that no pool is kept of, ``E-POOL`` for one that has
            changed since its runs, ``E-GIT`` without a commit to freeze, ``E-DEP`` or
            ``E-CLUSTER`` without Ray or a cluster; those of `sources.Notebook.settings`.
    """
    folder = folder or results.root()
    notebook = sources.find(folder, name)
    settings = notebook.settings(protocol)
    if settings["tier"] not in COMMITTED:
        known = ", ".join(
            p for p in notebook.protocols if notebook.settings(p)["tier"] in COMMITTED
        )
        refuse("E-TIER", f"no pool is kept of '{protocol}' (tier {settings['tier']}); use {known}")
    declared = {p.name: p.default for p in notebook.parameters.values()}
    kept = results.pool(name, protocol, folder)
    _check_design(kept, sources.design(declared | settings))
    asked = arms or str((declared | settings).get("arms", ""))
    todo = [job for seed in wanted for job in _jobs(name, protocol, seed, asked, declared, kept)]
    print(f"{name} at {protocol}: {len(wanted)} seeds, {len(todo)} to run", flush=True)
    if not todo:
        return 0
    copy, failed, start = freeze(folder), 0, time.monotonic()
    with closing(_local(todo, copy, jobs) if engine == "local" else _cluster(todo, copy)) as ended:
        for number, (job, outcome) in enumerate(ended, start=1):
            left = (time.monotonic() - start) / number * (len(todo) - number) / 60
            ahead = f"{number} of {len(todo)}" + (f", about {left:.0f} min left" if left else "")
            line, good = _take_in(outcome, copy, folder)
            failed += not good
            print(f"seed {job.overrides['seed']}: {line} ({ahead})", flush=True)
    return failed


def _check_design(kept: Pool | None, design: dict[str, Any]) -> None:
    """Refuse a protocol whose parameters are not those that its runs were made with."""
    then = kept.runs[0].settings if kept else {}
    for name in sorted(then.keys() & design.keys()):
        if kept and then[name] != design[name]:
            pair = f"{name} = {design[name]!r}, its runs were made with {then[name]!r}"
            refuse("E-POOL", f"protocol {kept.protocol} says {pair}; give it another name")


def _jobs(
    name: str, protocol: str, seed: int, arms: str, declared: dict[str, Any], kept: Pool | None
) -> list[Job]:
    """What is missing of one seed: a job, or none."""
    runs = [run for run in kept.runs if run.seed == seed] if kept else []
    have = {arm for run in runs for arm in run.arms}
    overrides: dict[str, Any] = {"seed": seed}
    if "arms" in declared:
        known = [arm for run in runs for arm in run.manifest.get("known_arms", run.arms)]
        asked = dict.fromkeys(known if arms == ALL else arms.split(","))
        overrides["arms"] = ",".join(a for a in asked if a not in have) if runs else arms
    elif arms:
        refuse("E-RANGE", f"{name} has no arms; leave --arms away")
    missing = not runs or overrides.get("arms")
    return [Job(name, protocol, overrides)] if missing else []


def _local(todo: Sequence[Job], copy: Path, jobs: int | None) -> Ended:
    """Execute jobs on this machine."""
    with processes.Processes() as started:
        yield from started.side_by_side(todo, copy, min(jobs or processes.cores(), len(todo)))


def _cluster(todo: Sequence[Job], copy: Path) -> Ended:
    """Execute jobs as tasks of the Ray cluster; one whose node dies is run again elsewhere."""
    try:
        import ray
    except ImportError:
        refuse("E-DEP", "--engine ray needs Ray: pip install 'moebook[cluster]'")
    environment = {"working_dir": str(copy), "excludes": ["runs"]}
    try:
        ray.init(address="auto", runtime_env=environment, log_to_driver=False, logging_level=40)
    except ConnectionError:
        refuse("E-CLUSTER", "no Ray cluster is running here; start one: ray start --head")
    try:
        task = ray.remote(num_cpus=1, max_retries=5)(_task)
        waiting = {task.remote(job): job for job in todo}
        while waiting:
            (done, *_), _ = ray.wait(list(waiting))
            job = waiting.pop(done)
            try:
                path = copy / "runs" / "cluster" / f"{job.overrides['seed']}.parquet"
                with results.replacing(path) as temporary:
                    temporary.write_bytes(ray.get(done))
                yield job, path
            except Refusal as refusal:
                yield job, Refusal(refusal.code, refusal.message)
            except ray.exceptions.RayError as error:
                yield job, Refusal("E-CLUSTER", str(error).strip().splitlines()[-1])
    finally:
        ray.shutdown()


def _task(job: Job) -> bytes:
    """What a task does on its node: the same process as `local`, in the copy that Ray brought."""
    with processes.Processes() as started:
        return started.execute(job, Path.cwd()).with_suffix(".parquet").read_bytes()


def _take_in(outcome: Path | Refusal, copy: Path, folder: Path) -> tuple[str, bool]:
    """Add a finished run to its pool; say in a line what became of it, and whether it is there."""
    try:
        if isinstance(outcome, Refusal):
            raise outcome
        run = results.read_run(outcome.with_suffix(".parquet"))
        path = add(run, folder)
    except Refusal as refusal:
        here = str(copy.relative_to(folder) / "runs" / "failed")
        return f"failed: {str(refusal).replace('runs/failed', here)}", False
    spent = run.manifest["seconds"]
    return f"{spent:.0f} s, {len(run.values)} values in {path.relative_to(folder)}", True


def add(run: Run, folder: Path) -> Path:
    """Put a run into its pool and return its file; one that does not belong there is refused.

    Raises:
        Refusal: ``E-POOL``, and the pool stays as it was.
    """
    kept = results.pool(run.notebook, run.protocol, folder)
    Pool(run.notebook, run.protocol, (*(kept.runs if kept else ()), run))
    place = folder / "results" / run.notebook / run.protocol
    path = place / f"{run.seed}.parquet"
    for part in range(2, 1000):
        if not path.exists():
            break
        path = place / f"{run.seed}.{part}.parquet"
    results.write_run(path, run)
    return path


def add_notebook(path: Path, folder: Path | None = None) -> tuple[Run, Path]:
    """Take in an executed notebook, such as plain papermill leaves it, as a run of its protocol.

    Raises:
        Refusal: ``E-NOFILE``, ``E-NOTEBOOK`` or ``E-RUN`` for a file that is no executed notebook
            of this project or does not say when it was executed, ``E-PROTOCOL`` for parameters that
            are no protocol's, ``E-POOL`` as in `add`.
    """
    folder = folder or results.root()
    run = read_notebook(path, folder)
    if "date" not in run.manifest:
        refuse("E-RUN", f"{path.name} does not say when it was executed; give papermill's output")
    notebook = sources.find(folder, run.notebook)
    declared = {p.name: p.default for p in notebook.parameters.values()}
    designs = {p: sources.design(declared | notebook.settings(p)) for p in notebook.protocols}
    fits = [p for p, design in designs.items() if design == run.settings]
    if not fits or run.tier not in COMMITTED:
        near = [p for p, design in designs.items() if design["tier"] == run.tier] or ["cpu"]
        other = designs.get(near[0], {})
        odd = [f"{k} = {v!r}, not {other.get(k)!r}" for k, v in run.settings.items()
               if other.get(k) != v] or [f"tier {run.tier} has no pool"]  # fmt: skip
        refuse("E-PROTOCOL", f"{path.name} is of no protocol; beside '{near[0]}' {odd[0]}")
    run = replace(run, protocol=fits[0])
    return run, add(run, folder)


def read_notebook(path: Path, folder: Path) -> Run:
    """Read an executed notebook as a run, protocol unknown (``mine``).

    Raises:
        Refusal: ``E-NOFILE``, ``E-NOTEBOOK``, ``E-PARAMETER`` or ``E-RUN`` as in `add_notebook`.
    """
    if not path.is_file():
        refuse("E-NOFILE", f"no file {path}; give an executed notebook, such as my_run.ipynb")
    beside = path.with_suffix(".parquet")  # as `moebook run` leaves it: it knows cost and day
    if beside.is_file():
        run = results.read_run(beside)
        if run.manifest.get("executed") == results.digest(path):
            return replace(run, protocol="mine")
    source = sources.read(path)
    executed = json.loads(path.read_text(encoding="utf-8"))
    if not all(map(_whole, executed["cells"])):
        refuse("E-NOTEBOOK", f"{path.name} has a cell without outputs; open and save it in Jupyter")
    values = publish.values(executed)
    if not values:
        refuse("E-RUN", f"{path.name} holds no recorded values; execute it first")
    name, known = values[0].name.split("/")[0], sources.notebooks(folder)
    if name not in known:
        refuse("E-NOTEBOOK", f"{path.name} records values of '{name}'; {nearest(name, known)}")
    given = {p.name: p.default for p in source.parameters.values()} | _injected(executed, path.name)
    lock = results.digest(folder / "requirements.lock")
    code = {"notebook": results.source(path), "lock": lock}
    cost = {**runner.seconds(executed), "peak_memory": None}
    manifest = {"parameters": given, "overrides": {}, **cost, **_when(executed)}
    return runner.harvest(executed, name, "mine", given, code, manifest)


def _when(executed: Any) -> dict[str, Any]:
    """The date on which papermill ended a notebook, where it did."""
    date = executed.get("metadata", {}).get("papermill", {}).get("end_time")
    return {"date": date} if date else {}


def _whole(cell: Any) -> bool:
    """Whether a cell has what a notebook's format asks of it and is read here."""
    outputs = cell.get("outputs") if cell.get("cell_type") == "code" else []
    return (
        {"cell_type", "source"} <= set(cell)
        and isinstance(cell.get("metadata", {}), dict)
        and isinstance(outputs, list)
        and all(isinstance(o, dict) and isinstance(o.get("data", {}), dict) for o in outputs)
    )


def _injected(executed: Any, where: str) -> dict[str, Any]:
    """What papermill set: its cell is tagged, also in copies whose other metadata are gone."""
    tagged = [
        cell for cell in executed["cells"]
        if "injected-parameters" in cell.get("metadata", {}).get("tags", [])
    ]  # fmt: skip
    if not tagged:
        return {}
    try:
        return injected("".join(tagged[-1]["source"]))
    except (SyntaxError, ValueError) as error:
        refuse("E-PARAMETER", f"{where}: the injected cell is not name = value lines ({error})")


def freeze(folder: Path) -> Path:
    """Export the commit into ``runs/frozen/<commit>``, once, and return that folder.

    So one can go on writing while runs take hours. What is not committed is not part of it, which
    is said.
    """
    commit = results.commit(folder)
    if commit is None:
        refuse("E-GIT", f"{folder} has no git commit to freeze; a study runs committed code")
    if commit["dirty"]:
        print("uncommitted changes of the code are not part of this study", flush=True)
    place: Path = folder / "runs" / "frozen" / commit["id"][:12]
    if place.is_dir():
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent) as temporary:
        tree = ["git", "-C", str(folder), "archive", commit["id"], "--"]
        names = [name for name in CODE if (folder / name).exists()]
        archive = subprocess.run([*tree, *names], capture_output=True, check=False)
        if archive.returncode:
            refuse("E-GIT", f"git archive: {archive.stderr.decode().strip()}")
        (Path(temporary) / "code.tar").write_bytes(archive.stdout)
        shutil.unpack_archive(Path(temporary) / "code.tar", Path(temporary) / "code", filter="data")
        results.write(Path(temporary) / "code" / results.FROZEN, commit["id"])
        with suppress(OSError):  # another study of this commit was faster
            os.rename(Path(temporary) / "code", place)
    return place
