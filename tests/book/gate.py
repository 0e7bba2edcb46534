"""Look at every page of a rendered book: `python tests/book/gate.py _build/html`.

A page fails where axe-core finds something critical or serious, in light or in dark, where it is
taller than 12,000 px at a width of 1400 or than 20,000 px on a phone (a notebook with its code
folded: who reads the code scrolls for it; what scrolls within a box counts on a phone), prints on
more than 20 sheets, is larger than 3 MB though no notebook, loses a heading in print, is wider
than a phone or cuts a formula there, throws an error or writes one to the console, or asks another
host for anything. A long table must
show ten rows on arrival, at 1400 x 900, and a figure fill a phone.
No number of a table or a drawing is NaN, and no caption stands without its figure. The build judges
figures (`moebook.lab.plotting.charts.faults`): the gate finds those that have not been there.
Exits with 1 if one fails.
"""

import base64
import hashlib
import re
import sys
import tempfile
from pathlib import Path

from chromium import Chromium, installed
from lxml import etree

from moebook import storage
from moebook.lab.records import runs

TALLEST = 12_000
LARGEST = 3_000_000
PHONE = 420
TALLEST_ON_A_PHONE = 20_000
ROWS = 10
SHEETS = 20
# Of each long table, the rows that are seen on arrival, or ten where it has no more.
SHOWN = """[...document.querySelectorAll('.moe-long')].map(box => {
  const rows = [...box.querySelectorAll('tbody tr')];
  const bottom = Math.min(box.getBoundingClientRect().top + box.clientHeight, innerHeight);
  const shown = rows.filter(row => row.getBoundingClientRect().bottom <= bottom + 1);
  return shown.length === rows.length ? 10 : shown.length;
})"""
# Figures that are drawn narrower than their column, or wider.
NARROW = """[...document.querySelectorAll('.cell_output img, img.moe-plot')].filter(one => {
  const column = one.closest('section, article').getBoundingClientRect().width;
  return one.offsetParent && Math.abs(one.getBoundingClientRect().width - column) > 24;
}).length"""
# What is not in a page's height, since it scrolls within its boxes.
HIDDEN = """[...document.querySelectorAll('main *')].filter(
  box => box.checkVisibility() && /auto|scroll/.test(getComputedStyle(box).overflowY)
).reduce((height, box) => height + box.scrollHeight - box.clientHeight, 0)"""
STILL = "document.head.insertAdjacentHTML('beforeend', '<style>* {transition: none !important}')"
THEME = (
    "Object.assign(document.documentElement.dataset, {theme: '%s', mode: '%s'}); null"
)
SIZE = "document.documentElement.%s"
FOLD = "document.querySelector('.moe-fold')?.click()"
NOT_A_NUMBER = """[...document.querySelectorAll('td, svg text')].filter(
  cell => /^[(]?nan\\b/i.test(cell.textContent.trim())
).length"""
ALONE = """[...document.querySelectorAll('figure:has(figcaption)')].filter(
  one => !one.querySelector('img, svg, table')
).length"""
# Sections that do not print. The title prints on its own, and studies stay folded.
LOST = """[...document.querySelectorAll('.bd-article h2')].filter(
  one => !one.getClientRects().length
).length"""
# Formulas within a line that end where their column does, and do not scroll.
CUT = """[...document.querySelectorAll('.bd-article span.math')].filter(one =>
  one.clientWidth && one.scrollWidth > one.clientWidth + 2
  && getComputedStyle(one).overflowX === 'hidden'
).length"""
# What a figure leaves that no backend made a picture of.
NO_PICTURE = "document.body.textContent.includes('<Figure size')"


