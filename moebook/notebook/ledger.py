"""The ledger as parts of pages: every claim with the paper's number, ours, and the verdict."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from urllib.parse import urlencode

import yaml

from moebook.notebook.fragments import TITLES, mark, row, table
from moebook.notebook.measurements import describe
from moebook.notebook.session import VALUE
from moebook.notebook.verdicts import LABELS, Row
from moebook.papers import Claim

KINDS = {
    "reproduced": "reproduced",
    "direction holds": "holds",
    "direction fails": "fails",
    "inconclusive": "inconclusive",
    "not run": "notrun",
}
"""Label to the badge's class in ``_static/moebook.css``."""


@dataclass(frozen=True)
class Places:
    """Where the ledger's links lead: the cell that records a value, and the code behind a claim.

    Args:
        folder: The project.
    """

    folder: Path

    def links(self, one: Row) -> str:
        """Return the links of a row as HTML; empty while neither page nor function exist."""
        claim, measured = one.claim, one.verdict.measurement
        short = claim.function.removeprefix("moebook.").removeprefix("methods.")
        targets = {
            "notebook": self._page(claim, measured.scale if measured else ""),
            f"<code>{escape(short)}</code>": self._code(claim),
        }
        found = [f'<a href="{escape(url)}">{text}</a>' for text, url in targets.items() if url]
        return f'<span class="note">{" · ".join(found)}</span>' if found else ""

    def _page(self, claim: Claim, scale: str) -> str | None:
        """Return the page of the run that the verdict rests on, else the live one."""
        for name in (f"{claim.notebook}-{scale}", claim.notebook):
            if (self.folder / "book" / "notebooks" / f"{name}.ipynb").is_file():
                return f"notebooks/{name}.html{self._anchors.get(claim.value, '')}"
        return None

    @cached_property
    def _anchors(self) -> dict[str, str]:
        """Recorded value to the heading above its cell, over all executed copies."""
        found: dict[str, str] = {}
        for path in (self.folder / "book" / "notebooks").glob("*.ipynb"):
            heading = ""
            for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
                titles = re.findall(r"^#{2,} +(.+)$", "".join(cell["source"]), re.MULTILINE)
                if cell["cell_type"] == "markdown" and titles:
                    words = re.sub(r"[^a-z0-9]+", "-", titles[-1].lower())
                    heading = "#" + words.strip("-")
                for output in cell.get("outputs", []):
                    if value := output.get("data", {}).get(VALUE):
                        found.setdefault(value["name"], heading)
        return found

    def _code(self, claim: Claim) -> str | None:
        """Return the address of the line that defines the claim's function."""
        module, _, name = claim.function.rpartition(".")
        place = self.folder / module.replace(".", "/")
        files = sorted(place.glob("*.py")) if place.is_dir() else [place.with_suffix(".py")]
        for path in filter(Path.is_file, files):
            lines = path.read_text(encoding="utf-8").splitlines()
            for number, line in enumerate(lines, start=1):
                if re.match(rf"(def|class) {name}\b", line):
                    return f"{self._repository}/{path.relative_to(self.folder)}#L{number}"
        return None

    @cached_property
    def _repository(self) -> str:
        config = yaml.safe_load((self.folder / "_config.yml").read_text(encoding="utf-8"))
        return f"{config['repository']['url']}/blob/{config['repository']['branch']}"


def summary(rows: Sequence[Row]) -> str:
    """Return how many claims of each paper have which verdict; every number leads to its rows."""
    counts = {paper: Counter[str]() for paper in TITLES}
    for one in rows:
        counts[one.claim.paper][str(one.verdict.label)] += 1
    lines = [
        row({
            "paper": escape(TITLES[paper]),
            "claims": _count(count.total(), paper=TITLES[paper]),
            **{label: _count(count[label], paper=TITLES[paper], verdict=label) for label in LABELS},
        })
        for paper, count in counts.items()
        if count
    ]  # fmt: skip
    return table(("paper", "claims", *LABELS), lines, caption="Number of claims by verdict")


def _count(count: int, **filters: str) -> str:
    return f'<a href="ledger.html?{escape(urlencode(filters))}">{count}</a>' if count else "0"


def ledger(rows: Sequence[Row], places: Places) -> str:
    """Return one row a claim, with filters by verdict and, where there are several, by paper."""
    several = len({one.claim.paper for one in rows}) > 1
    return table(
        ("claim", "the paper", "ours", "verdict"),
        (_row(one, places) for one in rows),
        caption="An effect is value minus reference; intervals are at 95 %",
        filters=("paper", "verdict") if several else ("verdict",),
    )


def _where(text: str) -> str:
    return f'<span class="where">{escape(text)}</span>'


def _row(one: Row, places: Places) -> str:
    claim, label = one.claim, str(one.verdict.label)
    number = isinstance(claim.reference, (int, float)) and claim.reference
    bound = f", less {number:g}" if number else ""
    notes = (claim.where, f"measure: {claim.quantity}{bound}")
    measured = [describe(found) for found in (one.recorded, one.live) if found is not None]
    cells = {
        "claim": escape(claim.sentence) + "".join(map(_where, notes)),
        "the paper": escape(claim.printed),
        "ours": "".join(f'<span class="note">{escape(text)}</span>' for text in measured) or "–",
        "verdict": mark(label, KINDS[label]) + places.links(one),
    }
    return row(cells, {"paper": TITLES[claim.paper], "verdict": label}, claim.id)
