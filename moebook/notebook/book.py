"""The book: execute its notebooks side by side, publish them, and render the pages."""

from __future__ import annotations

import importlib.util
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

from moebook import papers, plotting, results, runtime
from moebook.errors import Refusal, located, refuse
from moebook.notebook import (
    findings,
    moving,
    pages,
    plans,
    publish,
    rendering,
    runner,
    sources,
    study,
    verdicts,
    warm,
)
from moebook.notebook.sources import Notebook
from moebook.notebook.study import Job
from moebook.results import store


def make(tier: str, only: str | None, folder: Path) -> None:
    """Execute what has changed and render the book; another who builds it is not disturbed."""
    with rendering.alone(folder):
        execute(tier, only, folder)
        build(tier, folder)


def execute(tier: str, only: str | None, folder: Path) -> None:
    """Execute the notebooks, or ``only`` one, at a tier side by side; publish each that ran.

    Findings notebooks come last and are executed at every build: they read pools and train nothing.
    When all have ended, the first run that failed is refused; the others are published.
    """
    notebooks = sources.notebooks(folder)
    chosen = [sources.find(folder, only)] if only else list(notebooks.values())
    chosen.sort(key=lambda notebook: _cost(notebook, folder))
    jobs = [Job(one.name, "cpu" if one.findings else tier) for one in chosen]
    workers = 1 if tier in ("gpu", "paper") else min(runtime.cores(), len(jobs))
    failures, start = list[Refusal](), datetime.now(UTC).isoformat(timespec="seconds")
    # Libraries are imported once for all; a GPU's notebooks run alone, each in a new process.
    environment = publish.environment() | study.THREADS
    with (
        runner.staging() as directory,
        warm.warm(directory, environment) as place,
        closing(study.side_by_side(jobs, folder, workers, place)) as ended,
    ):
        for job, outcome in ended:
            if isinstance(outcome, Refusal):
                failures.append(outcome)
                line = f"failed: {outcome}"
            else:
                ran = _publish(outcome, notebooks[job.notebook].path.stem, folder).manifest
                fresh = ran["date"] >= start
                line = f"{ran['seconds']:.1f} s" if fresh else "unchanged, not executed again"
            print(f"{job.notebook} at {job.protocol}: {line}", flush=True)
    if failures:
        raise failures[0]


def _cost(notebook: Notebook, folder: Path) -> tuple[bool, float]:
    """Longest first, so that the last one to end is a short one; findings after all others."""
    shown = store.live(notebook.name, folder)
    return notebook.findings, -(shown.runs[0].manifest["seconds"] or 0) if shown else 0.0


def _publish(executed: Path, stem: str, folder: Path) -> results.Run:
    """Copy a run to where the book reads it, one process at a time, and return it."""
    target = folder / "book" / "notebooks" / f"{stem}.ipynb"
    run = results.read_run(executed.with_suffix(".parquet"))
    with results.locked(target.with_suffix(".lock"), wait=True):
        results.sweep(target.parent)
        runner.put(target, executed.read_text(encoding="utf-8"), run)
    return run


def build(tier: str, folder: Path) -> Path:
    """Render the book, warnings being errors; print and return the path of its first page.

    A notebook's page shows the live run that is there; a refusal names the command that makes one.
    The caller holds the book (`rendering.alone`).
    """
    if importlib.util.find_spec("jupyter_book") is None:
        refuse("E-DEP", "Jupyter Book is not installed; pip install 'moebook[book]'")
    for page in notebook_pages(folder):
        _check(folder, page, tier)
    for name, text in generated(folder).items():
        results.write(folder / "book" / "_generated" / f"{name}.md", text)
    rendering.render(folder)
    first = folder / "_build" / "html" / "index.html"
    print(f"book: {first}")
    return first


def notebook_pages(folder: Path) -> list[str]:
    """List the notebooks in the book's table of contents: ``01_pesc``, ``01_pesc_findings``."""
    with results.formed(folder / "book" / "_toc.yml") as toc:
        files = [chapter["file"] for part in toc["parts"] for chapter in part["chapters"]]
        return [file.removeprefix("notebooks/") for file in files if file.startswith("notebooks/")]


def generated(folder: Path) -> dict[str, str]:
    """Return the text of every file in ``book/_generated``, by name; draw the pictures beside."""
    rows, places = verdicts.ledger(folder), pages.Places(folder)
    every = (*papers.PAPERS, *papers.OURS)
    mine = {paper: [row for row in rows if row.claim.paper == paper] for paper in every}
    pictures = {paper: _forest(paper, f"Findings: {pages.TITLES[paper]}", mine[paper], folder)
                for paper in mine}  # fmt: skip
    pictures["front"] = _forest("front", "The main claims", findings.mains(rows), folder)
    judged = {"rows": rows, "places": places, "pictures": pictures}
    kinds = ("summary", "ledger", "chance", "found", "front")
    return {name: pages.page(name, **judged) for name in kinds} | {
        **{f"ledger_{p}": pages.page("ledger", rows=mine[p], places=places) for p in mine},
        "audit": pages.audit(papers.audit()),
        "which": pages.which(folder),
        "records": pages.records(folder),
        "designs": pages.designs(folder),
        "withdrawn": pages.withdrawn(folder),
        "repeated": pages.repeated(folder),
        "taught": pages.taught(folder),
        "tested": pages.tested(folder),
        "sizes": moving.sizes(),
        "experts": moving.experts(folder),
        "selection": moving.selection(folder),
        "accelerated": pages.accelerated(folder),
        "plan": plans.shown(folder),
    }


def _forest(name: str, title: str, rows: list[verdicts.Row], folder: Path) -> str | None:
    """Draw claims at the committed scales; return the picture's name beside the pages."""
    plotting.style()
    figure = findings.forest(rows, title)
    if figure is None:
        return None
    path = folder / "book" / "_generated" / f"found_{name}.svg"
    with results.replacing(path) as temporary:
        figure.savefig(temporary, format="svg", metadata={"Date": None})
    return f"_generated/{path.name}"


def _check(folder: Path, page: str, tier: str) -> None:
    copy, fix = f"book/notebooks/{page}.ipynb", f"moebook book --tier {tier} --only {page[3:]}"
    path = folder / copy
    if not path.is_file():
        refuse("E-BOOK", f"{copy} is missing, so its page would be empty; run: {fix}")
    with located("", "E-BOOK", f"remove it, then run: {fix}"):
        cells = results.read_ipynb(path)["cells"]
    if not path.with_suffix(".parquet").is_file():
        refuse("E-BOOK", f"{copy} has no run beside it; run: {fix}")
    for number, cell in enumerate(cells, start=1):
        for output in cell.get("outputs", []):
            if output["output_type"] == "error":
                refuse("E-BOOK", f"{copy}: cell {number} holds {output['ename']}; run: {fix}")
