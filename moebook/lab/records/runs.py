"""Values, curves, and the run that holds them: one notebook, one protocol, one seed, one file.

The file is parquet: a row a value or curve (items and points are compressed columns),
and in its metadata who ran what, where and when. A digest over all of it is checked
when it is read.
"""

from __future__ import annotations

import csv
import errno
import functools
import io
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field, fields, replace
from datetime import date
from pathlib import Path
from typing import Annotated, Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import Field

from moebook.errors import Refusal, located, refuse, refuse_unknown
from moebook.settings import record
from moebook.storage import files
from moebook.storage.documents import json_object

TIERS = ("smoke", "cpu", "study", "gpu", "paper")

UNITS: dict[str, tuple[float, float]] = {
    "share": (0.0, 1.0),
    "percent_points": (-100.0, 100.0),
    "nats": (-math.inf, math.inf),
    "seconds": (0.0, math.inf),
    "bytes": (0.0, math.inf),
    "count": (0.0, math.inf),
    "ratio": (-math.inf, math.inf),
    "correlation": (-1.0, 1.0),
    "number": (-math.inf, math.inf),
}
"""Unit to the lowest and highest value. Differences of shares are percent_points, of nats nats;
"number" is for what has no unit (a gradient's norm, the scale of logits)."""

DIGITS = 4  # of items and of points of curves, which are most of a run
# A sign before 0, 0.0, ...: of what rounds to zero.
_SIGNED_ZERO = re.compile(r"(?<![\w.])[+-](?=0(\.0+)?(?![\d.]))")
NAMES_SHOWN = 3  # of parts that have changed since a run
FORMAT = 1  # of the file; a newer one is refused
HEAD = b"moebook"  # key of the file's metadata
COLUMNS = pa.schema(
    [
        ("name", pa.string()),
        ("unit", pa.string()),
        ("value", pa.float64()),  # null for a curve
        # Of a value, per test row; of a curve, its heights.
        ("items", pa.list_(pa.float64())),
        ("x", pa.list_(pa.float64())),  # of a curve, its positions
    ]
)
# Files are half as large as by default: items of a domain repeat among those of all tasks, which
# dictionaries hide from the compression.
COMPRESSED: dict[str, Any] = {
    "compression": "brotli",
    "compression_level": 11,
    "use_dictionary": ["name", "unit"],
    "store_schema": False,  # beside Parquet's own, and it would hold the head once more
    "write_statistics": False,  # which no digest covers
}

Hash = Callable[[Path], str]  # of what a file does, as `files.code_digest`
_WORD = r"[A-Za-z0-9][A-Za-z0-9_.=+-]*"
# Such as pesc/sparse/accuracy.
Name = Annotated[str, Field(pattern=rf"^{_WORD}(/{_WORD})*$")]
# Below the package.
Module = Annotated[str, Field(pattern=r"^[\w-][\w.-]*(/[\w-][\w.-]*)*$")]
Numbers = Annotated[tuple[float, ...], Field(min_length=1)]


def minus(text: str) -> str:
    """Write the minus of a number as a reader knows it; what rounds to zero has no sign."""
    unsigned = _SIGNED_ZERO.sub("", text)
    return unsigned.replace("-", "−")


def word(name: str) -> str:
    """Write a base or a benchmark as one part of a recorded value's name.

    A name that can be one stays as it is; what else a path holds, or a hub's ``org/name@commit``,
    becomes ``_``.
    """
    return re.sub(r"[^A-Za-z0-9_.=+-]+", "_", name).lstrip("_.=+-") or "folder"


def within(
    unit: str, ends: tuple[float, float], *, is_difference: bool = False
) -> tuple[float, float]:
    """Cut an interval of a value where its unit ends, or of a difference of two values.

    Student's interval may leave 0 to 1, a share cannot; and no two shares differ by more than 1.
    """
    low, high = UNITS[unit]
    if is_difference:
        low, high = low - high, high - low
    return max(ends[0], low), min(ends[1], high)


