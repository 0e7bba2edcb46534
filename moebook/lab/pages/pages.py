"""The book's generated pages: templates filled from verdicts, pools and the audit."""

from __future__ import annotations

import inspect
import pkgutil
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from moebook import storage
from moebook.errors import refuse
from moebook.intervals import another
from moebook.lab import records
from moebook.lab.evidence import findings, heads, verdicts
from moebook.lab.evidence.verdicts import (
    Measurement,
    Row,
    Verdict,
    amount,
    quantity,
    seeds,
    span,
)
from moebook.lab.pages.filling import ENVIRONMENT, page
from moebook.lab.papers import Claim
from moebook.lab.papers.arithmetic import STATUSES, Finding
from moebook.lab.records import Run, Value, store
from moebook.lab.records.runs import changed, day, restored
from moebook.lab.records.store import CLASS, COMMITTED, LIVE, Pool
from moebook.lab.run import pace, sources
from moebook.lab.run.session import VALUE
from moebook.lab.run.sources import cost, duration, last_seed


class Titles(dict[str, str]):
    """A notebook's short name to what pages call it; one that has no title here has its name."""

    def __missing__(self, name: str) -> str:
        return name


TITLES = Titles(
    bases="Base and tasks",
    pesc="PESC",
    router_init="Router initialisation",
    rocket="Rocket",
    rivals="Rocket's rivals",
    esft="ESFT",
    routing="ESFT's routing",
    banks="Does Rocket's lead hang on its bank? (our own)",
    together="Together (our own)",
    causes="Causes (our own)",
    kernels="Kernels",
)
KINDS = {  # label to the badge's class in _static/moebook.css; others are inconclusive
    "reproduced": "reproduced",
    "direction holds": "holds",
    "direction fails": "fails",
    "not testable here": "notrun",
    "not run": "notrun",
    "withdrawn": "notrun",
}
PURPOSES = {  # tier, or the protocol of courses, to what it is for
    "smoke": "tests: everything runs, and the numbers mean nothing",
    "cpu": "the live run on a notebook's page",
    CLASS: "courses: one parameter to change",
    "study": "runs on record that began without a plan",
    "gpu": "larger models and data sets, on one large GPU",
    "paper": "the papers' models and settings, where a paper has them",
}
FAULTS = {
    "values": "Generated values",
    "calls": "Calls with hostile values",
    "mutations": "Changed files",
    "disk": "Calls at which the disk failed",
    "kills": "Killed runs and studies",
    "store": "Processes on one store",
}


def anchor(pool: Pool) -> str:
    """Name the row of a pool in the list of recorded runs, for links to it."""
    return re.sub(r"\W+", "-", f"runs-{pool.notebook}-{pool.protocol}")


def plan_anchor(notebook: str, protocol: str) -> str:
    """Name the design of a study, for links to it."""
    return re.sub(r"[\W_]+", "-", f"plan-{notebook}-{protocol}")


def spans(seeds: Iterable[int]) -> str:
    """Write seeds for a reader, three or more in a row as a span: "10, 11, 100–174"."""
    rows: list[list[int]] = []
    for seed in sorted(seeds):
        if rows and seed == rows[-1][-1] + 1:
            rows[-1].append(seed)
        else:
            rows.append([seed])
    texts: list[str] = []
    for row in rows:
        texts += [f"{row[0]}–{row[-1]}"] if len(row) > 2 else map(str, row)
    return ", ".join(texts)


def bound(claim: Claim) -> str:
    """Say which number is subtracted from a claim's quantity, if any, and for whom it must fail."""
    number = isinstance(claim.reference, (int, float)) and claim.reference
    less = f", less {number:g}" if number else ""
    if claim.trivial is None:
        return less
    who = claim.trivial if isinstance(claim.trivial, str) else f"{claim.trivial:g}"
    return f"{less}; as a check, it must fail for {who}"


