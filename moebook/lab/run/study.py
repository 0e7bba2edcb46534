"""Fill pools: each run in a process of its own with one thread, from a frozen copy of the commit.

A run that is in the pool is skipped, one that fails is reported while the others go on,
and each is kept as soon as it has ended: what was finished survives whatever ends the
study.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from moebook import cluster, lists, runtime, storage
from moebook.errors import Refusal, placed, refuse, told
from moebook.lab import records
from moebook.lab.records import Run, Value, store
from moebook.lab.records.runs import packed
from moebook.lab.records.store import CLASS, COMMITTED, Pool
from moebook.lab.run import children, parameters, sources
from moebook.lab.run.parameters import Scalar
from moebook.lab.run.publish import read_notebook
from moebook.lab.run.runner import check_device, run_notebook
from moebook.lab.run.sources import Notebook
from moebook.lists import ALL

# What a study freezes.
CODE = (
    "moebook",
    "notebooks",
    "results/banks",
    "_config.yml",
    "requirements.lock",
)
# Notebooks whose arms `experiments` knows.
PLANNED = (
    "pesc",
    "router_init",
    "rocket",
    "esft",
    "rivals",
    "together",
    "banks",
)
# At the top of a frozen copy: the hash of its files, as they were exported.
SEAL = ".seal"
CHILD = "from moebook.lab.run import study; study.child()"
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
    jobs: Sequence[Job],
    folder: Path,
    workers: int,
    places: Mapping[str, str | None] | None = None,
) -> Ended:
    """Execute jobs with the code of a project, so many at a time; yield each as it ends.

    However this process ends, they end as well. Where ``places`` has a notebook's name,
    the run and its kernel are forks of the process that listens there (`warm`).
    """
    if places is None:
        places = {}
    with children.lifeline() as (waiting, end), ThreadPoolExecutor(workers) as threads:
        futures = {}
        for job in jobs:
            place = places.get(job.notebook)
            futures[threads.submit(_execute, job, folder, waiting, place)] = job
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
            end()


def _execute(job: Job, folder: Path, waiting: int, place: str | None) -> Outcome:
    try:
        text = json.dumps(vars(job))
        printed = children.run(CHILD, text, folder=folder, waiting=waiting, place=place)
        return Path(printed[-1])
    except Refusal as refusal:
        return refusal


def child() -> None:
    """Execute the job that the command line holds, and print the path of its notebook."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    job = Job(**json.loads(sys.argv[-1]))
    try:
        outcome = run_notebook(
            job.notebook, job.protocol, job.overrides, folder=Path.cwd()
        )
    except Exception as error:
        print(told(error), file=sys.stderr)
        sys.exit(2)
    if outcome:
        print(outcome.notebook)


def study(
    name: str,
    protocol: str,
    wanted: Sequence[int],
    *,
    folder: Path,
    arms: str | None = None,
    jobs: int | None = None,
    engine: str = "local",
    gpus: float = 0,
) -> int:
    """Execute the runs that a pool lacks, a progress line each; return how many failed.

    ``arms`` are names with commas between them, or ``all`` (default: the protocol's).
    ``jobs`` runs go at a time (default: cores); the ``engine`` is ``local``, or ``ray``
    for the cluster here, which gives each run a CPU and so many ``gpus``.
    """
    notebook = sources.find(folder, name)
    pool = _pool(notebook, protocol, folder)
    default = (notebook.defaults | notebook.settings(protocol)).get("arms")
    if arms and default is None:
        refuse("E-RANGE", f"{name} has no arms; leave --arms away")
    if arms is not None:
        arms = lists.tight(arms)
        parts = arms.split(",")
        if not any(parts):
            refuse("E-RANGE", f"--arms {arms!r}: name one arm at least, or all")
        lists.listed("--arms", arms, parts)  # each once
    asked = None if default is None else arms or str(default)
    todo: list[Job] = []
    for seed in wanted:
        overrides = _lacking(seed, asked, pool)
        if overrides:
            todo.append(Job(name, protocol, overrides))
    _check(notebook, protocol, todo, engine)
    print(f"{name} at {protocol}: {len(wanted)} seeds, {len(todo)} to run", flush=True)

    def into_the_pool(run: Run) -> str:
        path = add(run, folder)
        return f"{len(run.values)} values in {path.relative_to(folder)}"

    return _run_all(todo, engine, jobs, gpus, folder, into_the_pool)


