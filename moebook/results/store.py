"""A pool is all runs of one protocol; verdicts, intervals and figures over seeds come from pools.

``results/<notebook>/<protocol>/*.parquet`` holds the committed runs, a file each. One more file
adds a seed, or arms to a seed, and changes nothing else but the list of what is there.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from moebook.errors import refuse
from moebook.results import files
from moebook.results.files import root
from moebook.results.runs import TIERS, Curve, Run, Value, packed, read_run

SEALS = "SHA256SUMS"  # in results/: the hashes of all committed runs, as sha256sum writes them
BENCH = "bench"  # folder of the runs of all ops, one a machine
COMMITTED = ("study", "gpu", "paper")  # tiers whose runs are kept in the repository
SEEDS = 3  # that a comparison needs to be decided
MARKED = 5  # that the mark of a correction needs: one more has turned verdicts of three
CLASS = "class"  # protocol of a course: its pool stands beside a student's run and decides nothing
LIVE = "this build"  # the protocol's name in the pool of the one run that a page shows
DOMAINS = {"code", "common_sense", "language", "mathematics", "text", "translation"}
Reader = Callable[[Path], Run]  # of a run's file
Reference = str | float | tuple[str, ...] | None  # what a value is less: see `Pool.effects`
BASES = ("nano", "nano-moe", "small", "mid-moe", "smollm2")  # smallest first; others are larger
SCALES = {"nano": "1 M", "nano-moe": "1 M", "small": "11 M", "mid-moe": "41 M", "smollm2": "135 M"}
"""Base to its scale, by the size of its weights; a larger base is a scale of its own."""
AUTHORS = "the authors' data"  # the scale of what only reads published files


@dataclass(frozen=True)
class Pool:
    """All runs of one notebook under one protocol; runs that do not fit together are refused."""

    notebook: str
    protocol: str
    runs: tuple[Run, ...]  # at least one; of a seed there may be several, with different arms

    def __post_init__(self) -> None:
        for number, run in enumerate(self.runs):
            for other in self.runs[:number]:
                for clash in _clashes(other, run):
                    refuse("E-POOL", f"{self.notebook}/{self.protocol}, seed {run.seed}: {clash}")

    @property
    def tier(self) -> str:
        """The scale that its protocol belongs to, one of `TIERS`."""
        return self.runs[0].tier

    @property
    def rank(self) -> tuple[int, int]:
        """Place among other pools: by tier, then by the size of the base."""
        base = str(self.runs[0].settings.get("base", ""))
        return TIERS.index(self.runs[0].tier), BASES.index(base) if base in BASES else len(BASES)

    @property
    def scale(self) -> str:
        """Where its verdicts belong: one of `SCALES`, a larger base, or `AUTHORS`."""
        if self.published:
            return AUTHORS
        return scale(str(self.runs[0].settings.get("base", "")))

    @property
    def published(self) -> bool:
        """Whether its runs only read what others published: they drew nothing by their seeds."""
        return all(run.manifest.get("files") and not run.rows for run in self.runs)

    @property
    def last(self) -> Run:
        """The run that ended last."""
        return max(self.runs, key=lambda run: (str(run.manifest.get("date", "")), run.seed))

    @cached_property
    def seeds(self) -> dict[int, dict[str, Value]]:
        """Values by seed and name; what several runs of a seed recorded is that of the newest."""
        seeds: dict[int, dict[str, Value]] = {}
        for run in sorted(self.runs, key=lambda run: (run.seed, run.manifest.get("date", ""))):
            seeds.setdefault(run.seed, {}).update({value.name: value for value in run.values})
        return seeds

    @cached_property
    def arms(self) -> dict[str, tuple[int, ...]]:
        """The seeds that each arm ran with."""
        runs = sorted(self.runs, key=lambda run: run.seed)
        names = dict.fromkeys(arm for run in runs for arm in run.arms)
        return {arm: tuple(run.seed for run in runs if arm in run.arms) for arm in names}

    def lacking(self, arms: Iterable[str]) -> str:
        """Say which of a protocol's arms have fewer seeds than the pool; empty where none has."""
        number = {arm: len(self.arms.get(arm, ())) for arm in arms if arm not in ("", "all")}
        number = {arm: n for arm, n in number.items() if self.arms and n < len(self.seeds)}
        return f" (of these: {', '.join(f'{a} {n}' for a, n in number.items())})" if number else ""

    def values(self, name: str) -> dict[int, Value]:
        """Values of one name by seed; empty where no run has it."""
        return {seed: values[name] for seed, values in self.seeds.items() if name in values}

    def curves(self, name: str) -> dict[int, Curve]:
        """Curves of one name by seed; empty where no run has it."""
        return {run.seed: curve for run in self.runs for curve in run.curves if curve.name == name}

    def having(self, *names: str | float | None) -> set[int]:
        """Seeds with values, or curves, of all names; a number or None is no name."""
        told = (name for name in names if isinstance(name, str))
        return {*self.seeds}.intersection(*(self.values(x) or self.curves(x) for x in told))

    def tasks(self, name: str) -> dict[str, str]:
        """Names of the values, by task, whose mean ``a/b`` is: ``a/<task>/b`` or ``a/b/<task>``."""
        place, _, last = map(re.escape, name.rpartition("/"))
        form = re.compile(rf"{place}/(.+)/{last}|{place}/{last}/([^/]+)")
        every = dict.fromkeys(value for values in self.seeds.values() for value in values)
        return {found[1] or found[2]: one for one in every if (found := form.fullmatch(one))}

    def average(self, name: str) -> float | None:
        """Mean over seeds of a value, or of those by task that stand for it; None without any."""
        names = [name] if self.values(name) else [*self.tasks(name).values()]
        every = [value.value for one in names for value in self.values(one).values()]
        return sum(every) / len(every) if every else None

    def parts(self, name: str, reference: Reference) -> dict[str, np.ndarray]:
        """Effects, as `effects` gives them, by the tasks or domains whose mean a value is."""
        others = [self.tasks(other) for other in _names(reference)]
        found = {}
        for task, value in self.tasks(name).items():
            if all(task in other for other in others):
                less = tuple(other[task] for other in others)
                found[task] = self.effects(value, less or reference)
        return found

    @cached_property
    def rates(self) -> dict[str, dict[int, dict[float, float]]]:
        """Loss on validation rows by arm, seed and learning rate tried: the sum over its tasks."""
        found: dict[str, dict[int, dict[float, float]]] = {}
        for seed, values in self.seeds.items():
            for name, value in values.items():
                if "/rate/" in name:
                    arm, rate, *_ = name.partition("/rate/")[2].split("/")
                    losses = found.setdefault(arm, {}).setdefault(seed, {})
                    losses[float(rate)] = losses.get(float(rate), 0.0) + value.value
        return found

    def at_end(self, *names: str | float | None) -> str:
        """Say which arms in values' names had most seeds at one end of their rates, or no choice.

        With another rate such an arm may do better. Rates that the protocol fixes for each arm were
        chosen in runs of their own.
        """
        several = dict.fromkeys("/".join(map(str, names)).split("/"))
        untried = [arm for arm in several if arm in self.arms and arm not in self.rates]
        chosen_before = any(run.settings.get("fixed_rates") for run in self.runs)
        found = []
        if untried and self.tier in COMMITTED and not chosen_before:
            found.append(f"{' and '.join(untried)} had no choice of rate")
        for arm in several:
            grids = [grid for grid in self.rates.get(arm, {}).values() if len(grid) > 1]
            for end, which in (("lowest", min), ("highest", max)):
                number = sum(min(grid, key=grid.__getitem__) == which(grid) for grid in grids)
                if 2 * number > len(grids):
                    found.append(f"{arm} took its {end} rate in {number} of {len(grids)} seeds")
        return ", ".join(found)

    def effects(self, name: str, reference: Reference = None) -> np.ndarray:
        """A value less a reference, ``[S, I]`` by seed and item.

        The reference is a number, another value's name, or several names whose mean is meant. S are
        the seeds that have all, if any; I is 1 where not all carry the same items.
        """
        values = self.values(name)
        if names := _names(reference):
            others = [self.values(other) for other in names]
            rows = [
                _minus(value, [other[seed] for other in others])
                for seed, value in values.items()
                if all(seed in other for other in others)
            ]
        else:
            number = reference if isinstance(reference, int | float) else 0.0
            rows = [_items(value) - number for value in values.values()]
        if len({len(row) for row in rows}) > 1:
            rows = [row.mean(keepdims=True) for row in rows]
        effects = np.array(rows) if rows else np.empty((0, 1))
        scale = max((abs(value.value) for value in values.values()), default=0.0)
        # Numbers that differ by rounding alone are equal.
        return np.where(np.abs(effects) <= 1e-12 * max(scale, 1.0), 0.0, effects)


