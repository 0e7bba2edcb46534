"""Slides for each paper, from the pages and figures of a rendered book.

``python -m workshop.slides FOLDER`` writes ``FOLDER/<paper>.html`` beside the two libraries that
they need, so that they show without a network. A deck tells the story of the paper's chapter: the
problem, the idea as a picture, its equation, the whole answer with its price, one result a slide
with its figure, the surprise, and a task for the group. Nothing on them is typed here.
"""

from __future__ import annotations

import base64
import re
import shutil
import sys
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from nbconvert.filters import markdown2html

from moebook import errors, storage
from moebook.errors import Refusal, refuse
from moebook.lab import papers
from moebook.lab.evidence import prose, verdicts
from moebook.lab.pages.pages import TITLES
from moebook.lab.run import sources
from workshop.editions import exercises, plain

HERE = Path(__file__).parent
EQUATION = re.compile(r"([^\n]+(?:\n[^\n]+)*)\n\n\$\$\n(.*?)\n\$\$", re.DOTALL)
IDEA = re.compile(r"# .*\n\n(.+(?:\n.+)*)")
FIGURE = re.compile(
    r"(?s)```\{figure\} (\S+)\n.*?^:alt: (.*?)\n\n(.*?)\n```", re.MULTILINE
)


class Slide(NamedTuple):
    """One slide: Markdown, and a picture with its caption where there is one."""

    title: str
    text: str = ""
    image: str = ""
    alt: str = ""
    caption: str = ""


def data(content: bytes, kind: str) -> str:
    """Write a picture as an address of its own, so that a deck is one file."""
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def slides(paper: str, folder: Path) -> Iterator[Slide]:
    """Make the slides of a paper from a project whose book is built; E-BOOK where it is not."""
    book = folder / "book"
    executed = sorted((book / "notebooks").glob(f"*_{paper}_findings.ipynb"))
    if not executed:
        refuse("E-BOOK", f"no results of {paper} in {book}/notebooks; run: make book")
    theory = book / f"{paper}_theory.md"
    title = sources.find(folder, paper).title
    yield Slide(TITLES[paper], f"**{title.partition(': ')[2].capitalize()}**")
    (idea,) = _part(theory, IDEA, "paragraph below its title")
    path, alt, caption = _part(theory, FIGURE, "figure")
    diagram = data((book / path).read_bytes(), "svg+xml")
    yield Slide("The idea", plain(idea), diagram, alt, plain(caption))
    before, equation = _part(theory, EQUATION, "equation below a paragraph")
    yield Slide("In one equation", f"{plain(before)}\n\n$$\n{equation}\n$$")
    told = prose.pages(folder, verdicts.ledger(folder, live=False))[f"found_{paper}"]
    answer, _, surprise = told.strip().partition("**The surprise.** ")
    # All of it: what comes last, a fair comparison or the price, may overturn what comes first.
    for paragraph in answer.strip().split("\n\n"):
        sentences = "\n\n".join(paragraph.splitlines())
        yield Slide("What we found", plain(sentences))
    for notebook in executed:
        yield from _results(storage.read_ipynb(notebook)["cells"])
    if surprise:
        yield Slide("The surprise", plain(surprise))
    page = book / f"{paper}_exercises.md"
    _, tasks = exercises(page)
    if not tasks:
        refuse("E-BOOK", f"{page} has no exercise, which the slides show; write one")
    yield Slide(f"Your turn: {tasks[0].title}", plain(tasks[0].text))


def _part(page: Path, part: re.Pattern[str], name: str) -> tuple[str, ...]:
    """Find the first part of a page that has this form; E-BOOK where there is none."""
    found = part.search(page.read_text(encoding="utf-8"))
    if found is None:
        refuse("E-BOOK", f"{page} has no {name}, which the slides show; write one")
    return found.groups()


def _results(cells: list[Any]) -> Iterator[Slide]:
    """Make a slide of each figure of an executed notebook: heading, figure, what one sees."""
    heading = ""
    for cell, after in zip_longest(cells, cells[1:]):
        if cell["cell_type"] == "markdown":
            found = re.findall(r"^## +(.+)$", cell["source"], re.MULTILINE)
            heading = found[-1] if found else heading
        figure = cell["metadata"].get("mystnb", {})
        for output in cell.get("outputs", []):
            if figure and (png := output.get("data", {}).get("image/png")):
                caption = figure["figure"]["caption"]
                alt = figure["image"]["alt"]
                picture = data(base64.b64decode(png), "png")
                said = after["source"].split("\n\n")[0] if after else ""
                # A sentence that leads to a table, "In numbers:", leads nowhere here.
                seen = re.sub(r"[^.?!]*:$", "", said.strip())
                yield Slide(heading, plain(seen), picture, alt, caption)


def write(target: Path, folder: Path) -> list[Path]:
    """Write a deck a paper and the libraries beside them; return the decks."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["markdown2html"] = markdown2html
    template = environment.get_template("slides.html")
    decks = {}
    for paper in papers.PAPERS:
        decks[target / f"{paper}.html"] = template.render(
            title=f"{TITLES[paper]}: slides", slides=list(slides(paper, folder))
        )
    shutil.copytree(HERE / "reveal", target / "reveal", dirs_exist_ok=True)
    shutil.copy(
        folder / "book" / "_static" / "mathjax" / "tex-svg.js", target / "reveal"
    )
    for path, deck in decks.items():
        storage.write(path, deck)
    return list(decks)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m workshop.slides FOLDER")
    try:
        for deck in write(Path(sys.argv[1]), storage.checkout()):
            print(deck)
    except (Refusal, OSError) as error:
        print(errors.told(error), file=sys.stderr)
        sys.exit(2)
