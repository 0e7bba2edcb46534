"""Render the book from executed notebooks and recorded results; nothing is executed here."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from moebook import papers, results
from moebook.errors import refuse
from moebook.notebook import fragments, ledger, verdicts

COMMAND = "from jupyter_book.cli.main import main; main()"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def build(tier: str, folder: Path | None = None) -> Path:
    """Render the book, warnings being errors; print and return the path of its first page.

    A notebook's page shows the live run that is there, whatever its tier: one notebook may be run
    again without the others. A page such as ``01_pesc-study`` shows a committed run.

    Args:
        tier: The tier just run; a refusal names the command that makes a missing page at it.
        folder: The project; found from the working directory by default.

    Raises:
        Refusal: ``E-BOOK`` for a notebook that was not executed or holds an error, and for any
            warning of Jupyter Book; ``E-DEP`` without Jupyter Book.
    """
    folder = folder or results.root()
    if importlib.util.find_spec("jupyter_book") is None:
        refuse("E-DEP", "Jupyter Book is not installed; pip install 'moebook[book]'")
    for page in pages(folder):
        if "-" in page:
            _place_recorded(folder, *page.split("-"))
        else:
            _check(folder, page, "cpu" if tier in results.COMMITTED else tier)
    for name, text in generated(folder).items():
        results.write(folder / "book" / "_generated" / f"{name}.md", text)
    _render(folder)
    first = folder / "_build" / "html" / "index.html"
    print(f"book: {first}")
    return first


def pages(folder: Path) -> list[str]:
    """List the notebooks in the book's table of contents: ``01_pesc``, ``01_pesc-study``."""
    toc = yaml.safe_load((folder / "book" / "_toc.yml").read_text(encoding="utf-8"))
    files = [chapter["file"] for part in toc["parts"] for chapter in part["chapters"]]
    return [file.removeprefix("notebooks/") for file in files if file.startswith("notebooks/")]


def generated(folder: Path) -> dict[str, str]:
    """Return the text of every file in ``book/_generated``, by name."""
    rows, places = verdicts.ledger(folder), ledger.Places(folder)
    by_paper = {
        f"ledger_{paper}": ledger.ledger([row for row in rows if row.claim.paper == paper], places)
        for paper in papers.PAPERS
    }
    return by_paper | {
        "summary": ledger.summary(rows),
        "ledger": ledger.ledger(rows, places),
        "audit": fragments.audit(papers.audit()),
        "records": fragments.records(folder),
    }


def _check(folder: Path, page: str, tier: str) -> None:
    """Refuse an executed copy that is missing, has no manifest, or holds an error."""
    copy, fix = f"book/notebooks/{page}.ipynb", f"moebook run {page[3:]} --tier {tier}"
    notebook = _json(folder / copy, fix)
    _json(folder / "book" / "notebooks" / f"{page}.manifest.json", fix)
    for number, cell in enumerate(notebook["cells"], start=1):
        for output in cell.get("outputs", []):
            if output["output_type"] == "error":
                refuse("E-BOOK", f"{copy}: cell {number} holds {output['ename']}; run: {fix}")


def _place_recorded(folder: Path, stem: str, tier: str) -> None:
    """Make the page of a committed run: its title names the tier, its figures have other names."""
    source, fix = folder / "results" / stem[3:] / tier, f"moebook run {stem[3:]} --tier {tier}"
    notebook = _json(source / "notebook.ipynb", fix)
    title, *text = "".join(notebook["cells"][0]["source"]).split("\n", 1)
    notebook["cells"][0]["source"] = "\n".join([f"{title}: the recorded {tier}", *text])
    for cell in notebook["cells"]:
        if figure := cell["metadata"].get("mystnb", {}).get("figure"):
            figure["name"] += f"-{tier}"
    page = folder / "book" / "notebooks" / f"{stem}-{tier}"
    results.write(page.with_suffix(".ipynb"), json.dumps(notebook))
    manifest = (source / "manifest.json").read_text(encoding="utf-8")
    results.write(page.with_suffix(".manifest.json"), manifest)


def _json(path: Path, fix: str) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        refuse("E-BOOK", f"{path} is missing, so its page would be empty; run: {fix}")
    except ValueError as error:
        refuse("E-BOOK", f"{path} is not JSON ({error}); run: {fix} --force")


def _render(folder: Path) -> None:
    """Run Jupyter Book, every warning an error; the whole log stays in ``_build/book.log``."""
    command = [sys.executable, "-c", COMMAND, "build", "-W", "-n", "--keep-going", "book"]
    here = Path(__file__).parents[2]
    path = os.pathsep.join(filter(None, [str(here), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
    )
    log = folder / "_build" / "book.log"
    results.write(log, _COLOUR.sub("", done.stdout))
    if done.returncode:
        lines = log.read_text(encoding="utf-8").splitlines()
        found = [line for line in lines if re.search(r"WARNING|ERROR|Error", line)] or lines[-1:]
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        refuse("E-BOOK", f"the book has warnings: {found[0]}{more}; see {log.relative_to(folder)}")
