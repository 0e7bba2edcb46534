"""The book renders without a warning, reads offline, and refuses copies that failed."""

import base64
import html
import io
import json
import os
import re
import shutil
from pathlib import Path
from urllib.parse import unquote, urlsplit

import gate
import matplotlib
import pytest
import yaml
from chromium import served

from moebook import storage
from moebook.errors import Refusal
from moebook.experiments import every
from moebook.lab import papers, plotting
from moebook.lab.pages import book, generated
from moebook.lab.pages.pages import TITLES
from moebook.lab.records import Run, Value, write_run
from moebook.lab.run import sources
from moebook.lab.run.session import GLUE
from tests import abbreviations, sentences
from tests.refusals import refused
from workshop import pdf, slides

ROOT = Path(__file__).parents[2]
STYLE = ROOT / "book" / "_static" / "moebook.css"
NO_PROSE = "index genindex search py-modindex".split()
VALUE = {"name": "pesc/dense/accuracy", "value": 0.43, "unit": "share"}


def _notebook(name="pesc"):
    """A small executed notebook: text, a formula, a figure, a table and a recorded value."""
    figure = io.BytesIO()
    plotting.loads({"layer 0": [0.5, 0.5]}).savefig(figure)
    picture = {
        "mystnb": {
            "figure": {"caption": "Load by expert.", "name": f"fig-{name}"},
            "image": {"alt": "One bar of two equal parts."},
        }
    }
    value = {"application/vnd.moebook.value+json": VALUE, f"{GLUE}text/plain": "0.43"}
    glue = {"scrapbook": {"name": "pesc/dense/accuracy", "mime_prefix": GLUE}}
    table = "<table class='dataframe'><tr><th>accuracy</th></tr><tr><td>0.43</td></tr></table>"
    formula = "# PESC\n\nWith $E$ experts:\n\n$$\ny = \\sum_{i=1}^{E} g_i A_i\n$$"
    cells = [
        {
            "cell_type": "markdown",
            "id": f"text-{len(text)}",
            "metadata": {},
            "source": text,
        }
        for text in (formula, "## Accuracy of the dense model")
    ]
    png = {"image/png": base64.b64encode(figure.getvalue()).decode()}
    undrawn = {"mystnb": {"figure": {"caption": "Undrawn.", "name": "fig-undrawn"}}}
    cells += [
        _code(png, {}, picture),
        _code({"text/plain": "'Nothing ran.'"}, {}, undrawn),
        _code({"text/html": table}, {}, {}),
        _code(value, glue, {}),
    ]
    metadata = {"language_info": {"name": "python", "pygments_lexer": "ipython3"}}
    return {"nbformat": 4, "nbformat_minor": 5, "metadata": metadata, "cells": cells}


def _code(data, metadata, cell):
    output = {"output_type": "display_data", "data": data, "metadata": metadata}
    facts = {"id": f"code-{len(str(data))}", "execution_count": 1, "source": "show()"}
    return {"cell_type": "code", "metadata": cell, "outputs": [output], **facts}


def _run(name, tier, seed=0):
    """A run; of pesc with both arms, of which the sparse one is better by a twentieth."""
    manifest = {
        "date": "2026-01-02T03:04:05+00:00",
        "seconds": 252.3,
        "peak_memory": 1_300_000_000,
        "environment": {"cpu": "A processor", "cores": 2, "accelerator": None},
        "overrides": {},
        "commit": {"id": "0123456789abcdef", "dirty": False},
    }
    right = {"dense": 50, "sparse": 60 + seed} if name == "pesc" else {}
    items = {}
    for arm, count in right.items():
        items[arm] = tuple(float(item < count) for item in range(100))
    values = [
        Value(f"pesc/{a}/accuracy", right[a] / 100, "share", x)
        for a, x in items.items()
    ]
    protocol = "nano" if tier == "study" else tier
    base = {"base": "nano"}
    return Run(
        name, protocol, tier, seed, tuple(values), settings=base, manifest=manifest
    )


