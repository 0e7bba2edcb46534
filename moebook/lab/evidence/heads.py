"""The heads of protocols: what was decided before their studies, and what came of it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np

from moebook import lists, storage
from moebook.errors import refuse
from moebook.intervals import sees
from moebook.lab.evidence import prose
from moebook.lab.evidence.verdicts import quantity
from moebook.lab.records import store
from moebook.lab.records.store import Pool
from moebook.lab.run import sources
from moebook.lab.run.sources import (
    OTHERS,
    PRIMARY,
    ROWS,
    SEEDS,
    SMALLEST,
    SPREAD,
    duration,
)

MARK = "Decided before the first run."
UNDECIDING = "It decides no claim."  # says a study that chooses rates for others
RUNNING = "Still running"
DECIDED = (PRIMARY, SMALLEST, SEEDS, SPREAD, ROWS, OTHERS)
"""What the head of a protocol decides before these runs, a line each; the last two if any."""


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
        for protocol in planned(notebook):
            head = notebook.head(protocol)
            said = notebook.facts(protocol)
            pool = pools.get(protocol)
            facts = {fact: text for fact, text in said.items() if fact in DECIDED}
            facts |= _computed(facts, pools, notebook, protocol, folder)
            facts |= _departures(folder, notebook, protocol, pool)
            if RUNNING in facts:
                facts.pop("Found", None)  # nobody looks before all is there
            _give_unit(facts, pools.values())
            arms = str(notebook.settings(protocol).get("arms", "")).split(",")
            every.append(
                Design(
                    name,
                    protocol,
                    facts,
                    filled(
                        _prose(head),
                        pools,
                        f"{name}/{protocol}",
                        sources.planned(notebook, protocol),
                    ),
                    pool,
                    pool.lacking(arms) if pool else "",
                    notebook.decides(protocol),
                )
            )
    return every


def planned(notebook: sources.Notebook) -> list[str]:
    """Return the protocols whose heads were written before the runs: each has a design."""
    return [one for one in notebook.protocols if MARK in notebook.head(one)]


def tuned_by(notebook: sources.Notebook, protocol: str) -> list[str]:
    """Name the studies that fixed a protocol's rates before its first run.

    They are those that its head names and whose own heads say that they decide no claim.
    """
    head = " ".join(notebook.head(protocol))
    if UNDECIDING in head:
        return []
    named = dict.fromkeys(re.findall(r"`(\w+)`", head))
    studies = [study for study in notebook.protocols if study in named]
    return [one for one in studies if UNDECIDING in " ".join(notebook.head(one))]


def _prose(head: Iterable[str]) -> str:
    """Return what a head says beside its facts: commands as code, empty lines as paragraphs."""
    said = []
    for line in head:
        if line.partition(":")[0] in (*DECIDED, "Decides", sources.STOPPED, MARK):
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
    departures = _other_seeds(folder, notebook, protocol, pool)
    path = notebook.path.with_name(f"{notebook.path.stem}.{protocol}.yaml")
    first = min(pool.runs, key=lambda run: str(run.manifest.get("date", "")))
    before = storage.files.at(first.manifest.get("commit"), path, folder)
    if before is not None:
        changes = _changes(before, path.read_text(encoding="utf-8"))
        if changes:
            departures["Changed after its first run"] = ", ".join(changes)
        planned_arms = _told(before).get("arms", notebook.defaults.get("arms", ""))
        more_arms = _added(pool, str(planned_arms))
        if more_arms:
            departures["Arms added later"] = ", ".join(more_arms)
    return departures


def _other_seeds(
    folder: Path, notebook: sources.Notebook, protocol: str, pool: Pool
) -> dict[str, str]:
    """Say which planned seeds a pool lacks, and which of its seeds were not planned."""
    facts = notebook.facts(protocol)
    if SEEDS not in facts:
        return {}
    departures = {}
    planned = {*notebook.seeds(protocol), *notebook.seeds(protocol, OTHERS)}
    ran = planned.intersection(pool.seeds)
    if len(ran) < len(planned):
        count = f"{len(ran)} of {len(planned)} seeds ran"
        if protocol in sources.running(notebook, folder):
            departures[RUNNING] = f"{count}; it decides nothing before all have"
        else:
            why = facts.get(sources.STOPPED, "")
            departures["Stopped early"] = f"{count}: {why}" if why else count
    added = set(pool.seeds).difference(planned)
    if added:
        departures["Seeds added later"] = ", ".join(map(str, sorted(added)))
    return departures


def _added(pool: Pool, planned: str) -> list[str]:
    """Name the arms of a pool that its file did not name before the first run."""
    if planned == lists.ALL:
        return []
    arms = set(chain.from_iterable(run.arms for run in pool.runs))
    return sorted(arms.difference(planned.split(",")))


def _changes(before: str, now: str) -> list[str]:
    """Name the facts and parameters of a protocol that its file says otherwise than before."""
    then = _told(before)
    since = _told(now)
    names = then.keys() | since.keys()
    return sorted(name for name in names if then.get(name) != since.get(name))


def _told(text: str) -> dict[str, str]:
    """Return the facts that a protocol's head says, and its parameters, by name.

    A fact that stands on several lines, as ``Decides`` may, is all of them.
    """
    facts: dict[str, str] = {}
    for line in text.splitlines():
        remark = line.startswith("#")
        name, colon, value = line.lstrip("# ").partition(": ")
        if colon and (not remark or name in (*DECIDED, "Decides")):
            facts[name] = f"{facts[name]}, {value}" if name in facts else value
    return facts


def filled(
    text: str, pools: Mapping[str, Pool], home: str, planned: Collection[int] = ()
) -> str:
    """Fill what stands between braces in a protocol's head, as `prose.filled` does.

    ``home`` is ``notebook/protocol``. Where a pool has no run yet, or an arm of the home has still
    to run with some of the ``planned`` seeds, that is said: nobody looks before.
    """
    notebook, _, protocol = home.partition("/")
    evidence = prose.Evidence({notebook: pools}, home=home)

    def written(match: re.Match[str]) -> str:
        effect = match[1].rpartition(": ")[2]  # behind readings, if there are any
        elsewhere = re.search(r" in ([\w/]+)", effect)
        where = elsewhere[1] if elsewhere else protocol
        if where.removeprefix(f"{notebook}/") not in pools:
            return f"(no pool {where} on record)"
        if not elsewhere and pools[protocol].unfinished(effect.split(), planned):
            return "(still running)"
        return prose.filled(match[0], evidence, f"head of {protocol}")

    return re.sub(r"\{([^{}]+)\}", written, text)


def _on_record(
    facts: Mapping[str, str], pools: Mapping[str, Pool], folder: Path
) -> np.ndarray | None:
    """Return the effects on record by whose spread a design is simulated; None without a pool.

    ``Spread on record: nano`` is the primary measure in another pool of the notebook. Where no pool
    has its arms another measure stands in for it, behind a colon, and where another notebook has
    that, its name before the pool's: ``rivals/fresh: a less b``.
    """
    where, _, measure = facts[SPREAD].partition(": ")
    notebook, _, protocol = where.rpartition("/")
    if notebook:
        pools = store.pools(notebook, folder)
    pool = pools.get(protocol)
    if pool is None:
        return None
    value, less, other = (measure or facts[PRIMARY]).partition(" less ")
    effects = pool.effects(value, prose.reference(other)) if less else np.empty((0, 0))
    if len(effects) < 2:
        told = (
            f"two seeds of '{measure or facts[PRIMARY]}' in {where}, has {len(effects)}"
        )
        refuse("E-CONFIG", f"'{SPREAD}: {facts[SPREAD]}': expected {told}")
    return effects


def _number(text: str) -> float:
    """Read the smallest effect of interest: a number, which its unit may follow."""
    try:
        return float(text.split()[0])
    except (IndexError, ValueError):
        refuse("E-CONFIG", f"'{SMALLEST}: {text}': expected a number first")


def _test_rows(facts: Mapping[str, str]) -> int:
    """Read how many test rows are planned; 0 without the line, for as many as on record."""
    text = facts.get(ROWS)
    if text is None:
        return 0
    if not text.isdecimal() or int(text) < 1:
        refuse("E-CONFIG", f"'{ROWS}: {text}': expected a whole number, 1 or more")
    return int(text)


def _rows_that_ran(measure: str, ran: Pool | None) -> int:
    """Count the test rows of a primary measure's effects; 0 where it has none, or did not run."""
    value, less, other = measure.partition(" less ")
    if ran is None or not less:
        return 0
    effects = ran.effects(value, prose.reference(other))
    return effects.shape[1] if len(effects) and effects.shape[1] > 1 else 0


