"""Committed runs, and those that the book shows, beside what they claim to be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from moebook import storage
from moebook.errors import Refusal, nearest, printable, refuse
from moebook.lab import records
from moebook.lab.records import Run, store
from moebook.lab.run import publish, sources
from moebook.storage.files import own

WITHDRAWN = "withdrawn"  # below results/: pools that count no more
EMPTY = "it holds no run"


@dataclass(frozen=True)
class Finding:
    """What of one run or pool does not agree; ``right`` is said where all does."""

    path: str
    failures: tuple[str, ...]
    right: str = ""

    def __str__(self) -> str:
        fails = f"FAILS {self.path}: {'; '.join(self.failures)}"
        return printable(fails if self.failures else f"ok    {self.path}: {self.right}")


def verify(name: str | None, folder: Path) -> list[Finding]:
    """Check runs of one notebook (or ``bench``, ``banks``), or all: digests, pools, copies, seals.

    A run that is merely behind the code does not fail.
    """
    faults = store.unsealed(folder)
    names: dict[Path, str] = {}  # of each pool and page: the notebook that it is of
    for pool in sorted(_pools(folder) | faults.keys()):
        names[pool] = pool.parent.name
    for page in sorted(_pages(folder)):
        names[page] = page.stem[3:]
    chosen = [path for path in names if name in (None, names[path])]
    if name is not None and not chosen:
        known = set(names.values())
        if not known:
            refuse(
                "E-NOTEBOOK", f"'{name}' has no runs, nor has any other notebook here"
            )
        refuse("E-NOTEBOOK", f"'{name}' has no runs; {nearest(name, known)}")
    return [_finding(path, faults.get(path, []), folder) for path in chosen]


def _pools(folder: Path) -> set[Path]:
    """Find the folders of pools, ``results/<notebook>/<protocol>``, withdrawn ones too."""
    place = folder / "results"
    withdrawn = place / WITHDRAWN
    paths = {*own(place, "*/*"), *own(withdrawn, "*/*")}
    paths -= {*own(withdrawn)}  # its notebooks' folders, which look like pools
    return {path for path in paths if path.is_dir()}


def _pages(folder: Path) -> set[Path]:
    """Find the runs that the book shows, also one of which only the page is there."""
    pages: set[Path] = set()
    for kind in ("ipynb", "parquet"):
        for path in own(folder / "book" / "notebooks", f"*.{kind}"):
            pages.add(path.with_suffix(".parquet"))
    return pages


def _finding(path: Path, faults: list[str], folder: Path) -> Finding:
    place = str(path.relative_to(folder))
    try:
        if path.suffix == ".parquet":
            run = records.read_run(path)
            failures = tuple(_against_copy(path.with_suffix(".ipynb"), run))
            since = records.since(run, folder)
            return Finding(place, failures, f"values and page agree; {since}")
        if path.parent.name == "banks" and any(part.is_dir() for part in own(path)):
            # LoRAs, a folder each, beside the notebook's pools. With torch, which they alone need.
            from moebook.models import checkpoint

            loras = [lora for lora in own(path) if lora.is_dir()]
            seals = [checkpoint.verify(lora) for lora in loras]
            return Finding(
                place, tuple(faults), f"the seals of {len(seals)} LoRAs agree"
            )
        if path.parents[1].name == WITHDRAWN:
            runs = [records.read_run(file) for file in own(path, "*.parquet")]
            if not runs:
                return Finding(place, (*faults, EMPTY))
            seeds = ", ".join(str(run.seed) for run in runs)
            return Finding(
                place, tuple(faults), f"seeds {seeds}, withdrawn, are as they were"
            )
        pool = store.pool(path.parent.name, path.name, folder)
        if pool is None:
            return Finding(place, (*faults, EMPTY))
        if pool.notebook != store.BENCH:
            sources.find(folder, pool.notebook).agrees(pool)
        seeds = ", ".join(map(str, pool.seeds))
        since = records.since(pool.last, folder)
        return Finding(place, tuple(faults), f"seeds {seeds} agree; {since}")
    except Refusal as refusal:
        return Finding(place, (*faults, str(refusal)))


def _against_copy(copy: Path, run: Run) -> Iterator[str]:
    """Say where a run and the executed notebook beside it do not agree."""
    if not copy.is_file():
        yield f"the executed copy {copy.name} is missing"
        return
    if run.manifest.get("executed") != storage.digest(copy):
        yield f"the hash of the executed copy {copy.name} is not the manifest's"
    shown = {value.name: value for value in publish.values(storage.read_ipynb(copy))}
    recorded = {value.name: value for value in run.values}
    for name in sorted(recorded.keys() | shown.keys()):
        ours = recorded.get(name)
        theirs = shown.get(name)
        if ours != theirs:
            in_run = ours.value if ours else "absent"
            in_copy = theirs.value if theirs else "absent"
            yield f"{name} is {in_run} in the run and {in_copy} in {copy.name}"