@pytest.fixture(scope="module", autouse=True)
def style():
    """Undo the style that the book's own figures set."""
    with matplotlib.rc_context():
        plotting.style()
        yield


def _render(folder, warmed):
    """Fill a folder with the book's own pages, an executed copy of every notebook, and one pool."""
    left_out = shutil.ignore_patterns("notebooks", "_generated")
    shutil.copytree(ROOT / "book", folder / "book", ignore=left_out)
    shutil.copytree(ROOT / "notebooks", folder / "notebooks")
    for name in ("moebook", "tests", "_config.yml"):
        (folder / name).symlink_to(ROOT / name)
    # Of PESC's protocols one alone decides here.
    for path in (folder / "notebooks").glob("01_pesc.*.yaml"):
        head = re.sub(r"# Decides: .*\n", "", path.read_text())
        if path.name == "01_pesc.nano.yaml":
            head = "# Decides: pesc.sparse-beats-dense\n" + head
        path.write_text(head)
    for page in book.notebook_pages(folder):
        copy = folder / "book" / "notebooks" / f"{page}.ipynb"
        write_run(copy.with_suffix(".parquet"), _run(page[3:], "smoke"))
        _write(copy, _notebook(page[3:]))
    pool = folder / "results" / "pesc" / "nano"
    for seed in range(3):
        write_run(pool / f"{seed}.parquet", _run("pesc", "study", seed))
    for path in (folder / "book" / "found").glob("*.md"):  # told from this one pool
        path.write_text(
            "{Holds: pesc.sparse-beats-dense at 1 M}, "
            "{value of pesc/sparse/accuracy in pesc/nano}.\n"
        )
    # Here, where all is imported; else the build starts a process.
    generated.write(folder)
    book.build("smoke", folder, book.Places(read=warmed))
    return folder


@pytest.fixture(scope="module")
def project(tmp_path_factory, warmed):
    """A project and its rendered book, made once for all workers; a warning of the build fails."""
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared
    with storage.locked(shared / "book.lock", wait=True):
        if not (shared / "book").exists():
            folder = _render(tmp_path_factory.mktemp("project"), warmed)
            folder.rename(shared / "book")
    return shared / "book"


def _write(path, content):
    path.write_text(json.dumps(content), encoding="utf-8")


def _page(site, name):
    """A page's HTML, in which a space is a space, whether or not a line may end there."""
    text = (site / f"{name}.html").read_text(encoding="utf-8")
    return text.replace("\u00a0", " ")


@pytest.fixture
def site(project):
    """The rendered pages."""
    return project / "_build" / "html"


@pytest.fixture
def small(tmp_path):
    """A project with a book of two pages, one of them an executed notebook."""
    chapters = [{"file": "found"}, {"file": "notebooks/01_pesc"}]
    toc = {
        "format": "jb-book",
        "root": "intro",
        "parts": [{"caption": "A", "chapters": chapters}],
    }
    (tmp_path / "book" / "notebooks").mkdir(parents=True)
    _write(tmp_path / "book" / "_toc.yml", toc)
    config = {"title": "A", "execute": {"execute_notebooks": "off"}}
    _write(tmp_path / "book" / "_config.yml", config)
    (tmp_path / "book" / "intro.md").write_text("# A book\n")
    page = tmp_path / "book" / "notebooks" / "01_pesc.ipynb"
    _write(page, _notebook())
    write_run(page.with_suffix(".parquet"), _run("pesc", "smoke"))
    return tmp_path


