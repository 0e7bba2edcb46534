"""A reader's run beside the book's and the papers' numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from moebook import storage
from moebook.errors import printable, refuse
from moebook.intervals import CONFIDENCE, another
from moebook.lab import papers, records
from moebook.lab.evidence import findings, verdicts
from moebook.lab.records import TIERS, Run, Value, store
from moebook.lab.records.store import CLASS, Pool
from moebook.lab.run import publish, sources

UNKNOWN = "unknown"


def compare(path: Path, folder: Path) -> str:
    """Put a reader's executed notebook beside the book's runs and the papers' numbers, as text.

    First what differs in parameters, versions and hardware. Then, for a run that is
    nearest to the protocol of a course, what lies outside its pool; else the ledger, or
    all values of both where the notebook has no claims.
    """
    mine = publish.read_notebook(path, folder)
    book = list(sources.pools(mine.notebook, folder, shown=True).values())
    executed: list[Any] = []
    for pool in book:
        executed += [run.manifest.get("executed") for run in pool.runs]
    if storage.digest(path) in executed:
        fix = "compare one with another parameter"
        refuse("E-COMPARE", f"{path} is the book's own run; {fix}")
    count = len(mine.values)
    lines = [f"{path.name}: notebook {mine.notebook}, tier {mine.tier}, {count} values"]
    of_course = _of_course(mine, folder)
    beside = of_course or _nearest(mine, book)
    if beside is None:
        lines.append("the book has no run of this notebook yet")
    else:
        where = f"at {beside.protocol}, seeds {', '.join(map(str, beside.seeds))}"
        lines.append(f"beside the book's runs {where}; differences (yours | book's):")
        lines += _differences(mine, beside) or ["  none"]
    claims = [claim for claim in papers.claims() if claim.run == mine.notebook]
    if of_course:
        rest = _outside(mine, of_course)
    elif claims:
        rest = _ledger(claims, mine, book, folder)
    else:
        rest = _values(mine, beside)
    return "\n".join(map(printable, [*lines, "", *rest]))


def _nearest(mine: Run, book: Sequence[Pool]) -> Pool | None:
    """Find the pool nearest to a run: by tier (lower before higher), base, other parameters."""
    place = TIERS.index(mine.tier)

    def distance(pool: Pool) -> tuple[bool, int, bool, int]:
        tier_place, _ = pool.rank
        theirs = pool.runs[0].settings
        is_higher = tier_place > place
        is_other_base = theirs.get("base") != mine.settings.get("base")
        differing = mine.settings.items() - theirs.items()
        return is_higher, abs(tier_place - place), is_other_base, len(differing)

    return min(book, key=distance, default=None)


def _of_course(mine: Run, folder: Path) -> Pool | None:
    """Find the pool of a course if no other protocol is nearer to a run by its parameters."""
    notebook = sources.find(folder, mine.notebook)

    def distance(protocol: str) -> tuple[int, bool]:
        other_parameters = mine.settings.items() - notebook.design(protocol).items()
        return len(other_parameters), protocol != CLASS

    nearest = min(notebook.protocols, key=distance)
    return store.pool(mine.notebook, CLASS, folder) if nearest == CLASS else None


def _differences(mine: Run, pool: Pool) -> list[str]:
    """Say which facts of a run are those of no run of a pool, and whether it ran other arms."""
    ours = dict(_facts(mine))
    theirs = [dict(_facts(run)) for run in pool.runs]
    names = dict.fromkeys(ours)
    for facts in theirs:
        names |= dict.fromkeys(facts)
    lines: list[str] = []
    for name in names:
        our_fact = ours.get(name, UNKNOWN)
        their_facts = [facts.get(name, UNKNOWN) for facts in theirs]
        if our_fact not in their_facts:
            lines.append(f"  {name}: {our_fact} | {_each(their_facts)}")
    # A pool has those of all its files.
    if set(mine.arms) != set(pool.arms):
        ran = [", ".join(arms) or UNKNOWN for arms in (mine.arms, pool.arms)]
        lines.append(f"  arms: {ran[0]} | {ran[1]}")
    return lines


def _each(facts: Sequence[Any]) -> str:
    """Write what several runs have: each fact once, of more than two measurements the ends."""
    different: list[Any] = []
    for fact in facts:
        if fact not in different:
            different.append(fact)
    if len(different) > 2 and all(isinstance(fact, float) for fact in different):
        return f"{min(different)} to {max(different)}"
    return " or ".join(map(str, different))


def _facts(run: Run) -> Iterator[tuple[str, Any]]:
    """What a result may depend on: parameters, versions, hardware, the code's hashes; no arms."""
    environment = dict(run.manifest.get("environment", {}))
    for name, value in run.settings.items():
        yield f"parameter {name}", value
    versions = environment.pop("versions", None)
    if isinstance(versions, dict):
        for name, value in versions.items():
            yield f"version of {name}", value
    yield from environment.items()
    for name in ("notebook", "lock"):
        yield f"hash of the {name}", str(run.code.get(name))[:12]
    seconds = run.manifest.get("seconds")
    if seconds:
        yield "seconds", round(seconds, 1)


