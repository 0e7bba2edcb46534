"""Data sets of the hub, pinned to a commit, and templates (`catalogue.yaml`).

The catalogue names no commit: whoever runs an experiment pins one for each data set,
and the run's record holds it. A folder can stand in for the hub, with data sets under
the hub's names in the hub's files: ``openai/gsm8k/main/test.jsonl``,
``Rowan/hellaswag/data/validation-00000-of-00001.parquet``.
"""

from __future__ import annotations

import os
import random
import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import datasets
from pydantic import Field, SkipValidation

from moebook.data.reading import ENDINGS, Rows, local
from moebook.data.templates import Row, Source
from moebook.errors import nearest, refuse, refuse_unknown
from moebook.settings import NAMED, Place, checked
from moebook.storage import formed

__all__ = [
    "contents",
    "folder",
    "load",
    "mixture",
    "pins",
    "shards",
]

with formed(Path(__file__).with_name("catalogue.yaml")) as _FILE:
    CATALOGUE = {name: Source(**entry) for name, entry in _FILE["sets"].items()}
    MIXTURES: dict[str, dict[str, int]] = _FILE["mixtures"]
    COPIES: dict[str, str] = _FILE["copies"]
FileName = Annotated[str, Field(min_length=1), NAMED]
# A name and its commit; a name has = in parentheses alone, as in "Toolformer (th=0.6)".
_PIN = re.compile(r"((?:[^=(]|\([^)]*\))+)=([^=]*)")
# Of a data set: a commit of the hub's repository, or a folder.
Origin = Annotated[str | Path, NAMED] | None


@checked
def load(
    name: str,
    *,
    revision: Origin = None,
    path: Place | None = None,
    size: int | None = None,
    seed: int = 0,
) -> list[Row]:
    """Load the training rows of a data set: task, domain, prompt, answer, maybe more.

    ``revision`` is the commit of the hub's repository, 40 hexadecimal digits; ``path``
    a local JSONL, JSON or parquet file in the hub's own form instead. The seed draws
    ``size`` of them.
    """
    source = _source(name)
    rows = local(Path(path)) if path is not None else pinned(source, revision)
    return _draw(f"{name}/train", [(name, rows)], size, seed)


@checked
def pins(
    text: str, data: Place = "", known: Collection[str] | None = None
) -> dict[str, Origin]:
    """Read commits by data set from ``name=commit,name=commit``; "" names none.

    The data sets are among the ``known``, by default those of the `CATALOGUE`; all that are
    not named are found in the folder ``data``, or, without one, nowhere.
    """
    commits: dict[str, Origin] = {}
    for pair in filter(None, text.split(",")):
        pin = _PIN.fullmatch(pair)
        name, commit = (part.strip() for part in pin.groups()) if pin else ("", "")
        if not pin or name in commits:
            expected = "expected name=commit,name=commit, each name once"
            refuse("E-PIN", f"revisions is '{text}', {expected}")
        choices = CATALOGUE if known is None else known
        refuse_unknown(name, choices, "E-PIN", f"revisions names no data set '{name}';")
        commits[name] = commit
    place = folder(data)
    return defaultdict(lambda: place, commits)


@checked
def mixture(
    sizes: Mapping[str, int],
    origins: SkipValidation[Mapping[str, Origin]],
    seed: int = 0,
) -> list[Row]:
    """Draw training rows of several data sets, from where `pins` says, shuffled.

    Sizes are by name, as in `MIXTURES`; names joined by + are drawn from as one pool.
    """
    if not sizes:
        expected = "expected at least one, as {'gsm8k': 200}"
        refuse("E-DATA", f"the mixture names no data set; {expected}")
    drawn = []
    for names, size in sizes.items():
        pool = []
        for name in names.split("+"):
            source = _source(name)
            pool.append((name, pinned(source, origin(name, origins))))
        drawn += _draw(f"{names}/train", pool, size, seed)
    random.Random(f"hub/{seed}").shuffle(drawn)
    return drawn


def origin(name: str, origins: Mapping[str, Origin]) -> Origin:
    """Where a data set comes from; the dictionary of `pins` knows of every name."""
    try:
        return origins[name]
    except KeyError:
        refuse("E-PIN", f"no origin is given for '{name}'; {nearest(name, origins)}")


def _draw(
    label: str, pool: list[tuple[str, Rows]], size: int | None, seed: int
) -> list[Row]:
    """Map all rows of the pool, or `size` at random, by their sets' templates."""
    drawn = []
    for name, rows in pool:
        drawn += [(name, rows, place) for place in range(len(rows))]
    have = len(drawn)
    if size is not None:
        if not 1 <= size <= have:
            need = f"have {have} rows, need {size}; ask for 1 to {have}"
            refuse("E-DATA", f"{label}: {need}")
        drawn = random.Random(f"{label}/{seed}").sample(drawn, size)
    mapped = []
    for name, rows, place in drawn:
        where, row = rows[place]
        source = CATALOGUE[name]
        head = {"task": name, "domain": source.domain}
        mapped.append(head | source.row(row, where))
    return mapped