def seed_by_seed(measured: Measurement) -> str:
    """List the effects whose mean a verdict is, a seed each, with their unit once."""
    numbers: list[str] = []
    unit = ""
    for seed, effect in measured.by_seed.items():
        number, _, unit = amount(measured.claim, effect).partition(" ")
        numbers.append(f"{seed}: {number}")
    return f"{', '.join(numbers)} {unit}".strip()


QUANTITIES = {"nll": "loss", "cost/step": "time of a step"}


def compared(measure: str) -> str:
    """Say what a study compares as a reader would: "loss, sparse less dense"."""
    value, _, other = measure.partition(" less ")
    one, both, two = other.partition(" and ")
    if both:
        first, _, name = compared(f"{value} less {one}").rpartition(" ")
        second = compared(f"{value} less {two}").rpartition(" ")[2]
        return f"{first} the mean of {name} and {second}"
    if "/" not in value:
        return measure
    parts = value.split("/")
    others = other.split("/")
    if len(parts) != len(others):
        what = " ".join(parts[1:]).replace("_", " ")
        if not re.fullmatch(r"[\d.]+", other):
            return f"{what} less {other}"
        return what if other == "0" else f"{what}, above the bound of {other}"
    pairs = enumerate(zip(parts, others, strict=True))
    differing = [place for place, (one, two) in pairs if one != two]
    if len(differing) != 1:
        return measure
    (place,) = differing
    quantity = "/".join(parts[place + 1 :])
    text = f"{QUANTITIES.get(quantity, quantity)}, {parts[place]} less {others[place]}"
    return text.replace("_", " ")


def judged(rows: Iterable[Row]) -> dict[str, Counter[str]]:
    """Count verdicts by paper, one a claim and scale, in the order of `TITLES`."""
    several = list(rows)
    counts = {paper: Counter[str]() for paper in TITLES}
    for row in several:
        counts[row.claim.paper].update(row.labels)
    return {paper: count for paper, count in counts.items() if count}


def scales_of(rows: Iterable[Row]) -> list[str]:
    """Name the scales at which claims were measured, the smallest first."""
    every: set[str] = set()
    for row in rows:
        every |= {verdict.scale for verdict in row.verdicts}
    return sorted(every, key=lambda scale: (store.size(scale), scale))


def labels_by_scale(rows: Iterable[Row]) -> dict[str, list[str]]:
    """List the labels of what pools decide, by scale."""
    several = list(rows)
    labels: dict[str, list[str]] = {scale: [] for scale in scales_of(several)}
    for row in several:
        for verdict in row.decided:
            if verdict.label != "not testable here":
                labels[verdict.scale].append(verdict.label)
    return {scale: told for scale, told in labels.items() if told}


def surviving(every: Iterable[Verdict]) -> list[str]:
    """Name the claims whose verdicts, taken alone, survive the correction."""
    rows = [Row(verdict.claim, (verdict,)) for verdict in every]
    return [decision.claim for decision in verdicts.chance(rows).hochberg]


def counted(things: Iterable[Any], paper: str, label: str) -> dict[str, Counter[str]]:
    """Count labels by paper, both of which are attributes, in the order of `TITLES`."""
    counts: dict[str, Counter[str]] = {title: Counter() for title in TITLES}
    for thing in things:
        of_paper, said = attrgetter(paper, label)(thing)
        if of_paper in counts:
            counts[of_paper][said] += 1
    return {title: count for title, count in counts.items() if count}


for thing in (
    amount,
    anchor,
    plan_anchor,
    bound,
    compared,
    cost,
    counted,
    duration,
    judged,
    labels_by_scale,
    last_seed,
    scales_of,
    seed_by_seed,
    seeds,
    span,
    spans,
    surviving,
    verdicts.chance,
    findings.intervals,
    findings.notes,
    findings.power,
    findings.rates,
):
    ENVIRONMENT.globals[thing.__name__] = thing