def repeat(
    name: str,
    protocol: str,
    wanted: Sequence[int],
    *,
    folder: Path,
    jobs: int | None = None,
) -> int:
    """Execute recorded runs once more, a line each beside the record; return how many failed.

    A seed runs with all arms that its record has. The pool stays as it is: what comes out lies in
    ``runs/repeated``, and a seed that lies there is compared without another run.
    """
    notebook = sources.find(folder, name)
    pool = _pool(notebook, protocol, folder)
    recorded = pool.seeds if pool else {}
    place = folder / "runs" / "repeated" / name / protocol
    todo: list[Job] = []
    for seed in wanted:
        if pool is None or seed not in recorded:
            have = ", ".join(map(str, sorted(recorded))) or "none"
            where = f"{name} at {protocol} has seed {have} on record, not {seed}"
            refuse("E-RANGE", f"--seeds: {where}; leave --repeat away to run it")
        if (place / f"{seed}.parquet").is_file():
            continue
        overrides: dict[str, Scalar] = {"seed": seed}
        arms = [arm for arm, seeds in pool.arms.items() if seed in seeds]
        if arms:
            overrides["arms"] = ",".join(arms)
        todo.append(Job(name, protocol, overrides))
    _check(notebook, protocol, todo, "local")
    count = f"{len(wanted)} seeds, {len(todo)} to run"
    print(f"{name} at {protocol}, once more: {count}", flush=True)

    def beside_the_record(run: Run) -> str:
        path = place / f"{run.seed}.parquet"
        storage.write(path, packed(run))
        return f"{_beside(run, recorded[run.seed])}; in {path.relative_to(folder)}"

    for seed in wanted:
        path = place / f"{seed}.parquet"
        if path.is_file():
            told_before = _beside(records.read_run(path), recorded[seed])
            print(f"seed {seed}: {told_before}", flush=True)
    return _run_all(todo, "local", jobs, 0, folder, beside_the_record)


def _beside(run: Run, recorded: Mapping[str, Value]) -> str:
    """Say how many values of a run are bit for bit those on record, and which differs most.

    Times and memory are those of a machine and are left out.
    """
    compared = {
        value.name: value
        for value in run.values
        if value.unit not in ("seconds", "bytes") and value.name in recorded
    }
    differences: dict[str, float] = {}
    for name, value in compared.items():
        if value != recorded[name]:
            differences[name] = abs(value.value - recorded[name].value)
    same = len(compared) - len(differences)
    line = f"{same} of {len(compared)} values are as recorded"
    if differences:
        name = max(differences, key=lambda one: differences[one])
        both = f"{compared[name].value:.6g} here, {recorded[name].value:.6g} on record"
        line += f"; furthest is {name}: {both}"
    return line


def _pool(notebook: Notebook, protocol: str, folder: Path) -> Pool | None:
    """Read the pool of a protocol; one of a tier that keeps none is refused (E-TIER)."""
    tier = notebook.settings(protocol)["tier"]
    pooled: list[str] = []
    for each in notebook.protocols:
        if each == CLASS or notebook.settings(each)["tier"] in COMMITTED:
            pooled.append(each)
    if protocol not in pooled:
        others = ", ".join(pooled)
        refuse("E-TIER", f"no pool is kept of '{protocol}' (tier {tier}); use {others}")
    pool = store.pool(notebook.name, protocol, folder)
    if pool:
        notebook.agrees(pool)
    return pool


def _check(notebook: Notebook, protocol: str, todo: Sequence[Job], engine: str) -> None:
    """Refuse at once, before a commit is frozen, what every run would be refused for."""
    for job in todo:
        parameters.check(
            notebook.parameters, job.overrides, f"{notebook.name} at {protocol}"
        )
    settings = notebook.defaults | notebook.settings(protocol)
    if engine == "local":  # a cluster's nodes may have other devices
        check_device(settings)
    if notebook.name in PLANNED:
        from moebook import experiments  # with torch and all methods

        for asked in {str(job.overrides["arms"]) for job in todo}:
            experiments.check(notebook.name, settings | {"arms": asked})


def _lacking(seed: int, arms: str | None, pool: Pool | None) -> dict[str, Any]:
    """Return the overrides of the run that is missing of a seed; empty where none is."""
    runs = [run for run in pool.runs if run.seed == seed] if pool else []
    if arms is None:
        return {} if runs else {"seed": seed}
    if not runs:
        return {"seed": seed, "arms": arms}
    have: set[str] = set()
    known: list[str] = []  # all arms that the notebook had when these runs were made
    for run in runs:
        have.update(run.arms)
        known += run.manifest.get("known_arms", run.arms)
    # All are those of then: a run is not incomplete because an arm was added since.
    asked = known if arms == ALL else [arm for arm in arms.split(",") if arm]
    missing = [arm for arm in dict.fromkeys(asked) if arm not in have]
    if not missing:
        return {}
    return {"seed": seed, "arms": ",".join(missing)}


