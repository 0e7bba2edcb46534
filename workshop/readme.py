"""What the README says was found and measured: main claims and times, from records, never typed.

``python -m workshop.readme`` writes them between their marks; a test holds them to the records.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from moebook import errors, storage
from moebook.errors import Refusal, refuse
from moebook.lab.evidence import prose, verdicts
from moebook.lab.pages import pages
from moebook.lab.run import pace

MARK = "<!-- {}: python -m workshop.readme -->\n"


def found(folder: Path) -> str:
    """Return the front page's table of papers, promises and verdicts as Markdown."""
    rows = verdicts.ledger(folder, live=False)
    return linked(prose.pages(folder, rows)["found_front"])


def linked(text: str) -> str:
    """Let the links of a page to those beside it lead there from the README."""
    return re.sub(r"\]\((\w+\.md)", r"](book/\1", text)


def times(folder: Path) -> str:
    """Return how long the commands took, as a table in Markdown."""
    return pages.page("commands", told=pace.times(folder))


def renewed(text: str, folder: Path) -> str:
    """Put what was found and measured between the marks of a README, each of which stands once."""
    for name, part in (("found", found(folder)), ("times", times(folder))):
        start = MARK.format(name)
        end = f"<!-- end of {name} -->\n"
        marks = re.findall(f"{re.escape(start)}|{re.escape(end)}", text)
        if marks != [start, end]:
            expected = f"{start.strip()}, then {end.strip()}"
            refuse("E-FORMAT", f"README.md: expected {expected}, each on a line, once")
        before, _, rest = text.partition(start)
        _, _, after = rest.partition(end)
        text = f"{before}{start}{part}{end}{after}"
    return text


if __name__ == "__main__":
    try:
        place = storage.checkout()
        readme = place / "README.md"
        storage.write(readme, renewed(readme.read_text(encoding="utf-8"), place))
    except (Refusal, OSError) as error:
        print(errors.told(error), file=sys.stderr)
        sys.exit(2)
