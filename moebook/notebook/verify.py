"""Recompute what records and manifests say, and tell which records are behind the code."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from moebook import results
from moebook.errors import Refusal, nearest, refuse
from moebook.notebook import manifest as manifests
from moebook.notebook import publish
from moebook.results import Record


@dataclass(frozen=True)
class Finding:
    """What was found about one record.

    Args:
        path: The record's file, relative to the project.
        failures: What does not agree, one line each; empty when all does.
        behind: What of notebook, package and lock has changed since the run.
    """

    path: str
    failures: tuple[str, ...]
    behind: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.failures:
            return f"FAILS {self.path}: {'; '.join(self.failures)}"
        behind = f"; behind the code: {', '.join(self.behind)} changed since" if self.behind else ""
        return f"ok    {self.path}: hashes and values agree{behind}"


def verify(name: str | None = None, folder: Path | None = None) -> list[Finding]:
    """Check every record, committed and live, against its manifest and its executed copy.

    Hashes of the files are recomputed, the run's key from its parts, and the values are harvested
    again from the executed notebook. A record that is merely behind the code does not fail.

    Args:
        name: Short name of one notebook; all by default.
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
    """Find the records of notebooks; those of ``moebook bench`` lie in folders of no tier."""
    found = [(folder / "results").glob(f"*/{tier}/record.json") for tier in results.COMMITTED]
    return sorted(chain(*found)) + sorted((folder / "book" / "notebooks").glob("*.record.json"))


def _name(path: Path) -> str:
    if path.name == "record.json":
        return path.parent.parent.name
    return path.name.removesuffix(".record.json")[3:]


def _finding(path: Path, folder: Path) -> Finding:
    place = str(path.relative_to(folder))
    try:
        record = results.read(path)
        copy = manifests.executed(path)
        failures = [*_against_manifest(path, record), *_against_copy(copy, record)]
        return Finding(place, tuple(failures), results.changed(record, folder))
    except Refusal as refusal:
        return Finding(place, (str(refusal),))


def _against_manifest(path: Path, record: Record) -> Iterator[str]:
    """Compare a record with its manifest, and the manifest with itself."""
    manifest = record.manifest
    hashes = manifest.get("hashes", {})
    if (manifest.get("notebook"), manifest.get("tier")) != (record.notebook, record.scale):
        yield "the manifest is of another notebook or tier"
    if path.name == "record.json" and path.parts[-3:-1] != (record.notebook, record.scale):
        yield f"it lies in the folder of {'/'.join(path.parts[-3:-1])}"
    if hashes.get("record") != results.digest(path):
        yield "its hash is not the manifest's"
    if manifest.get("values") != {value.key: value.value for value in record.values}:
        yield "its values are not the manifest's"
    key = manifests.key(record.scale, manifest.get("parameters", {}), hashes)
    if manifest.get("key") != key:
        yield "the manifest's key is not that of its parameters and hashes"


def _against_copy(copy: Path, record: Record) -> Iterator[str]:
    """Compare a record with the executed notebook that it was made from."""
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
    except (ValueError, KeyError, TypeError):
        yield f"the executed copy {copy.name} is no notebook"
        return
    kept = {value.key: value for value in record.values}
    for key in sorted(kept.keys() | found.keys()):
        if kept.get(key) != found.get(key):
            pair = [value.value if value else "absent" for value in (kept.get(key), found.get(key))]
            yield f"{key} is {pair[0]} in the record and {pair[1]} in {copy.name}"