def _source(name: str) -> Source:
    refuse_unknown(name, CATALOGUE, "E-DATA", f"unknown data set '{name}':")
    return CATALOGUE[name]


class _Numbered(Sequence[tuple[str, Mapping[str, Any]]]):
    """A `datasets.Dataset` whose rows come with their place; nothing is read ahead."""

    def __init__(self, dataset: datasets.Dataset, origin: str) -> None:
        self.dataset = dataset
        self.origin = origin

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        return f"{self.origin}:{index + 1}", self.dataset[index]


@checked
def pinned(source: Source, revision: Origin, split: str = "") -> Rows:
    """Open a split of a data set (the one to train on), at a commit or in a folder.

    A split may be a part of one, in the hub's form: ``validation[50%:]``.
    """
    split = split or source.split
    if isinstance(revision, Path):
        return _part(revision, source, split)
    if not re.fullmatch("(?!0{40})[0-9a-f]{40}", revision or ""):
        expected = "expected a commit of 40 hexadecimal digits"
        expected += " (notebooks: revisions, name=commit)"
        refuse("E-PIN", f"{source.repo}: revision is {revision!r}, {expected}")
    origin = f"{source.repo}@{revision}"
    try:
        data = datasets.load_dataset(
            source.repo,
            source.config,
            data_files=source.files,
            split=split,
            revision=revision,
        )
    except ConnectionError:
        away = "is not cached, the hub out of reach"
        refuse("E-OFFLINE", f"{origin} {away}; connect or give path=")
    except FileNotFoundError as error:
        check = "check id and commit on the hub, or give path="
        refuse("E-NOFILE", f"{origin}: {error}; {check}")
    except RuntimeError as error:
        if "script" not in str(error):
            raise
        branch = "refs/convert/parquet"
        refuse("E-REMOTECODE", f"{origin} is a script; pin a commit of branch {branch}")
    except ValueError as error:
        refuse("E-DATA", f"{origin}: {error}")
    return _Numbered(data, origin)


def _part(place: Path, source: Source, split: str) -> Rows:
    """Read a split of a folder, or a part of it."""
    name = split.partition("[")[0]
    rows: list[tuple[str, Mapping[str, Any]]] = []
    for path in shards(place, source.repo, source.config, name):
        rows += local(path)
    try:
        instruction = datasets.ReadInstruction.from_spec(split)
        (cut,) = instruction.to_absolute({name: len(rows)})
    except (ValueError, AssertionError) as error:
        expected = "expected a part as validation[50%:]"
        refuse("E-DATA", f"split is '{split}', {expected}: {error}")
    return rows[cut.from_ : cut.to]


@checked
def folder(data: Place) -> Path | None:
    """Find the folder that stands in for the hub; ``$NAME`` is the environment's."""
    place = Path(os.path.expandvars(data))
    if data and not place.is_dir():
        expected = "expected org/name/... in it"
        refuse("E-NOFILE", f"{data}: no such folder of data sets; {expected}")
    return place if data else None


def contents(data: Place) -> dict[str, Path]:
    """List the data files in the folder that stands in for the hub, by their place."""
    place = folder(data)
    if not place:
        return {}
    files = {}
    for path in sorted(place.rglob("*")):
        if path.name.endswith(ENDINGS):
            files[str(path.relative_to(place))] = path
    return files


@checked
def shards(
    place: Annotated[Path, NAMED],
    repository: FileName,
    name: FileName | None,
    split: FileName,
) -> list[Path]:
    """Find a split's file or shards, below the configuration's folder if any."""
    root = place / repository
    if not root.is_dir() and repository in COPIES:
        root = place / COPIES[repository]
    form = re.compile(
        rf"{re.escape(split)}(-\d+-of-(\d+))?\.(jsonl|json|parquet|jsonl\.gz)"
    )
    paths = []
    kinds = set()  # folder, ending, and how many files there are to be
    for path in sorted(root.rglob("*")):
        match = form.fullmatch(path.name)
        below = name is None or name in path.relative_to(root).parts[:-1]
        if match and below:
            paths.append(path)
            kinds.add((path.parent, match[3], int(match[2] or 1)))
    counts = [count for _, _, count in kinds]
    if counts != [len(paths)]:  # not one kind, or not all of it
        have = ", ".join(str(path.relative_to(root)) for path in paths) or "missing"
        where = f"{root / (name or '')}: split '{split}' is {have}"
        one = f"one file {split}.jsonl, .json or .parquet"
        refuse("E-NOFILE", f"{where}; expected {one}, or all of {split}-00000-of-...")
    return paths