def _ledger(
    claims: Sequence[papers.Claim], mine: Run, book: Sequence[Pool], folder: Path
) -> Iterator[str]:
    alone = Pool(mine.notebook, mine.protocol, (mine,))
    deciders = sources.deciders(folder)
    for claim in claims:
        yield f"{claim.id}: {claim.sentence}"
        yield f"  paper  {claim.printed} ({claim.where})"
        yield f"  book   {_plain(verdicts.row(claim, book, deciders.get(claim.id, {})))}"
        measured = verdicts.measure(claim, alone)
        if measured:
            remarks = [findings.numbers(measured), *findings.notes(measured)]
        else:
            remarks = ["not run"]
        yield f"  yours  {'; '.join(remarks)}"


def _plain(row: verdicts.Row) -> str:
    """Say what the book found about a claim, without Markdown."""
    text = findings.said(row).replace("**", "")
    return text[:1].lower() + text[1:]


def _values(mine: Run, other: Pool | None) -> Iterator[str]:
    for value in mine.values:
        theirs = _numbers(other, value.name) if other else []
        yield _pair(value, theirs)


def _pair(value: Value, theirs: Sequence[float]) -> str:
    """Write a reader's value beside the mean of the book's."""
    mine = _written(value.value, value.unit)
    book = _written(sum(theirs) / len(theirs), value.unit) if theirs else UNKNOWN
    return f"{value.name}: yours {mine} | book's {book} {value.unit}"


def _written(number: float, unit: str) -> str:
    """Write a number with four digits; of a count all that stand before the point."""
    is_long = float(number).is_integer() or abs(number) >= 1000
    return f"{number:,.0f}" if unit == "count" and is_long else f"{number:.4g}"


def _numbers(pool: Pool, name: str) -> list[float]:
    """Return a value's number of each seed of a pool."""
    return [value.value for value in pool.values(name).values()]


def _outside(mine: Run, of_course: Pool) -> Iterator[str]:
    """What lies where another seed's would hardly: farthest first, what no seed changes last."""
    # How many widths of the interval outside, and what to say.
    lines: list[tuple[float, str]] = []
    count = 0
    # Of them: what no seed changes lies outside for another reason than chance.
    varying = 0
    for value in mine.values:
        theirs = _numbers(of_course, value.name)
        if len(theirs) < 2 or value.unit == "seconds":
            continue
        count += 1
        low, high = records.within(value.unit, another(theirs))
        largest = max(map(abs, (*theirs, value.value)))
        rounding = 1e-6 * largest  # on another machine
        width = high - low
        varying += width > rounding
        gap = max(low - value.value, value.value - high) - rounding
        if gap <= 0:
            continue
        pair = _pair(value, theirs)
        if width > rounding:
            ends = f"another seed from {low:.4g} to {high:.4g}"
            lines.append((gap / width, f"{pair}, {ends}"))
        else:
            lines.append((0.0, f"{pair}, with every seed"))
    where = "where another seed's would in 5 of 100 cases"
    by_chance = f"{varying * (1 - CONFIDENCE):.0f}"
    yield f"{len(lines)} of {count} values lie {where}; about {by_chance} would by chance"
    for _, line in sorted(lines, reverse=True):
        yield line
