"""Recompute what records and manifests say, and tell which records are behind the code."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moebook import results
from moebook.errors import Refusal, nearest, refuse
from moebook.notebook import manifest as manifests
from moebook.notebook import publish
from moebook.results import Record

BENCH = "bench"
"""The folder of the records that ``moebook bench`` leaves."""


@dataclass(frozen=True)
class Finding:
    """What was found about one record.

    Args:
        path: The record's file, relative to the project.
        failures: What does not agree, one line each; empty when all does.
        behind: What of notebook, package and lock has changed since the run.
        right: What is said where all agrees.
    """

    path: str
    failures: tuple[str, ...]
    behind: tuple[str, ...] = ()
    right: str = "hashes and values agree"

    def __str__(self) -> str:
        if self.failures:
            return f"FAILS {self.path}: {'; '.join(self.failures)}"
        behind = f"; behind the code: {', '.join(self.behind)} changed since" if self.behind else ""
        return f"ok    {self.path}: {self.right}{behind}"


def verify(name: str | None = None, folder: Path | None = None) -> list[Finding]:
    """Check every record, committed and live, against its manifest and its executed copy.

    Hashes of the files are recomputed, the run's key from its parts, and the values are harvested
    again from the executed notebook. A record of ``moebook bench`` has no executed copy: its hash
    is checked. A record that is merely behind the code does not fail.

    Args:
        name: Short name of one notebook, or ``bench``; all by default.
        folder: The project; found from the working directory by default.

    Raises:
        Refusal: ``E-NOTEBOOK`` when no notebook of that name has records.
    """
    folder = folder or results.root()
    paths = [path for path in _records(folder) if name in (None, _name(path))]
    if name is not None and not paths:
        known = {_name(path) for path in _records(folder)}
        refuse("E-NOTEBOOK", f"'{name}' has no records; {nearest(name, known)}")
    return [_finding(path, folder) for path in paths]


def _records(folder: Path) -> list[Path]:
    """Find the records of notebooks, and those of ``moebook bench``, a folder a machine."""
    kinds = [f"*/{tier}" for tier in results.COMMITTED] + [f"{BENCH}/*"]
    kept = {path for kind in kinds for path in (folder / "results").glob(f"{kind}/record.json")}
    return sorted(kept) + sorted((folder / "book" / "notebooks").glob("*.record.json"))


def _name(path: Path) -> str:
    if path.name == "record.json":
        return path.parent.parent.name
    return path.name.removesuffix(".record.json")[3:]


def _finding(path: Path, folder: Path) -> Finding:
    place = str(path.relative_to(folder))
    try:
        record = results.read(path)
        manifests.check(record.manifest, place.replace("record.json", "manifest.json"))
        failures, behind = [*_against_manifest(path, record)], results.changed(record, folder)
        if _name(path) == BENCH:
            return Finding(place, tuple(failures), behind, "hash and tier agree")
        failures += [*_against_run(path, record), *_against_copy(path, record)]
        return Finding(place, tuple(failures), behind)
    except Refusal as refusal:
        return Finding(place, (str(refusal),))


def _against_manifest(path: Path, record: Record) -> Iterator[str]:
    """Compare a record with what its manifest says of it."""
    manifest = record.manifest
    if (manifest.get("notebook"), manifest.get("tier")) != (record.notebook, record.scale):
        yield "the manifest is of another notebook or tier"
    if manifest.get("hashes", {}).get("record") != results.digest(path):
        yield "its hash is not the manifest's"


def _against_run(path: Path, record: Record) -> Iterator[str]:
    """Compare a notebook's record with its place, its values and the key of its run."""
    manifest = record.manifest
    if path.name == "record.json" and path.parts[-3:-1] != (record.notebook, record.scale):
        yield f"it lies in the folder of {'/'.join(path.parts[-3:-1])}"
    if manifest.get("values") != {value.key: value.value for value in record.values}:
        yield "its values are not the manifest's"
    key = manifests.key(record.scale, manifest.get("parameters", {}), manifest.get("hashes", {}))
    if manifest.get("key") != key:
        yield "the manifest's key is not that of its parameters and hashes"


def _against_copy(path: Path, record: Record) -> Iterator[str]:
    """Compare a record with the executed notebook that it was made from."""
    copy = manifests.executed(path)
    if not copy.is_file():
        yield f"the executed copy {copy.name} is missing"
        return
    if record.manifest.get("hashes", {}).get("executed") != results.digest(copy):
        yield f"the hash of the executed copy {copy.name} is not the manifest's"
    yield from _differences(copy, record)


def _differences(copy: Path, record: Record) -> Iterator[str]:
    try:
        executed: Any = json.loads(copy.read_text(encoding="utf-8"))
        found = {value.key: value for value in publish.values(executed)}
    except (AttributeError, KeyError, TypeError, ValueError):
        yield f"the executed copy {copy.name} is no notebook"
        return
    kept = {value.key: value for value in record.values}
    for key in sorted(kept.keys() | found.keys()):
        if kept.get(key) != found.get(key):
            pair = [value.value if value else "absent" for value in (kept.get(key), found.get(key))]
            yield f"{key} is {pair[0]} in the record and {pair[1]} in {copy.name}"
