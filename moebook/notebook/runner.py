"""Execute a notebook through papermill and keep what it left: all of it or nothing.

Every run ends in ``runs/mine/<name>/<protocol>-<key>``: the filtered notebook (``.ipynb``) and its
run (``.parquet``). One that is there already and that nothing has changed since is not repeated.
A failed copy goes to ``runs/failed/<name>/`` and nowhere else. Nothing here touches the book:
`moebook.notebook.book` publishes, `moebook.notebook.study` adds runs to pools.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import nbformat
import papermill
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from papermill.exceptions import PapermillExecutionError

from moebook import results, runtime
from moebook.errors import Refusal, refuse
from moebook.notebook import parameters, privacy, publish, sources
from moebook.notebook.kernel import Kernel, kernel
from moebook.notebook.parameters import Scalar
from moebook.notebook.sources import Notebook
from moebook.results import Run

CELL_SECONDS = {"smoke": 600, "cpu": 1800}
"""Longest time for one cell; the other tiers have none."""


@dataclass(frozen=True)
class Outcome:
    """A finished run.

    Args:
        run: Its values and manifest.
        notebook: The executed copy; the run's file lies beside it under the same name.
        fresh: Whether it was executed now; False when an equal run was there already.
    """

    run: Run
    notebook: Path
    fresh: bool

    @property
    def path(self) -> Path:
        """The run's file."""
        return self.notebook.with_suffix(".parquet")

    def describe(self, folder: Path) -> str:
        """Say in one line what was done, with paths relative to the project."""
        spent = self.run.manifest["seconds"]
        done = f"executed in {spent:.1f} s" if self.fresh else "unchanged, not executed again"
        page, run = self.notebook.relative_to(folder), self.run
        count = f"{len(run.values)} values in {self.path.name}"
        return f"{run.notebook} at {run.protocol}: {done}; {page}, {count} beside it"


def run_notebook(
    name: str,
    protocol: str,
    overrides: Mapping[str, Scalar] | None = None,
    *,
    folder: Path | None = None,
    force: bool = False,
    cell_seconds: float | None = None,
) -> Outcome | None:
    """Run a notebook under a protocol, unless an equal run is there.

    Under ``accelerate launch`` every process runs the notebook, in which they train together, and
    the first one keeps what it left.

    Args:
        name: Short name, such as ``pesc``.
        protocol: One of the notebook's protocols, such as ``cpu`` or ``nano``.
        overrides: Parameters that go before the protocol's.
        folder: The project; found from the working directory by default.
        force: Run even when an equal run is there.
        cell_seconds: Longest time for one cell; `CELL_SECONDS` by default.

    Returns:
        What is kept; None in all processes but the first, which leave nothing.

    Raises:
        Refusal: ``E-NOTEBOOK``, ``E-PROTOCOL``, ``E-PARAMETER``, ``E-TYPE``, ``E-RANGE`` or
            ``E-CONFIG`` before anything runs; ``E-CELL``, ``E-TIMEOUT``, ``E-KERNEL``,
            ``E-OUTPUT``, ``E-SECRET`` or the notebook's own refusal after a failed run.
    """
    folder = folder or results.root()
    notebook = sources.find(folder, name)
    settings = _settings(notebook, protocol, overrides or {})
    defaults = {p.name: p.default for p in notebook.parameters.values()}
    store = _store(notebook, protocol, defaults | settings, folder)
    found = None if force or notebook.findings else _found(store, folder)
    if found is None:
        limit = cell_seconds or CELL_SECONDS.get(str(settings["tier"]))
        given = {"parameters": defaults | settings, "overrides": dict(overrides or {})}
        _execute(notebook, protocol, settings, given, folder, store, limit)
    if runtime.processes()[0]:
        return None
    run = found or results.read_run(store.with_suffix(".parquet"))
    return Outcome(run, store, found is None)


def _settings(
    notebook: Notebook, protocol: str, overrides: Mapping[str, Scalar]
) -> dict[str, Scalar]:
    """Merge the protocol's parameters with the reader's, checked."""
    if "tier" in overrides:
        refuse("E-USAGE", "the parameter tier is set by the protocol (--on)")
    parameters.check(notebook.parameters, overrides, "-p")
    for name, value in overrides.items():
        if privacy.secret(str(value)):
            refuse("E-SECRET", f"-p {name} looks like a secret; parameters are stored in clear")
    return notebook.settings(protocol) | dict(overrides)


def _store(notebook: Notebook, protocol: str, parameters: Mapping[str, Any], folder: Path) -> Path:
    """Name the executed copy of a run: by its parameters, notebook and lock."""
    lock = results.digest(folder / "requirements.lock")
    parts = [dict(parameters), results.digest(notebook.path), lock]
    key = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]
    return folder / "runs" / "mine" / notebook.name / f"{protocol}-{key}.ipynb"


def _found(store: Path, folder: Path) -> Run | None:
    """Return the run in the store if it is whole and nothing has changed since, else None."""
    try:
        run = results.read_run(store.with_suffix(".parquet"))
    except Refusal:
        return None
    whole = run.manifest.get("executed") == results.digest(store)
    return run if whole and not results.changed(run, folder) else None


