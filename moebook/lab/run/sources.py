"""The notebooks of the project: ``notebooks/NN_name.ipynb``, their parameters and protocols.

A protocol is a YAML file beside the notebook, ``NN_name.<protocol>.yaml``: one flat
mapping of parameter to scalar, which plain ``papermill -f`` reads too. The tier that
the parameters cell declares as its default needs no file. A notebook
``NN_name_findings.ipynb`` reads pools of runs and trains nothing: it has no protocols.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from moebook import lists, storage
from moebook.errors import printable, refuse, refuse_unknown
from moebook.lab import papers
from moebook.lab.records import TIERS, Run, store
from moebook.lab.records.runs import read_head
from moebook.lab.records.store import CLASS, COMMITTED, Pool
from moebook.lab.run import parameters
from moebook.lab.run.parameters import Parameter, Scalar

DECIDES = "Decides"
PRIMARY = "Primary measure"
SMALLEST = "Smallest effect of interest"
SEEDS = "Seeds"
SPREAD = "Spread on record"
ROWS = "Test rows"
OTHERS = "Ten other seeds"  # the same design once more
STOPPED = "Stopped"  # before all of its seeds had run: why
FACTS = (DECIDES, PRIMARY, SMALLEST, SEEDS, SPREAD, ROWS, OTHERS, STOPPED)
# The second group is there where a space and a text follow the colon.
_FACT = re.compile(rf"\s*#\s*({'|'.join(FACTS)}):( +\S)?")
_STEM = re.compile(r"\d\d_([a-z0-9_]+)")


@dataclass(frozen=True)
class Notebook:
    """A notebook's source, its first heading and what its parameters cell declares, by name."""

    path: Path
    title: str
    parameters: dict[str, Parameter]

    @property
    def name(self) -> str:
        """The short name: ``pesc`` for ``01_pesc.ipynb``."""
        return self.path.stem[3:]

    @property
    def findings(self) -> bool:
        """Whether it reads the pools of another notebook, and has nothing to run at a scale."""
        return self.name.endswith("_findings")

    @property
    def defaults(self) -> dict[str, Scalar]:
        """Its parameters' defaults."""
        return {
            parameter.name: parameter.default for parameter in self.parameters.values()
        }

    @property
    def protocols(self) -> list[str]:
        """Names of its protocols: the tiers in their order, where `study` stands for its own."""
        names = {str(self.defaults["tier"])}
        for path in storage.files.own(self.path.parent, f"{self.path.stem}.*.yaml"):
            names.add(
                path.name.removeprefix(f"{self.path.stem}.").removesuffix(".yaml")
            )
        order = {tier: place for place, tier in enumerate(TIERS)}
        return sorted(names, key=lambda name: (order.get(name, order["study"]), name))

    def settings(self, protocol: str) -> dict[str, Scalar]:
        """Read and check what a protocol sets, ``tier`` included."""
        file = self._file(protocol)
        message = f"{self.name} has no protocol '{protocol}' ({file.name});"
        if storage.files.foreign(file.name) and file.is_file():
            message = f"{file.name} looks like a copy, by its name, and is no protocol;"
        refuse_unknown(protocol, self.protocols, "E-PROTOCOL", message)
        settings = {"tier": self.defaults["tier"]}
        lines = read_flat(file) if file.is_file() else {}
        for name, (value, where) in lines.items():
            settings |= parameters.check(self.parameters, {name: value}, where)
        tiers = _tiers(protocol)
        tier = settings["tier"]
        if tier not in tiers:
            expected = f"expected {', '.join(tiers)}"
            refuse("E-CONFIG", f"{file.name}: tier = {tier!r}; {expected}")
        return settings

    def _file(self, protocol: str) -> Path:
        return self.path.parent / f"{self.path.stem}.{protocol}.yaml"

    def head(self, protocol: str) -> list[str]:
        """Return the comment at the top of a protocol's file, line by line.

        A line that says one of `FACTS` and would not be read as one is refused (E-CONFIG).
        """
        file = self._file(protocol)
        if not file.is_file():
            return []
        where = f"{file.parent.name}/{file.name}"
        try:
            lines = file.read_text(encoding="utf-8-sig").splitlines()
        except UnicodeDecodeError as error:
            refuse("E-CONFIG", f"{where}: not UTF-8 at byte {error.start}")
        comment = [*takewhile(lambda line: line.startswith("#"), lines)]
        said: set[str] = set()
        for number, line in enumerate(lines, start=1):
            fact = _FACT.match(line)
            if fact is None:
                continue
            place = f"{where}:{number}"
            if number > len(comment):
                head = "the comment at the top, which has no empty line; move it there"
                refuse("E-CONFIG", f"{place}: '{fact[1]}:' is not in {head}")
            if not fact[2]:
                expected = f"expected a space behind '{fact[1]}:', and a text"
                refuse("E-CONFIG", f"{place}: {expected}")
            if fact[1] in said - {DECIDES}:
                refuse(
                    "E-CONFIG", f"{place}: '{fact[1]}:' stands there twice; say it once"
                )
            said.add(fact[1])
        return [line[1:].strip() for line in comment]

    def facts(self, protocol: str) -> dict[str, str]:
        """Return what the head says by name: ``Seeds: 0-9``."""
        facts: dict[str, str] = {}
        for line in self.head(protocol):
            name, colon, fact = line.partition(": ")
            if colon:
                facts[name] = fact
        return facts

    def decides(self, protocol: str) -> list[str]:
        """Return the ids of the claims that its runs decide, from lines ``Decides: id, id``."""
        ids: list[str] = []
        for line in self.head(protocol):
            name, _, claims = line.partition(": ")
            if name == DECIDES:
                ids += re.split(r",\s*", claims)
        return [claim_id for claim_id in ids if claim_id]

    def seeds(self, protocol: str, fact: str = SEEDS) -> list[int]:
        """Return the seeds that a line of the head names, ``Seeds: 0-9``; none without it."""
        text = self.facts(protocol).get(fact)
        if text is None:
            return []
        return lists.seeds(f"{self._file(protocol).name}: {fact}", text)

    def design(self, protocol: str) -> dict[str, Any]:
        """Return the parameters that all runs of a protocol share."""
        return design(self.defaults | self.settings(protocol))

    def agrees(self, pool: Pool) -> None:
        """Refuse a pool that was made with other parameters than its protocol has (E-POOL)."""
        then = pool.last.settings
        now = self.design(pool.protocol)
        for key in sorted(then.keys() & now.keys()):
            if then[key] != now[key]:
                pair = f"{key} = {now[key]!r}, its runs were made with {then[key]!r}"
                refuse(
                    "E-POOL",
                    f"protocol {pool.protocol} says {pair}; give it another name",
                )


