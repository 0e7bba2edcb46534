"""Check that runs are what was written, and that pages are what their runs say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moebook import results
from moebook.errors import Refusal, nearest, refuse
from moebook.notebook import publish
from moebook.results import Run


@dataclass(frozen=True)
class Finding:
    """What was found about one run or pool.

    Args:
        path: The file or folder, relative to the project.
        failures: What does not agree, one line each; empty when all does.
        right: What is said where all agrees.
    """

    path: str
    failures: tuple[str, ...]
    right: str = ""

    def __str__(self) -> str:
        if self.failures:
            return f"FAILS {self.path}: {'; '.join(self.failures)}"
        return f"ok    {self.path}: {self.right}"


def verify(name: str | None = None, folder: Path | None = None) -> list[Finding]:
    """Check every run: its digest, its pool and, of a live one, its executed copy.

    Values are harvested again from the executed copies of live runs. A run that is merely behind
    the code does not fail.

    Args:
        name: Short name of one notebook, or ``bench``; all by default.
        folder: The project; found from the working directory by default.

    Raises:
        Refusal: ``E-NOTEBOOK`` when no notebook of that name has runs.
    """
    folder = folder or results.root()
    pools = sorted(path for path in (folder / "results").glob("*/*") if path.is_dir())
    pages = sorted((folder / "book" / "notebooks").glob("*.parquet"))
    names = {path: path.parent.name for path in pools} | {path: path.stem[3:] for path in pages}
    chosen = [path for path in names if name in (None, names[path])]
    if name is not None and not chosen:
        refuse("E-NOTEBOOK", f"'{name}' has no runs; {nearest(name, set(names.values()))}")
    return [_finding(path, folder) for path in chosen]


def _finding(path: Path, folder: Path) -> Finding:
    place = str(path.relative_to(folder))
    try:
        if path.is_dir():
            return _pool(path, place, folder)
        run = results.read_run(path)
        failures = tuple(_against_copy(path.with_suffix(".ipynb"), run))
        return Finding(place, failures, f"values and page agree; {results.since(run, folder)}")
    except Refusal as refusal:
        return Finding(place, (str(refusal),))


def _pool(path: Path, place: str, folder: Path) -> Finding:
    pool = results.pool(path.parent.name, path.name, folder)
    if pool is None:
        return Finding(place, ("it holds no run",))
    seeds = ", ".join(map(str, pool.seeds))
    return Finding(place, (), f"seeds {seeds} agree; {results.since(pool.last, folder)}")


def _against_copy(copy: Path, run: Run) -> Iterator[str]:
    """Compare a run with the executed notebook that it was made from."""
    if not copy.is_file():
        yield f"the executed copy {copy.name} is missing"
        return
    if run.manifest.get("executed") != results.digest(copy):
        yield f"the hash of the executed copy {copy.name} is not the manifest's"
    try:
        executed: Any = json.loads(copy.read_text(encoding="utf-8"))
        shown = {value.name: value for value in publish.values(executed)}
    except (AttributeError, KeyError, TypeError, ValueError):
        yield f"the executed copy {copy.name} is no notebook"
        return
    kept = {value.name: value for value in run.values}
    for name in sorted(kept.keys() | shown.keys()):
        if kept.get(name) != shown.get(name):
            pair = [
                value.value if value else "absent" for value in (kept.get(name), shown.get(name))
            ]
            yield f"{name} is {pair[0]} in the run and {pair[1]} in {copy.name}"