def scale(base: str) -> str:
    """Name the scale of a base: one of `SCALES`, or what a larger base is called."""
    return SCALES.get(base, base.partition("@")[0])


def size(scale: str) -> int:
    """Place of a scale among others, the smallest first and the authors' data last."""
    order = [*dict.fromkeys(SCALES.values())]
    if scale == AUTHORS:
        return len(order) + 1
    return order.index(scale) if scale in order else len(order)


def mean(parts: Iterable[np.ndarray]) -> np.ndarray:
    """Mean effects over tasks, ``[S, I]`` each, item by item where all have several."""
    several = [*parts]
    if min(part.shape[1] for part in several) == 1:
        return np.mean([part.mean(axis=1, keepdims=True) for part in several], axis=0)
    items = sum(part.shape[1] for part in several) / len(several)  # each task weighs as much
    return np.concatenate([part * items / part.shape[1] for part in several], axis=1)


def _items(value: Value) -> np.ndarray:
    return np.array(value.items if value.items else (value.value,), float)


def _names(reference: Reference) -> tuple[str, ...]:
    """Names of the recorded values in a reference: none where it is a number."""
    if isinstance(reference, tuple):
        return reference
    return (reference,) if isinstance(reference, str) else ()


def _minus(value: Value, others: Sequence[Value]) -> np.ndarray:
    """Subtract the mean of others, item by item where all carry as many, else that of the means."""
    one, two = _items(value), [_items(other) for other in others]
    if {len(items) for items in two} == {len(one)}:
        return one - np.mean(two, axis=0)
    return np.array([value.value - np.mean([other.value for other in others])])


