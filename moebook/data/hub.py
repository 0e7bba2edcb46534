"""Data sets of the hub, pinned to a commit, with the papers' templates (`catalogue.yaml`).

The catalogue names no commit: whoever runs an experiment pins one for each data set, and the run's
record holds it. A folder can stand in for the hub, with data sets under the hub's names in the
hub's files: ``openai/gsm8k/main/test.jsonl``,
``Rowan/hellaswag/data/validation-00000-of-00001.parquet``.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import datasets
from pydantic import Field, SkipValidation

from moebook.data.templates import Row, Source
from moebook.errors import Refusal, nearest, refuse, refuse_unknown
from moebook.results import formed
from moebook.settings import NAMED, Place, checked

Rows = Sequence[tuple[str, Mapping[str, Any]]]  # (where it stands, raw row)
LONGEST_LINE = 50_000_000  # bytes; a longer line is not a row but a mistake
ENDINGS = (".jsonl", ".json", ".parquet", ".jsonl.gz")
SCRIPTS = (".py", ".pyc", ".ipynb", ".sh")  # endings of what is no data: no code is ever run

with formed(Path(__file__).with_name("catalogue.yaml")) as _FILE:
    CATALOGUE = {name: Source(**entry) for name, entry in _FILE["sets"].items()}
    MIXTURES: dict[str, dict[str, int]] = _FILE["mixtures"]
    COPIES: dict[str, str] = _FILE["copies"]
FileName = Annotated[str, Field(min_length=1), NAMED]
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
    """Load the training rows of a data set: task, domain, prompt, answer and perhaps more.

    ``revision`` is the commit of the hub's repository, 40 hexadecimal digits; ``path`` a local
    JSONL, JSON or parquet file in the hub's own form instead. The seed draws ``size`` of them.
    """
    source = _source(name)
    rows = local(Path(path)) if path is not None else pinned(source, revision)
    return _draw(f"{name}/train", [(name, rows)], size, seed)


@checked
def pins(text: str, data: Place = "") -> dict[str, Origin]:
    """Read commits by data set from ``name=commit,name=commit``; an empty text names none.

    All other data sets are found in the folder ``data``, or, without one, nowhere.
    """
    pairs = [pair.split("=") for pair in text.split(",") if pair]
    commits = {pair[0]: pair[-1] for pair in pairs}
    if any(len(pair) != 2 for pair in pairs) or len(commits) < len(pairs):
        refuse("E-PIN", f"revisions is '{text}', expected name=commit,name=commit, each name once")
    place = folder(data)
    return defaultdict(lambda: place, commits)


@checked
def mixture(
    sizes: Mapping[str, int], origins: SkipValidation[Mapping[str, Origin]], seed: int = 0
) -> list[Row]:
    """Draw training rows of several data sets, from where `pins` says, and shuffle them together.

    Sizes are by name, as in `MIXTURES`; names joined by + are drawn from as one pool.
    """
    if not sizes:
        refuse("E-DATA", "the mixture names no data set; expected at least one, as {'gsm8k': 200}")
    drawn = []
    for names, size in sizes.items():
        pool = [(name, pinned(_source(name), _origin(name, origins))) for name in names.split("+")]
        drawn += _draw(f"{names}/train", pool, size, seed)
    random.Random(f"hub/{seed}").shuffle(drawn)
    return drawn


def _origin(name: str, origins: Mapping[str, Origin]) -> Origin:
    """Look up where a data set comes from; the dictionary of `pins` knows of every name."""
    try:
        return origins[name]
    except KeyError:
        refuse("E-PIN", f"no origin is given for '{name}'; {nearest(name, origins)}")


def _draw(label: str, pool: list[tuple[str, Rows]], size: int | None, seed: int) -> list[Row]:
    """Map all rows of the pool, or `size` of them at random, each by its own set's template."""
    drawn = [(name, rows, place) for name, rows in pool for place in range(len(rows))]
    if size is not None:
        have = len(drawn)
        if not 1 <= size <= have:
            refuse("E-DATA", f"{label}: have {have} rows, need {size}; ask for 1 to {have}")
        drawn = random.Random(f"{label}/{seed}").sample(drawn, size)
    mapped = []
    for name, rows, place in drawn:
        where, row = rows[place]
        source = CATALOGUE[name]
        mapped.append({"task": name, "domain": source.domain} | source.row(row, where))
    return mapped


