"""All pages of the book in one PDF: ``make pdf``, into ``_build/moebook.pdf``.

The book on one page, with its contents after the front page, printed by a Chromium. LaTeX would
leave out what pages hold as HTML, such as the ledger and every other table that is made from runs.
"""

from __future__ import annotations

import html
import re
import shutil
import subprocess
import sys
from pathlib import Path

from moebook import errors, storage
from moebook.errors import Refusal, refuse
from moebook.lab.pages import rendering

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
PRINT = """--headless --no-sandbox --disable-gpu --no-pdf-header-footer
--export-tagged-pdf --generate-pdf-document-outline""".split()
PATIENCE = "--virtual-time-budget=600000"  # milliseconds of the page's own clock, for its formulas


# Of a chapter the name and the title, before which there may be anchors of the index.
DOCUMENT = re.compile(
    r'<span id="(document-[^"]+)"></span><section[^>]*>'
    r"\s*(?:<span[^>]*></span>\s*)*<h\d>(.*?)<a "
)
# A chapter's name, and the section that it stands before.
NAMED = re.compile(r'(<span id="document-[^"]+"></span>)<section([^>]*>)')


def contented(text: str) -> str:
    """Put a list of all chapters before the second one of the book on one page.

    A chapter begins a sheet and holds the name that links lead to. Before it, that name would be a
    line on the sheet before, or alone on one.
    """
    chapters = list(DOCUMENT.finditer(text))
    if not chapters:
        return text
    lines = []
    for chapter in chapters:
        title = html.escape(html.unescape(re.sub(r"<[^>]+>", "", chapter[2])).strip())
        lines.append(f'<li><a href="#{chapter[1]}">{title}</a></li>')
    listed = (
        f'<nav class="moe-contents"><h2>Contents</h2><ol>{"".join(lines)}</ol></nav>'
    )
    place = chapters[0].start()
    begun = NAMED.sub(r'<section style="break-before: page"\2\1', text[place:])
    return f"{text[:place]}{listed}{begun}"


def write(target: Path, folder: Path) -> Path:
    """Print a project whose book is built; the file is there when this returns."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        refuse(
            "E-DEP", f"the PDF is printed by one of {', '.join(BROWSERS)}: install one"
        )
    with rendering.alone(folder):
        rendering.render(folder, "singlehtml")
    page = folder / "_build" / "singlehtml" / "intro.html"
    storage.write(page, contented(page.read_text(encoding="utf-8")))
    command = [browser, *PRINT, PATIENCE, f"--print-to-pdf={target}", page.as_uri()]
    target.unlink(missing_ok=True)  # Chromium ends with 0 even where it prints nothing
    told = subprocess.run(command, capture_output=True, text=True, check=False).stderr
    if not target.is_file():
        refuse("E-DEP", f"{browser} printed nothing: {''.join(told.splitlines()[-1:])}")
    return target


if __name__ == "__main__":
    try:
        place = storage.checkout()
        print(f"pdf: {write(place / '_build' / 'moebook.pdf', place)}")
    except (Refusal, OSError) as error:
        print(errors.told(error), file=sys.stderr)
        sys.exit(2)
