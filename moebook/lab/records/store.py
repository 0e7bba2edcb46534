"""A pool is all runs of one protocol; verdicts, intervals and figures over seeds come from pools.

``results/<notebook>/<protocol>/*.parquet`` holds the committed runs, a file each. One
more file adds a seed, or arms to a seed, and changes nothing else but the list of what
is there.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from moebook.errors import refuse
from moebook.lab.records.runs import TIERS, Curve, Run, Value, packed, read_run
from moebook.storage import files
from moebook.storage.files import root

SEALS = "SHA256SUMS"  # in results/: the hashes of all committed runs, as sha256sum writes them
BENCH = "bench"  # folder of the runs of all ops, one a machine
COMMITTED = ("study", "gpu", "paper")  # tiers whose runs are kept in the repository
SEEDS = 3  # that a comparison needs to be decided
MARKED = 5  # that the mark of a correction needs: one more has turned verdicts of three
CLASS = "class"  # protocol of a course: its pool stands beside a student's run and decides nothing
LIVE = "this build"  # the protocol's name in the pool of the one run that a page shows
DOMAINS = {"code", "common_sense", "language", "mathematics", "text", "translation"}
Reader = Callable[[Path], Run]  # of a run's file
# What a value is less: see `Pool.effects`.
Reference = str | float | tuple[str, ...] | None
SCALES = {
    "nano": "1 M",
    "nano-moe": "1 M",
    "small": "11 M",
    "mid-moe": "41 M",
    "smollm2": "135 M",
}
"""Base to its scale, by the weights that a token uses; a larger base is a scale of its own."""
BASES = tuple(SCALES)  # smallest first; others are larger
SPOKEN = {"nano-moe": "3 M"}
"""Base to how readers meet it, by all of its weights, where that is not its scale."""
AUTHORS = "the authors' data"  # the scale of what only reads published files


@dataclass(frozen=True)
class Pool:
    """All runs of one notebook under one protocol; runs that do not fit together are refused."""

    notebook: str
    protocol: str
    # At least one; of a seed there may be several, with different arms.
    runs: tuple[Run, ...]

    def __post_init__(self) -> None:
        where = f"{self.notebook}/{self.protocol}"
        units: dict[str, tuple[str, int]] = {}  # of a value's name, and whose seed
        for number, run in enumerate(self.runs):
            for other in self.runs[:number]:
                for clash in _clashes(other, run):
                    refuse("E-POOL", f"{where}, seed {run.seed}: {clash}")
            for value in run.values:
                unit, seed = units.setdefault(value.name, (value.unit, run.seed))
                if value.unit != unit:
                    pair = f"{value.unit}, seed {seed} has it in {unit}"
                    refuse(
                        "E-POOL", f"{where}, seed {run.seed}: {value.name} is in {pair}"
                    )

    @property
    def tier(self) -> str:
        """The scale that its protocol belongs to, one of `TIERS`."""
        return self.runs[0].tier

    @property
    def rank(self) -> tuple[int, int]:
        """Place among other pools: by tier, then by the size of the base."""
        base = str(self.runs[0].settings.get("base", ""))
        tier_place = TIERS.index(self.tier)
        base_place = BASES.index(base) if base in BASES else len(BASES)
        return tier_place, base_place

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
        return max(
            self.runs, key=lambda run: (str(run.manifest.get("date", "")), run.seed)
        )

    @cached_property
    def seeds(self) -> dict[int, dict[str, Value]]:
        """Values by seed and name; of what several runs of a seed recorded, the newest's."""
        oldest_first = sorted(
            self.runs, key=lambda run: (run.seed, run.manifest.get("date", ""))
        )
        seeds: dict[int, dict[str, Value]] = {}
        for run in oldest_first:
            values = seeds.setdefault(run.seed, {})
            for value in run.values:
                values[value.name] = value
        return seeds

    @cached_property
    def arms(self) -> dict[str, tuple[int, ...]]:
        """The seeds that each arm ran with."""
        seeds: dict[str, tuple[int, ...]] = {}
        for run in sorted(self.runs, key=lambda run: run.seed):
            # An arm that a run lists twice has still run once.
            for arm in dict.fromkeys(run.arms):
                seeds[arm] = (*seeds.get(arm, ()), run.seed)
        return seeds

    def lacking(self, arms: Iterable[str]) -> str:
        """Say which of a protocol's arms have fewer seeds than the pool; empty if none."""
        if not self.arms:
            return ""
        short: dict[str, int] = {}
        for arm in arms:
            count = len(self.arms.get(arm, ()))
            if arm not in ("", "all") and count < len(self.seeds):
                short[arm] = count
        if not short:
            return ""
        counts = ", ".join(f"{arm} {count}" for arm, count in short.items())
        return f" (of these: {counts})"

    def unfinished(self, names: Iterable[object], planned: Collection[int]) -> bool:
        """Whether an arm in values' names has still to run with seeds that were planned."""
        words = {*"/".join(map(str, names)).split("/")}
        return any(
            not set(seeds).issuperset(planned)
            for arm, seeds in self.arms.items()
            if arm in words
        )

    def of_seeds(self, seeds: Collection[int]) -> Pool:
        """Return the pool of the runs of these seeds alone."""
        return replace(self, runs=tuple(run for run in self.runs if run.seed in seeds))

    def values(self, name: str) -> dict[int, Value]:
        """Values of one name by seed; empty where no run has it."""
        return {
            seed: values[name] for seed, values in self.seeds.items() if name in values
        }

    def curves(self, name: str) -> dict[int, Curve]:
        """Curves of one name by seed; empty where no run has it."""
        curves: dict[int, Curve] = {}
        for run in self.runs:
            for curve in run.curves:
                if curve.name == name:
                    curves[run.seed] = curve
        return curves

    def having(self, *names: str | float | None) -> set[int]:
        """Seeds with values, or curves, of all names; a number or None is no name."""
        seeds = set(self.seeds)
        for name in names:
            if isinstance(name, str):
                seeds.intersection_update(self.values(name) or self.curves(name))
        return seeds

    def tasks(self, name: str) -> dict[str, str]:
        """Return by task the values whose mean ``a/b`` is: ``a/<task>/b``, ``a/b/<task>``."""
        place, _, last = map(re.escape, name.rpartition("/"))
        form = re.compile(rf"{place}/(.+)/{last}|{place}/{last}/([^/]+)")
        recorded: dict[str, None] = {}  # names in the order of their first seed
        for values in self.seeds.values():
            recorded |= dict.fromkeys(values)
        names_by_task: dict[str, str] = {}
        for value_name in recorded:
            match = form.fullmatch(value_name)
            if match:
                task = match[1] or match[2]
                names_by_task[task] = value_name
        return names_by_task

    def average(self, name: str) -> float | None:
        """Mean over seeds of a value, or of its tasks' values; None without any."""
        names = [name] if self.values(name) else list(self.tasks(name).values())
        numbers: list[float] = []
        for each in names:
            numbers += [value.value for value in self.values(each).values()]
        return sum(numbers) / len(numbers) if numbers else None

    def parts(self, name: str, reference: Reference) -> dict[str, np.ndarray]:
        """Effects, as `effects` gives them, by the tasks or domains whose mean a value is."""
        mine = self.tasks(name)
        others = [self.tasks(other) for other in _names(reference)]
        if not others:  # a number is the same for every task
            return {task: self.effects(mine[task], reference) for task in mine}
        effects: dict[str, np.ndarray] = {}
        for task, value_name in mine.items():
            if all(task in other for other in others):
                of_task = tuple(other[task] for other in others)
                effects[task] = self.effects(value_name, of_task)
        return effects

    @cached_property
    def rates(self) -> dict[str, dict[int, dict[float, float]]]:
        """Loss on validation rows by arm, seed and learning rate: the sum over its tasks."""
        rates: dict[str, dict[int, dict[float, float]]] = {}
        for seed, values in self.seeds.items():
            for name, value in values.items():
                _, mark, place = name.partition("/rate/")
                if not mark:
                    continue
                arm, rate_text, *_ = place.split("/")
                rate = float(rate_text)
                losses = rates.setdefault(arm, {}).setdefault(seed, {})
                losses[rate] = losses.get(rate, 0.0) + value.value
        return rates

    def tried(self, *names: str | float | None) -> dict[str, bool]:
        """Say of each arm in values' names whether its runs chose among several rates."""
        words = dict.fromkeys("/".join(map(str, names)).split("/"))
        tried: dict[str, bool] = {}
        for arm in words:
            grids = self.rates.get(arm, {}).values()
            if arm in self.arms or grids:
                tried[arm] = any(len(grid) > 1 for grid in grids)
        return tried

    def at_end(self, *names: str | float | None) -> str:
        """Say which arms in values' names had most seeds at one end of their rates.

        With another rate such an arm may do better.
        """
        words = dict.fromkeys("/".join(map(str, names)).split("/"))
        remarks: list[str] = []
        for which, extreme in (("lowest", min), ("highest", max)):
            liked: list[str] = []
            for arm in words:
                every = self.rates.get(arm, {}).values()  # loss by rate, a grid a seed
                grids = [grid for grid in every if len(grid) > 1]
                best = [min(grid, key=grid.__getitem__) for grid in grids]
                ends = [extreme(grid) for grid in grids]
                count = sum(rate == end for rate, end in zip(best, ends, strict=True))
                if 2 * count > len(grids):
                    liked.append(f"{arm} ({count} of {len(grids)} seeds)")
            if liked:
                preferred = f"preferred the {which} rate we tried"
                remarks.append(f"{', '.join(liked)} {preferred} and may be under-tuned")
        return "; ".join(remarks)

    def effects(self, name: str, reference: Reference = None) -> np.ndarray:
        """A value less a reference, ``[S, I]`` by seed and item.

        The reference is a number, another value's name, or several names whose mean is
        meant. S are the seeds that have all, if any; I is 1 where not all carry the
        same items.
        """
        values = self.values(name)
        other_names = _names(reference)
        rows: list[np.ndarray] = []
        if other_names:
            others = [self.values(other) for other in other_names]
            for seed, value in values.items():
                if all(seed in other for other in others):
                    rows.append(_minus(value, [other[seed] for other in others]))
        else:
            number = reference if isinstance(reference, int | float) else 0.0
            rows = [_items(value) - number for value in values.values()]
        lengths = {len(row) for row in rows}
        if len(lengths) > 1:
            rows = [row.mean(keepdims=True) for row in rows]
        effects = np.array(rows) if rows else np.empty((0, 1))
        # Numbers that differ by rounding alone are equal.
        largest = max((abs(value.value) for value in values.values()), default=0.0)
        rounding = 1e-12 * max(largest, 1.0)
        return np.where(np.abs(effects) <= rounding, 0.0, effects)


