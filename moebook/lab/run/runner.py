"""Execute a notebook through papermill and keep what it left: all of it or nothing.

Every run ends in ``runs/mine/<name>/<protocol>-<key>``: the filtered notebook
(``.ipynb``) and its run (``.parquet``). One that is there already is not repeated while
its parameters, its cells' statements, the lock and the code stay; what else changes in
the notebook is put into the copy. A failed copy goes to ``runs/failed/<name>/`` and
nowhere else.

Meanwhile each `training.fit` keeps checkpoints below
``runs/resume/<name>/<protocol>-<key>``. A run that was killed, or failed, goes on from
them with the same bits, unless parameters, notebook, code or machine have changed; all
but training runs again. Its ``seconds`` count the training it found done (``resumed``).
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import secrets
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import nbformat
import papermill
from ipykernel.kernelspec import make_ipkernel_cmd
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpec
from jupyter_core.utils import run_sync
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from papermill.exceptions import PapermillExecutionError

from moebook import runtime, storage
from moebook.errors import LESS, Refusal, lacks_memory, no_memory, placed, refuse, told
from moebook.lab import papers, records
from moebook.lab.records import Run
from moebook.lab.run import children, freshness, parameters, publish, sources, warm
from moebook.lab.run.parameters import Scalar
from moebook.lab.run.publish import code_cells, harvest, seconds
from moebook.lab.run.sources import Notebook

LEFT = ("id", "execution_count", "outputs")  # of a cell, by its execution
# Longest time for one cell; other tiers have none.
CELL_SECONDS = {
    "smoke": 600,
    "cpu": 1800,
}
ROOM = 2**24  # bytes that a run's files may take
LONGEST = 80  # bytes in the name of the sockets' folder: a Unix socket's whole name holds about 100


@dataclass(frozen=True)
class Outcome:
    """A finished run and its executed notebook; ``fresh`` when it was not there already."""

    run: Run
    notebook: Path
    fresh: bool

    @property
    def path(self) -> Path:
        """The run's file."""
        return self.notebook.with_suffix(".parquet")

    def describe(self, folder: Path) -> str:
        """Say in one line what was done, with paths relative to the project."""
        run = self.run
        page = self.notebook.relative_to(folder)
        done = "unchanged, not executed again"
        if self.fresh:
            done = f"executed in {run.manifest['seconds']:.1f} s"
            resumed = run.manifest.get("resumed", 0)
            if resumed:
                done += f", {resumed:.1f} s of training among them before it was interrupted"
        values = f"{len(run.values)} values in {self.path.name} beside it"
        return f"{run.notebook} at {run.protocol}: {done}; {page}, {values}"


@dataclass(frozen=True)
class Request:
    """A notebook that shall run under a protocol in a project; a wrong parameter is refused."""

    notebook: Notebook
    protocol: str
    folder: Path
    overrides: Mapping[str, Scalar] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if "tier" in self.overrides:
            refuse("E-USAGE", "the parameter tier is set by the protocol (--on)")
        parameters.check(self.notebook.parameters, self.overrides, "-p")
        for name, value in self.overrides.items():
            if publish.secret(str(value)):
                refuse(
                    "E-SECRET",
                    f"-p {name} looks like a secret; parameters are stored in clear",
                )
        check_device(self.settings)

    @cached_property
    def settings(self) -> dict[str, Scalar]:
        """What differs from the notebook's defaults."""
        given = parameters.check(self.notebook.parameters, self.overrides, "-p")
        return self.notebook.settings(self.protocol) | given

    @cached_property
    def store(self) -> Path:
        """Where its executed copy is kept: named by its parameters, cells' statements and lock."""
        cells = storage.read_ipynb(self.notebook.path)["cells"]
        # Whatever a code cell's tags, and empty ones too.
        code = [cell["source"] for cell in cells if _is_code(cell)]
        digests = list(map(storage.files.cell_digest, code))
        lock = storage.digest(storage.part(self.folder, "requirements.lock"))
        parts = [self.notebook.defaults | self.settings, digests, lock]
        text = json.dumps(parts, sort_keys=True)
        key = storage.text_digest(text)[:12]
        mine = self.folder / "runs" / "mine"
        return mine / self.notebook.name / f"{self.protocol}-{key}.ipynb"

    @cached_property
    def evidence(self) -> str | None:
        """A hash of all that findings are made of; None for other notebooks."""
        return freshness.digest(self.folder) if self.notebook.findings else None

    @cached_property
    def resume(self) -> Path:
        """Where its trainings keep checkpoints: named by all that, and by the package's code."""
        place = self.folder / "runs" / "resume" / self.notebook.name
        package = storage.files.code(storage.files.PACKAGE, by=storage.digest)
        return place / f"{self.store.stem}-{package[:12]}"


