"""The pages that are made from runs, claims and the audit, and their pictures.

They lie in ``book/_generated`` and are made anew when anything has changed that they are made of.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from moebook import storage
from moebook.lab import papers, plotting
from moebook.lab.evidence import findings, verdicts
from moebook.lab.pages import moving, pages, plans
from moebook.lab.records import store
from moebook.lab.run import freshness, sources

RENDERER = """
jupyter_book.sphinx myst_nb.sphinx_ext sphinx_book_theme sphinxcontrib.bibtex sphinx.builders.html
sphinx_design sphinx_exercise sphinx_proof sphinx_thebe
""".split()


def prepare() -> None:
    """Read all runs of the project in the working directory, and hash all code that is loaded.

    Forks of this process, which make findings and pages and render them, find that done, and what
    they import.
    """
    for name in RENDERER:
        import_module(name)
    for name in sources.notebooks(Path.cwd()):
        store.pools(name)
    storage.files.loaded()


def write(folder: Path) -> None:
    """Write all pages, and seal them with what they are made of (`freshness`)."""
    place, made_of = (
        folder / "book" / "_generated",
        freshness.digest(folder, freshness.SHOWN),
    )
    for name, text in generated(folder).items():
        storage.write(place / f"{name}.md", text)
    freshness.seal(place, made_of)


def generated(folder: Path) -> dict[str, str]:
    """Return the text of every file in ``book/_generated``, by name; draw the pictures beside."""
    rows, places = verdicts.ledger(folder), pages.Places(folder)
    every = (*papers.PAPERS, *papers.OURS)
    mine = {paper: [row for row in rows if row.claim.paper == paper] for paper in every}
    pictures = {
        paper: _forest(paper, f"Findings: {pages.TITLES[paper]}", mine[paper], folder)
        for paper in mine
    }
    pictures["front"] = _forest(
        "front", "The main claims", findings.mains(rows), folder
    )
    judged = {"rows": rows, "places": places, "pictures": pictures}
    kinds = ("summary", "ledger", "chance", "found", "front")
    return {name: pages.page(name, **judged) for name in kinds} | {
        **{
            f"ledger_{p}": pages.page("ledger", rows=mine[p], places=places)
            for p in mine
        },
        "audit": pages.audit(papers.audit()),
        "which": pages.which(folder),
        "records": pages.recorded(folder),
        "designs": pages.designs(folder),
        "withdrawn": pages.withdrawn(folder),
        "repeated": pages.repeated(folder),
        "taught": pages.taught(folder),
        "tested": pages.tested(folder),
        "times": pages.times(folder),
        "sizes": moving.sizes(),
        "experts": moving.experts(folder),
        "selection": moving.selection(folder),
        "accelerated": pages.accelerated(folder),
        "plan": plans.shown(folder),
    }


def _forest(
    name: str, title: str, rows: list[verdicts.Row], folder: Path
) -> str | None:
    """Draw claims at the committed scales; return the picture's name beside the pages."""
    plotting.style()
    figure = findings.forest(rows, title)
    if figure is None:
        return None
    path = folder / "book" / "_generated" / f"found_{name}.svg"
    with storage.replacing(path) as temporary:
        figure.savefig(temporary, format="svg", metadata={"Date": None})
    return f"_generated/{path.name}"
