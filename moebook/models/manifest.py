"""Folders that prove themselves: sealed with the hash of every file, and committed by one rename.

A folder is written under a temporary name beside its target, sealed (`MANIFEST.json` holds the
sha256 and the size of every file, and all of it is on the disk), then renamed. Whatever is found
under the final name is therefore whole, and `verify` tells when it was changed afterwards.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moebook.errors import refuse

NAME = "MANIFEST.json"
_REPAIR = "restore the folder, or delete it where it can be made again"


@contextmanager
def building(target: Path, **facts: Any) -> Iterator[Path]:
    """Give a folder to fill, then seal it with the facts and commit it; drop it when that fails."""
    stage = target.with_name(f".stage-{target.name}-{os.getpid()}")
    shutil.rmtree(stage, ignore_errors=True)
    stage.mkdir(parents=True)
    try:
        yield stage
        seal(stage, **facts)
        commit(stage, target)
    except BaseException:
        shutil.rmtree(stage, ignore_errors=True)
        raise


def seal(folder: Path, **facts: Any) -> None:
    """Write the manifest of a finished folder and force every byte of the folder to the disk.

    Args:
        folder: A flat folder of plain files, complete except for its manifest.
        facts: JSON values to keep beside the hashes: versions, recipe, seeds.
    """
    paths = sorted(folder.iterdir())
    measured = {
        "files": {path.name: _digest(path) for path in paths},
        "sizes": {path.name: path.stat().st_size for path in paths},
    }
    (folder / NAME).write_text(json.dumps({**facts, **measured}, indent=1, sort_keys=True))
    for path in folder.iterdir():
        _sync(path)
    _sync(folder)


def commit(stage: Path, target: Path) -> None:
    """Give a sealed folder its final name: the one instant at which it comes to exist.

    Raises:
        OSError: When the target exists already and is not empty.
    """
    os.rename(stage, target)
    _sync(target.parent)


def verify(folder: Path) -> dict[str, Any]:
    """Check every file of a sealed folder against its manifest and return the manifest.

    Raises:
        Refusal: ``E-MANIFEST`` when the manifest is missing, unreadable or names another set of
            plain files than the folder holds; ``E-HASH`` when a file's size or hash differs.
    """
    manifest = _read(folder / NAME)
    named, found = set(manifest["files"]), {path.name for path in folder.iterdir()} - {NAME}
    if named != found:
        refuse(
            "E-MANIFEST",
            f"{folder}: {NAME} and folder disagree on {sorted(named ^ found)[:3]}; {_REPAIR}",
        )
    for name, expected in manifest["files"].items():
        path = folder / name
        if path.is_symlink() or not path.is_file():
            refuse("E-PATH", f"{path}: expected a plain file")
        if (found_digest := _digest(path)) != expected:
            size = manifest.get("sizes", {}).get(name, "unknown")
            refuse(
                "E-HASH",
                f"{path}: has {path.stat().st_size} bytes and sha256 {found_digest[:12]}, {NAME} "
                f"says {size} and {expected[:12]}; {_REPAIR}",
            )
    return manifest


def _read(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads(path.read_text())
        if all(isinstance(digest, str) for digest in manifest["files"].values()):
            return manifest
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    refuse("E-MANIFEST", f"{path}: missing or not a manifest; {_REPAIR}")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