def test_all_pages_are_rendered_and_a_live_one_has_a_badge_and_leads_to_its_findings(
    site, project
):
    toc = (ROOT / "book" / "_toc.yml").read_text(encoding="utf-8")
    pages = re.findall(r"(?:root|file): (\S+)", toc)
    assert len(pages) > 10
    assert [page for page in pages if not (site / f"{page}.html").is_file()] == []
    live = _page(site, "notebooks/01_pesc")
    findings = _page(site, "notebooks/01_pesc_findings")
    for fact in (
        "4 min 12 s",
        "1.3 GB",
        "2 × A processor",
        "0123456",
        "numbers mean nothing",
        "Full-size runs: nano (3 seeds)",
    ):
        assert fact in live
    assert re.search(r'href="01_pesc_findings.html"><span[^>]*>the findings', live)
    assert "moe-cost" in live
    assert "moe-cost" not in findings
    assert "Nothing ran." in live and "Undrawn." not in live
    start = r'href="https://colab\S+?/blob/main/(\S+?)"'
    for page in book.notebook_pages(project):
        ways = re.findall(start, _page(site, f"notebooks/{page}"))
        assert ways == [f"notebooks/{page}.ipynb"]
        assert (ROOT / ways[0]).is_file()
    assert (
        json.loads((project / "book/notebooks/01_pesc.ipynb").read_text())
        == _notebook()
    )


def test_claims_stand_in_the_ledger_and_among_findings_with_pictures_of_what_ran(
    site, project
):
    ledger = _page(site, "ledger")
    found = _page(site, "found")
    for claim in papers.claims():
        assert f'id="{claim.id}"' in ledger
    assert "chance alone would produce about" in ledger
    records = _page(site, "records")
    page = _page(site, "audit")
    assert records.count("(committed)") == 1
    assert records.count(", on its page)") == 10
    differs = [finding for finding in papers.audit() if finding.status == "differs"]
    assert differs
    assert all(finding.printed in page for finding in differs)
    assert found.count("Holds, 61.0 %.") == 6
    front = _page(site, "intro")
    assert "Holds, 61.0 %." in front
    assert "promises.svg" in front
    drawn = {path.name for path in (project / "book" / "_generated").glob("*.svg")}
    assert drawn == {"promises.svg"}


def test_no_page_has_a_sentence_of_more_than_35_words(site):
    long = {}
    for page in site.rglob("*.html"):
        if page.stem not in NO_PROSE and "_static" not in page.parts:
            told = sentences.read(page.read_text(encoding="utf-8"))
            # A frozen head or a generated list may go on behind a colon.
            ends = f"{sentences.STOPS};:"
            long[str(page.relative_to(site))] = [*sentences.long(told, ends)]
    assert len(long) > 50
    assert {name: told for name, told in long.items() if told} == {}


def test_every_abbreviation_and_unit_of_a_rendered_page_is_in_the_glossary(site):
    missing = {}
    for page in site.rglob("*.html"):
        # The bibliography has the titles of papers.
        if page.stem in [*NO_PROSE, "bibliography"] or "_static" in page.parts:
            continue
        told = abbreviations.read(page.read_text(encoding="utf-8"))
        for word in abbreviations.missing(told):
            missing.setdefault(word, page.stem)
    assert missing == {}


def test_every_arm_of_an_experiment_or_a_protocol_is_in_the_glossary(site):
    """A protocol may name an arm with another number: budget600 beside budget400."""
    page = html.unescape(_page(site, "glossary"))
    notebooks = sources.notebooks(ROOT)
    arms = every.arms({name: one.defaults for name, one in notebooks.items()})

    def kind(arm):
        return re.sub(r"[\d.]+$", "N", arm)

    for name, known in arms.items():
        title = TITLES[name].removesuffix(" (our own)")
        _, _, table = page.partition(f"Arms in the notebook “{title}”")
        listed = re.findall(r"<code>(.*?)</code>", table.partition("</table>")[0])
        assert {*known} == {*listed}, name
        for protocol in notebooks[name].protocols:
            named = notebooks[name].settings(protocol).get("arms", "all").split(",")
            assert {*map(kind, named)} <= {*map(kind, listed), "all"}, (name, protocol)