def _give_unit(facts: dict[str, str], pools: Iterable[Pool]) -> None:
    """Write the smallest effect in the unit in which runs record the primary measure."""
    value = facts.get(PRIMARY, "").partition(" less ")[0]
    unit = _unit(value.rpartition("/")[2], pools)
    smallest = facts.get(SMALLEST, "")
    if unit and re.fullmatch(r"[\d.]+", smallest):
        told = quantity(float(smallest), unit, compared=True)
        facts[SMALLEST] = told.removeprefix("+")


def _unit(measure: str, pools: Iterable[Pool]) -> str:
    """Return the unit that runs record a measure in, such as ``nll``; empty where none has it."""
    for pool in pools:
        for value in pool.last.values:
            if value.name.endswith(f"/{measure}"):
                return value.unit
    return ""


def _computed(
    facts: Mapping[str, str],
    pools: Mapping[str, Pool],
    notebook: sources.Notebook,
    protocol: str,
    folder: Path,
) -> dict[str, str]:
    """What follows from a head's facts and the pools: the chance to see the effect; what was seen.

    The chance is simulated from the spread on record, for as many test rows as the runs turned out
    to have.
    """
    computed: dict[str, str] = {}
    ran = pools.get(protocol)
    home = f"{notebook.name}/{protocol}"
    planned = all(name in facts for name in (PRIMARY, SMALLEST, SEEDS, SPREAD))
    effects = _on_record(facts, pools, folder) if planned else None
    if effects is not None:
        smallest = _number(facts[SMALLEST])
        rows = _test_rows(facts)
        counted = _rows_that_ran(facts[PRIMARY], ran)
        seen = partial(sees, effects, smallest, items=counted or rows)
        number = len(lists.seeds(f"{protocol}: {SEEDS}", facts[SEEDS]))
        if number < 2:
            told = "expected two or more, as one seed has no spread"
            refuse("E-CONFIG", f"'{SEEDS}: {facts[SEEDS]}': {told}")
        said = f"{seen(number):.0%} with {number} seeds"
        had = len(ran.seeds) if ran else 0
        if 1 < had < number:
            said += f", {seen(had):.0%} with the {had} that have run"
        if rows and counted and counted != rows:
            said += f": it has {counted:,} test rows, not {rows:,}"
        computed["Chance to see it"] = said
    if ran is None:
        return computed
    measure = facts.get(PRIMARY, "")
    if re.fullmatch(r"\S+/\S+ less \S+( and \S+)*", measure):
        planned_seeds = sources.planned(notebook, protocol)
        # Seeds that nobody planned decide nothing: see `verdicts.row`.
        decisive = {protocol: ran.of_seeds(planned_seeds)} if planned_seeds else {}
        read_from = {**pools, **decisive}
        computed["Found"] = filled(f"{{{measure}}}", read_from, home, planned_seeds)
    held = ran.at_end(*ran.rates)
    if held:
        computed["At an end of its rates"] = held
    took = [float(run.manifest["seconds"]) for run in ran.runs]
    shortest = duration(min(took))
    longest = duration(max(took))
    alike = shortest == longest
    computed["A run took"] = shortest if alike else f"{shortest} to {longest}"
    return computed