ENVIRONMENT.globals.update(
    TITLES=TITLES,
    KINDS=KINDS,
    LABELS=verdicts.LABELS,
    STATUSES=STATUSES,
    LIVE=LIVE,
    FAULTS=FAULTS,
    COMMANDS=pace.COMMANDS,
)


@dataclass(frozen=True)
class Places:
    """Where a project's ledger links to: findings, the cell that records a value, the code."""

    folder: Path

    def links(self, row: Row) -> dict[str, str]:
        """Return the links of a row: what each is called, and its address."""
        claim = row.claim
        pooled = any(one.pool.tier in COMMITTED for one in row.measurements)
        links = {
            "findings": self._findings(claim) if pooled else None,
            "notebook": self._page(claim.notebook, self._anchors.get(claim.value, "")),
            "code of the comparison": self.code(
                "moebook.lab.evidence.verdicts.measure"
            ),
            "code of the interval": self.code("moebook.intervals.interval"),
            claim.function.removeprefix("moebook.").removeprefix("methods."): self.code(
                claim.function
            ),
        }
        return {text: url for text, url in links.items() if url}

    def _findings(self, claim: Claim) -> str | None:
        """Return the address of the section of the findings that tells a claim, or their page."""
        name = f"{claim.notebook}_findings"
        return self._page(name, self._sections.get(claim.id, ""))

    def _page(self, name: str, anchor: str = "") -> str | None:
        copy = self.folder / "book" / "notebooks" / f"{name}.ipynb"
        return f"notebooks/{name}.html{anchor}" if copy.is_file() else None

    @cached_property
    def _anchors(self) -> dict[str, str]:
        """Recorded value to the heading above its cell, over all executed copies."""
        anchors: dict[str, str] = {}
        for stem, cells in self._cells.items():
            for heading, cell in cells:
                for output in cell.get("outputs", []):
                    value = output.get("data", {}).get(VALUE)
                    if value:
                        name = restored(Value, value, f"{stem}.ipynb").name
                        anchors.setdefault(name, heading)
        return anchors

    @cached_property
    def _sections(self) -> dict[str, str]:
        """Claim to the heading of the section that names it in its metadata."""
        sections: dict[str, str] = {}
        for cells in self._cells.values():
            for heading, cell in cells:
                claims = cell.get("metadata", {}).get("claims", ())
                sections |= dict.fromkeys(claims, heading)
        return sections

    @cached_property
    def _cells(self) -> dict[str, list[tuple[str, Any]]]:
        """Cells of each executed copy, each behind the heading above it."""
        pages: dict[str, list[tuple[str, Any]]] = {}
        for path in storage.files.own(self.folder / "book" / "notebooks", "*.ipynb"):
            heading = ""
            cells = pages.setdefault(path.stem, [])
            for cell in storage.read_ipynb(path)["cells"]:
                titles = re.findall(r"^#{2,} +(.+)$", cell["source"], re.MULTILINE)
                if cell["cell_type"] == "markdown" and titles:
                    words = re.sub(r"[^a-z0-9]+", "-", titles[-1].lower())
                    heading = "#" + words.strip("-")
                cells.append((heading, cell))
        return pages

    def code(self, function: str) -> str:
        """Return the address of the line that defines a function."""
        return f"{self._repository}/{_defined(function)}"

    @cached_property
    def _repository(self) -> str:
        """The address of the code at the commit that the book is made from, if git knows it."""
        built_from = storage.commit(self.folder)
        with storage.formed(self.folder / "_config.yml") as config:
            repository = config["repository"]
            at = built_from["id"] if built_from else repository["branch"]
            return f"{repository['url']}/blob/{at}"


@cache
def _defined(name: str) -> str:
    """Return the file and line that define a function: ``moebook/nn/lora.py#L30``."""
    function = inspect.unwrap(pkgutil.resolve_name(name))
    path = Path(inspect.getfile(function)).relative_to(storage.files.PACKAGE.parent)
    return f"{path}#L{inspect.getsourcelines(function)[1]}"