def scale(base: str) -> str:
    """Name the scale of a base: one of `SCALES`, or what a larger base is called."""
    return SCALES.get(base, base.partition("@")[0])


def size(scale: str) -> int:
    """Place of a scale among others, the smallest first and the authors' data last."""
    order = list(dict.fromkeys(SCALES.values()))
    if scale == AUTHORS:
        return len(order) + 1
    return order.index(scale) if scale in order else len(order)


def mean(parts: Iterable[np.ndarray]) -> np.ndarray:
    """Mean effects over tasks, ``[S, I]`` each, item by item where all have several."""
    tasks = list(parts)
    counts = [task.shape[1] for task in tasks]
    if min(counts) == 1:
        return np.mean([task.mean(axis=1, keepdims=True) for task in tasks], axis=0)
    # The items lie side by side; scaled so that each task weighs as much as the others.
    average_count = sum(counts) / len(tasks)
    scaled = [task * average_count / task.shape[1] for task in tasks]
    return np.concatenate(scaled, axis=1)


def _items(value: Value) -> np.ndarray:
    return np.array(value.items if value.items else (value.value,), float)


def _names(reference: Reference) -> tuple[str, ...]:
    """Names of the recorded values in a reference: none where it is a number."""
    if isinstance(reference, tuple):
        return reference
    return (reference,) if isinstance(reference, str) else ()


