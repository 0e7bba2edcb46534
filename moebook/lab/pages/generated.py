"""The pages that are made from runs, claims and the audit, and their pictures.

They lie in ``book/_generated`` and are made anew when anything has changed that they are made of.
"""

from __future__ import annotations

from importlib import import_module
from io import BytesIO
from pathlib import Path

from moebook import storage
from moebook.lab import papers, plotting
from moebook.lab.evidence import findings, prose, verdicts
from moebook.lab.pages import moving, pages, plans
from moebook.lab.records import store
from moebook.lab.run import freshness, sources

RENDERER = """
jupyter_book.sphinx myst_nb.sphinx_ext sphinx_book_theme sphinxcontrib.bibtex sphinx.builders.html
sphinx_design sphinx_exercise sphinx_proof sphinx_thebe
""".split()
# Imported where pages are made: with torch, which those who render them do without.
LATE = ("moebook.evaluation", "moebook.experiments.every")

JUDGED = ("summary", "ledger", "chance")  # pages of the verdicts on all claims


def prepare() -> None:
    """Read all runs of the project in the working directory, and hash all code that is loaded.

    Forks of this process, which make findings and pages and render them, find that done, and what
    they import.
    """
    for name in (*RENDERER, *LATE):
        import_module(name)
    for name in sources.notebooks(Path.cwd()):
        store.pools(name)
    storage.files.loaded()


def write(folder: Path) -> None:
    """Write all pages, and seal them with what they are made of (`freshness`)."""
    place = folder / "book" / "_generated"
    made_of = freshness.digest(folder, freshness.SHOWN)
    for name, text in generated(folder).items():
        _renew(place / f"{name}.md", text.encode())
    freshness.seal(place, made_of)


def _renew(path: Path, content: bytes) -> None:
    """Write a file unless it says that already: else all that include it are rendered again."""
    if not path.is_file() or path.read_bytes() != content:
        storage.write(path, content)


def told(folder: Path) -> dict[str, str]:
    """Return what was found, in prose and in the front page's figure, by committed runs alone.

    A run that a page shows may be the only one at its scale, and differs from build to build.
    """
    rows = verdicts.ledger(folder, live=False)
    drawn = _promises(rows, folder)
    return prose.pages(folder, rows) | {"promises": pages.page("promises", drawn=drawn)}


def generated(folder: Path) -> dict[str, str]:
    """Return the text of every file in ``book/_generated``, by name; draw the pictures beside."""
    rows = verdicts.ledger(folder)
    places = pages.Places(folder)
    judged = {name: pages.page(name, rows=rows, places=places) for name in JUDGED}
    return judged | {
        **told(folder),
        "arms": pages.arms(folder),
        "audit": pages.audit(papers.audit()),
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


def _promises(rows: list[verdicts.Row], folder: Path) -> bool:
    """Draw the papers' main gains beside ours; False if none ran."""
    plotting.style()
    figure = findings.promises(rows)
    if figure is None:
        return False
    plotting.check(figure, "the promises and what was measured")
    drawn = BytesIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None})
    _renew(folder / "book" / "_generated" / "promises.svg", drawn.getvalue())
    return True