def _source(name: str) -> Source:
    refuse_unknown(name, CATALOGUE, "E-DATA", f"unknown data set '{name}':")
    return CATALOGUE[name]


class _Numbered(Sequence[tuple[str, Mapping[str, Any]]]):
    """A `datasets.Dataset` whose rows come with where they stand; nothing is read ahead."""

    def __init__(self, dataset: datasets.Dataset, origin: str) -> None:
        self.dataset, self.origin = dataset, origin

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        return f"{self.origin}:{index + 1}", self.dataset[index]


@checked
def pinned(source: Source, revision: Origin, split: str = "") -> Rows:
    """Open a split of a data set (the one to train on) at a commit of the hub, or of a folder.

    A split may be a part of one, in the hub's form: ``validation[50%:]``.
    """
    split = split or source.split
    if isinstance(revision, Path):
        return _part(revision, source, split)
    if not re.fullmatch("(?!0{40})[0-9a-f]{40}", revision or ""):
        problem = f"{source.repo}: revision is {revision!r}, expected a commit"
        refuse("E-PIN", f"{problem} of 40 hexadecimal digits (notebooks: revisions, name=commit)")
    origin = f"{source.repo}@{revision}"
    try:
        data = datasets.load_dataset(
            source.repo, source.config, data_files=source.files, split=split, revision=revision
        )
    except ConnectionError:
        refuse("E-OFFLINE", f"{origin} is not cached, the hub out of reach; connect or give path=")
    except FileNotFoundError as error:
        refuse("E-NOFILE", f"{origin}: {error}; check id and commit on the hub, or give path=")
    except RuntimeError as error:
        if "script" not in str(error):
            raise
        refuse("E-REMOTECODE", f"{origin} is a script; pin a commit of branch refs/convert/parquet")
    except ValueError as error:
        refuse("E-DATA", f"{origin}: {error}")
    return _Numbered(data, origin)


def _part(place: Path, source: Source, split: str) -> Rows:
    name, _, part = split.partition("[")
    paths = shards(place, source.repo, source.config, name)
    rows = [pair for path in paths for pair in local(path)]
    try:
        whole = datasets.ReadInstruction.from_spec(f"{name}[{part}" if part else name)
        (cut,) = whole.to_absolute({name: len(rows)})
    except (ValueError, AssertionError) as error:
        refuse("E-DATA", f"split is '{split}', expected a part as validation[50%:]: {error}")
    return rows[cut.from_ : cut.to]


@checked
def folder(data: Place) -> Path | None:
    """Find the folder that stands in for the hub, in whose name ``$NAME`` is the environment's."""
    place = Path(os.path.expandvars(data))
    if data and not place.is_dir():
        refuse("E-NOFILE", f"{data}: no such folder of data sets; expected org/name/... in it")
    return place if data else None


def contents(data: Place) -> dict[str, Path]:
    """List the data files below the folder that stands in for the hub, by their place in it."""
    if not (place := folder(data)):
        return {}
    paths = sorted(path for path in place.rglob("*") if path.name.endswith(ENDINGS))
    return {str(path.relative_to(place)): path for path in paths}


