"""Runs beside what they claim to be, and a reader's run beside the book's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moebook import papers, results
from moebook.errors import Refusal, nearest, printable, refuse
from moebook.models import checkpoint
from moebook.notebook import findings, publish, sources, verdicts
from moebook.results import TIERS, Run, store
from moebook.results.intervals import CONFIDENCE, another
from moebook.results.store import CLASS, Pool

UNKNOWN = "unknown"


@dataclass(frozen=True)
class Finding:
    """What of one run or pool does not agree; ``right`` is said where all does."""

    path: str
    failures: tuple[str, ...]
    right: str = ""

    def __str__(self) -> str:
        fails = f"FAILS {self.path}: {'; '.join(self.failures)}"
        return printable(fails if self.failures else f"ok    {self.path}: {self.right}")


def verify(name: str | None, folder: Path) -> list[Finding]:
    """Check runs of one notebook (or ``bench``, ``banks``), or all: digests, pools, copies, seals.

    A run that is merely behind the code does not fail.
    """
    faults, shown = store.unsealed(folder), folder / "book" / "notebooks"
    pools = {path for path in (folder / "results").glob("*/*") if path.is_dir()} | faults.keys()
    pages = {path.with_suffix(".parquet") for kind in ("ipynb", "parquet")
             for path in shown.glob(f"*.{kind}")}  # fmt: skip
    names = {path: path.parent.name for path in sorted(pools)}
    names |= {path: path.stem[3:] for path in sorted(pages)}
    chosen = [path for path in names if name in (None, names[path])]
    if name is not None and not chosen:
        refuse("E-NOTEBOOK", f"'{name}' has no runs; {nearest(name, set(names.values()))}")
    return [_finding(path, faults.get(path, []), folder) for path in chosen]


def _finding(path: Path, faults: list[str], folder: Path) -> Finding:
    place = str(path.relative_to(folder))
    try:
        if path.suffix == ".parquet":
            run = results.read_run(path)
            failures = tuple(_against_copy(path.with_suffix(".ipynb"), run))
            return Finding(place, failures, f"values and page agree; {results.since(run, folder)}")
        if path.parent.name == "banks":
            seals = [checkpoint.verify(lora) for lora in sorted(path.iterdir())]
            return Finding(place, tuple(faults), f"the seals of {len(seals)} LoRAs agree")
        pool = store.pool(path.parent.name, path.name, folder)
        if pool is None:
            return Finding(place, (*faults, "it holds no run"))
        if pool.notebook != store.BENCH:
            sources.find(folder, pool.notebook).agrees(pool)
        seeds = ", ".join(map(str, pool.seeds))
        since = results.since(pool.last, folder)
        return Finding(place, tuple(faults), f"seeds {seeds} agree; {since}")
    except Refusal as refusal:
        return Finding(place, (*faults, str(refusal)))


def _against_copy(copy: Path, run: Run) -> Iterator[str]:
    if not copy.is_file():
        yield f"the executed copy {copy.name} is missing"
        return
    if run.manifest.get("executed") != results.digest(copy):
        yield f"the hash of the executed copy {copy.name} is not the manifest's"
    shown = {value.name: value for value in publish.values(results.read_ipynb(copy))}
    recorded = {value.name: value for value in run.values}
    for name in sorted(recorded.keys() | shown.keys()):
        one, two = recorded.get(name), shown.get(name)
        if one != two:
            ours, theirs = (value.value if value else "absent" for value in (one, two))
            yield f"{name} is {ours} in the run and {theirs} in {copy.name}"


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
    rest = _ledger(claims, mine, book) if claims else _values(mine, other)
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


def _ledger(claims: Sequence[papers.Claim], mine: Run, book: Sequence[Pool]) -> Iterator[str]:
    alone = Pool(mine.notebook, mine.protocol, (mine,))
    for claim in claims:
        yield f"{claim.id}: {claim.sentence}"
        yield f"  paper  {claim.printed} ({claim.where})"
        yield f"  book   {''.join(findings.told(verdicts.row(claim, book)))}"
        yield f"  yours  {''.join(findings.told(verdicts.row(claim, [alone])))}"


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