@record
class Value:
    """A number that a notebook measured, within the bounds of its unit."""

    name: Name
    value: float
    unit: str
    # One per test row; value is their mean before they are `rounded`.
    items: Numbers | None = None

    def __post_init__(self) -> None:
        _check_unit(self.name, self.unit)
        given = f"{self.name} = {self.value!r}"
        low, high = UNITS[self.unit]
        if not low <= self.value <= high:
            expected = f"expected a number in [{low:g}, {high:g}] {self.unit}"
            refuse("E-VALUE", f"{given}: {expected}")
        items = self.items or (self.value,)
        mean = math.fsum(items) / len(items)
        size = sum(map(abs, items)) / len(items)
        # Items are rounded to `DIGITS`: each is off by half of its last digit at most.
        rounding = 10 ** (1 - DIGITS) / 2 * size + 1e-8
        if abs(mean - self.value) > rounding:
            refuse("E-VALUE", f"{given} is not the mean {mean!r} of its items")


@record
class Curve:
    """A line that a figure needs, such as a loss over steps: heights ``y`` at positions ``x``."""

    name: Name
    unit: str
    x: Numbers
    y: Numbers

    def __post_init__(self) -> None:
        _check_unit(self.name, self.unit)
        if len(self.x) != len(self.y):
            pair = f"{len(self.x)} positions, {len(self.y)} heights"
            refuse("E-VALUE", f"curve {self.name}: {pair}")


def _check_unit(name: str, unit: str) -> None:
    refuse_unknown(unit, UNITS, "E-VALUE", f"{name}: unknown unit '{unit}';")


def rounded(numbers: Iterable[float]) -> tuple[float, ...]:
    """Round to `DIGITS` significant digits; whole numbers stay as they are."""
    every: list[float] = []
    for number in map(float, numbers):
        whole = number.is_integer()
        every.append(number if whole else float(f"{number:.{DIGITS}g}"))
    return tuple(every)


@record
class Run:
    """One execution of a notebook: one protocol, one seed, some or all of its arms.

    ``rows`` and ``code`` are hashes: of what it trained on (``train``) and was tested
    on (``test``); of the ``notebook``'s code, the ``lock``, and ``modules`` by name.
    """

    notebook: str  # short name, such as pesc
    protocol: str  # name of the parameter file, such as nano
    tier: str  # the protocol's scale, one of TIERS
    seed: int  # of everything random
    values: tuple[Value, ...]  # in the order of the notebook, each name once
    curves: tuple[Curve, ...] = ()
    arms: tuple[str, ...] = ()  # that ran; empty where the notebook has none
    # But seed, arms and where it ran.
    settings: Mapping[str, Any] = field(default_factory=dict)
    rows: Mapping[str, str] = field(default_factory=dict)
    code: Mapping[str, str | Mapping[Module, str] | None] = field(default_factory=dict)
    # Date, commit, machine, cost.
    manifest: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        refuse_unknown(self.tier, TIERS, "E-TIER", f"unknown tier '{self.tier}':")
        for recorded in (self.values, self.curves):
            names = [each.name for each in recorded]
            repeated = {name for name in names if names.count(name) > 1}
            if repeated:
                where = f"{self.notebook}, seed {self.seed}"
                twice = f"{min(repeated)} is recorded twice"
                refuse("E-VALUE", f"{where}: {twice}; give each its own name")


Part = TypeVar("Part", bound=Value | Curve)


def plain(part: Value | Curve) -> dict[str, Any]:
    """Return a value or curve as plain JSON, without absent items."""
    return {key: item for key, item in vars(part).items() if item is not None}


def restored(kind: type[Part], data: object, where: str) -> Part:
    """Make a value or curve of what `plain` wrote; ``where`` names the cell in a refusal."""
    parts: dict[str, Any] = {}
    if isinstance(data, dict):
        for name, part in data.items():
            parts[name] = tuple(part) if isinstance(part, list) else part
    with located(where, "E-VALUE"):
        return kind(**parts)


def packed(run: Run) -> bytes:
    """Return what a run's file holds."""
    lines = [vars(value) for value in run.values]
    for curve in run.curves:
        lines.append({**vars(curve), "items": curve.y})
    table = pa.Table.from_pylist(lines, COLUMNS)
    head = _head(run) | {"format": FORMAT, "digest": _digest(run, table)}
    content = io.BytesIO()
    with pq.ParquetWriter(content, COLUMNS, **COMPRESSED) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({HEAD: json.dumps(head)})
    return content.getvalue()


def write_run(path: Path, run: Run) -> None:
    """Write a run's file, whole or not at all."""
    files.write(path, packed(run))


