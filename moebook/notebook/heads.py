"""The heads of protocols: what was decided before their studies, and what came of it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from moebook.errors import refuse
from moebook.notebook import sources, study
from moebook.notebook.sources import duration
from moebook.notebook.verdicts import Row, quantity
from moebook.results import store
from moebook.results.intervals import interval, sees
from moebook.results.store import Pool

MARK = "Decided before the first run."
PRIMARY, SMALLEST, SEEDS = "Primary measure", "Smallest effect of interest", "Seeds"
SPREAD, ROWS, OTHERS = "Spread on record", "Test rows", "Ten other seeds"
DECIDED = (PRIMARY, SMALLEST, SEEDS, SPREAD, ROWS, "Replaces", OTHERS)
"""What the head of a protocol decides before these runs, a line each; the last three if any."""
_EFFECT = re.compile(r"\{(\S+?)(?: less (\S+?))?(?: in (\w+))?(?: of ([\d,-]+))?\}")


class Design(NamedTuple):
    """A protocol whose head says what was decided, and the pool of its runs."""

    notebook: str
    protocol: str
    facts: dict[str, str]  # by `DECIDED`, and what is computed from runs
    prose: str  # the rest of the head, in Markdown
    pool: Pool | None
    fewer: str  # arms with fewer seeds than the pool
    replaced: bool  # by another protocol
    decides: int  # claims whose verdicts rest on it


def read(folder: Path, rows: Iterable[Row]) -> list[Design]:
    """Read the heads of a project's protocols that were written before the runs."""
    rest = Counter((row.claim.run, row.best.pool.protocol) for row in rows if row.best)
    every = []
    for name, notebook in sources.notebooks(folder).items():
        old, pools = sources.replaced(folder, name, notebook.protocols), store.pools(name, folder)
        for protocol in notebook.protocols:
            if MARK in (head := notebook.head(protocol)):
                told, ran = notebook.facts(protocol), pools.get(protocol)
                facts = {fact: text for fact, text in told.items() if fact in DECIDED}
                facts |= _computed(facts, pools, protocol)
                said = (f"`{x}`" if re.match(r"(\w+=\S+ )*moebook ", x) else x or "\n\n"
                        for x in head)  # fmt: skip
                prose = " ".join(x for x in said if x.partition(":")[0] not in (*DECIDED, MARK))
                arms = str(notebook.settings(protocol).get("arms", "")).split(",")
                every.append(Design(
                    name, protocol, facts, filled(prose, pools, protocol), ran,
                    ran.lacking(arms) if ran else "", protocol in old, rest[name, protocol],
                ))  # fmt: skip
    return every


def filled(prose: str, pools: Mapping[str, Pool], protocol: str) -> str:
    """Write effects into a text of a protocol, in the place of what names them between braces.

    ``{a less b}`` is value a less value b, or a number, in its pool, with an interval at 95 %;
    ``{a}`` one value; ``{a less b in nano of 3-5}`` names another pool, and seeds of it. What a
    pool does not have is refused (E-POOL); where there is no pool, that is said.
    """

    def written(match: re.Match[str]) -> str:
        name, other, elsewhere, seeds = match.groups()
        where = elsewhere or protocol
        if (pool := pools.get(where)) is None:
            return f"(no pool {where} on record)"
        if seeds:
            kept = study.seeds(seeds)
            pool = replace(pool, runs=tuple(run for run in pool.runs if run.seed in kept))
        if not len(effects := pool.effects(name, other and _reference(other))):
            refuse("E-POOL", f"head of {protocol}: the pool of {where} has no {match[0][1:-1]}")
        unit, compared = next(iter(pool.values(name).values())).unit, other is not None
        number, *ends = (quantity(x, unit, compared=compared)
                         for x in (float(effects.mean()), *(interval(effects) or ())))  # fmt: skip
        return number + f" ({' to '.join(end.partition(' ')[0] for end in ends)})" * bool(ends)

    return _EFFECT.sub(written, prose)


def _reference(text: str) -> str | float:
    return text if "/" in text else float(text)


def _computed(facts: Mapping[str, str], pools: Mapping[str, Pool], protocol: str) -> dict[str, str]:
    """What follows from a head's facts and the pools: the chance to see the effect; what was seen.

    The chance is simulated from the spread of the pool on record.
    """
    found, measure, ran = dict[str, str](), facts.get(PRIMARY, ""), pools.get(protocol)
    if {*facts} >= {*DECIDED[:4]} and (pool := pools.get(facts[SPREAD])):
        value, other = measure.split(" less ")
        number, items = len(study.seeds(facts[SEEDS])), int(facts.get(ROWS, 0))
        effects = pool.effects(value, _reference(other))
        seen = partial(sees, effects, float(facts[SMALLEST]), items=items)
        said, had = f"{seen(number):.0%} with {number} seeds", len(ran.seeds) if ran else 0
        said += f", {seen(had):.0%} with the {had} that have run" if 1 < had < number else ""
        found["Chance to see it"] = said
    if ran is None:
        return found
    if re.fullmatch(r"\S+/\S+ less \S+", measure):
        found["Found"] = filled(f"{{{measure}}}", pools, protocol)
    if held := ran.at_end(*ran.rates):
        found["At an end of its rates"] = held
    took = [float(run.manifest["seconds"]) for run in ran.runs]
    return found | {"A run took": " to ".join(dict.fromkeys(map(duration, (min(took), max(took)))))}