@checked
def shards(
    place: Annotated[Path, NAMED], repository: FileName, name: FileName | None, split: FileName
) -> list[Path]:
    """Find a split's file or shards, below the configuration's folder where there is one."""
    root = place / repository
    if not root.is_dir() and repository in COPIES:
        root = place / COPIES[repository]
    form = re.compile(rf"{re.escape(split)}(-\d+-of-(\d+))?\.(jsonl|json|parquet|jsonl\.gz)")
    below = [(path, form.fullmatch(path.name)) for path in sorted(root.rglob("*"))
             if name is None or name in path.relative_to(root).parts[:-1]]  # fmt: skip
    found = {path: (path.parent, match[3], int(match[2] or 1)) for path, match in below if match}
    if [kind[2] for kind in set(found.values())] != [len(found)]:  # one kind, all shards
        have = ", ".join(str(path.relative_to(root)) for path in found) or "missing"
        refuse("E-NOFILE", f"{root / (name or '')}: split '{split}' is {have}; expected one file "
               f"{split}.jsonl, .json or .parquet, or all of {split}-00000-of-...")  # fmt: skip
    return list(found)


@checked
def local(path: Annotated[Path, NAMED]) -> Rows:
    """Open a JSONL, JSON or parquet file in the hub's own form."""
    if path.name.endswith(SCRIPTS):
        refuse("E-REMOTECODE", f"{path}: a script is not data; give its output as JSONL or parquet")
    if not path.is_file():
        refuse("E-NOFILE", f"{path}: no such file; expected JSONL, JSON or parquet")
    if path.suffix not in (".parquet", ".json"):
        try:
            rows = list(_lines(path))
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            refuse("E-DATA", f"{path}: not a whole gzip file ({error}); fetch it again")
    else:
        try:
            whole = {"data_files": str(path), "split": "train", "streaming": True}
            parquet = path.suffix == ".parquet"
            found = list(datasets.load_dataset("parquet", **whole)) if parquet else _json(path)
        except Refusal:
            raise
        except Exception as error:  # StopIteration, RecursionError and pyarrow's own among them
            refuse("E-DATA", f"{path}: not a readable {path.suffix[1:]} file ({error!s:.200})")
        rows = [(f"{path}:{number}", row) for number, row in enumerate(found, 1)]
    return rows or refuse("E-DATA", f"{path}:1: the file is empty; expected at least one row")


def _json(path: Path) -> list[Any]:
    """Read objects in a list, as columns or by line; datasets' reader dies of a mere ``null``."""
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError:
        return [row for _, row in _lines(path)]
    if isinstance(content, dict):
        columns = all(isinstance(column, list) for column in content.values())
        lines = zip(*content.values(), strict=True) if columns else [content.values()]
        content = [dict(zip(content, line, strict=True)) for line in lines]
    if not isinstance(content, list) or not all(isinstance(row, dict) for row in content):
        raise TypeError("expected objects")
    return content


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (`file:line`, object) for each line of a JSONL file that is not blank."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        lines = iter(lambda: file.readline(LONGEST_LINE + 1), b"")
        for number, line in enumerate(lines, start=1):
            where, encoding = f"{path}:{number}", "utf-8-sig" if number == 1 else "utf-8"
            if (row := _row(line, encoding, where)) is not None:
                yield where, row


def _row(line: bytes, encoding: str, where: str) -> dict[str, Any] | None:
    """Read a line's object; None where the line is blank."""
    if len(line) > LONGEST_LINE:
        refuse("E-DATA", f"{where}: line longer than {LONGEST_LINE:,} bytes; one row a line")
    try:
        if not (text := line.decode(encoding).strip()):
            return None
        value = json.loads(text)
    except UnicodeDecodeError as error:
        refuse("E-DATA", f"{where}: invalid UTF-8 at byte {error.start}; save the file as UTF-8")
    except RecursionError:
        refuse("E-DATA", f"{where}: JSON nested too deeply; expected a flat object")
    except ValueError as error:
        refuse("E-DATA", f"{where}: not JSON ({error}); expected one object a line")
    if not isinstance(value, dict):
        refuse("E-DATA", f"{where}: a row is {type(value).__name__}, expected an object")
    return value