def check_device(settings: Mapping[str, Scalar]) -> None:
    """Refuse a device that this machine does not have, before a kernel starts."""
    device = str(settings.get("device", "auto"))
    if device not in ("auto", "cpu"):  # which are everywhere; torch knows of the others
        runtime.resolve_device(device)


def check_paths(given: Mapping[str, Scalar], folder: Path) -> None:
    """Refuse a file of the caller's folder in a text of ``-p``: paths count from the project's."""
    for name, value in given.items():
        if not isinstance(value, str):
            continue
        parts = re.split(r"(\s*[,:=]\s*)", value)  # with what stands between them
        from_there = [_from(folder, part) for part in parts]
        if from_there != parts:
            text = "".join(from_there)
            why = f"names what is in {Path.cwd()}, but paths count from {folder}"
            fix = f"write -p {name}={text}, or run it there"
            refuse("E-PATH", f"-p {name}={value} {why}: {fix}")


def _from(folder: Path, part: str) -> str:
    """Name what is there from the caller's folder as it is named from another; leave other text."""
    same = os.path.realpath(part) == os.path.realpath(folder / part)
    if not part or same or not os.path.exists(part):
        return part
    return os.path.relpath(part, folder)


def run_notebook(
    name: str,
    protocol: str,
    overrides: Mapping[str, Scalar] | None = None,
    *,
    folder: Path,
    force: bool = False,
) -> Outcome | None:
    """Run a notebook under a protocol, unless an equal run is there, or by ``force``.

    Under ``accelerate launch`` every process runs the notebook, in which they train
    together; the first one keeps what it left, the others return None. A notebook that
    fails is refused too: with ``E-CELL``, ``E-TIMEOUT``, ``E-KERNEL``, ``E-OUTPUT``,
    ``E-SECRET`` or its own refusal. ``overrides`` are parameters that go before the
    protocol's.
    """
    request = Request(sources.find(folder, name), protocol, folder, overrides or {})
    run = None if force else kept(request)
    fresh = run is None
    if fresh:
        run = _execute(request)
    first = runtime.processes()[0] == 0
    return Outcome(run, request.store, fresh) if run and first else None


def kept(request: Request) -> Run | None:
    """Return the run in the store if it is whole and nothing has changed since, else None.

    Its copy gets the text cells, remarks and captions that the notebook has now.
    """
    try:
        run = records.read_run(request.store.with_suffix(".parquet"))
    except Refusal:
        return None
    if run.manifest.get("executed") != storage.digest(request.store):
        return None
    if run.manifest.get("evidence") != request.evidence:
        return None
    if records.runs.changed(run, request.folder):
        return None
    return _reworded(request, run)


def _reworded(request: Request, run: Run) -> Run:
    """Put what a notebook says now around what its cells left; return the run of that copy."""
    page = storage.read_ipynb(request.store)
    executed: list[Any] = []
    injected: list[Any] = []
    texts: dict[str, Any] = {}
    for cell in page["cells"]:
        if not _is_code(cell):
            texts[cell["source"]] = cell
        elif not _injected(cell):
            executed.append(cell)
        if _injected(cell):
            injected.append(cell)
    # The code cells are those that ran, in their order; texts may have come, gone, moved.
    remaining = iter(executed)
    cells: list[Any] = []
    for cell in storage.read_ipynb(request.notebook.path)["cells"]:
        before = texts.get(cell["source"], cell)
        if _is_code(cell):
            before = next(remaining)
        left = {part: before[part] for part in LEFT if part in before}
        cells.append({**cell, **left})
        if "parameters" in storage.tags(cell):
            cells += injected
    clean, _ = publish.clean({**page, "cells": cells}, request.folder)
    text = json.dumps(clean, indent=1) + "\n"
    if json.loads(text) == page:
        return run
    digest = storage.text_digest(text)
    run = replace(run, manifest={**run.manifest, "executed": digest})
    with storage.locked(request.store.with_suffix(".lock"), wait=True):
        put(request.store, text, run)
    return run


