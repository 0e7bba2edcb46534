"""The book renders without a warning, reads offline, and refuses copies that failed."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moebook import papers, plotting
from moebook.errors import Refusal
from moebook.notebook import book

ROOT = Path(__file__).parents[2]
VALUE = {"name": "pesc/dense/accuracy", "value": 0.43, "unit": "share", "seed": 0}


def _notebook(name: str = "pesc") -> dict[str, Any]:
    """A small executed notebook: text, a formula, a figure, a table and a recorded value."""
    figure = io.BytesIO()
    plotting.loads({"layer 0": [0.5, 0.5]}).savefig(figure)
    picture = {
        "mystnb": {
            "figure": {"caption": "Load by expert.", "name": f"fig-{name}"},
            "image": {"alt": "One bar of two equal parts."},
        }
    }
    value = {
        "application/vnd.moebook.value+json": VALUE,
        "application/papermill.record/text/plain": "0.43",
    }
    glue = {"name": "pesc/dense/accuracy@0", "mime_prefix": "application/papermill.record/"}
    table = "<table class='dataframe'><tr><th>accuracy</th></tr><tr><td>0.43</td></tr></table>"
    return {
        "nbformat": 4,
        "nbformat_minor": 5,
        "metadata": {"language_info": {"name": "python", "pygments_lexer": "ipython3"}},
        "cells": [
            _text("# PESC\n\nWith $E$ experts:\n\n$$\ny = \\sum_{i=1}^{E} g_i A_i\n$$"),
            _text("## Accuracy of the dense model"),
            _code({"image/png": base64.b64encode(figure.getvalue()).decode()}, {}, picture),
            _code({"text/html": table}, {}, {}),
            _code(value, {"scrapbook": glue}, {}),
        ],
    }


def _text(source: str) -> dict[str, Any]:
    return {"cell_type": "markdown", "id": f"text-{len(source)}", "metadata": {}, "source": source}


def _code(data: Any, metadata: Any, cell: Any) -> dict[str, Any]:
    output = {"output_type": "display_data", "data": data, "metadata": metadata}
    return {
        "cell_type": "code",
        "id": f"code-{len(str(data))}",
        "execution_count": 1,
        "metadata": cell,
        "source": "show()",
        "outputs": [output],
    }


def _manifest(tier: str, name: str = "pesc") -> dict[str, Any]:
    environment = {"cpu": "A processor", "cores": 2, "accelerator": None}
    return {
        "notebook": name, "tier": tier, "date": "2026-01-02T03:04:05+00:00", "seconds": 252.3,
        "peak_memory": 1_300_000_000, "environment": environment, "hashes": {}, "overrides": {},
        "parameters": {"tier": tier, "seeds": 2},
        "commit": {"id": "0123456789abcdef", "dirty": False},
    }  # fmt: skip


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with the book's own pages, a live run and a study of every notebook."""
    folder = tmp_path_factory.mktemp("project")
    left_out = shutil.ignore_patterns("notebooks", "_generated")
    shutil.copytree(ROOT / "book", folder / "book", ignore=left_out)
    shutil.copy(ROOT / "_config.yml", folder)
    (folder / "moebook").symlink_to(ROOT / "moebook")
    shutil.copytree(ROOT / "notebooks", folder / "notebooks")
    for stem in sorted(path.stem for path in (folder / "notebooks").glob("*.ipynb")):
        name, values = stem[3:], [VALUE] if stem == "01_pesc" else []
        live, study = folder / "book" / "notebooks", folder / "results" / name / "study"
        for place, start, scale in ((live, f"{stem}.", "smoke"), (study, "", "study")):
            place.mkdir(parents=True, exist_ok=True)
            _write(place / f"{start or 'notebook.'}ipynb", _notebook(name))
            _write(place / f"{start}manifest.json", _manifest(scale, name))
            record = {"notebook": name, "scale": scale, "values": values}
            _write(place / f"{start}record.json", record)
    return folder


def _write(path: Path, content: object) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


@pytest.fixture(scope="module")
def site(project: Path) -> Path:
    """The rendered pages; a warning of Jupyter Book fails here."""
    return book.build("smoke", project).parent


@pytest.fixture
def copy(project: Path) -> Iterator[Path]:
    """The executed notebook, put back after a test has spoilt it."""
    path = project / "book" / "notebooks" / "01_pesc.ipynb"
    yield path
    _write(path, _notebook())


def _addresses(site: Path) -> list[str]:
    """All pages but index.html, which only sends the reader on to the first one."""
    pages = [page for page in sorted(site.rglob("*.html")) if "_static" not in page.parts]
    return [page.as_uri() for page in pages if page.name != "index.html"]


def test_every_page_of_the_contents_is_rendered(site: Path) -> None:
    toc = (ROOT / "book" / "_toc.yml").read_text(encoding="utf-8")
    pages = re.findall(r"(?:root|file): (\S+)", toc)
    assert len(pages) > 10
    assert [page for page in pages if not (site / f"{page}.html").is_file()] == []