def _minus(value: Value, others: Sequence[Value]) -> np.ndarray:
    """Subtract others' mean, item by item where all carry as many, else mean from mean."""
    items = _items(value)
    other_items = [_items(other) for other in others]
    if all(len(each) == len(items) for each in other_items):
        return items - np.mean(other_items, axis=0)
    return np.array([value.value - np.mean([other.value for other in others])])


def _clashes(one: Run, other: Run) -> Iterator[str]:
    """Say why no pool can hold both of two runs."""
    pools = [(run.notebook, run.protocol, run.tier) for run in (one, other)]
    if pools[0] != pools[1]:
        here, odd = (f"{name} at {on} (tier {tier})" for name, on, tier in pools)
        yield f"a run of {odd} lies among runs of {here}"
    for name in sorted(one.settings.keys() & other.settings.keys()):
        before = one.settings[name]
        now = other.settings[name]
        if before != now:
            pair = f"{now!r}, seed {one.seed} has {before!r}"
            yield f"{name} = {pair}; another protocol needs another name"
    if one.rows.get("test") != other.rows.get("test"):
        yield f"tested on other rows than seed {one.seed}; nothing pairs them"
    if one.seed == other.seed:
        yield from _clashes_of_a_seed(one, other)


def _clashes_of_a_seed(one: Run, other: Run) -> Iterator[str]:
    """Say why two runs of one seed cannot be its arms."""
    shared = [arm for arm in other.arms if arm in one.arms]
    if shared:
        yield f"two files hold the arm {shared[0]}; take one away"
    if not one.arms or not other.arms:
        yield "two files hold this seed; take one away"
    if one.rows != other.rows:
        yield "two files of this seed trained on other rows; take one away"
    items = {value.name: value.items for value in one.values}
    for value in other.values:
        if value.items != items.get(value.name, value.items):
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
            belongs = f"{run.notebook} at {run.protocol}"
            refuse("E-POOL", f"{path} is a run of {belongs}; move it there")
    if not runs:
        return None
    by_seed = sorted(runs.values(), key=lambda run: run.seed)
    return Pool(notebook, protocol, tuple(by_seed))


