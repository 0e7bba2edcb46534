"""The notebooks of the project: ``notebooks/NN_name.ipynb``, their parameters and protocols.

A protocol is a YAML file beside the notebook, ``NN_name.<protocol>.yaml``: one flat mapping of
parameter to scalar, which plain ``papermill -f`` reads too. The tier that the parameters cell
declares as its default needs no file. A notebook ``NN_name_findings.ipynb`` reads pools of runs and
trains nothing: it has no protocols.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from moebook import papers, results
from moebook.errors import printable, refuse, refuse_unknown
from moebook.notebook import parameters
from moebook.notebook.parameters import Parameter, Scalar
from moebook.results import TIERS, Run, store
from moebook.results.runs import read_head
from moebook.results.store import CLASS, COMMITTED, Pool

DECIDES = "Decides: "
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
        return {parameter.name: parameter.default for parameter in self.parameters.values()}

    @property
    def protocols(self) -> list[str]:
        """Names of its protocols: the tiers in their order, where `study` stands for its own."""
        files = results.files.own(self.path.parent, f"{self.path.stem}.*.yaml")
        names = {path.name.split(".")[1] for path in files} | {str(self.defaults["tier"])}
        order = {tier: place for place, tier in enumerate(TIERS)}
        return sorted(names, key=lambda name: (order.get(name, order["study"]), name))

    def settings(self, protocol: str) -> dict[str, Scalar]:
        """Read and check what a protocol sets, ``tier`` included."""
        file = self.path.with_name(f"{self.path.stem}.{protocol}.yaml")
        message = f"{self.name} has no protocol '{protocol}' ({file.name});"
        if results.files.foreign(file.name) and file.is_file():
            message = f"{file.name} looks like a copy, by its name, and is no protocol;"
        refuse_unknown(protocol, self.protocols, "E-PROTOCOL", message)
        settings = {"tier": self.defaults["tier"]}
        for name, (value, where) in read_flat(file).items() if file.is_file() else ():
            parameters.check(self.parameters, {name: value}, where)
            settings[name] = value
        wanted = (protocol,) if protocol in TIERS else ("cpu",) if protocol == CLASS else COMMITTED
        if (tier := settings["tier"]) not in wanted:
            refuse("E-CONFIG", f"{file.name}: tier = {tier!r}; expected {', '.join(wanted)}")
        return settings

    def head(self, protocol: str) -> list[str]:
        """Return the comment at the top of a protocol's file, line by line."""
        file = self.path.with_name(f"{self.path.stem}.{protocol}.yaml")
        lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
        return [line[1:].strip() for line in takewhile(lambda line: line.startswith("#"), lines)]

    def facts(self, protocol: str) -> dict[str, str]:
        """Return what the head says by name: ``Seeds: 0-9``."""
        return dict(line.split(": ", 1) for line in self.head(protocol) if ": " in line)

    def decides(self, protocol: str) -> list[str]:
        """Return the ids of the claims that its runs decide, from lines ``Decides: id, id``."""
        lines = [line for line in self.head(protocol) if line.startswith(DECIDES)]
        return [
            one for line in lines for one in re.split(r",\s*", line.removeprefix(DECIDES)) if one
        ]

    def design(self, protocol: str) -> dict[str, Any]:
        """Return the parameters that all runs of a protocol share."""
        return design(self.defaults | self.settings(protocol))

    def agrees(self, pool: Pool) -> None:
        """Refuse a pool that was made with other parameters than its protocol has (E-POOL)."""
        then, now = pool.last.settings, self.design(pool.protocol)
        for key in sorted(then.keys() & now.keys()):
            if then[key] != now[key]:
                pair = f"{key} = {now[key]!r}, its runs were made with {then[key]!r}"
                refuse("E-POOL", f"protocol {pool.protocol} says {pair}; give it another name")


