"""A reader's run beside the book's and the papers' numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from moebook import papers, results
from moebook.errors import printable, refuse
from moebook.notebook import findings, publish, sources, verdicts
from moebook.results import TIERS, Run, store
from moebook.results.intervals import CONFIDENCE, another
from moebook.results.store import CLASS, Pool

UNKNOWN = "unknown"


def compare(path: Path, folder: Path) -> str:
    """Put a reader's executed notebook beside the book's runs and the papers' numbers, as text.

    First what differs in parameters, versions and hardware. Then, for a run that is nearest to the
    protocol of a course, what lies outside its pool; else the ledger, or all values of both where
    the notebook has no claims.
    """
    mine = publish.read_notebook(path, folder)
    book = list(store.pools(mine.notebook, folder, shown=True).values())
    if results.digest(path) in [run.manifest.get("executed") for p in book for run in p.runs]:
        refuse("E-COMPARE", f"{path} is the book's own run; compare one with another parameter")
    lines = [f"{path.name}: notebook {mine.notebook}, tier {mine.tier}, {len(mine.values)} values"]
    place = TIERS.index(mine.tier)  # beside the pool of this tier, else of the next lower one
    key = lambda pool: (pool.rank[0] > place, abs(pool.rank[0] - place))  # noqa: E731
    taught = _taught(mine, folder)
    other = taught or min(book, key=key, default=None)
    if other is None:
        lines.append("the book has no run of this notebook yet")
    else:
        where = f"at {other.protocol}, seeds {', '.join(map(str, other.seeds))}"
        lines.append(f"beside the book's runs {where}; differences (yours | book's):")
        lines += _differences(mine, other.runs[0]) or ["  none"]
    claims = [claim for claim in papers.claims() if claim.run == mine.notebook]
    rest = _ledger(claims, mine, book, folder) if claims else _values(mine, other)
    rest = _outside(mine, taught) if taught else rest
    return "\n".join(map(printable, [*lines, "", *rest]))


def _taught(mine: Run, folder: Path) -> Pool | None:
    """Find the pool of a course if no other protocol is nearer to a run by its parameters."""
    notebook = sources.find(folder, mine.notebook)
    apart = lambda p: (len(mine.settings.items() - notebook.design(p).items()), p != CLASS)  # noqa: E731
    nearest = min(notebook.protocols, key=apart)
    return store.pool(mine.notebook, CLASS, folder) if nearest == CLASS else None


def _differences(mine: Run, other: Run) -> list[str]:
    ours, theirs = dict(_facts(mine)), dict(_facts(other))
    pairs = {k: (ours.get(k, UNKNOWN), theirs.get(k, UNKNOWN)) for k in ours | theirs}
    return [f"  {name}: {a} | {b}" for name, (a, b) in pairs.items() if a != b]


def _facts(run: Run) -> Iterator[tuple[str, Any]]:
    """What a result may depend on: parameters, versions, hardware, and the code's hashes."""
    environment = dict(run.manifest.get("environment", {}))
    yield from ((f"parameter {name}", value) for name, value in run.settings.items())
    if run.arms:
        yield "arms", ", ".join(run.arms)
    versions = environment.pop("versions", None)
    every = versions.items() if isinstance(versions, dict) else ()
    yield from ((f"version of {name}", value) for name, value in every)
    yield from environment.items()
    for name in ("notebook", "lock"):
        yield f"hash of the {name}", str(run.code.get(name))[:12]
    if seconds := run.manifest.get("seconds"):
        yield "seconds", round(seconds, 1)


def _ledger(
    claims: Sequence[papers.Claim], mine: Run, book: Sequence[Pool], folder: Path
) -> Iterator[str]:
    alone = Pool(mine.notebook, mine.protocol, (mine,))
    deciders = sources.deciders(folder)
    for claim in claims:
        yield f"{claim.id}: {claim.sentence}"
        yield f"  paper  {claim.printed} ({claim.where})"
        yield f"  book   {_plain(verdicts.row(claim, book, deciders.get(claim.id, ())))}"
        measured = verdicts.measure(claim, alone)
        told = [findings.numbers(measured), *findings.notes(measured)] if measured else ["not run"]
        yield f"  yours  {'; '.join(told)}"


def _plain(row: verdicts.Row) -> str:
    """Say what the book found about a claim, without Markdown."""
    text = findings.said(row).replace("**", "")
    return text[:1].lower() + text[1:]


def _values(mine: Run, other: Pool | None) -> Iterator[str]:
    for value in mine.values:
        theirs = [v.value for v in other.values(value.name).values()] if other else []
        book = f"{sum(theirs) / len(theirs):.4g}" if theirs else UNKNOWN
        yield f"{value.name}: yours {value.value:.4g} | book's {book} {value.unit}"


def _outside(mine: Run, taught: Pool) -> Iterator[str]:
    """What lies where another seed's would hardly: farthest first, what no seed changes last."""
    lines, count = list[tuple[float, str]](), 0
    for value in mine.values:
        theirs = [one.value for one in taught.values(value.name).values()]
        if len(theirs) > 1 and value.unit != "seconds":
            low, high = another(theirs)
            slack = 1e-6 * max(map(abs, (*theirs, value.value)))  # of rounding on another machine
            gap, count = max(low - value.value, value.value - high) - slack, count + 1
            line = f"{value.name}: yours {value.value:.4g} | book's {sum(theirs) / len(theirs):.4g}"
            wide = high - low > slack
            ends = f"another seed from {low:.4g} to {high:.4g}" if wide else "with every seed"
            lines += [(wide and gap / (high - low), f"{line} {value.unit}, {ends}")] * (gap > 0)
    yield (f"{len(lines)} of {count} values lie where another seed's would in 5 of 100 cases; "
           f"about {count * (1 - CONFIDENCE):.0f} would by chance")  # fmt: skip
    yield from (line for _, line in sorted(lines, reverse=True))