def test_every_link_within_the_book_leads_to_a_place_that_is_there(site):
    places = {}  # of each page, what a link may name
    links = set()
    for page in site.rglob("*.html"):
        if "_static" in page.parts:
            continue
        text = page.read_text(encoding="utf-8")
        places[page] = {"", *re.findall(r'\sid="([^"]+)"', text)}
        for link in map(html.unescape, re.findall(r'<a\s[^>]*?href="([^"]*)"', text)):
            target = urlsplit(link)
            if not target.scheme and not target.path.startswith("/"):
                links.add((page, unquote(target.path), unquote(target.fragment)))
    assert len(links) > 1000
    for page, path, place in links:
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), (page.name, path)
        assert place in places.get(target, {""}), (page.name, path, place)


def test_a_warning_and_a_copy_with_an_error_or_without_its_run_are_refused(
    small, warmed, monkeypatch
):
    with (
        monkeypatch.context() as patch,
        pytest.raises(Refusal, match=r"warnings: .*found.*no-su"),
    ):
        patch.setattr(book, "_pages_are_current", lambda folder: True)
        (small / "book" / "found.md").write_text("# Found\n\n{ref}`no-such-place`\n")
        book.build("smoke", small, book.Places(read=warmed))
    assert "no-such-place" in (small / "_build" / "book.log").read_text()
    copy = small / "book" / "notebooks" / "01_pesc.ipynb"
    notebook = _notebook()
    error = {
        "output_type": "error",
        "ename": "ValueError",
        "evalue": "no",
        "traceback": [],
    }
    notebook["cells"][3]["outputs"] = [error]
    _write(copy, notebook)
    refused("cell 4 holds ValueError", book.build, "smoke", small)
    for suffix, message in (
        (".parquet", "has no run beside it"),
        (".ipynb", "is missing"),
    ):
        copy.with_suffix(suffix).unlink()
        refused(
            f"{message}.*; run: moebook book --tier cpu --only pesc",
            book.build,
            "cpu",
            small,
        )


RAW = r"""document.querySelectorAll('.math:not(:has(mjx-container))').length
+ document.querySelectorAll('mjx-merror, [data-mjx-error]').length
+ (document.body.innerText.match(/\\\(|\\\[|\$\$/g) ?? []).length"""
WITHOUT_A_TEXT = (
    "[...document.images].filter(e => !e.alt && !e.ariaHidden).map(e => e.src)"
)


def one_of_a_kind(pages):
    """Leave out pages that are made as another one is."""
    kinds = {}
    for page in sorted(pages):
        alike = re.search("^reference_|_map$|_switches$|_exercises$", page.stem)
        kinds.setdefault(alike[0] if alike else page.stem, page)
    return list(kinds.values())


@pytest.mark.browser
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_pages_ask_for_nothing_outside_set_every_formula_and_fit_a_narrow_screen(
    site, browser, every
):
    pages = [page for page in site.rglob("*.html") if "_static" not in page.parts]
    pages = pages if every else one_of_a_kind(pages)
    formulas = 0
    browser.resize(400, 800)
    # The theme's icons, whose script is its largest, are not looked at here.
    browser.call("Network.setBlockedURLs", urls=["*/fontawesome.js*"])
    with served(site) as address:
        for page in pages:
            if page.name == "index.html":  # which only sends the reader on to the first
                continue
            browser.open(f"{address}/{page.relative_to(site).as_posix()}")
            formulas += browser.run("document.querySelectorAll('mjx-container').length")
            assert browser.run(RAW) == 0, page
            assert browser.run("document.documentElement.scrollWidth") <= 400, page
            assert browser.run(WITHOUT_A_TEXT) == [], page
    here = (address, "data:", "about:")
    outside = [url for url in browser.requests if not url.startswith(here)]
    assert outside == [] == browser.errors
    assert formulas > 50