def _run_all(
    todo: Sequence[Job],
    engine: str,
    jobs: int | None,
    gpus: float,
    folder: Path,
    take: Callable[[Run], str],
) -> int:
    """Execute jobs; ``take`` keeps each run and tells of it in a line; return how many failed."""
    if not todo:
        return 0
    copy = freeze(folder)
    failed = 0
    start = time.monotonic()
    if engine == "local":
        workers = min(jobs or runtime.cores(), len(todo))
        running = side_by_side(todo, copy, workers)
    else:
        running = _on_ray(todo, copy, gpus)
    with closing(running) as ended:
        for number, (job, outcome) in enumerate(ended, start=1):
            each = (time.monotonic() - start) / number
            minutes_left = each * (len(todo) - number) / 60
            progress = f"{number} of {len(todo)}"
            if minutes_left:
                progress += f", about {minutes_left:.0f} min left"
            line, good = _taken(outcome, copy, folder, take)
            if not good:
                failed += 1
            print(f"seed {job.overrides['seed']}: {line} ({progress})", flush=True)
    return failed


def _on_ray(todo: Sequence[Job], copy: Path, gpus: float) -> Ended:
    """Execute jobs as tasks of the Ray cluster; one whose node dies is run again elsewhere.

    Ray names a task's GPUs in ``CUDA_VISIBLE_DEVICES``. Where no node is left that
    could run them, the jobs that are left fail.
    """
    with cluster.joined(gpus, working_dir=str(copy), excludes=["runs"]) as ray:
        task = ray.remote(num_cpus=1, num_gpus=gpus or None, max_retries=5)(_task)
        waiting = {task.remote(job): job for job in todo}
        while waiting:
            done, _ = ray.wait(list(waiting), timeout=LOOK)
            lack = "" if done else cluster.lacking(ray, gpus)
            if lack:  # nodes have gone
                for job in waiting.values():
                    yield job, Refusal("E-CLUSTER", lack)
                return
            for each in done:
                job = waiting.pop(each)
                try:
                    path = (
                        copy / "runs" / "cluster" / f"{job.overrides['seed']}.parquet"
                    )
                    storage.write(path, ray.get(each))
                    yield job, path
                except Refusal as refusal:
                    yield job, Refusal(refusal.code, refusal.message)
                except ray.exceptions.RayError as error:
                    last_line = str(error).strip().splitlines()[-1]
                    yield job, Refusal("E-CLUSTER", last_line)


def _task(job: Job) -> bytes:
    """What a task does on its node: the same process as here, in the copy that Ray brought."""
    ((_, outcome),) = side_by_side([job], Path.cwd(), 1)
    if isinstance(outcome, Refusal):
        raise outcome
    return outcome.with_suffix(".parquet").read_bytes()


def _taken(
    outcome: Outcome, copy: Path, folder: Path, take: Callable[[Run], str]
) -> tuple[str, bool]:
    """Keep a finished run; say in a line what became of it, and whether it is kept."""
    try:
        if isinstance(outcome, Refusal):
            raise outcome
        run = records.read_run(outcome.with_suffix(".parquet"))
        line = take(run)
    except Exception as error:  # whatever it is, the other runs go on
        return f"failed: {_with_place(str(told(error)), copy, folder)}", False
    return f"{run.manifest['seconds']:.0f} s, {line}", True


def _with_place(message: str, copy: Path, folder: Path) -> str:
    """Say where a failed copy lies, which its run named from the code where it executed."""
    before, names, path = message.rpartition("the failed copy is ")
    if not names:
        return message
    if not (copy / path).exists():
        return f"{message} on its node"
    return f"{before}{names}{copy.relative_to(folder) / path}"


def add(run: Run, folder: Path) -> Path:
    """Put a run into its pool and return its file; one that does not belong there is refused."""
    place = folder / "results" / run.notebook / run.protocol
    lock = folder / "runs" / f"{run.notebook}-{run.protocol}.lock"
    with storage.locked(lock, wait=True):
        storage.sweep(place)
        pool = store.pool(run.notebook, run.protocol, folder)
        others = pool.runs if pool else ()
        Pool(run.notebook, run.protocol, (*others, run))  # refuses what does not fit
        path = _free_file(place, run.seed)
        store.keep(run, path, folder)
    return path


def _free_file(place: Path, seed: int) -> Path:
    """Return ``3.parquet``, or ``3.2.parquet`` and so on for further arms of that seed."""
    path = place / f"{seed}.parquet"
    part = 1
    while path.exists():
        part += 1
        path = place / f"{seed}.{part}.parquet"
    return path


