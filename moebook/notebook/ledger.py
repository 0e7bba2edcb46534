"""The ledger as parts of pages: every claim with the paper's number, ours by scale, the verdict."""

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

from moebook.notebook import findings
from moebook.notebook.fragments import TITLES, mark, row, table
from moebook.notebook.session import VALUE
from moebook.notebook.verdicts import LABELS, SO_FAR, Measurement, Row, amount, chance, side, span
from moebook.papers import Claim
from moebook.results import COMMITTED

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
    """Where the ledger's links lead: what was found, the cell that records it, and the code.

    Args:
        folder: The project.
    """

    folder: Path

    def links(self, one: Row) -> str:
        """Return the links of a row as HTML; empty while there is nothing to link to."""
        claim, best = one.claim, one.best
        short = claim.function.removeprefix("moebook.").removeprefix("methods.")
        findings_page = f"{claim.notebook}_findings"
        pooled = best is not None and best.pool.tier in COMMITTED
        targets = {
            "findings": self._page(findings_page) if pooled else None,
            "notebook": self._page(claim.notebook, self._anchors.get(claim.value, "")),
            f"<code>{escape(short)}</code>": self._code(claim),
        }
        found = [f'<a href="{escape(url)}">{text}</a>' for text, url in targets.items() if url]
        return f'<span class="note">{" · ".join(found)}</span>' if found else ""

    def _page(self, name: str, anchor: str = "") -> str | None:
        copy = self.folder / "book" / "notebooks" / f"{name}.ipynb"
        return f"notebooks/{name}.html{anchor}" if copy.is_file() else None

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
        counts[one.claim.paper][str(one.label)] += 1
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
    """Return one row a claim, a column a scale, with filters by verdict and, if several, paper."""
    several = len({one.claim.paper for one in rows}) > 1
    ordered = sorted((m.pool.rank, m.pool.protocol) for one in rows for m in one.measurements)
    scales = list(dict.fromkeys(name for _, name in ordered))
    return table(
        ("claim", "the paper", *scales, "verdict"),
        (_row(one, scales, places) for one in rows),
        caption="An effect is value minus reference; intervals are at 95 %",
        filters=("paper", "verdict") if several else ("verdict",),
    )


def _row(one: Row, scales: Sequence[str], places: Places) -> str:
    claim, label = one.claim, str(one.label)
    number = isinstance(claim.reference, (int, float)) and claim.reference
    bound = f", less {number:g}" if number else ""
    notes = (claim.where, f"measure: {claim.quantity}{bound}")
    where = "".join(f'<span class="where">{escape(text)}</span>' for text in notes)
    ours = {measured.pool.protocol: _cell(measured) for measured in one.measurements}
    cells = {
        "claim": escape(claim.sentence) + where,
        "the paper": escape(claim.printed),
        **{scale: ours.get(scale, "–") for scale in scales},
        "verdict": mark(label, KINDS[label]) + places.links(one),
    }
    return row(cells, {"paper": TITLES[claim.paper], "verdict": label}, claim.id)


def _cell(measured: Measurement) -> str:
    """The effect at one scale, with its interval and seeds."""
    claim = measured.claim
    notes = []
    if measured.interval:
        notes.append(f"95 %: {span(claim, *measured.interval)}")
    if not claim.exact:
        notes.append(f"{measured.seeds} seed" + "s" * (measured.seeds > 1))
    if not measured.decides:
        notes.append(SO_FAR[side(claim, measured.effect, measured.effect)])
    told = "".join(f'<span class="note">{escape(text)}</span>' for text in notes)
    return f"<b>{escape(amount(claim, measured.effect))}</b>{told}"


def corrections(rows: Sequence[Row]) -> str:
    """Say how many verdicts chance alone would give, and which survive a correction for that."""
    told = chance(rows)
    if not told.tested:
        return "No claim has been tested yet by runs that decide.\n"
    lines = [
        f"Of the {len(rows)} claims, {len(told.tested)} about a direction were tested by runs that"
        f" may decide; {len(told.decided)} of these have a verdict, *holds* or *fails*. If there"
        f" were no effect anywhere, chance alone would give about {told.expected:.1f}.",
        _surviving("Holm's correction (in 95 of 100 such ledgers none is false)", told.holm),
        _surviving("Benjamini and Hochberg's (of those named one in twenty is false, on average)",
                   told.hochberg),
    ]  # fmt: skip
    return "\n\n".join(lines) + "\n"


def _surviving(rule: str, names: Sequence[str]) -> str:
    links = ", ".join(f'<a href="#{escape(name)}">{escape(name)}</a>' for name in names) or "none"
    return f"{len(names)} survive {rule}: {links}."


def found(rows: Sequence[Row], pictures: dict[str, str]) -> str:
    """Return the page of what was found: a sentence a claim, paper by paper, surprises first.

    Args:
        rows: The ledger.
        pictures: Paper to the file of its forest plot, beside the generated text.
    """
    parts = []
    for paper in dict.fromkeys(one.claim.paper for one in rows):
        mine = findings.ordered(one for one in rows if one.claim.paper == paper)
        told = [one for one in mine if one.best]
        open_ = [one for one in mine if not one.best]
        parts.append(f"## {TITLES[paper]}\n")
        if paper in pictures:
            claims = f"the claims of {TITLES[paper]}"
            parts.append(picture(pictures[paper], f"fig-found-{paper.replace('_', '-')}", claims))
        parts.append("\n".join(f"- {_linked(one)}" for one in told) + "\n")
        if open_:
            lines = "\n".join(f"- {_linked(one)}" for one in open_)
            parts.append(f":::{{dropdown}} Not run yet: {len(open_)} claims\n{lines}\n:::\n")
    return "\n".join(parts)


def front(rows: Sequence[Row], file: str | None = None) -> str:
    """Return the five strongest lines of what was found, and their picture."""
    lines = [f"- {TITLES[one.claim.paper]}: {_linked(one)}" for one in findings.strongest(rows)]
    text = "\n".join(lines) + "\n"
    return text + (f"\n{picture(file, 'fig-front', 'the five strongest')}" if file else "")


def _linked(one: Row) -> str:
    return f'{findings.sentence(one)} <a href="ledger.html#{escape(one.claim.id)}">ledger</a>'


def picture(file: str, name: str, claims: str) -> str:
    """Return the directive that shows a forest plot."""
    caption = (
        "Effects with 95 % intervals over seeds and test items; to the right of zero is as the"
        " paper says. Filled markers are decided, hollow ones are not."
    )
    alt = f"Forest plot of {claims}: for each a point and a horizontal interval beside zero."
    options = f":name: {name}\n:figclass: moe-plot\n:alt: {alt}"
    return f":::{{figure}} {file}\n{options}\n\n{caption}\n:::\n"
