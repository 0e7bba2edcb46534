"""The heads of protocols: what was decided before their studies, and what came of it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from moebook import results
from moebook.errors import refuse
from moebook.notebook import sources, study
from moebook.notebook.sources import duration
from moebook.notebook.verdicts import quantity
from moebook.results import store
from moebook.results.intervals import interval, sees
from moebook.results.store import Pool

MARK = "Decided before the first run."
PRIMARY, SMALLEST, SEEDS = "Primary measure", "Smallest effect of interest", "Seeds"
SPREAD, ROWS, OTHERS = "Spread on record", "Test rows", "Ten other seeds"
DECIDED = (PRIMARY, SMALLEST, SEEDS, SPREAD, ROWS, OTHERS)
"""What the head of a protocol decides before these runs, a line each; the last two if any."""
_EFFECT = re.compile(
    r"\{(\S+?)(?: less (\S+?(?: and \S+?)*))?(?: in (\w+))?(?: of ([\d,-]+))?\}"
)


class Design(NamedTuple):
    """A protocol whose head says what was decided, and the pool of its runs."""

    notebook: str
    protocol: str
    facts: dict[str, str]  # by `DECIDED`, and what is computed from runs
    prose: str  # the rest of the head, in Markdown
    pool: Pool | None
    fewer: str  # arms with fewer seeds than the pool
    decides: list[str]  # ids of claims; without any it is exploratory


def read(folder: Path) -> list[Design]:
    """Read the heads of a project's protocols that were written before the runs."""
    every = []
    for name, notebook in sources.notebooks(folder).items():
        pools = store.pools(name, folder)
        for protocol in notebook.protocols:
            head = notebook.head(protocol)
            if MARK not in head:
                continue
            told, pool = notebook.facts(protocol), pools.get(protocol)
            facts = {fact: text for fact, text in told.items() if fact in DECIDED}
            facts |= _computed(facts, pools, protocol)
            facts |= _departures(folder, notebook, protocol, pool)
            arms = str(notebook.settings(protocol).get("arms", "")).split(",")
            every.append(
                Design(
                    name,
                    protocol,
                    facts,
                    filled(_prose(head), pools, protocol),
                    pool,
                    pool.lacking(arms) if pool else "",
                    notebook.decides(protocol),
                )
            )
    return every


def _prose(head: Iterable[str]) -> str:
    """Return what a head says beside its facts: commands as code, empty lines as paragraphs."""
    said = []
    for line in head:
        if line.partition(":")[0] in (*DECIDED, "Decides", MARK):
            continue
        command = re.match(r"(\w+=\S+ )*moebook ", line)
        said.append(f"`{line}`" if command else line or "\n\n")
    return " ".join(said)


def _departures(
    folder: Path, notebook: sources.Notebook, protocol: str, pool: Pool | None
) -> dict[str, str]:
    """Say where a pool departs from its design: seeds, and what changed after its first run.

    What the file said then is looked up in git, at the commit of the first run; without that
    history nothing is said of changes.
    """
    if pool is None:
        return {}
    found, told = {}, notebook.facts(protocol)
    if SEEDS in told:
        planned = {
            *study.seeds(told[SEEDS]),
            *study.seeds(told.get(OTHERS, told[SEEDS])),
        }
        if missing := planned.difference(pool.seeds):
            found["Stopped early"] = (
                f"{len(planned) - len(missing)} of {len(planned)} seeds ran"
            )
        if more := set(pool.seeds).difference(planned):
            found["Seeds added later"] = ", ".join(map(str, sorted(more)))
    path = notebook.path.with_name(f"{notebook.path.stem}.{protocol}.yaml")
    first = min(pool.runs, key=lambda run: str(run.manifest.get("date", "")))
    before = results.files.at(first.manifest.get("commit"), path, folder)
    if before is not None:
        changes = _changes(before, path.read_text(encoding="utf-8"))
        if changes:
            found["Changed after its first run"] = ", ".join(changes)
    return found


def _changes(before: str, now: str) -> list[str]:
    """Name the facts and parameters of a protocol that its file says otherwise than before."""

    def told(text: str) -> dict[str, str]:
        lines = (line.lstrip("# ") for line in text.splitlines())
        pairs = (line.split(": ", 1) for line in lines if ": " in line)
        names = (*DECIDED, "Decides")
        return {k: v for k, v in pairs if k in names or re.fullmatch(r"[a-z_]+", k)}

    then, since = told(before), told(now)
    return sorted(k for k in then.keys() | since.keys() if then.get(k) != since.get(k))


def filled(prose: str, pools: Mapping[str, Pool], protocol: str) -> str:
    """Write effects into a text of a protocol, in the place of what names them between braces.

    ``{a less b}`` is value a less value b, or a number, in its pool, with an interval at 95 %;
    ``{a less b and c}`` is that less the mean of two; ``{a}`` one value;
    ``{a less b in nano of 3-5}`` names another pool, and seeds of it. What a pool does not have is
    refused (E-POOL); where there is no pool, that is said.
    """

    def written(match: re.Match[str]) -> str:
        name, other, elsewhere, seeds = match.groups()
        where = elsewhere or protocol
        if (pool := pools.get(where)) is None:
            return f"(no pool {where} on record)"
        if seeds:
            kept = study.seeds(seeds)
            pool = replace(
                pool, runs=tuple(run for run in pool.runs if run.seed in kept)
            )
        if not len(effects := pool.effects(name, other and _reference(other))):
            refuse(
                "E-POOL",
                f"head of {protocol}: the pool of {where} has no {match[0][1:-1]}",
            )
        unit, compared = next(iter(pool.values(name).values())).unit, other is not None
        number, *ends = (
            quantity(x, unit, compared=compared)
            for x in (float(effects.mean()), *(interval(effects) or ()))
        )
        return (
            number
            + f" ({' to '.join(end.partition(' ')[0] for end in ends)})" * bool(ends)
        )

    return _EFFECT.sub(written, prose)


def _reference(text: str) -> store.Reference:
    """Read what stands behind "less": a value's name, several whose mean is meant, or a number."""
    if " and " in text:
        return tuple(text.split(" and "))
    return text if "/" in text else float(text)


def _computed(
    facts: Mapping[str, str], pools: Mapping[str, Pool], protocol: str
) -> dict[str, str]:
    """What follows from a head's facts and the pools: the chance to see the effect; what was seen.

    The chance is simulated from the spread of the pool on record.
    """
    found, measure, ran = dict[str, str](), facts.get(PRIMARY, ""), pools.get(protocol)
    if {*facts} >= {*DECIDED[:4]} and (pool := pools.get(facts[SPREAD])):
        value, other = measure.split(" less ")
        number, items = len(study.seeds(facts[SEEDS])), int(facts.get(ROWS, 0))
        effects = pool.effects(value, _reference(other))
        seen = partial(sees, effects, float(facts[SMALLEST]), items=items)
        said, had = (
            f"{seen(number):.0%} with {number} seeds",
            len(ran.seeds) if ran else 0,
        )
        said += (
            f", {seen(had):.0%} with the {had} that have run"
            if 1 < had < number
            else ""
        )
        found["Chance to see it"] = said
    if ran is None:
        return found
    if re.fullmatch(r"\S+/\S+ less \S+( and \S+)*", measure):
        found["Found"] = filled(f"{{{measure}}}", pools, protocol)
    if held := ran.at_end(*ran.rates):
        found["At an end of its rates"] = held
    took = [float(run.manifest["seconds"]) for run in ran.runs]
    return found | {
        "A run took": " to ".join(dict.fromkeys(map(duration, (min(took), max(took)))))
    }