def audit(every: Sequence[Finding]) -> str:
    """Return the audit: the counts by paper, then every finding, those of one cause in one row."""
    folds: dict[tuple[str, ...], list[Finding]] = {}
    for one in every:
        how = "" if one.status == "agrees" else one.explanation
        folds.setdefault((one.paper, one.group, one.status, how), []).append(one)
    order = sorted(folds.values(), key=lambda fold: -STATUSES.index(fold[0].status))
    return page("audit", every=every, folds=order)


def recorded(folder: Path) -> str:
    """Return the list of recorded runs: their seeds, cost and day, and what changed since."""
    pools: list[store.Pool] = []
    others: list[store.Pool | None] = []  # of courses, and of the pages' own runs
    for name, notebook in sources.notebooks(folder).items():
        if not notebook.findings:
            pools += store.pools(name, folder).values()
            others += [store.pool(name, CLASS, folder), store.live(name, folder)]
    pools += [pool for pool in others if pool]
    planned = {
        (name, protocol)
        for name, notebook in sources.notebooks(folder).items()
        for protocol in heads.planned(notebook)
    }
    told = partial(changed, folder=folder, hashed=cache(storage.files.code_digest))
    return page("records", pools=pools, planned=planned, changed=told, day=day)


def arms(folder: Path) -> str:
    """Return what each arm of each notebook is, for the glossary."""
    from moebook.experiments import every  # with torch: what renders pages does without

    notebooks = sources.notebooks(folder)
    defaults = {name: notebook.defaults for name, notebook in notebooks.items()}
    return page("arms", every=every.arms(defaults))


def taught(folder: Path) -> str:
    """Return what a course can change in each notebook: the heads of its protocols, its pools."""
    every = []
    for name, notebook in sources.notebooks(folder).items():
        pool = store.pool(name, CLASS, folder)
        if pool:
            facts = notebook.facts(CLASS)
            seen = pool.values(facts["See"]).values()
            theirs = [value.value for value in seen]
            unit = next(iter(seen)).unit
            ends = records.within(unit, another(theirs))
            numbers = [sum(theirs) / len(theirs), *ends]
            told = [quantity(one, unit, compared=False) for one in numbers]
            every.append((pool, facts, *told))
    return page("taught", pools=every)


def designs(folder: Path, rows: Sequence[Row]) -> str:
    """Return what was decided before each study ran, and what it found.

    ``rows`` are the ledger's: the verdicts of each study are counted.
    """
    by_id = {row.claim.id: row for row in rows}
    counted: dict[tuple[str, str], list[tuple[str, int]]] = {}
    every = heads.read(folder)
    for design in every:
        if design.pool and heads.RUNNING not in design.facts:
            theirs = [_label(by_id[claim], design.pool) for claim in design.decides]
            counted[design.notebook, design.protocol] = Counter(theirs).most_common()
    return page(
        "designs",
        designs=every,
        counted=counted,
        about=_about(folder),
        unplanned=_unplanned(folder),
    )


def _unplanned(folder: Path) -> dict[str, tuple[str, list[str]]]:
    """Return what each protocol without a plan is for, and the notebooks that have it."""
    every: dict[str, tuple[str, list[str]]] = {}
    for name, notebook in sources.notebooks(folder).items():
        if notebook.findings:
            continue
        planned = heads.planned(notebook)
        for protocol in notebook.protocols:
            if protocol not in planned:
                tier = str(notebook.settings(protocol)["tier"])
                kind = CLASS if protocol == CLASS else tier
                every.setdefault(protocol, (PURPOSES[kind], []))[1].append(name)
    return every