def read_run(path: Path) -> Run:
    """Read a run's file; one that is no run, newer, damaged or altered is refused (E-RUN).

    A process that reads the same bytes again gets the same run, which nobody may
    change.
    """
    with _readable(path):
        content = path.read_bytes()
    return _unpacked(path, content)


@functools.lru_cache(maxsize=2048)
def _unpacked(path: Path, content: bytes) -> Run:
    with _readable(path):
        table = pq.read_table(pa.BufferReader(content))
    head, digest = _head_of(table.schema, path)
    with _readable(path):
        run = _from_lines(head, table.to_pylist())
    if _digest(run, table) != digest:
        refuse(
            "E-RUN",
            f"{path} was altered after it was written; bring it back, or run it again",
        )
    return _of_statements(run)


def read_head(path: Path) -> Run:
    """Read who ran what, and what it cost: a run without its values and curves.

    It takes a hundredth of the time of `read_run`, which alone can tell whether the
    file was altered after it was written.
    """
    with _readable(path):
        schema = pq.read_schema(path)
    head, _ = _head_of(schema, path)
    with _readable(path):
        return _of_statements(_from_lines(head, []))


def _of_statements(run: Run) -> Run:
    """Give a run that recorded the hash of its notebook's text that of its statements."""
    recorded = run.code.get("notebook")
    statements = _recorded_texts().get(str(recorded), recorded)
    now = _moved_notebooks().get(str(statements), statements)
    return run if now == recorded else replace(run, code={**run.code, "notebook": now})


@functools.cache
def _recorded_texts() -> dict[str, str]:
    """Read which statements (`files.source`) a notebook had whose text was hashed.

    So runs did up to November 2026; ``notebooks.csv`` names a commit that holds each
    text.
    """
    return {line["text"]: line["statements"] for line in _lines("notebooks.csv")}


@functools.cache
def _moved_notebooks() -> dict[str, str]:
    """Hash of a notebook's statements before its imports moved, and after."""
    lines = [line for name, line in _moves().items() if name.startswith("notebooks/")]
    return {line["statements_then"]: line["statements_now"] for line in lines}


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Refuse what a file brings that is damaged or no run; what a disk says is no damage."""
    try:
        yield
    except FileNotFoundError:
        refuse("E-NOFILE", f"no file {path}")
    except (
        Refusal,
        pa.ArrowException,
        OSError,
        KeyError,
        TypeError,
        ValueError,
    ) as error:
        if _lies_elsewhere(error):
            raise
        reason = " ".join(str(error).split())[:120]
        refuse(
            "E-RUN", f"{path} is damaged or no run of moebook ({reason}); run it again"
        )


def _lies_elsewhere(error: Exception) -> bool:
    """Whether memory, a disk or a limit of the system is at fault, and no file."""
    if isinstance(error, OSError):
        # Arrow's own errors have no number.
        return error.errno not in (None, errno.EISDIR, errno.ENOTDIR)
    return isinstance(error, MemoryError)  # pa.ArrowMemoryError is one


def _head_of(schema: pa.Schema, path: Path) -> tuple[dict[str, Any], str]:
    """Return what a run's file says of itself, and its digest."""
    with _readable(path):
        if list(schema.metadata or {}) != [HEAD]:
            raise ValueError("other metadata than a run has")
        head = json_object(schema.metadata[HEAD], path.name)
        digest = head.pop("digest")
        version = head.pop("format")
    # First of all: another format may have other columns.
    if version != FORMAT:
        refuse(
            "E-RUN",
            f"{path} has format {version}, this moebook reads {FORMAT}: update it",
        )
    with _readable(path):
        if not schema.equals(COLUMNS):
            raise ValueError("other columns than a run has")
    return head, digest


def _from_lines(head: Mapping[str, Any], lines: list[dict[str, Any]]) -> Run:
    """Make a run of what its file says of itself, and of the file's lines."""
    values: list[Value] = []
    curves: list[Curve] = []
    for line in lines:
        items = None if line["items"] is None else tuple(line["items"])
        if line["value"] is None:
            curves.append(
                Curve(line["name"], line["unit"], tuple(line["x"]), items or ())
            )
        else:
            values.append(Value(line["name"], line["value"], line["unit"], items))
    parts: dict[str, Any] = {**head, "arms": tuple(head["arms"])}
    return Run(**parts, values=tuple(values), curves=tuple(curves))


