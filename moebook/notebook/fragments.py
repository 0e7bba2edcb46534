"""Parts of the book's pages that are made from data: the audit and the list of records, as HTML.

Each is a whole table that reads without JavaScript; ``_static/tables.js`` adds the filters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

from moebook import results
from moebook.notebook import badge, overview, sources
from moebook.papers.arithmetic import STATUSES, Finding
from moebook.results import Pool

TITLES = {
    "bases": "Base and tasks",
    "pesc": "PESC",
    "router_init": "Router initialisation",
    "rocket": "Rocket",
    "esft": "ESFT",
    "kernels": "Kernels",
}


def table(
    head: Sequence[str],
    rows: Iterable[str],
    *,
    caption: str,
    filters: Sequence[str] = (),
) -> str:
    """Return a table as a raw block of Markdown.

    Args:
        head: The columns' names.
        rows: The rows, from `row`.
        caption: What the table shows.
        filters: The rows' ``data-`` attributes by which a reader may choose.
    """
    columns = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    marked = f' data-filters="{" ".join(filters)}"' if filters else ""
    body = "\n".join(rows)
    return (
        f'```{{raw}} html\n<table class="moe"{marked}><caption>{escape(caption)}</caption>\n'
        f"<thead><tr>{columns}</tr></thead>\n<tbody>\n{body}\n</tbody></table>\n```\n"
    )


def row(
    cells: Mapping[str, str], data: Mapping[str, str] | None = None, identifier: str = ""
) -> str:
    """Return one row of a `table`.

    Args:
        cells: Column's name to HTML; on narrow screens the name stands before the cell.
        data: Its ``data-`` attributes.
        identifier: What a link to the row names.
    """
    named = f' id="{escape(identifier)}"' if identifier else ""
    named += "".join(f' data-{name}="{escape(value)}"' for name, value in (data or {}).items())
    inner = "".join(f'<td data-label="{escape(k)}">{v}</td>' for k, v in cells.items())
    return f"<tr{named}>{inner}</tr>"


def mark(word: str, kind: str) -> str:
    """Return a badge: the word says it, the style only repeats it."""
    return f'<span class="verdict {kind}">{escape(word)}</span>'


def audit(findings: Sequence[Finding]) -> str:
    """Return the audit: the counts by paper, then every finding, those of one cause in one row."""
    counts = {paper: Counter(f.status for f in findings if f.paper == paper) for paper in TITLES}
    head = ("paper", "recomputed", *STATUSES)
    summary = [
        row({
            "paper": escape(TITLES[paper]),
            "recomputed": str(count.total()),
            **{status: str(count[status]) for status in STATUSES},
        })
        for paper, count in counts.items()
        if count
    ]  # fmt: skip
    folds: dict[tuple[str, str, str, str], list[Finding]] = {}
    for found in findings:
        how = "" if found.status == "agrees" else found.explanation
        key = (found.paper, found.group, found.status, how)
        folds.setdefault(key, []).append(found)
    order = sorted(folds.values(), key=lambda fold: -STATUSES.index(fold[0].status))
    return "\n".join([
        table(head, summary, caption="How many numbers were recomputed, and what came out"),
        "## What was found\n",
        table(
            ("where", "printed", "recomputed", "result", "how"),
            map(_findings, order),
            caption="Differences first; numbers that one cause explains stand in one row",
            filters=("paper", "result"),
        ),
    ])  # fmt: skip


def _findings(fold: Sequence[Finding]) -> str:
    """Return one row for findings of the same group, result and explanation."""
    first = fold[0]
    where = f"<b>{escape(TITLES[first.paper])}</b><br>{escape(first.place)}"
    if len(fold) > 1:
        others = "".join(
            f"<li>{escape(f.place)}: {escape(f.printed)}, recomputed {escape(f.recomputed)}</li>"
            for f in fold[1:]
        )
        where += f"<details><summary>and {len(fold) - 1} more</summary><ul>{others}</ul></details>"
    cells = {
        "where": where,
        "printed": escape(first.printed),
        "recomputed": escape(first.recomputed),
        "result": mark(first.status, first.status),
        "how": escape(first.explanation),
    }
    return row(cells, {"paper": TITLES[first.paper], "result": first.status})


def records(folder: Path) -> str:
    """Return the list of recorded runs: their seeds and cost, their day, what changed since."""
    names = [name for name, one in sources.notebooks(folder).items() if not one.findings]
    pools = [pool for name in names for pool in results.pools(name, folder).values()]
    pools += [pool for name in names if (pool := results.live(name, folder))]
    if not pools:
        return "No run has been recorded yet.\n"
    return table(
        ("notebook", "runs", "cost of a run", "code since"),
        (_record(pool, folder) for pool in pools),
        caption="All runs that this book draws on",
    )


def _record(pool: Pool, folder: Path) -> str:
    last = pool.last
    where = f"{pool.tier}, on its page" if pool.protocol == results.LIVE else "committed"
    seeds = ", ".join(map(str, pool.seeds))
    return row({
        "notebook": f"<b>{escape(TITLES[pool.notebook])}</b><br>{pool.protocol} ({where})",
        "runs": f"{badge.seeds(len(pool.seeds))}: {seeds}<br>{len(last.values)} values each",
        "cost of a run": escape(overview.cost(last)),
        "code since": escape(results.since(last, folder))
        + f'<span class="note">commit {escape(badge.commit(last))}</span>',
    })  # fmt: skip