def _is_code(cell: Any) -> bool:
    return bool(cell["cell_type"] == "code")


def _injected(cell: Any) -> bool:
    """Whether papermill put a cell there: it holds the parameters."""
    return "injected-parameters" in storage.tags(cell)


def _execute(request: Request) -> Run | None:
    """Run in a temporary folder; the first process fills the store, or keeps a failed copy."""
    first = runtime.processes()[0] == 0
    place = _place(request) if first else nullcontext()
    with place, staging() as directory:
        staged = directory / "staged.ipynb"
        try:
            cost = _papermill(request, staged)
            return _keep(request, staged, cost) if first else None
        except Exception as error:  # whatever it is: what was executed is not lost
            if not staged.is_file() or not first:
                raise
            problem = told(error, "" if isinstance(error, Refusal) else "not kept")
            copy = _aside(request, staged)
            message = f"{problem.message}; the failed copy is {copy}"
            raise Refusal(problem.code, message) from error


@contextmanager
def _place(request: Request) -> Iterator[None]:
    """Hold the run's place in the store, where there must be room; sweep what killed runs left."""
    folder = request.store.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(ROOM))
    except OSError as error:
        raise told(error, f"nothing was run, {folder} could not keep it") from None
    with storage.locked(request.store.with_suffix(".lock")):
        storage.sweep(folder)
        _drop(request, but=request.resume)
        # Of an earlier attempt: each training that goes on writes its own again.
        for found in request.resume.glob(f"*/{runtime.FOUND}"):
            found.unlink()
        yield


def _drop(request: Request, but: Path | None = None) -> None:
    """Remove the checkpoints of a run, whatever the code; a kill leaves no part of any there."""
    place = request.resume.parent
    stem = request.store.stem
    for old in set(place.glob(f"{stem}-*")) - {but}:
        with suppress(OSError):
            old.rename(old.with_name(f".{old.name}.{secrets.token_hex(4)}"))
    for gone in place.glob(f".{stem}-*"):
        shutil.rmtree(gone, ignore_errors=True)


@contextmanager
def staging() -> Iterator[Path]:
    """Give a private folder with a short name, and sweep those of processes that were killed."""
    place = Path(tempfile.gettempdir())
    pattern = f"moebook-{8 * '[0-9a-f]'}"
    folders = set(place.glob(pattern))
    for lock in place.glob(f"{pattern}.lock"):
        folders.add(lock.with_suffix(""))
    for old in folders:
        lock = old.with_suffix(".lock")
        with suppress(Refusal, OSError), storage.locked(lock, patience=0):
            # One without a lock was left by a dying kernel.
            shutil.rmtree(old, ignore_errors=True)
    folder = place / f"moebook-{secrets.token_hex(4)}"
    with storage.locked(folder.with_suffix(".lock")):
        folder.mkdir(mode=0o700)
        try:
            with placed(folder):
                yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _aside(request: Request, staged: Path) -> Path:
    """Put a failed copy aside; where that fails too, it stays in a folder that is not swept."""
    aside = (
        request.folder / "runs" / "failed" / request.notebook.name / request.store.name
    )
    try:
        storage.write(aside, staged.read_text(encoding="utf-8"))
        return aside.relative_to(request.folder)
    except OSError:
        kept = staged.parent.with_name(
            staged.parent.name.replace("moebook-", "moebook-kept-")
        )
        return staged.parent.rename(kept) / staged.name