@pytest.mark.browser
def test_the_pdf_is_printed_by_a_browser_and_needs_one(
    small, browser, tmp_path, monkeypatch
):
    indexed = "```{index} !finding\n```\n\n# Found\n"
    rows = "<tr><td>a claim</td><td>holds</td></tr>" * 300
    ledger = (
        f"<div class='moe-long'><table class='moe'><tbody>{rows}</tbody></table></div>"
    )
    raw = f"\n```{{raw}} html\n{ledger}\n```\n"
    (small / "book" / "found.md").write_text(indexed + raw)
    (small / "book" / "_static").mkdir()
    shutil.copy(STYLE, small / "book" / "_static")
    (small / "book" / "_config.yml").rename(small / "_config.yml")
    path = pdf.write(tmp_path / "book.pdf", small)
    sheets = len(re.findall(rb"/Type /Page\b", path.read_bytes()))
    assert sheets > 6, "a table that scrolls on a screen is printed whole"
    assert b"/Outlines" in path.read_bytes()
    page = (small / "_build" / "singlehtml" / "intro.html").read_text()
    contents = page.partition('<nav class="moe-contents"><h2>Contents</h2><ol>')[2]
    assert contents.partition("</ol>")[0].count("<li><a href=") == 2
    monkeypatch.setattr(pdf.shutil, "which", lambda name: None)
    refused("E-DEP: the PDF is printed by one of chromium, ", pdf.write, path, small)


@pytest.mark.browser
def test_a_chapter_that_ends_with_its_sheet_is_followed_by_no_empty_one(
    browser, tmp_path
):
    chapter = """<span id="document-{0}"></span><section><h1>{0}<a class="headerlink"></a></h1>
    <p style="height: 700px; margin-bottom: 400px">A long text.</p></section>"""
    chapters = "".join(map(chapter.format, ("one", "two")))
    page = tmp_path / "page.html"
    style = f"<!doctype html><link rel='stylesheet' href='{STYLE.as_uri()}'>"
    page.write_text(f"{style}<h1>A book</h1>{pdf.contented(chapters)}")
    browser.open(page.as_uri())
    assert browser.printed() == 4, "the front page, the contents and two chapters"
    place = "document.querySelector('#document-two').parentElement.tagName"
    assert browser.run(place) == "SECTION", "a link leads to the chapter's own sheet"


@pytest.mark.browser
def test_slides_show_idea_findings_figures_and_turn_by_keyboard(
    project, browser, tmp_path
):
    decks = slides.write(tmp_path, project)
    assert [deck.stem for deck in decks] == list(papers.PAPERS)
    browser.resize(1280, 720)
    browser.open(decks[0].as_uri())
    titles = browser.run(
        "[...document.querySelectorAll('section > h1, section > h2')]"
        ".map(title => title.textContent)"
    )
    assert titles[:4] == ["PESC", "The idea", "In one equation", "What we found"]
    assert titles[4] == "Accuracy of the dense model", "a figure has a slide"
    assert titles[-1].startswith("Your turn: ")
    told = "Math.max(...[...document.querySelectorAll('section')]"
    words = f"{told}.map(slide => slide.textContent.split(/\\s+/).length))"
    assert browser.run(words) < 150 and not browser.run(
        "document.querySelector('section li')"
    )
    assert browser.run(
        "[...document.images].every(one => one.alt && one.naturalWidth > 9)"
    )
    assert browser.run("document.querySelectorAll('mjx-container').length") > 1
    for number in range(len(titles)):
        assert browser.run("Reveal.getIndices().h") == number
        assert browser.run("Reveal.getCurrentSlide().scrollHeight") <= 720, titles[
            number
        ]
        browser.run(
            "document.dispatchEvent(new KeyboardEvent('keydown', {keyCode: 39})); null"
        )
    assert (
        [url for url in browser.requests if url.startswith("http")]
        == []
        == browser.errors
    )