def _execute(
    notebook: Notebook,
    protocol: str,
    settings: Mapping[str, Scalar],
    given: Mapping[str, Any],
    folder: Path,
    store: Path,
    limit: float | None,
) -> None:
    """Run in a temporary folder; on success fill the store, on failure keep the copy aside.

    Of several processes only the first does either.
    """
    first = runtime.processes()[0] == 0
    with tempfile.TemporaryDirectory(prefix="moebook-") as directory:
        staged = Path(directory) / "staged.ipynb"
        try:
            peak = _papermill(notebook, settings, folder, staged, limit)
            if first:
                _keep(staged, notebook, protocol, {**given, "peak_memory": peak}, folder, store)
        except Refusal as refusal:
            if not staged.is_file() or not first:
                raise
            failed = folder / "runs" / "failed" / notebook.name / store.name
            results.write(failed, staged.read_text(encoding="utf-8"))
            place = failed.relative_to(folder)
            refuse(refusal.code, f"{refusal.message}; the failed copy is {place}")


def _papermill(
    notebook: Notebook,
    settings: Mapping[str, Scalar],
    folder: Path,
    staged: Path,
    limit: float | None,
) -> int | None:
    """Execute into the staged copy; return the kernel's peak memory in bytes.

    Raises:
        Refusal: For any way in which the notebook can fail.
    """
    logging.getLogger("papermill").addHandler(logging.NullHandler())
    source = nbformat.read(notebook.path, as_version=4)
    with kernel(folder, staged.parent) as manager:
        try:
            papermill.execute_notebook(
                source,
                str(staged),
                parameters=dict(settings),
                kernel_name="python3",
                language="python",
                progress_bar={"desc": notebook.name} if sys.stderr.isatty() else False,
                cwd=str(folder),
                km=manager,
                execution_timeout=limit,
            )
        except PapermillExecutionError as error:
            _refuse_cell(error, notebook.path.name)
        except CellTimeoutError:
            place = _place(staged, notebook.path.name)
            refuse("E-TIMEOUT", f"{place} took longer than {limit:g} seconds")
        except (DeadKernelError, RuntimeError):
            _refuse_kernel(manager, _place(staged, notebook.path.name))
    return manager.peak


def _refuse_cell(error: PapermillExecutionError, name: str) -> NoReturn:
    """Name the cell and its error; a refusal in the notebook keeps its own code."""
    code, text = "E-CELL", f"{error.ename}: {error.evalue}"
    if error.ename == Refusal.__name__:
        code, _, text = str(error.evalue).partition(": ")
    refuse(code, f"cell In [{error.exec_count}] of notebooks/{name}: {text[:400]}")


def _refuse_kernel(manager: Kernel, place: str) -> NoReturn:
    """Say how the kernel ended."""
    status = manager.exit_code
    how = "did not answer" if status is None else f"ended with status {status}"
    if status is not None and status < 0:
        how = f"was killed by signal {-status}" + " (out of memory?)" * (status == -9)
    refuse("E-KERNEL", f"the kernel {how} in {place}")


def _place(staged: Path, name: str) -> str:
    """Name the last cell that was started."""
    cells = nbformat.read(staged, as_version=4).cells if staged.is_file() else []
    code = [cell for cell in cells if cell.cell_type == "code"]
    started = [cell for cell in code if cell.metadata.get("papermill", {}).get("start_time")]
    return f"cell In [{len(started)}] of notebooks/{name}"


def _keep(
    staged: Path,
    notebook: Notebook,
    protocol: str,
    given: Mapping[str, Any],
    folder: Path,
    store: Path,
) -> None:
    """Filter an executed notebook, harvest its run, and write both to the store."""
    executed = nbformat.read(staged, as_version=4)
    clean, stripped = publish.clean(executed, folder)
    text = json.dumps(clean, indent=1) + "\n"
    manifest = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **given,
        **seconds(executed),
        "commit": results.commit(folder),
        "stripped": stripped,
        "executed": hashlib.sha256(text.encode()).hexdigest(),
    }
    lock = results.digest(folder / "requirements.lock")
    code = {"notebook": results.source(notebook.path), "lock": lock}
    run = harvest(clean, notebook.name, protocol, given["parameters"], code, manifest)
    store.with_suffix(".parquet").unlink(missing_ok=True)
    results.write(store, text)
    results.write_run(store.with_suffix(".parquet"), run)


def harvest(
    executed: Any,
    name: str,
    protocol: str,
    parameters: Mapping[str, Any],
    code: Mapping[str, Any],
    manifest: Mapping[str, Any],
) -> Run:
    """Make a run of what an executed notebook left in its outputs.

    Args:
        executed: The notebook, as JSON.
        name: Short name of the notebook.
        protocol: What it ran under.
        parameters: All of them, with the values they had.
        code: Hashes of the ``notebook`` and the ``lock``; those of modules are in the outputs.
        manifest: Everything else that is known.
    """
    notes = publish.notes(executed)
    return Run(
        notebook=name,
        protocol=protocol,
        tier=str(parameters["tier"]),
        seed=int(parameters.get("seed", 0)),
        values=publish.values(executed),
        curves=publish.curves(executed),
        arms=tuple(notes.get("arms", ())),
        settings=sources.design(parameters),
        rows=notes.get("rows", {}),
        code={**code, "modules": notes.get("modules", {})},
        manifest={
            **manifest,
            "environment": notes.get("environment", {}),
            "known_arms": notes.get("known", []),
        },
    )


def seconds(executed: Any) -> dict[str, Any]:
    """Read the time of the run and of each code cell, as papermill measured them."""
    cells = [cell for cell in executed["cells"] if cell["cell_type"] == "code"]
    took = [cell["metadata"].get("papermill", {}).get("duration") for cell in cells]
    spent = {str(number): duration for number, duration in enumerate(took, start=1)}
    total = executed["metadata"].get("papermill", {}).get("duration")
    return {"seconds": total, "cell_seconds": spent}
