"""A reader's executed notebook beside the book's runs and the papers: one ledger of the three.

The reader's notebook may come from ``moebook run``, from plain papermill or from an afternoon in
Jupyter: its values, machine, versions and code are outputs of the notebook itself, its parameters
the parameters cell with what papermill injected.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from moebook import papers, results
from moebook.errors import refuse
from moebook.notebook import verdicts
from moebook.notebook.study import read_notebook
from moebook.results import TIERS, Pool, Run

UNKNOWN = "unknown"


def compare(path: Path, folder: Path | None = None) -> str:
    """Put an executed notebook beside the book's runs and the papers' numbers.

    Args:
        path: The reader's executed notebook.
        folder: The project with the book's runs; found from the working directory by default.

    Returns:
        Text: what was compared, differences in parameters, versions and hardware, then the ledger,
        and every value of both where the notebook has no claims.

    Raises:
        Refusal: Those of `study.read_notebook`; E-COMPARE for one of the book's own files.
    """
    folder = folder or results.root()
    mine = read_notebook(path, folder)
    shown = results.live(mine.notebook, folder)
    book = [*results.pools(mine.notebook, folder).values(), *([shown] if shown else [])]
    if results.digest(path) in [run.manifest.get("executed") for p in book for run in p.runs]:
        refuse("E-COMPARE", f"{path} is the book's own run; compare one with another parameter")
    other = _nearest(mine, book)
    lines = [f"{path.name}: notebook {mine.notebook}, tier {mine.tier}, {len(mine.values)} values"]
    if other is None:
        lines.append("the book has no run of this notebook yet")
    else:
        first = other.runs[0]
        where = f"at {other.protocol}, seeds {', '.join(map(str, other.seeds))}"
        lines.append(f"beside the book's runs {where}; differences (yours | book's):")
        lines.extend(_differences(mine, first) or ["  none"])
    return "\n".join([*lines, "", *_ledger(mine, book), *_values(mine, other)])


def _nearest(mine: Run, book: list[Pool]) -> Pool | None:
    """The book's pool at the reader's tier, else at the next lower one, else the lowest."""
    place = TIERS.index(mine.tier)
    return min(
        book,
        key=lambda pool: (pool.rank[0] > place, abs(pool.rank[0] - place)),
        default=None,
    )


def _differences(mine: Run, other: Run) -> list[str]:
    ours, theirs = dict(_facts(mine)), dict(_facts(other))
    lines = []
    for name in dict.fromkeys([*ours, *theirs]):
        a, b = ours.get(name, UNKNOWN), theirs.get(name, UNKNOWN)
        if a != b:
            lines.append(f"  {name}: {a} | {b}")
    return lines


def _facts(run: Run) -> Iterator[tuple[str, Any]]:
    """What a result may depend on: parameters, versions, hardware, and the code's hashes."""
    environment: Mapping[str, Any] = run.manifest.get("environment", {})
    for name, value in run.settings.items():
        yield f"parameter {name}", value
    if run.arms:
        yield "arms", ", ".join(run.arms)
    for name, value in environment.get("versions", {}).items():
        yield f"version of {name}", value
    for name, value in environment.items():
        if name != "versions":
            yield name, value
    for name in ("notebook", "lock"):
        yield f"hash of the {name}", str(run.code.get(name))[:12]
    if seconds := run.manifest.get("seconds"):
        yield "seconds", round(seconds, 1)


def _ledger(mine: Run, book: list[Pool]) -> Iterator[str]:
    own = Pool(mine.notebook, mine.protocol, (mine,))
    for claim in papers.claims():
        if claim.run == mine.notebook:
            yield f"{claim.id}: {claim.sentence}"
            yield f"  paper  {claim.printed} ({claim.where})"
            yield f"  book   {verdicts.row(claim, book).badge}"
            yield f"  yours  {verdicts.row(claim, [own]).badge}"


def _values(mine: Run, other: Pool | None) -> Iterator[str]:
    """Every value beside the book's mean, where no claim speaks of the notebook."""
    if any(claim.run == mine.notebook for claim in papers.claims()):
        return
    for value in mine.values:
        found = other.values(value.name) if other else {}
        mean = sum(v.value for v in found.values()) / len(found) if found else None
        book = UNKNOWN if mean is None else f"{mean:.4g}"
        yield f"{value.name}: yours {value.value:.4g} | book's {book} {value.unit}"