def _head(run: Run) -> dict[str, Any]:
    """Return all of a run but its values and curves."""
    names = [field.name for field in fields(run)]
    head = {name: getattr(run, name) for name in names}
    del head["values"], head["curves"]
    return head


def _digest(run: Run, table: pa.Table) -> str:
    """Hash a run, whose values and curves ``table`` holds, as JSON with sorted keys.

    json writes millions of numbers one by one; Arrow takes half the time.
    """
    short = table.select(["name", "unit", "value"]).to_pylist()
    items = _as_json(table["items"])
    positions = _as_json(table["x"])
    parts = [json.dumps(_head(run), sort_keys=True, default=dict)]
    for line, numbers, x in zip(short, items, positions, strict=True):
        value = line.pop("value")
        words = json.dumps(line)[1:-1]
        if value is None:
            parts.append(f'{{{words}, "x": [{x}], "y": [{numbers}]}}')
        else:
            given = f'"items": [{numbers}], ' if numbers else ""
            parts.append(f'{{{given}{words}, "value": {json.dumps(value)}}}')
    return files.text_digest(f"[{', '.join(parts)}]")


def _as_json(column: pa.ChunkedArray) -> list[str]:
    """Write each list of numbers as json does, without its brackets, each number once."""
    lists = column.combine_chunks()
    # By its bits, a number of two signs is two.
    numbers = lists.values.view(pa.int64()).dictionary_encode()
    distinct = numbers.dictionary.view(pa.float64()).to_pylist()
    texts = pa.array(json.dumps(distinct)[1:-1].split(", "))
    written = pa.ListArray.from_arrays(lists.offsets, texts.take(numbers.indices))
    joined: list[str] = pc.binary_join(written, ", ").to_pylist()
    return joined


def changed(
    run: Run, folder: Path | None = None, hashed: Hash = files.code_digest
) -> tuple[str, ...]:
    """Name what differs now from what a run ran: ``notebook``, ``lock``, and modules by name.

    Who asks for many runs caches ``hashed``: they share most of the files.
    """
    if folder is None:
        folder = files.root()
    place = files.part(folder, "notebooks")
    notebooks = sorted(place.glob(f"[0-9][0-9]_{run.notebook}.ipynb"))
    now = {
        "notebook": hashed(notebooks[0]) if notebooks else None,
        "lock": files.digest(files.part(folder, "requirements.lock")),
    }
    parts = [part for part in now if part in run.code and run.code[part] != now[part]]
    modules = run.code.get("modules")
    if isinstance(modules, Mapping):
        for name, digest in modules.items():
            today, wanted = _after_the_move(name, digest)
            file = files.PACKAGE / today
            if not file.is_file() or hashed(file) != wanted:
                module = today.removesuffix(".py").removesuffix("/__init__")
                parts.append(module.replace("/", "."))
    return tuple(parts)


def _after_the_move(name: str, statements: str) -> tuple[str, str]:
    """Say what a recorded file is called now, and the hash of the same statements.

    In November 2026 the laboratory moved into rooms of its own. A module that only moved, or
    whose imports alone name what moved, has not changed since: ``moved.csv`` holds both hashes.
    """
    move = _moves().get(name)
    if move is None:
        return name, statements
    same = statements == move["statements_then"]
    return move["now"], move["statements_now"] if same else statements


@functools.cache
def _moves() -> dict[str, dict[str, str]]:
    return {line["then"]: line for line in _lines("moved.csv")}


def _lines(name: str) -> list[dict[str, str]]:
    """Read a table of this package."""
    path = Path(__file__).with_name(name)
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def since(
    run: Run, folder: Path | None = None, hashed: Hash = files.code_digest
) -> str:
    """Say of which day a run is and what has changed since, the first names only."""
    parts = changed(run, folder, hashed)
    if not parts:
        return f"of {day(run)}; code unchanged"
    names = ", ".join(parts[:NAMES_SHOWN])
    further = len(parts) - NAMES_SHOWN
    more = f" and {further} more" if further > 0 else ""
    return f"of {day(run)}; changed since: {names}{more}"


def day(run: Run) -> date:
    """Return the day on which a run ended (UTC); a manifest without one is refused (E-RUN)."""
    try:
        return date.fromisoformat(run.manifest["date"][:10])
    except (KeyError, TypeError, ValueError):
        where = f"{run.notebook}, {run.protocol}, seed {run.seed}"
        refuse("E-RUN", f"manifest of {where} has no date")