def add_notebook(path: Path, folder: Path) -> tuple[Run, Path]:
    """Take in an executed notebook, such as plain papermill leaves it, as a run of its protocol."""
    run = read_notebook(path, folder)
    if "date" not in run.manifest:
        fix = "give papermill's output"
        refuse("E-RUN", f"{path.name} does not say when it was executed; {fix}")
    notebook = sources.find(folder, run.notebook)
    designs: dict[str, dict[str, Any]] = {}
    for protocol in notebook.protocols:
        designs[protocol] = notebook.design(protocol)
    fitting = [
        protocol for protocol, design in designs.items() if design == run.settings
    ]
    if not fitting or run.tier not in COMMITTED:
        protocol, difference = _nearest_design(run, designs)
        odd = f"is of no protocol; beside '{protocol}' {difference}"
        refuse("E-PROTOCOL", f"{path.name} {odd}")
    run = replace(run, protocol=fitting[0])
    return run, add(run, folder)


def _nearest_design(
    run: Run, designs: Mapping[str, Mapping[str, Any]]
) -> tuple[str, str]:
    """Return the first protocol of a run's tier, or ``cpu``, and what first differs from it."""
    of_tier = [name for name, design in designs.items() if design["tier"] == run.tier]
    protocol = of_tier[0] if of_tier else "cpu"
    design = designs.get(protocol, {})
    for name, value in run.settings.items():
        if design.get(name) != value:
            return protocol, f"{name} = {value!r}, not {design.get(name)!r}"
    return protocol, f"tier {run.tier} has no pool"


def freeze(folder: Path) -> Path:
    """Export the commit into ``runs/frozen/<commit>``, so that one can go on writing meanwhile."""
    commit = storage.commit(folder, CODE)
    if commit is None:
        why = "a study runs committed code"
        refuse("E-GIT", f"{folder} has no git commit to freeze; {why}")
    if (folder / storage.files.FROZEN).is_file():
        _refuse_touched(folder)
        return folder  # a frozen copy itself
    if commit["dirty"]:
        print("uncommitted changes are not part of this study", flush=True)
    place: Path = folder / "runs" / "frozen" / commit["id"][:12]
    with storage.locked(place.with_name("frozen.lock"), wait=True):
        for stage in place.parent.glob(".stage-*"):  # by a study that was killed
            shutil.rmtree(stage)
        if place.is_dir():
            _refuse_touched(place)
            return place
        with tempfile.TemporaryDirectory(
            prefix=".stage-", dir=place.parent
        ) as temporary:
            code = Path(temporary) / "code"
            with placed(place):
                _export(folder, commit["id"], code)
            storage.write(code / SEAL, _seal(code))
            storage.write(code / storage.files.FROZEN, commit["id"])
            code.rename(place)
    return place


def _refuse_touched(copy: Path) -> None:
    """Refuse a frozen copy whose files are not those that were exported, or that has no seal."""
    seal = copy / SEAL
    if not seal.is_file() or seal.read_bytes() != _seal(copy).encode():
        fix = "delete it, where no study runs from it, and start again"
        refuse("E-HASH", f"{copy} is not as it was exported from git; {fix}")


def _seal(copy: Path) -> str:
    """Hash the files of a frozen copy, but runs and bytecode, which come to lie there."""
    digests: list[tuple[str, str | None]] = []
    for name in CODE:
        for path in (copy / name, *storage.files.own(copy / name, "**/*")):
            left = path.suffix == ".parquet" or "__pycache__" in path.parts
            if path.is_file() and not left:
                place = path.relative_to(copy).as_posix()
                digests.append((place, storage.digest(path)))
    return storage.files.text_digest(repr(digests))


def _export(folder: Path, commit: str, code: Path) -> None:
    """Write a commit's files, as git gives them, into a new folder."""
    git_here = ["git", "-C", str(folder)]
    listing = [*git_here, "ls-tree", "--name-only", commit, "--", *CODE]
    listed = subprocess.run(listing, capture_output=True, text=True)
    if listed.returncode:
        refuse("E-GIT", f"git ls-tree: {listed.stderr.strip()}")
    names = listed.stdout.splitlines()
    command = [*git_here, "archive", commit, "--", *names]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as git:
        assert git.stdout and git.stderr  # for mypy: they are pipes
        damage = ""
        try:
            with tarfile.open(fileobj=git.stdout, mode="r|") as archive:
                archive.extractall(code, filter="data")
        except tarfile.TarError as error:
            # Also where git ended early, and says why itself.
            damage = str(error)
        git.stdout.close()
        complaint = git.stderr.read().decode(errors="replace").strip()
    if git.returncode or damage:
        reason = complaint or damage or f"it {children.ending(git.returncode)}"
        refuse("E-GIT", f"git archive: {reason}")