@pytest.mark.browser
def test_the_gate_finds_every_fault_of_a_wrong_page_alone(site, browser, tmp_path):
    assert list(gate.faults(browser, site / "ledger.html")) == []
    (tmp_path / "_static").symlink_to(site / "_static")
    wide = "<p style='width: 500px; height: 13000px'>wide</p><img src='http://127.0.0.1:9/x.png'>"
    wide += "<p><img class='moe-plot' style='width: 90px' src='none.png' alt='x'></p>"
    wide += "<pre>&lt;Figure size 640x480 with 1 Axes&gt;</pre>"
    wide += (
        "<table><tr><td>nan</td></tr></table><button aria-label='other'>word</button>"
    )
    wide += "<figure><figcaption>alone</figcaption></figure>"
    wide += "<style>@media print { .here { display: none } }</style>"
    wide += "<section class='here'><h2>Here</h2></section>"
    wide += "<p style='width: 300px'><span class='math' style='display: inline-block; "
    wide += "width: 300px; overflow: hidden'><b style='padding: 200px'>x</b></span></p>"
    wrong = tmp_path / "wrong.html"
    wrong.write_text(_page(site, "teaching").replace("</article>", f"{wide}</article>"))
    found = " ".join(gate.faults(browser, wrong))
    for fault in (
        "px tall",
        "light: image-alt",
        "dark: image-alt",
        "px wide on a phone",
        "asks for http://127.0.0.1:9",
        f"ERR_FILE_NOT_FOUND {(tmp_path / 'none.png').as_uri()}",
        "figures do not fill a phone",
        "a figure is text",
        "1 numbers are NaN",
        "1 captions stand alone",
        "prints without 1 headings",
        "1 formulas are cut on a phone",
        "label-content-name-mismatch",
    ):
        assert fault in found


@pytest.mark.browser
def test_on_paper_answers_stay_shut_unless_unfolded_and_other_folds_open(
    browser, tmp_path
):
    styles = (ROOT / "book" / "_static" / "moebook.css").as_uri()
    kinds = {
        "other": "class='sd-dropdown'",
        "answers": "class='sd-dropdown moe-answers'",
        "unfolded": "class='sd-dropdown moe-answers' open",
    }
    folds = "".join(
        f"<details {kind}><summary>{name}</summary><p id={name}>x</p></details>"
        for name, kind in kinds.items()
    )
    for name in ("router", "sizes"):
        table = f"<details><summary>table</summary><p id={name}>x</p></details>"
        folds += f"<figure class=moe-move data-move={name}>{table}</figure>"
    page = tmp_path / "page.html"
    page.write_text(f"<!doctype html><link rel=stylesheet href={styles}>{folds}")
    browser.open(page.as_uri())
    browser.call("Emulation.setEmulatedMedia", media="print")
    seen = browser.run(
        "[...document.querySelectorAll('p')].filter(e => e.checkVisibility()).map(e => e.id)"
    )
    browser.call("Emulation.setEmulatedMedia", media="")
    # The toy's table of logits, which the primer works on; not what a caption says already.
    assert seen == ["other", "unfolded", "router"]


def test_solutions_and_answers_print_shut():
    config = yaml.safe_load((ROOT / "_config.yml").read_text())
    assert config["sphinx"]["config"]["togglebutton_open_on_print"] is False
    pages = [path.read_text() for path in (ROOT / "book").glob("*.md")]
    for page in pages:
        count = page.count("{dropdown} Answers\n")
        assert page.count(":class-container: moe-answers\n") == count
    assert sum("{dropdown} Answers\n" in page for page in pages) == 3
    exercises = [*(ROOT / "book").glob("*_exercises.md")]
    assert len(exercises) == 8
    for path in exercises:
        assert "only where you have unfolded them" in path.read_text(), path


