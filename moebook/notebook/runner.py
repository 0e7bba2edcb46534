"""Execute a notebook through papermill, keep what it left, and publish it: all or nothing.

Every run ends in ``runs/executed/NN_name.<tier>.<key>.*``: the filtered notebook and its manifest,
which is written last. A run whose key is there already is not repeated. From there its record and
manifest are copied, with the notebook, to ``results/`` (study, gpu, paper) or to
``book/notebooks/``. A failed copy goes to ``runs/failed/`` and nowhere else.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import nbformat
import papermill
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from papermill.exceptions import PapermillExecutionError

from moebook import results, runtime
from moebook.errors import Refusal, refuse
from moebook.notebook import manifest as manifests
from moebook.notebook import parameters, privacy, publish, sources
from moebook.notebook.kernel import Kernel, kernel
from moebook.notebook.manifest import Plan
from moebook.notebook.parameters import Scalar
from moebook.notebook.sources import Notebook
from moebook.results import Record

CELL_SECONDS = {"smoke": 600, "cpu": 1800}
"""Longest time for one cell; the other tiers have none."""


@dataclass(frozen=True)
class Outcome:
    """A run that is published.

    Args:
        record: Its values and manifest.
        path: The record's file.
        notebook: The executed copy beside it.
        fresh: Whether it was executed now; False when an equal run was there already.
    """

    record: Record
    path: Path
    notebook: Path
    fresh: bool

    def describe(self, folder: Path) -> str:
        """Say in one line what was done, with paths relative to the project."""
        spent = self.record.manifest["seconds"]
        done = f"executed in {spent:.1f} s" if self.fresh else "unchanged, not executed again"
        count, path = len(self.record.values), self.path.relative_to(folder)
        name, scale = self.record.notebook, self.record.scale
        page = self.notebook.relative_to(folder)
        return f"{name} at tier {scale}: {done}; {count} values in {path}, notebook in {page}"


def run_notebook(
    name: str,
    tier: str,
    overrides: Mapping[str, Scalar] | None = None,
    *,
    folder: Path | None = None,
    force: bool = False,
    cell_seconds: float | None = None,
) -> Outcome | None:
    """Run a notebook at a tier, unless an equal run is there, and publish what it left.

    Under ``accelerate launch`` every process runs the notebook, in which they train together, and
    the first one publishes.

    Args:
        name: Short name, such as ``pesc``.
        tier: One of the notebook's tiers.
        overrides: Parameters that go before the tier's.
        folder: The project; found from the working directory by default.
        force: Run even when an equal run is there.
        cell_seconds: Longest time for one cell; `CELL_SECONDS` by default.

    Returns:
        What is published; None in all processes but the first, which leave nothing.

    Raises:
        Refusal: ``E-NOTEBOOK``, ``E-TIER``, ``E-PARAMETER``, ``E-TYPE``, ``E-RANGE`` or
            ``E-CONFIG`` before anything runs; ``E-CELL``, ``E-TIMEOUT``, ``E-KERNEL``,
            ``E-OUTPUT``, ``E-SECRET`` or the notebook's own refusal after a failed run.
    """
    folder = folder or results.root()
    notebook = sources.find(folder, name)
    settings = _settings(notebook, tier, overrides or {})
    defaults = {p.name: p.default for p in notebook.parameters.values()}
    plan = manifests.plan(name, tier, defaults | settings, overrides or {}, folder)
    store = folder / "runs" / "executed" / f"{notebook.path.stem}.{tier}.{plan.key[:16]}.ipynb"
    fresh = force or not _kept(store, plan)
    if fresh:
        limit = cell_seconds or CELL_SECONDS.get(tier)
        _execute(notebook, plan, settings, folder, store, limit)
    if runtime.processes()[0]:
        return None
    path, page = _publish(store, notebook, tier, folder)
    return Outcome(results.read(path), path, page, fresh)


def _settings(notebook: Notebook, tier: str, overrides: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Merge the tier's parameters with the reader's, checked."""
    if "tier" in overrides:
        refuse("E-USAGE", "the parameter tier is set by --tier")
    parameters.check(notebook.parameters, overrides, "-p")
    for name, value in overrides.items():
        if privacy.secret(str(value)):
            refuse("E-SECRET", f"-p {name} looks like a secret; parameters are stored in clear")
    return notebook.settings(tier) | dict(overrides)


def _kept(store: Path, plan: Plan) -> bool:
    """Say whether the run is in the store, whole: its hashes are those of its manifest."""
    try:
        manifest = json.loads(_beside(store, "manifest").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    files = {"executed": store, "record": _beside(store, "record")}
    whole = all(manifest["hashes"][part] == results.digest(path) for part, path in files.items())
    return whole and manifest["key"] == plan.key


def _beside(notebook: Path, kind: str) -> Path:
    return notebook.with_name(f"{notebook.name.removesuffix('.ipynb')}.{kind}.json")


def _execute(
    notebook: Notebook,
    plan: Plan,
    settings: Mapping[str, Scalar],
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
                _keep(nbformat.read(staged, as_version=4), peak, plan, folder, store)
        except Refusal as refusal:
            if not staged.is_file() or not first:
                raise
            failed = folder / "runs" / "failed" / f"{notebook.path.stem}.{plan.tier}.ipynb"
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


def _keep(executed: Any, peak: int | None, plan: Plan, folder: Path, store: Path) -> None:
    """Filter an executed notebook, harvest its values, and write both to the store."""
    clean, stripped = publish.clean(executed, folder)
    values = publish.values(clean)
    record = Record(plan.notebook, plan.tier, values)
    texts = {"executed": json.dumps(clean, indent=1) + "\n", "record": record.to_text()}
    cost = _seconds(executed) | {"peak_memory": peak}
    manifest = manifests.manifest(
        plan, folder=folder, texts=texts, values=values, cost=cost, stripped=stripped
    )
    _beside(store, "manifest").unlink(missing_ok=True)
    results.write(store, texts["executed"])
    results.write(_beside(store, "record"), texts["record"])
    results.write(_beside(store, "manifest"), json.dumps(manifest, indent=1) + "\n")


def _seconds(executed: Any) -> dict[str, Any]:
    """Read the time of the run and of each code cell, as papermill measured them."""
    cells = [cell for cell in executed.cells if cell.cell_type == "code"]
    spent = {str(n): c.metadata.papermill.duration for n, c in enumerate(cells, start=1)}
    return {"seconds": executed.metadata.papermill.duration, "cell_seconds": spent}


def _publish(store: Path, notebook: Notebook, tier: str, folder: Path) -> tuple[Path, Path]:
    """Copy a run from the store to where it is read; return the paths of record and notebook.

    The manifest goes last: until then it does not agree with the other files, which `verify` sees.
    """
    target = results.record_path(folder, notebook.path.stem, tier)
    page = manifests.executed(target)
    results.write(page, store.read_text(encoding="utf-8"))
    results.write(target, _beside(store, "record").read_text(encoding="utf-8"))
    manifest = target.with_name(target.name.replace("record.json", "manifest.json"))
    results.write(manifest, _beside(store, "manifest").read_text(encoding="utf-8"))
    return target, page