def _about(folder: Path) -> dict[tuple[str, str], str]:
    """Say of each study in a few words what it compares, or whose learning rates it chooses."""
    about: dict[tuple[str, str], str] = {}
    for name, notebook in sources.notebooks(folder).items():
        for protocol in heads.planned(notebook):
            measure = notebook.facts(protocol).get(heads.PRIMARY, "")
            about.setdefault((name, protocol), compared(measure))
            for study in heads.tuned_by(notebook, protocol):
                about[name, study] = f"learning rates of `{protocol}`"
    return about


def _label(row: Row, pool: Pool) -> str:
    """Return the verdict on a claim at the scale of a pool that decides it."""
    verdict = row.at(pool.scale)
    if row.claim.ended:
        return "withdrawn"
    return verdict.label if verdict else "not run"


def withdrawn(folder: Path) -> str:
    """Return which runs were withdrawn for a fault in their design, why, and what that moved."""
    place = storage.part(folder, "results") / "withdrawn"
    listed = place / "withdrawn.yaml"
    entries = []
    written = storage.read_yaml(listed) if listed.is_file() else []
    for entry in written:
        notebook, protocol = entry["runs"].split("/")
        paths = storage.files.own(place / notebook / protocol, "*.parquet")
        runs = [records.read_run(path) for path in paths]
        entries.append(
            {
                **entry,
                "notebook": notebook,
                "protocol": protocol,
                "seeds": sorted({run.seed for run in runs}),
                "moved": _moved(
                    entry.get("moved", ()), runs, store.pool(notebook, protocol, folder)
                ),
            }
        )
    return page("withdrawn", runs=entries)


def _moved(
    names: Iterable[str], runs: Sequence[Run], pool: Pool | None
) -> list[tuple[str, str, str]]:
    """Return the mean of each named value in withdrawn runs, and in its pool for their seeds."""
    moved: list[tuple[str, str, str]] = []
    for name in names:
        before = Pool(runs[0].notebook, runs[0].protocol, tuple(runs)).values(name)
        after = pool.values(name) if pool else {}
        both = sorted(before.keys() & after.keys())
        if not both:
            refuse(
                "E-NAME", f"withdrawn runs and their pool have no '{name}' in common"
            )
        old = sum(before[seed].value for seed in both) / len(both)
        new = sum(after[seed].value for seed in both) / len(both)
        unit = before[both[0]].unit
        then = quantity(old, unit, compared=False)
        now = quantity(new, unit, compared=False)
        moved.append((name, then, now))
    return moved


def repeated(folder: Path) -> str:
    """Return which labels ten other seeds change, in the pools whose heads name them."""
    every = []
    for name, notebook in sources.notebooks(folder).items():
        for protocol in notebook.protocols:
            seeds_of_others = notebook.seeds(protocol, heads.OTHERS)
            if not seeds_of_others:
                continue
            pool = store.pool(name, protocol, folder)
            if pool:
                other = notebook.facts(protocol)[heads.OTHERS]
                pairs = verdicts.repeated(pool, seeds_of_others)
                every.append((pool, other, pairs))
    return page("repeated", pools=every)


def times(folder: Path) -> str:
    """Return how long the commands and the notebooks took, from their record."""
    return page("times", told=pace.times(folder))


def tested(folder: Path) -> str:
    """Return the figures of the tests in ``tests/faults`` from their record, and what it lacks."""
    path = folder / "results" / "faults.json"
    with storage.formed(path):
        return page("tested", record=storage.read_json(path) if path.is_file() else {})


def accelerated(folder: Path) -> str:
    """Return what needs a GPU, step by step, and what is on record of each command."""
    steps = []
    place = folder / "results" / "gpu"
    listed = folder / "recipes" / "gpu.yaml"
    written = storage.read_yaml(listed) if listed.is_file() else {}
    for name, step in written.items():
        path = place / f"{name}.json"
        recorded = storage.read_json(path) if path.is_file() else {}
        ran = [recorded[command] for command in step["commands"] if command in recorded]
        steps.append((step, ran, storage.files.code(folder / step["code"])))
    return page("accelerated", steps=steps)
