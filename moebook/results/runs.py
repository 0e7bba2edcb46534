"""A run is one file: what one notebook recorded under one protocol with one seed.

The file is parquet: a row a value or curve (items and points are compressed columns), and in its
metadata who ran what, where and when. A digest over all of it is checked when it is read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from moebook.errors import nearest, refuse
from moebook.results.files import replacing
from moebook.results.values import TIERS, Curve, Value

FORMAT = 1
"""Of the file; a newer one is refused."""

HEAD = b"moebook"
"""Key of the file's metadata."""

COLUMNS = pa.schema([
    ("name", pa.string()),
    ("unit", pa.string()),
    ("value", pa.float64()),  # null for a curve
    ("items", pa.list_(pa.float64())),  # of a value, per test row; of a curve, its heights
    ("x", pa.list_(pa.float64())),  # of a curve, its positions
])  # fmt: skip


@dataclass(frozen=True)
class Run:
    """One execution of a notebook: one protocol, one seed, some or all of its arms.

    Args:
        notebook: Short name, such as ``pesc``.
        protocol: Name of the parameter file, such as ``nano``; see `moebook.notebook.sources`.
        tier: Its scale, one of `TIERS`.
        seed: What everything random was drawn with.
        values: In the order of the notebook, each name once.
        curves: The same of curves.
        arms: The arms that ran; empty where the notebook has none.
        settings: The protocol's parameters: all but ``seed``, ``arms`` and where it ran.
        rows: Hashes of the rows it trained on (``train``) and was tested on (``test``).
        code: Hashes of what ran: the ``notebook``'s code, the ``lock``, and ``modules`` by name.
        manifest: Date, commit, machine, versions, parameters and cost.

    Raises:
        Refusal: ``E-TIER`` for an unknown tier, ``E-VALUE`` for a name that stands twice.
    """

    notebook: str
    protocol: str
    tier: str
    seed: int
    values: tuple[Value, ...]
    curves: tuple[Curve, ...] = ()
    arms: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    rows: Mapping[str, str] = field(default_factory=dict)
    code: Mapping[str, Any] = field(default_factory=dict)
    manifest: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.tier not in TIERS:
            refuse("E-TIER", f"unknown tier {self.tier!r}: {nearest(self.tier, TIERS)}")
        for several in (self.values, self.curves):
            names = [one.name for one in several]
            if twice := sorted({name for name in names if names.count(name) > 1}):
                where = f"{self.notebook}, seed {self.seed}"
                refuse("E-VALUE", f"{where}: {twice[0]} is recorded twice; give each its own name")


def plain(one: Value | Curve) -> dict[str, Any]:
    """Return a value or curve as plain JSON; absent items are left out."""
    return {key: item for key, item in asdict(one).items() if item is not None}


def value_from(data: object, where: str) -> Value:
    """Read a value from what `plain` wrote; ``where`` names the cell in a refusal."""
    return _from(Value, data, where)


def curve_from(data: object, where: str) -> Curve:
    """Read a curve from what `plain` wrote; ``where`` names the cell in a refusal."""
    return _from(Curve, data, where)


def _from(kind: Any, data: object, where: str) -> Any:
    names = {part.name for part in fields(kind)}
    if not isinstance(data, Mapping) or not names - {"items"} <= set(data) <= names:
        refuse("E-VALUE", f"{where}: expected {', '.join(sorted(names))}, found {str(data)[:60]}")
    made = {key: tuple(item) if isinstance(item, list) else item for key, item in data.items()}
    return kind(**made)


def write_run(path: Path, run: Run) -> None:
    """Write a run's file, whole or not at all."""
    lines = [
        *({"name": v.name, "unit": v.unit, "value": v.value, "items": v.items} for v in run.values),
        *({"name": c.name, "unit": c.unit, "items": c.y, "x": c.x} for c in run.curves),
    ]
    head = _head(run)
    text = json.dumps(head | {"format": FORMAT, "digest": _digest(head, run)})
    table = pa.Table.from_pylist(lines, COLUMNS.with_metadata({HEAD: text.encode()}))
    with replacing(path) as temporary:
        pq.write_table(table, temporary, compression="zstd", compression_level=19)


def read_run(path: Path) -> Run:
    """Read a run's file, and check that it is what was written.

    Raises:
        Refusal: ``E-NOFILE`` for a file that is not there; ``E-RUN`` for one that is no run, is of
            a newer format, or was damaged or altered.
    """
    head, table = _read(path)
    try:
        digest, version = head.pop("digest"), head.pop("format")
        if version > FORMAT:
            refuse("E-RUN", f"{path} has format {version}, this moebook reads {FORMAT}: update it")
        parts: dict[str, Any] = {**head, "arms": tuple(head["arms"])}
        run = Run(
            **parts,
            values=tuple(
                Value(r["name"], r["value"], r["unit"], r["items"] and tuple(r["items"]))
                for r in table if r["value"] is not None),
            curves=tuple(
                Curve(r["name"], r["unit"], tuple(r["x"]), tuple(r["items"]))
                for r in table if r["value"] is None),
        )  # fmt: skip
    except (KeyError, TypeError) as error:
        refuse("E-RUN", f"{path} is no run of moebook ({error}); take it out of the folder")
    if _digest(_head(run), run) != digest:
        refuse("E-RUN", f"{path} was altered after it was written; bring it back, or run it again")
    return run


def _read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    try:
        table = pq.read_table(path)
        head = json.loads((table.schema.metadata or {})[HEAD])
        return dict(head), table.select(COLUMNS.names).to_pylist()
    except FileNotFoundError:
        refuse("E-NOFILE", f"no file {path}")
    except (pa.ArrowException, OSError, KeyError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())[:120]
        refuse("E-RUN", f"{path} is damaged or no run of moebook ({reason}); run it again")


def _head(run: Run) -> dict[str, Any]:
    """Everything of a run but its values and curves."""
    parts = (part.name for part in fields(run) if part.name not in ("values", "curves"))
    return {name: getattr(run, name) for name in parts}


def _digest(head: Mapping[str, Any], run: Run) -> str:
    """The sha256 over all that a run says."""
    numbers: list[Value | Curve] = [*run.values, *run.curves]
    parts = [dict(head), *map(plain, numbers)]
    text = json.dumps(parts, sort_keys=True, default=dict)
    return hashlib.sha256(text.encode()).hexdigest()