def _papermill(request: Request, staged: Path) -> dict[str, float | None]:
    """Execute into the staged copy; return the kernel's peak memory in bytes and its CPU time."""
    logging.getLogger("papermill").addHandler(logging.NullHandler())
    notebook = request.notebook
    folder = request.folder
    limit = CELL_SECONDS.get(str(request.settings["tier"]))
    before = os.times()
    source = _executable(notebook.path)
    with kernel(folder, staged.parent, request.resume) as manager:
        try:
            papermill.execute_notebook(
                source,
                str(staged),
                parameters=request.settings,
                kernel_name="python3",
                language="python",
                progress_bar={"desc": notebook.name} if sys.stderr.isatty() else False,
                cwd=str(folder),
                km=manager,
                execution_timeout=limit,
            )
        except PapermillExecutionError as error:
            where = f"cell In [{error.exec_count}] of notebooks/{notebook.path.name}"
            refuse(*_in_cell(error, where))
        except CellTimeoutError:
            place = _last_begun(staged, notebook)
            refuse("E-TIMEOUT", f"{place} took longer than {limit:g} seconds")
        except (DeadKernelError, RuntimeError):
            place = _last_begun(staged, notebook)
            died = f"the kernel {manager.ending} in {place}{manager.last_words}"
            if lacks_memory(died):
                refuse("E-MEMORY", f"{died}; {LESS}")
            refuse("E-KERNEL", died)
    after = os.times()
    # Of children that have ended; a fork is no child of ours.
    user = after.children_user - before.children_user
    system = after.children_system - before.children_system
    forked = warm.seconds(manager.provisioner)
    return {"peak_memory": manager.peak, "cpu_seconds": user + system + forked}


def _last_begun(staged: Path, notebook: Notebook) -> str:
    """Name the last cell that papermill began, by the copy that it had saved then."""
    cells = code_cells(storage.read_ipynb(staged)) if staged.is_file() else []
    begun = 0
    for _, cell in cells:
        if cell["metadata"].get("papermill", {}).get("start_time"):
            begun += 1
    return f"cell In [{begun}] of notebooks/{notebook.path.name}"


def _in_cell(error: PapermillExecutionError, where: str) -> tuple[str, str]:
    """Return the code and the line of what a cell raised; a refusal in it keeps its code."""
    text = f"{error.ename}: {error.evalue}".strip().removesuffix(":")
    if error.ename == Refusal.__name__:
        code, _, message = str(error.evalue).partition(": ")
        return code, f"{where}: {message}"  # as long as a refusal may be
    if lacks_memory(text):
        return "E-MEMORY", f"{where}: {no_memory(text)}"
    return "E-CELL", f"{where}: {text[:400]}"


def _executable(path: Path) -> nbformat.NotebookNode:
    """Read a notebook as papermill takes it, where cells need ids of their own with these."""
    notebook = storage.read_ipynb(path)
    needs_ids = notebook["nbformat_minor"] >= 5
    taken = {None}
    for number, cell in enumerate(notebook["cells"]):
        tags = set(storage.tags(cell))
        skipping = tags & {"raises-exception", "skip-execution"}
        if skipping:
            why = "and a run has all cells and no error; take the tag away"
            problem = f"a cell is tagged {min(skipping)}, {why}"
            refuse("E-NOTEBOOK", f"notebooks/{path.name}: {problem}")
        if needs_ids and cell.get("id") in taken:
            free = number
            while f"cell-{free}" in taken:
                free += 1
            cell["id"] = f"cell-{free}"
        taken.add(cell.get("id"))
    return nbformat.from_dict(notebook)


def _keep(request: Request, staged: Path, cost: Mapping[str, float | None]) -> Run:
    """Filter an executed notebook, harvest its run, write both, and drop the checkpoints."""
    executed = storage.read_ipynb(staged)
    for line in publish.warned(executed):  # which no page shows
        print(line, file=sys.stderr)
    page, left_out = publish.clean(executed, request.folder)
    text = json.dumps(page, indent=1) + "\n"
    spent = seconds(executed)
    # Each training noted the seconds of those steps that it found done.
    found = request.resume.glob(f"*/{runtime.FOUND}")
    resumed = sum(json.loads(path.read_text()) for path in found)
    if resumed:
        spent["seconds"] += resumed
        spent["resumed"] = resumed
    manifest = {
        "date": runtime.now(),
        "parameters": request.notebook.defaults | request.settings,
        "overrides": dict(request.overrides),
        **cost,
        **spent,
        "commit": storage.commit(request.folder),
        "claims": papers.frozen(request.notebook.name),
        "stripped": left_out,
        "executed": storage.text_digest(text),
    }
    if request.evidence is not None:
        manifest["evidence"] = request.evidence
    unreadable = publish.unreadable(executed)
    if unreadable:  # the run is none the worse for it, but no book shows it
        manifest["unreadable"] = unreadable
    run = harvest(page, request.notebook, request.protocol, request.folder, manifest)
    put(request.store, text, run)
    _drop(request)
    return run


