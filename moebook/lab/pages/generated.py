"""The pages that are made from runs, claims and the audit, and their pictures.

They lie in ``book/_generated`` and are made anew when anything has changed that they are made of.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from importlib import import_module
from io import BytesIO
from pathlib import Path

from moebook import storage
from moebook.errors import Refusal
from moebook.lab import papers, plotting
from moebook.lab.evidence import findings, prose, verdicts
from moebook.lab.pages import moving, pages, plans
from moebook.lab.pages.filling import page
from moebook.lab.records import store
from moebook.lab.run import freshness, sources

RENDERER = """
jupyter_book.sphinx myst_nb.sphinx_ext sphinx_book_theme sphinxcontrib.bibtex sphinx.builders.html
sphinx_design sphinx_exercise sphinx_proof sphinx_thebe
""".split()
# Imported where pages are made: with torch, which those who render them do without.
LATE = ("moebook.evaluation", "moebook.experiments.every")

PROMISES = 4.5  # inches that its picture is wide: on a phone of 390 px the type is 9 px
JUDGED = ("summary", "ledger", "chance")  # pages of the verdicts on all claims


def prepare() -> None:
    """Read all runs of the project in the working directory, and make the pages of committed ones.

    Forks of this process, which make findings and pages and render them, find that done, the code
    that is loaded hashed, and what they import.
    """
    folder = Path.cwd()
    for name in (*RENDERER, *LATE):
        import_module(name)
    with suppress(Refusal):  # whoever reads the pools is told
        for name in sources.notebooks(folder):
            store.pools(name)
    storage.files.loaded()
    with suppress(Refusal):  # whoever writes the pages is told
        committed(folder, freshness.digest(folder, freshness.COMMITTED))


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


def generated(folder: Path) -> dict[str, str]:
    """Return the text of every file in ``book/_generated``, by name; draw the picture beside."""
    made_of = freshness.digest(folder, freshness.COMMITTED)
    rows = verdicts.ledger(folder)
    places = pages.Places(folder)
    judged = {name: page(name, rows=rows, places=places) for name in JUDGED}
    return judged | {
        **committed(folder, made_of),
        "promises": page("promises", drawn=_promises(folder, made_of)),
        "records": pages.recorded(folder),
        "experts": moving.experts(folder),
        "selection": moving.selection(folder),
    }


@cache
def committed(folder: Path, made_of: str) -> dict[str, str]:
    """Return the pages that show no run of this build; what they are ``made_of`` is hashed."""
    rows = _rows(folder, made_of)
    return prose.pages(folder, rows) | {
        "arms": pages.arms(folder),
        "audit": pages.audit(papers.audit()),
        "designs": pages.designs(folder, rows),
        "withdrawn": pages.withdrawn(folder),
        "repeated": pages.repeated(folder),
        "taught": pages.taught(folder),
        "tested": pages.tested(folder),
        "times": pages.times(folder),
        "sizes": moving.sizes(),
        "accelerated": pages.accelerated(folder),
        "plan": plans.shown(folder),
    }


@cache
def _rows(folder: Path, made_of: str) -> list[verdicts.Row]:
    """Judge all claims by committed runs alone, as prose and the front page's figure do.

    A run that a page shows may be the only one at its scale, and differs from build to build.
    """
    return verdicts.ledger(folder, live=False)


def _promises(folder: Path, made_of: str) -> bool:
    """Draw the papers' main gains beside ours; False if none ran."""
    plotting.style()
    figure = findings.promises(_rows(folder, made_of))
    if figure is None:
        return False
    figure.set_figwidth(PROMISES)
    plotting.check(figure, "the promises and what was measured")
    drawn = BytesIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None})
    _renew(folder / "book" / "_generated" / "promises.svg", drawn.getvalue())
    return True