def _tiers(protocol: str) -> tuple[str, ...]:
    """Return the tiers that a protocol may have, by its name."""
    if protocol in TIERS:
        return (protocol,)
    return ("cpu",) if protocol == CLASS else COMMITTED


def design(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters that runs of one protocol share: all but seed, arms and device."""
    own = ("seed", "arms", "device")
    return {name: value for name, value in parameters.items() if name not in own}


def paths(folder: Path) -> dict[str, Path]:
    """Find all notebooks of the project, by short name; none of them is read."""
    by_name: dict[str, Path] = {}
    for path in sorted(storage.part(folder, "notebooks").glob("*.ipynb")):
        match = _STEM.fullmatch(path.stem)
        if match is None:
            continue
        other = by_name.setdefault(match[1], path)
        if other != path:
            refuse("E-NOTEBOOK", f"{other.name} and {path.name} share a name")
    return by_name


def notebooks(folder: Path) -> dict[str, Notebook]:
    """Read all notebooks of the project, by short name, in the order of their numbers."""
    return {name: read(path) for name, path in paths(folder).items()}


def running(notebook: Notebook, folder: Path) -> set[str]:
    """Return the protocols of a notebook whose heads plan `SEEDS` that are still to run.

    Until then they decide nothing: else one could look at each seed that comes in, and stop where
    one likes what one sees. A study that ended before says why in its head (``Stopped: why``).
    """
    unfinished = set()
    for protocol in notebook.protocols:
        if STOPPED in notebook.facts(protocol):
            continue
        ran = store.recorded(notebook.name, protocol, folder)
        if not ran.issuperset(notebook.seeds(protocol)):
            unfinished.add(protocol)
    return unfinished


def pools(name: str, folder: Path, *, shown: bool = False) -> dict[str, Pool]:
    """Read a notebook's pools, as `store.pools` does, but those of studies still running."""
    every = store.pools(name, folder, shown=shown)
    path = paths(folder).get(name)
    unfinished = running(read(path), folder) if path else set()
    return {one: pool for one, pool in every.items() if one not in unfinished}


def planned(notebook: Notebook, protocol: str) -> frozenset[int]:
    """Return the seeds that decide: those that a head plans; none where it plans none, or stopped.

    A claim waits for them, those included that repeat the study (`OTHERS`).
    """
    first = notebook.seeds(protocol)
    if not first or STOPPED in notebook.facts(protocol):
        return frozenset()
    return frozenset({*first, *notebook.seeds(protocol, OTHERS)})


def plans(folder: Path) -> dict[str, dict[str, frozenset[int]]]:
    """Return the seeds that are `planned`, by notebook and protocol."""
    return {
        name: {one: planned(notebook, one) for one in notebook.protocols}
        for name, notebook in notebooks(folder).items()
    }


def deciders(folder: Path) -> dict[str, dict[str, frozenset[int]]]:
    """Return by claim the protocols that decide it, as their heads say (``Decides: id, id``).

    With each come the seeds that are `planned`, which alone decide; before all of them have
    measured a claim, it decides nothing of it. One that is still running decides nothing yet. A
    claim that does not exist or belongs to another notebook is refused, and so are two protocols of
    one scale that decide the same claim (E-CONFIG).
    """
    known = {claim.id: claim for claim in papers.claims()}
    protocols: dict[str, dict[str, frozenset[int]]] = {}
    files: dict[tuple[str, str], str] = {}  # by claim and scale, which file decides it
    for name, notebook in notebooks(folder).items():
        unfinished = running(notebook, folder)
        for protocol in notebook.protocols:
            where = f"{notebook.path.stem}.{protocol}.yaml"
            scale = store.scale(str(notebook.design(protocol).get("base", "")))
            for claim in notebook.decides(protocol):
                refuse_unknown(claim, known, "E-CONFIG", f"{where} decides '{claim}':")
                owner = known[claim].run
                if owner != name:
                    refuse(
                        "E-CONFIG", f"{where} decides {claim}, which {owner} measures"
                    )
                other = files.setdefault((claim, scale), where)
                if other != where:
                    both = f"{where} and {other} both decide {claim} at {scale}"
                    refuse("E-CONFIG", f"{both}; one may")
                if protocol not in unfinished:
                    seeds = planned(notebook, protocol)
                    protocols.setdefault(claim, {})[protocol] = seeds
    return protocols


def find(folder: Path, name: str) -> Notebook:
    """Return the notebook with that short name, or refuse with the nearest one."""
    known = paths(folder)
    if not known:
        refuse("E-NOFILE", f"no notebooks/NN_name.ipynb in {folder}")
    refuse_unknown(name, known, "E-NOTEBOOK", f"unknown notebook '{name}':")
    return read(known[name])


def read(path: Path) -> Notebook:
    """Read one notebook's title and the cell tagged ``parameters``; nothing of it is executed."""
    where = f"notebooks/{path.name}"
    cells = storage.read_ipynb(path)["cells"]
    tagged = [cell for cell in cells if "parameters" in storage.tags(cell)]
    if len(tagged) != 1:
        expected = "expected one cell tagged 'parameters'"
        refuse("E-NOTEBOOK", f"{where}: {expected}, found {len(tagged)}")
    declared = parameters.parse(tagged[0]["source"], where)
    if "tier" not in declared:
        line = 'tier: str = "cpu"  # {smoke, cpu, ...}'
        refuse("E-NOTEBOOK", f"{where} must declare {line}")
    texts = [cell["source"] for cell in cells if cell["cell_type"] == "markdown"]
    heading = re.search(r"^# (.*)", "\n".join(texts), re.MULTILINE)
    title = heading[1].strip() if heading else ""
    return Notebook(path, title, declared)


def read_flat(path: Path) -> dict[str, tuple[Any, str]]:
    """Read a YAML file of one flat mapping: name to value and the place of its line."""
    content, places = storage.read_places(path)
    if not isinstance(content, dict | None):
        where = f"{path.parent.name}/{path.name}:1:1"
        refuse("E-CONFIG", f"{where}: expected name: value")
    flat: dict[str, tuple[Any, str]] = {}
    for (name, value), place in zip((content or {}).items(), places, strict=True):
        if isinstance(value, list | dict):
            refuse("E-CONFIG", f"{place}: expected one flat mapping of name: value")
        flat[name] = (value, place)
    return flat


def overview(folder: Path) -> str:
    """Return the text of ``moebook list``: a block a notebook, with protocols and their costs."""
    blocks = (_block(notebook, folder) for notebook in notebooks(folder).values())
    return "\n\n".join(blocks) or f"no notebooks/NN_name.ipynb in {folder}"


def _block(notebook: Notebook, folder: Path) -> str:
    """Return a notebook's title, its parameters and its protocols with their costs."""
    pools = store.pools(notebook.name, folder, read=read_head)
    live = store.live(notebook.name, folder, read_head)
    if live:
        pools.setdefault(live.last.protocol, live)
    of_course = store.pool(notebook.name, CLASS, folder, read_head)
    if of_course:
        pools[CLASS] = of_course
    width = max(len(name) for name in notebook.parameters)
    lines = [f"{notebook.name}  {notebook.title} (notebooks/{notebook.path.name})"]
    for parameter in notebook.parameters.values():
        kind = parameter.type.__name__
        start = f"  -p {parameter.name:<{width}} {kind:<5} = {parameter.default!r}"
        lines.append(f"{start}  {parameter.help} {parameter.rule}".rstrip())
    for protocol in notebook.protocols:
        measured = _measured(pools.get(protocol))
        lines.append(f"  --on {protocol:<8} {measured}")
    return "\n".join(map(printable, lines))


def _measured(pool: Pool | None) -> str:
    """Say what the last seed of a pool cost, and which seeds there are, if several."""
    if pool is None:
        return "not measured"
    spent = cost(last_seed(pool))
    if len(pool.seeds) == 1:
        return spent
    which = "the last" if pool.lacking(pool.arms) else "each"
    return f"seeds {', '.join(map(str, pool.seeds))}, {which} {spent}"


def last_seed(pool: Pool) -> tuple[Run, ...]:
    """Return the runs of the seed that ran last: several where its arms have files of their own."""
    return pool.of_seeds([pool.last.seed]).runs


def cost(runs: Sequence[Run]) -> str:
    """Say what a seed cost, from its runs' manifests: time, peak memory, and on what."""
    spent = 0.0
    # CPU time is shorter where others ran beside it; the oldest runs did not measure it.
    measured = [run.manifest.get("cpu_seconds") for run in runs]
    busy = [seconds for seconds in measured if seconds is not None]
    memory: int | None = None
    machines: dict[str, None] = {}
    share = ""
    for run in runs:
        try:
            spent += run.manifest["seconds"]
            memory = max(memory or 0, run.manifest["peak_memory"] or 0) or None
            machine = run.manifest["environment"]
            cores = machine["cores"]
            processor = f"{machine['cpu']}, {cores} core{'s' if cores != 1 else ''}"
            machines[machine["accelerator"] or processor] = None
            # Once one run had several.
            seeds = run.manifest.get("parameters", {}).get("seeds", 1)
            share = f" for {seeds} seeds in one run" if seeds > 1 else ""
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            where = f"the manifest of {run.notebook}, {run.protocol}, seed {run.seed}"
            problem = f"{type(error).__name__}: {error}"
            refuse("E-RUN", f"{where} is incomplete ({problem}); run it again")
    time = f"{duration(spent)}{share}"
    if len(busy) == len(runs):
        time += f" (CPU time {duration(sum(busy))})"
    return f"{time}, {size(memory)} on {' and '.join(machines)}"


def duration(seconds: float) -> str:
    """Write seconds as ``4.2 s``, ``3 min 20 s`` or ``1 h 5 min``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"


def size(bytes_: int | None) -> str:
    """Write bytes as MB or GB (powers of ten)."""
    if bytes_ is None:
        return "memory not measured"
    return f"{bytes_ / 1e9:.1f} GB" if bytes_ >= 1e9 else f"{bytes_ / 1e6:.0f} MB"


def commit(known: Mapping[str, Any] | None) -> str:
    """Write a commit as `storage.commit` gives it: seven digits, and whether files differed."""
    if not known:
        return "unknown"
    return f"{known['id'][:7]}{' with changes' * known['dirty']}"
