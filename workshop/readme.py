"""What the README says was found: the main claims on committed runs, never typed.

``python -m workshop.readme`` writes them between the two marks; a test holds them to the pools.
"""

from __future__ import annotations

from pathlib import Path

from moebook import results
from moebook.notebook import findings, verdicts
from moebook.notebook.pages import TITLES

START, END = "<!-- found: python -m workshop.readme -->\n", "<!-- end of found -->\n"


def found(folder: Path) -> str:
    """Return the main claims with their verdicts as Markdown, a line each."""
    rows = findings.mains(verdicts.ledger(folder, live=False))
    return "".join(f"- {TITLES[row.claim.paper]}: {findings.sentence(row)}\n" for row in rows)


def renewed(text: str, folder: Path) -> str:
    """Put what was found between the marks of a README."""
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}{found(folder)}{END}{after}"


if __name__ == "__main__":
    place = results.checkout()
    readme = place / "README.md"
    results.write(readme, renewed(readme.read_text(encoding="utf-8"), place))