def design(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters that runs of one protocol share: all but seed, arms and device."""
    return {k: v for k, v in parameters.items() if k not in ("seed", "arms", "device")}


def paths(folder: Path) -> dict[str, Path]:
    """Find all notebooks of the project, by short name; none of them is read."""
    found = dict[str, Path]()
    for path in sorted(results.part(folder, "notebooks").glob("*.ipynb")):
        match = _STEM.fullmatch(path.stem)
        if match and (other := found.setdefault(match[1], path)) != path:
            refuse("E-NOTEBOOK", f"{other.name} and {path.name} share a name")
    return found


def notebooks(folder: Path) -> dict[str, Notebook]:
    """Read all notebooks of the project, by short name, in the order of their numbers."""
    return {name: read(path) for name, path in paths(folder).items()}


def deciders(folder: Path) -> dict[str, set[str]]:
    """Return by claim the protocols that decide it, as their heads say (``Decides: id, id``).

    A claim that does not exist or belongs to another notebook is refused, and so are two protocols
    of one scale that decide the same claim (E-CONFIG).
    """
    known = {claim.id: claim for claim in papers.claims()}
    found: dict[str, set[str]] = {}
    taken: dict[tuple[str, str], str] = {}
    for name, notebook in notebooks(folder).items():
        for protocol in notebook.protocols:
            where = f"{notebook.path.stem}.{protocol}.yaml"
            scale = store.scale(str(notebook.design(protocol).get("base", "")))
            for one in notebook.decides(protocol):
                refuse_unknown(one, known, "E-CONFIG", f"{where} decides '{one}':")
                if known[one].run != name:
                    refuse("E-CONFIG", f"{where} decides {one}, which {known[one].run} measures")
                other = taken.setdefault((one, scale), where)
                if other != where:
                    refuse("E-CONFIG", f"{where} and {other} both decide {one} at {scale}; one may")
                found.setdefault(one, set()).add(protocol)
    return found


def find(folder: Path, name: str) -> Notebook:
    """Return the notebook with that short name, or refuse with the nearest one."""
    known = paths(folder)
    if not known:
        refuse("E-NOFILE", f"no notebooks/NN_name.ipynb in {folder}")
    refuse_unknown(name, known, "E-NOTEBOOK", f"unknown notebook '{name}':")
    return read(known[name])


def read(path: Path) -> Notebook:
    """Read one notebook's title and the cell tagged ``parameters``; nothing of it is executed."""
    where, cells = f"notebooks/{path.name}", results.read_ipynb(path)["cells"]
    tagged = [cell for cell in cells if "parameters" in cell["metadata"].get("tags", [])]
    if len(tagged) != 1:
        refuse("E-NOTEBOOK", f"{where}: expected one cell tagged 'parameters', found {len(tagged)}")
    declared = parameters.parse(tagged[0]["source"], where)
    if "tier" not in declared:
        refuse("E-NOTEBOOK", f'{where} must declare tier: str = "cpu"  # {{smoke, cpu, ...}}')
    texts = [cell["source"] for cell in cells if cell["cell_type"] == "markdown"]
    title = re.search(r"^# (.*)", "\n".join(texts), re.MULTILINE)
    return Notebook(path, title[1].strip() if title else "", declared)


def read_flat(path: Path) -> dict[str, tuple[Any, str]]:
    """Read a YAML file of one flat mapping: name to value and the place of its line."""
    content, places = results.read_places(path)
    if not isinstance(content, dict | None):
        refuse("E-CONFIG", f"{path.parent.name}/{path.name}:1:1: expected name: value")
    pairs = zip((content or {}).items(), places, strict=True)
    flat = {name: (value, place) for (name, value), place in pairs}
    for value, place in flat.values():
        if isinstance(value, list | dict):
            refuse("E-CONFIG", f"{place}: expected one flat mapping of name: value")
    return flat


def overview(folder: Path) -> str:
    """Return the text of ``moebook list``: a block a notebook, with protocols and their costs."""
    blocks = (_block(notebook, folder) for notebook in notebooks(folder).values())
    return "\n\n".join(blocks) or f"no notebooks/NN_name.ipynb in {folder}"


def _block(notebook: Notebook, folder: Path) -> str:
    pools = store.pools(notebook.name, folder, read=read_head)
    if shown := store.live(notebook.name, folder, read_head):
        pools.setdefault(shown.last.protocol, shown)
    if taught := store.pool(notebook.name, CLASS, folder, read_head):
        pools[CLASS] = taught
    width = max(len(name) for name in notebook.parameters)
    lines = [f"{notebook.name}  {notebook.title} (notebooks/{notebook.path.name})"]
    for p in notebook.parameters.values():
        start = f"  -p {p.name:<{width}} {p.type.__name__:<5} = {p.default!r}"
        lines.append(f"{start}  {p.help} {p.rule}".rstrip())
    for protocol in notebook.protocols:
        measured = "not measured"
        if pool := pools.get(protocol):
            seeds = f"seeds {', '.join(map(str, pool.seeds))}, each " * (len(pool.seeds) > 1)
            measured = seeds + cost(pool.last)
        lines.append(f"  --on {protocol:<8} {measured}")
    return "\n".join(map(printable, lines))


def cost(run: Run) -> str:
    """Say what a run cost, from its manifest: time, peak memory, and on what."""
    try:
        spent, memory = run.manifest["seconds"], run.manifest["peak_memory"]
        machine = run.manifest["environment"]
        hardware = machine["accelerator"] or f"{machine['cpu']}, {machine['cores']} cores"
        several = run.manifest.get("parameters", {}).get("seeds", 1)  # once one run had several
        share = f" for {several} seeds" if several > 1 else ""
        return f"{duration(spent)}{share}, {size(memory)} on {hardware}"
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        where = f"the manifest of {run.notebook}, {run.protocol}, seed {run.seed}"
        refuse("E-RUN", f"{where} is incomplete ({type(error).__name__}: {error}); run it again")


def duration(seconds: float) -> str:
    """Write seconds as ``4.2 s``, ``3 min 20 s`` or ``1 h 5 min``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def size(bytes_: int | None) -> str:
    """Write bytes as MB or GB (powers of ten)."""
    if bytes_ is None:
        return "memory not measured"
    return f"{bytes_ / 1e9:.1f} GB" if bytes_ >= 1e9 else f"{bytes_ / 1e6:.0f} MB"
