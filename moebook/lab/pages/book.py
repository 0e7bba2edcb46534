"""The book: execute its notebooks side by side, publish them, and render the pages.

Nothing heavy is imported here: what needs the libraries are children, most of them forks (`warm`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moebook import runtime, storage
from moebook.errors import Refusal, extra, located, refuse
from moebook.lab import records
from moebook.lab.pages import rendering
from moebook.lab.records import Run, store
from moebook.lab.run import (
    children,
    freshness,
    pace,
    publish,
    runner,
    sources,
    study,
    warm,
)
from moebook.lab.run.runner import Request
from moebook.lab.run.sources import Notebook
from moebook.lab.run.study import Job

PREPARE = "moebook.lab.pages.generated:prepare"
GENERATE = """
from pathlib import Path
from moebook.lab.pages import generated
generated.write(Path.cwd())
"""


@dataclass(frozen=True)
class Places:
    """Where processes fork (`warm`), None where they do not."""

    plain: str | None = None  # with the libraries imported
    # With our modules too, and all runs read: for findings and pages.
    read: str | None = None


def make(tier: str, only: str | None, folder: Path) -> None:
    """Execute what has changed and render the book; another who builds it is not disturbed.

    ``only`` one notebook is executed where it is given; the pages of the others stay.
    """
    with rendering.alone(folder):
        every = sources.notebooks(folder)
        chosen = [sources.find(folder, only)] if only else every.values()
        protocols = {one.name: "cpu" if one.findings else tier for one in chosen}
        _make(protocols, tier, folder)


def renew(names: Sequence[str], folder: Path) -> None:
    """Execute notebooks again, each at the tier that its page shows, and render the book."""
    with rendering.alone(folder, wait=True):
        shown = {name: store.live(name, folder) for name in names}
        protocols = {
            name: pool.runs[0].tier if pool else "cpu" for name, pool in shown.items()
        }
        _make(protocols, "cpu", folder)


def _make(protocols: Mapping[str, str], tier: str, folder: Path) -> None:
    """Execute notebooks at protocols, where they have changed, and render the book."""
    with extra("book", "the book"):
        import jupyter_book  # noqa: F401  # its child would end without it
    jobs = list(_todo(protocols, folder))
    with _forking(folder, bool(jobs) or not _pages_are_current(folder)) as places:
        execute(jobs, folder, places)
        build(tier, folder, places)


@contextmanager
def _forking(folder: Path, needed: bool) -> Iterator[Places]:
    """Start the processes that fork, if they are needed."""
    if not needed:
        yield Places()
        return
    environment = publish.environment() | children.THREADS
    with runner.staging() as directory, warm.warm(directory, environment) as plain:
        if plain is None:
            yield Places()
            return
        with warm.prepared(plain, directory, environment, folder, PREPARE) as read:
            yield Places(plain, read)


def _todo(protocols: Mapping[str, str], folder: Path) -> Iterator[Job]:
    """Yield what must be executed, the longest first; publish the other runs, and tell of them.

    Findings come last: they are short, so that all cores are busy to the end.
    """
    notebooks = [sources.find(folder, name) for name in protocols]
    cost = {one.name: _cost(one, protocols[one.name], folder) for one in notebooks}
    for notebook in sorted(notebooks, key=lambda one: (one.findings, -cost[one.name])):
        protocol = protocols[notebook.name]
        request = Request(notebook, protocol, folder)
        if runner.kept(request):
            _publish(request.store, notebook.path.stem, folder)
            print(
                f"{notebook.name} at {protocol}: unchanged, not executed again",
                flush=True,
            )
        else:
            yield Job(notebook.name, protocol)


def _cost(notebook: Notebook, protocol: str, folder: Path) -> float:
    """Return the CPU seconds that a notebook took here last, or where its time was recorded."""
    shown = store.live(notebook.name, folder, records.runs.read_head)
    if shown and shown.runs[0].protocol == protocol:
        return float(shown.runs[0].manifest["cpu_seconds"])
    return pace.cost(notebook.name, protocol, folder)


def execute(jobs: Sequence[Job], folder: Path, places: Places = Places()) -> None:
    """Execute notebooks side by side; publish each that ran.

    When all have ended, the first run that failed is refused; the others are published.
    """
    if not jobs:
        return
    notebooks = sources.notebooks(folder)
    failures = list[Refusal]()
    alone = any(job.protocol in ("gpu", "paper") for job in jobs)
    workers = 1 if alone else min(runtime.cores(), len(jobs))
    forks = {job.notebook: _place(notebooks[job.notebook], places) for job in jobs}
    with closing(study.side_by_side(jobs, folder, workers, forks)) as ended:
        for job, outcome in ended:
            if isinstance(outcome, Refusal):
                failures.append(outcome)
                line = f"failed: {outcome}"
            else:
                run = _publish(outcome, notebooks[job.notebook].path.stem, folder)
                line = f"{run.manifest['seconds']:.1f} s"
            print(f"{job.notebook} at {job.protocol}: {line}", flush=True)
    if failures:
        raise failures[0]


def _place(notebook: Notebook, places: Places) -> str | None:
    return places.read if notebook.findings else places.plain


def _publish(executed: Path, stem: str, folder: Path) -> Run:
    """Copy a run to where the book reads it, one process at a time, and return it."""
    target = folder / "book" / "notebooks" / f"{stem}.ipynb"
    run = records.read_run(executed.with_suffix(".parquet"))
    with storage.locked(target.with_suffix(".lock"), wait=True):
        storage.sweep(target.parent)
        if not _holds(target, run):
            runner.put(target, executed.read_text(encoding="utf-8"), run)
    return run


def _holds(page: Path, run: Run) -> bool:
    """Whether a page, and the run beside it, are those of a run."""
    try:
        there = records.read_run(page.with_suffix(".parquet"))
    except Refusal:
        return False
    return there == run and storage.digest(page) == run.manifest["executed"]


def build(tier: str, folder: Path, places: Places = Places()) -> Path:
    """Render the book, warnings being errors; print and return the path of its first page.

    A notebook's page shows the live run that is there; a refusal names the command that makes one.
    The caller holds the book (`rendering.alone`).
    """
    for page in notebook_pages(folder):
        _check(folder, page, tier)
    if not _pages_are_current(folder):
        with children.lifeline() as (waiting, _):
            children.run(GENERATE, folder=folder, waiting=waiting, place=places.read)
    rendering.render(folder, place=places.read)
    first = folder / "_build" / "html" / "index.html"
    print(f"book: {first}")
    return first


def _pages_are_current(folder: Path) -> bool:
    made_of = freshness.digest(folder, freshness.SHOWN)
    return freshness.is_current(folder / "book" / "_generated", made_of)


def notebook_pages(folder: Path) -> list[str]:
    """List the notebooks in the book's table of contents: ``01_pesc``, ``01_pesc_findings``."""
    with storage.formed(folder / "book" / "_toc.yml") as toc:
        files = [file for part in toc["parts"] for file in _files(part["chapters"])]
        return [
            file.removeprefix("notebooks/")
            for file in files
            if file.startswith("notebooks/")
        ]


def _files(entries: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the files of a table of contents, each entry before its sections."""
    for entry in entries:
        yield entry["file"]
        yield from _files(entry.get("sections", ()))


def _check(folder: Path, page: str, tier: str) -> None:
    """Refuse a page that holds no run, an error, or a figure that a reader cannot read."""
    copy = f"book/notebooks/{page}.ipynb"
    fix = f"moebook book --tier {tier} --only {page[3:]}"
    path = folder / copy
    if not path.is_file():
        refuse("E-BOOK", f"{copy} is missing, so its page would be empty; run: {fix}")
    with located("", "E-BOOK", f"remove it, then run: {fix}"):
        cells = storage.read_ipynb(path)["cells"]
    beside = path.with_suffix(".parquet")
    if not beside.is_file():
        refuse("E-BOOK", f"{copy} has no run beside it; run: {fix}")
    for fault in records.runs.read_head(beside).manifest.get("unreadable", ()):
        refuse("E-BOOK", f"{copy}: {fault}")
    for number, cell in enumerate(cells, start=1):
        for output in cell.get("outputs", []):
            if output["output_type"] == "error":
                refuse(
                    "E-BOOK",
                    f"{copy}: cell {number} holds {output['ename']}; run: {fix}",
                )