@pytest.mark.browser
def test_one_button_folds_all_code_of_a_notebooks_page_and_shows_it_again(
    site, browser
):
    browser.open((site / "notebooks" / "01_pesc.html").as_uri())
    button = "document.querySelector('.moe-fold')"
    shown = []
    for text in ("Fold all code", "Show all code", "Fold all code"):
        assert browser.run(f"{button}.textContent") == text
        code = "[...document.querySelectorAll('.cell_input')].filter(e => e.offsetParent).length"
        shown.append(browser.run(code))
        browser.run(f"{button}.click()")
    assert shown[1] == 0 < shown[0] == shown[2]
    browser.open((site / "ledger.html").as_uri())
    assert browser.run(f"{button} === null")


@pytest.mark.browser
def test_the_ledger_is_filtered_by_paper_and_there_is_one_search_field(site, browser):
    browser.resize(1280, 800)
    browser.open((site / "ledger.html").as_uri() + "?paper=ESFT")
    shown = "[...document.querySelectorAll('table[data-filters] tbody tr')].filter(e => !e.hidden)"
    rows = browser.run(f"{shown}.map(e => e.id)")
    assert sorted(rows) == sorted(claim.id for claim in papers.claims("esft"))
    select = "const s = document.querySelector('.moe-filters select'); s.value = 'all'"
    browser.run(f"{{{select}; s.dispatchEvent(new Event('change'))}}")
    assert len(browser.run(f"{shown}.map(e => e.id)")) == len(papers.claims())
    # The way back from another page leads to the rows that were chosen last.
    assert browser.run("location.search") == ""
    browser.run(
        f"{{{select.replace('all', 'PESC')}; s.dispatchEvent(new Event('change'))}}"
    )
    assert browser.run("location.search") == "?paper=PESC"
    restored = f"{{{select}; window.dispatchEvent(new Event('pageshow'))}}"
    browser.run(restored)
    assert len(browser.run(f"{shown}.map(e => e.id)")) == len(papers.claims())
    visible = "[...document.querySelectorAll('.search-button-field')].filter(e => e.offsetParent)"
    assert browser.run(f"{visible}.length") == 1


@pytest.mark.browser
@pytest.mark.parametrize(
    ("query", "page"),
    [
        ("catastrophic forgetting", "esft_theory.html"),
        ("which method should I use", "which_method.html"),
        ("what is a mixture of experts", "primer.html"),
        ("LoRA or ESFT", "which_method.html"),
        ("run on Colab", "how_to_rerun.html"),
        ("ESFT versus LoRA", "which_method.html"),
        ("LoRA vs ESFT", "which_method.html"),
        ("best method", "which_method.html"),
        ("choose a method", "which_method.html"),
        ("how do I run this in Google Colab", "how_to_rerun.html"),
        ("does fine-tuning forget old skills", "esft_theory.html"),
        ("mixture of experts explained", "primer.html"),
        ("ledger", "ledger.html"),
        ("all claims", "ledger.html"),
        ("verdicts", "ledger.html"),
        ("records", "records.html"),
        ("audit", "audit.html"),
        ("xylophones and the mixture of experts", "primer.html"),
        # Not looked at while keywords were chosen.
        ("how were the studies planned", "designs.html"),
        ("cost of renting a GPU", "plan.html"),
        ("mistakes in the tables of the papers", "audit.html"),
        ("does it install on Windows", "doors.html"),
        ("teaching a workshop", "teaching.html"),
        # No questions.
        ("balance loss", "glossary.html"),
        ("shared experts", "glossary.html"),
        ("what is LoRA", "glossary.html"),
        ("dedup", "reference_methods_rocket.html"),
    ],
)
def test_a_question_finds_the_page_that_answers_it_first(site, browser, query, page):
    browser.open((site / "search.html").as_uri() + "?q=" + query.replace(" ", "+"))
    first = "document.querySelector('#search-results ul.search li a')"
    found = browser.run(
        "new Promise(done => {const look = () => "
        f"{first} ? done({first}.getAttribute('href')) : setTimeout(look, 50); look()}})"
    )
    assert found.partition("?")[0].partition("#")[0].endswith(page)