def recorded(notebook: str, protocol: str, folder: Path) -> set[int]:
    """Return the seeds of a protocol's committed runs, by the names of their files."""
    place = files.part(folder, "results") / notebook / protocol
    seeds = (path.name.partition(".")[0] for path in files.own(place, "*.parquet"))
    return {int(seed) for seed in seeds if seed.isdecimal()}


def keep(run: Run, path: Path, folder: Path) -> None:
    """Commit a run to a file below ``results/``, then its hash to the list there.

    So a kill in between loses nothing: the run is there, and `unsealed` says what the
    list lacks. What fails, on a full disk for one, leaves no run and no pool without
    any.
    """
    place = folder / "results"
    content = packed(run)
    with files.locked(folder / "runs" / "results.lock", wait=True):
        seals = _sealed(place)
        seals[path.relative_to(place).as_posix()] = hashlib.sha256(content).hexdigest()
        lines = [f"{seals[name]}  {name}\n" for name in sorted(seals)]
        new = not path.exists()
        try:
            # The later block ends first: the run takes its place before the list.
            with (
                files.replacing(place / SEALS) as list_file,
                files.replacing(path) as run_file,
            ):
                run_file.write_bytes(content)
                list_file.write_text("".join(lines), encoding="utf-8")
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
    if not path.is_file():
        return {}
    seals: dict[str, str] = {}
    for line in path.read_text("utf-8", "replace").splitlines():
        if not re.fullmatch(r"[0-9a-f]{64}  [\w.-]+(/[\w.-]+)*", line, re.ASCII):
            odd = f"'{line:.80}' is no hash and file"
            refuse("E-FORMAT", f"results/{SEALS}: {odd}; bring it back")
        digest, _, name = line.partition("  ")
        seals[name] = digest
    return seals


def unsealed(folder: Path) -> dict[Path, list[str]]:
    """Say by folder which committed runs are altered, gone, or not on the list."""
    place = folder / "results"
    seals = _sealed(place)
    present = files.own(place, "**/*.parquet")
    listed = [place / name for name in seals]
    faults: dict[Path, list[str]] = {}
    for path in sorted({*present, *listed}):
        digest = files.digest(path)
        wanted = seals.get(path.relative_to(place).as_posix())
        if digest == wanted:
            continue
        if wanted is None:
            fault = f"is not in {SEALS}; take it away, or add its line"
        elif digest is None:
            fault = "is gone; bring it back"
        else:
            fault = "was altered; bring it back"
        faults.setdefault(path.parent, []).append(f"{path.name} {fault}")
    return faults


def pools(
    notebook: str,
    folder: Path | None = None,
    *,
    shown: bool = False,
    read: Reader = read_run,
) -> dict[str, Pool]:
    """Read a notebook's pools but `CLASS`, smallest scale first.

    Last, if ``shown``, comes the pool of the one run that its page shows.
    """
    folder = folder or root()
    place = files.part(folder, "results") / notebook
    every: list[Pool] = []
    for path in files.own(place):
        if path.is_dir() and path.name != CLASS:
            committed = pool(notebook, path.name, folder, read)
            if committed:
                every.append(committed)
    every.sort(key=lambda each: each.rank)
    if shown:
        on_page = live(notebook, folder, read)
        if on_page:
            every.append(on_page)
    return {each.protocol: each for each in every}


def live(notebook: str, folder: Path, read: Reader = read_run) -> Pool | None:
    """Read the run that the notebook's page shows, as a pool of one; None without one."""
    place = folder / "book" / "notebooks"
    paths = files.own(place, f"[0-9][0-9]_{notebook}.parquet")
    if not paths:
        return None
    run = read(paths[0])
    if run.notebook != notebook:
        belongs = f"{run.notebook} at {run.protocol}"
        refuse("E-POOL", f"{paths[0]} is a run of {belongs}; run: make book")
    return Pool(notebook, LIVE, (run,))