def test_the_badge_tells_what_the_run_cost_and_the_copy_is_untouched(
    site: Path, project: Path
) -> None:
    page = (site / "notebooks" / "01_pesc.html").read_text(encoding="utf-8")
    for fact in ("4 min 12 s", "1.3 GB", "2 × A processor", "0123456", "numbers mean nothing"):
        assert fact in page
    assert json.loads((project / "book/notebooks/01_pesc.ipynb").read_text()) == _notebook()


def test_the_live_page_and_the_recorded_study_name_each_other(site: Path) -> None:
    live, study = (
        (site / "notebooks" / f"01_pesc{tier}.html").read_text(encoding="utf-8")
        for tier in ("", "-study")
    )
    assert 'href="01_pesc-study.html"' in live
    assert 'href="01_pesc.html"' in study
    assert "PESC: the recorded study" in study
    assert "of 2026-01-02; " in live and "of 2026-01-02; " in study


def test_the_ledger_has_every_claim_without_javascript(site: Path) -> None:
    page = (site / "ledger.html").read_text(encoding="utf-8")
    assert [claim.id for claim in papers.claims() if f'id="{claim.id}"' not in page] == []


def test_the_audit_page_has_every_number_that_differs(site: Path) -> None:
    page = (site / "audit.html").read_text(encoding="utf-8")
    differs = [finding for finding in papers.audit() if finding.status == "differs"]
    assert differs and all(finding.printed in page for finding in differs)


@pytest.mark.parametrize(("tier", "live"), [("smoke", "smoke"), ("study", "cpu")])
def test_an_executed_copy_that_is_missing_is_refused(
    project: Path, copy: Path, tier: str, live: str
) -> None:
    copy.unlink()
    with pytest.raises(Refusal, match=f"moebook run pesc --tier {live}"):
        book.build(tier, project)


def test_an_executed_copy_with_an_error_is_refused(project: Path, copy: Path) -> None:
    notebook = _notebook()
    error = {"output_type": "error", "ename": "ValueError", "evalue": "no", "traceback": []}
    notebook["cells"][3]["outputs"] = [error]
    _write(copy, notebook)
    with pytest.raises(Refusal, match="cell 4 holds ValueError"):
        book.build("smoke", project)


def test_a_warning_of_jupyter_book_is_refused(site: Path, project: Path) -> None:
    page = project / "book" / "glossary.md"
    text = page.read_text(encoding="utf-8")
    page.write_text(text + "\n{ref}`no-such-place`\n", encoding="utf-8")
    try:
        with pytest.raises(Refusal, match="no-such-place"):
            book.build("smoke", project)
    finally:
        page.write_text(text, encoding="utf-8")


@pytest.mark.browser
def test_pages_ask_for_nothing_outside_set_every_formula_and_fit_a_narrow_screen(
    site: Path, browser: Any
) -> None:
    formulas = 0
    browser.resize(400, 800)
    for address in _addresses(site):
        browser.open(address)
        formulas += browser.run("document.querySelectorAll('mjx-container').length")
        raw = browser.run(
            r"[...document.querySelectorAll('.math')].filter("
            r"e => !e.querySelector('mjx-container')).length"
            r" + document.querySelectorAll('mjx-merror, [data-mjx-error]').length"
            r" + (document.body.innerText"
            r".match(/\\\(|\\\[|\$\$/g) ?? []).length"
        )
        assert raw == 0, address
        assert browser.run("document.documentElement.scrollWidth") <= 400, address
        missing = "[...document.images].filter(e => !e.alt && !e.ariaHidden).map(e => e.src)"
        assert browser.run(missing) == [], address
    outside = [url for url in browser.requests if not url.startswith(("file:", "data:", "about:"))]
    assert outside == []
    assert formulas > 50


@pytest.mark.browser
def test_the_ledger_is_filtered_by_paper_and_verdict(site: Path, browser: Any) -> None:
    browser.open((site / "ledger.html").as_uri() + "?paper=ESFT")
    shown = "[...document.querySelectorAll('table[data-filters] tbody tr')].filter(e => !e.hidden)"
    rows = browser.run(f"{shown}.map(e => e.id)")
    assert sorted(rows) == sorted(claim.id for claim in papers.claims("esft"))
    browser.run(
        "{const s = document.querySelector('.moe-filters select'); s.value = 'all';"
        " s.dispatchEvent(new Event('change'))}"
    )
    assert len(browser.run(f"{shown}.map(e => e.id)")) == len(papers.claims())


@pytest.mark.browser
def test_there_is_one_search_field(site: Path, browser: Any) -> None:
    browser.resize(1280, 800)
    browser.open((site / "intro.html").as_uri())
    visible = "[...document.querySelectorAll('.search-button-field')].filter(e => e.offsetParent)"
    assert browser.run(f"{visible}.length") == 1