def _clashes(one: Run, other: Run) -> Iterator[str]:
    """Say why no pool can hold both of two runs."""
    if (one.notebook, one.protocol, one.tier) != (other.notebook, other.protocol, other.tier):
        kinds = [f"{run.notebook} at {run.protocol} (tier {run.tier})" for run in (one, other)]
        yield f"a run of {kinds[1]} lies among runs of {kinds[0]}"
    for name in sorted(one.settings.keys() & other.settings.keys()):
        if one.settings[name] != other.settings[name]:
            pair = f"{other.settings[name]!r}, seed {one.seed} has {one.settings[name]!r}"
            yield f"{name} = {pair}; another protocol needs another name"
    if one.rows.get("test") != other.rows.get("test"):
        yield f"tested on other rows than seed {one.seed}; nothing pairs them"
    if one.seed == other.seed:
        if shared := [arm for arm in other.arms if arm in one.arms]:
            yield f"two files hold the arm {shared[0]}; take one away"
        if not one.arms or not other.arms:
            yield "two files hold this seed; take one away"
        if one.rows != other.rows:
            yield "two files of this seed trained on other rows; take one away"
    known = {value.name: value for value in one.values}
    for value in other.values:
        before = known.get(value.name, value)
        if before.unit != value.unit:
            yield f"{value.name} is in {value.unit}, seed {one.seed} has it in {before.unit}"
        if before.items != value.items and one.seed == other.seed:
            yield f"two files record {value.name} differently; take one away"