def faults(browser, page):
    """Yield what is wrong with a page."""
    browser.requests.clear()
    browser.errors.clear()
    browser.resize(1400, 900)
    browser.open(page.as_uri())
    if browser.run(NO_PICTURE):
        yield "a figure is text, and no picture"
    if numbers := browser.run(NOT_A_NUMBER):
        yield f"{numbers} numbers are NaN"
    if captions := browser.run(ALONE):
        yield f"{captions} captions stand alone"
    browser.run(FOLD)
    height = browser.run(SIZE % "scrollHeight")
    if height > TALLEST:
        yield f"{height} px tall"
    browser.run(FOLD)
    tables = browser.run(SHOWN)
    yield from (f"a table shows {rows} rows" for rows in tables if rows < ROWS)
    if (sheets := browser.printed()) > SHEETS:
        yield f"prints on {sheets} sheets"
    browser.call("Emulation.setEmulatedMedia", media="print")
    if headings := browser.run(LOST):
        yield f"prints without {headings} headings"
    browser.call("Emulation.setEmulatedMedia", media="")
    if page.parent.name != "notebooks" and page.stat().st_size > LARGEST:
        yield f"{page.stat().st_size / 1e6:.1f} MB"
    browser.run(STILL)  # axe would see colours on their way from one theme to the other
    for theme in ("light", "dark"):
        browser.run(THEME % (theme, theme))
        yield from (f"{theme}: {violation}" for violation in browser.violations())
    browser.resize(PHONE, 800)
    browser.run(FOLD)
    width = browser.run(SIZE % "scrollWidth")
    if width > PHONE:
        yield f"{width} px wide on a phone"
    height = browser.run(SIZE % "scrollHeight") + browser.run(HIDDEN)
    if height > TALLEST_ON_A_PHONE:
        yield f"{height} px tall on a phone"
    if formulas := browser.run(CUT):
        yield f"{formulas} formulas are cut on a phone"
    narrow = browser.run(NARROW)
    if narrow:
        yield f"{narrow} figures do not fill a phone"
    yield from (f"asks for {url}" for url in browser.requests if url.startswith("http"))
    yield from (f"throws {error['text']}" for error in browser.errors)


def figures(site):
    """Yield the figures that the build has not judged, and drawings that say NaN."""
    known = set(judged(site.parents[1] / "book"))
    shown = set()  # Sphinx leaves those of an earlier build beside them
    for page in site.rglob("*.html"):
        shown |= set(re.findall(r"_images/([^\"]+)\"", page.read_text("utf-8")))
    for picture in sorted(site / "_images" / name for name in shown):
        content = picture.read_bytes()
        is_drawing = picture.suffix == ".svg"
        is_by_hand = is_drawing and b"matplotlib" not in content
        if not is_by_hand and storage.digest(picture) not in known:
            yield f"{picture.name} was not judged by the build"
        if is_drawing and _says_nan(content):
            yield f"{picture.name} says NaN"


def judged(book):
    """Yield the digest of each figure that the build has judged, and found to be readable.

    The front page's is judged before it is written. Those of notebooks are judged as they are
    drawn, but for what a cell draws with matplotlib itself, and the run says what was found.
    """
    yield from map(storage.digest, (book / "_generated").glob("*.svg"))
    for copy in (book / "notebooks").glob("*.ipynb"):
        cells = storage.read_ipynb(copy)["cells"]
        run = runs.read_head(copy.with_suffix(".parquet"))
        draws_itself = any("matplotlib" in cell["source"] for cell in cells)
        if run.manifest.get("unreadable") or draws_itself:
            continue
        for output in (one for cell in cells for one in cell.get("outputs", [])):
            picture = output.get("data", {}).get("image/png")
            if picture:
                yield hashlib.sha256(base64.b64decode(picture)).hexdigest()


def _says_nan(drawing):
    """Whether a text of an SVG is NaN; where letters are shapes, matplotlib remarks the text."""
    texts = [one.text or "" for one in etree.fromstring(drawing).iter()]
    return any(re.search(r"\bnan\b", text, re.IGNORECASE) for text in texts)


def main(site):
    """Print a line a page, and one for all figures; return whether all are right."""
    right = True
    with tempfile.TemporaryDirectory() as profile:
        browser = Chromium(installed(), profile)
        for page in sorted(Path(site).resolve().rglob("*.html")):
            # The index only leads to the first page.
            if "_static" in page.parts or page.name == "index.html":
                continue
            found = list(faults(browser, page))
            print(
                f"{'FAILS' if found else 'ok   '} {page.name}: {'; '.join(found)}",
                flush=True,
            )
            right &= not found
        browser.close()
    unsound = list(figures(Path(site).resolve()))
    print(f"{'FAILS' if unsound else 'ok   '} figures: {'; '.join(unsound)}")
    return right and not unsound


if __name__ == "__main__":
    if len(sys.argv) != 2 or installed() is None:
        sys.exit(
            "usage: python tests/book/gate.py _build/html, with Chromium on the PATH"
        )
    sys.exit(not main(sys.argv[1]))