def put(page: Path, text: str, run: Run) -> None:
    """Write an executed notebook, then its run, over older ones, in a place that the caller holds.

    A fault in between leaves a page that the older run has not executed: it counts as
    missing.
    """
    if run.manifest["executed"] != storage.text_digest(text):
        fix = "run and page disagree; run it again"
        refuse("E-RUN", f"{run.notebook} at {run.protocol}: {fix}")
    file = page.with_suffix(".parquet")
    # The later block ends first: the page takes its place before the run.
    with storage.replacing(file) as run_file, storage.replacing(page) as page_file:
        page_file.write_text(text, encoding="utf-8")
        run_file.write_bytes(records.runs.packed(run))


class Kernel(AsyncKernelManager):
    """A kernel of this very interpreter, whatever kernels the user has installed."""

    peak: int | None = None  # memory of its process in bytes, as far as seen
    written: Path | None = None  # what it wrote to its own standard output and error

    @property
    def kernel_spec(self) -> KernelSpec:
        """Start ``python -m ipykernel_launcher`` with the Python that runs now, `warm` if it is."""
        return KernelSpec(
            argv=make_ipkernel_cmd(),
            display_name="Python 3",
            language="python",
            metadata=warm.register() if children.PLACE in os.environ else {},
        )

    def client(self, **options: Any) -> Any:
        """Connect, and remember the connection so that it can be closed."""
        self.connection = super().client(**options)
        return self.connection

    @property
    def ending(self) -> str:
        """Say how it ended."""
        process = getattr(self.provisioner, "process", None)
        status = None if process is None else process.poll()
        return "did not answer" if status is None else children.ending(status)

    @property
    def last_words(self) -> str:
        """Say what it wrote last, beside its cells' outputs; empty where it wrote nothing."""
        return children.last_words(
            self.written.read_text(errors="replace") if self.written else ""
        )

    def watch(self, stop: threading.Event) -> None:
        """Follow the process's peak memory until told to stop: `runtime.stopwatch` resets it."""
        while not stop.wait(0.1):
            now = runtime.peak_memory(getattr(self.provisioner, "pid", None) or 0)
            self.peak = max(filter(None, (self.peak, now)), default=None)


@contextmanager
def kernel(folder: Path, directory: Path, resume: Path) -> Iterator[Kernel]:
    """Run a kernel in a project for the length of the block; its trainings ``resume`` from there.

    Its Unix sockets lie in a private ``directory``: no other user and no network can
    reach it.
    """
    if len(os.fsencode(directory)) > LONGEST:
        refuse(
            "E-PATH",
            f"{directory} is too long for sockets; set TMPDIR to a shorter folder",
        )
    connection = str(directory / "kernel.json")
    manager = Kernel(kernel_name="python3", transport="ipc", connection_file=connection)
    manager.written = directory / "kernel.log"
    environment = publish.environment() | {
        runtime.QUIET: "1",
        runtime.RESUME: str(resume),
        # Not the user's, be it there or writable or not.
        "IPYTHONDIR": str(directory / "ipython"),
    }
    options = [
        "--HistoryManager.hist_file=:memory:",
        "--IPKernelApp.capture_fd_output=False",  # what libraries say in dying goes to the log
    ]
    with manager.written.open("wb") as log:
        run_sync(manager.start_kernel)(
            extra_arguments=options,
            env=environment,
            cwd=str(folder),
            stdout=log,
            stderr=log,
        )
    stop = threading.Event()
    watcher = threading.Thread(target=manager.watch, args=(stop,), daemon=True)
    watcher.start()
    try:
        yield manager
    finally:
        stop.set()
        watcher.join()
        run_sync(_abandon)()
        if hasattr(manager, "connection"):
            manager.connection.stop_channels()
        run_sync(manager.shutdown_kernel)(now=True)


async def _abandon() -> None:
    """Cancel the tasks that an interrupt left waiting; else each would complain at the end."""
    waiting = asyncio.all_tasks() - {asyncio.current_task()}
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