def pool(
    notebook: str, protocol: str, folder: Path | None = None, read: Reader = read_run
) -> Pool | None:
    """Read a protocol's committed runs in a project; None where there are none.

    With ``read=read_head`` they have neither values nor curves, and are there at once.
    """
    place = files.part(folder or root(), "results") / notebook / protocol
    runs = {path: read(path) for path in files.own(place, "*.parquet")}
    for path, run in runs.items():
        if (run.notebook, run.protocol) != (notebook, protocol):
            refuse("E-POOL", f"{path} is a run of {run.notebook} at {run.protocol}; move it there")
    rising = sorted(runs.values(), key=lambda run: run.seed)
    return Pool(notebook, protocol, tuple(rising)) if rising else None


def keep(run: Run, path: Path, folder: Path) -> None:
    """Commit a run to a file below ``results/``, then its hash to the list there.

    So a kill in between loses nothing: the run is there, and `unsealed` says what the list lacks.
    What fails, on a full disk for one, leaves no run and no pool without any.
    """
    place, content = folder / "results", packed(run)
    with files.locked(folder / "runs" / "results.lock", wait=True):
        seals = _sealed(place)
        seals[path.relative_to(place).as_posix()] = hashlib.sha256(content).hexdigest()
        lines = (f"{seals[name]}  {name}\n" for name in sorted(seals))
        new = not path.exists()
        try:
            with files.replacing(place / SEALS) as last, files.replacing(path) as first:
                first.write_bytes(content)
                last.write_text("".join(lines), encoding="utf-8")
        except BaseException:
            if new:
                _withdraw(path)
            raise


def _withdraw(path: Path) -> None:
    """Take a run away that the list lacks, and the folders of a pool that has no other."""
    path.unlink(missing_ok=True)
    for folder in (path.parent, path.parents[1]):
        with suppress(OSError):  # one with other runs stays
            folder.rmdir()


def _sealed(place: Path) -> dict[str, str]:
    """Read the list of committed runs: file to hash."""
    path = place / SEALS
    lines = path.read_text("utf-8", "replace").splitlines() if path.is_file() else []
    for line in lines:
        if not re.fullmatch(r"[0-9a-f]{64}  [\w.-]+(/[\w.-]+)*", line, re.ASCII):
            refuse("E-FORMAT", f"results/{SEALS}: '{line:.80}' is no hash and file; bring it back")
    return {name: digest for digest, _, name in (line.partition("  ") for line in lines)}


def unsealed(folder: Path) -> dict[Path, list[str]]:
    """Say by folder which committed runs are altered, gone, or not on the list."""
    place, faults = folder / "results", dict[Path, list[str]]()
    seals = _sealed(place)
    for path in sorted({*files.own(place, "**/*.parquet"), *(place / name for name in seals)}):
        found, wanted = files.digest(path), seals.get(path.relative_to(place).as_posix())
        if found != wanted:
            fault = "was altered; bring it back" if found else "is gone; bring it back"
            fault = fault if wanted else f"is not in {SEALS}; take it away, or add its line"
            faults.setdefault(path.parent, []).append(f"{path.name} {fault}")
    return faults


def pools(
    notebook: str, folder: Path | None = None, *, shown: bool = False, read: Reader = read_run
) -> dict[str, Pool]:
    """Read a notebook's pools but `CLASS`, smallest scale first; last, if ``shown``, its page's."""
    place = files.part(folder or root(), "results") / notebook
    names = [path.name for path in files.own(place) if path.is_dir()]
    every = [pool(notebook, name, folder, read) for name in names if name != CLASS]
    found = sorted((one for one in every if one), key=lambda one: one.rank)
    if shown and (one := live(notebook, folder, read)):
        found.append(one)
    return {one.protocol: one for one in found}


def live(notebook: str, folder: Path | None = None, read: Reader = read_run) -> Pool | None:
    """Read the run that the notebook's page shows, as a pool of one; None where there is none."""
    place = (folder or root()) / "book" / "notebooks"
    runs = [read(path) for path in place.glob(f"[0-9][0-9]_{notebook}.parquet")][:1]
    return Pool(notebook, LIVE, tuple(runs)) if runs else None
