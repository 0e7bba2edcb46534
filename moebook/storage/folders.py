"""A folder takes the place of another in one step, so that no reader meets half of it."""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
from pathlib import Path
from typing import Any

_HERE = -100  # AT_FDCWD: paths are relative to the working directory
_EXCHANGE = 2  # RENAME_EXCHANGE of Linux, RENAME_SWAP of macOS


def put(new: Path, place: Path) -> None:
    """Let a folder take the place of another, which goes: a reader meets the one or the other.

    Linux and macOS exchange the two in one step. Where that is not possible (Windows, some file
    systems) the old folder steps aside first: `present` finds it there, and `mend` brings it back
    after a kill in between. A file or a link in its place goes as the old folder would, and
    what the link leads to stays.
    """
    if not os.path.lexists(place):
        new.rename(place)
    elif _exchange(new, place):
        remove(new)
    else:
        aside = _aside(place)
        place.rename(aside)
        new.rename(place)
        remove(aside)


def present(place: Path) -> Path:
    """Return where a folder is: in its place, or aside while `put` brings another."""
    return place if place.exists() else _aside(place)


def mend(place: Path) -> None:
    """Bring back a folder that stepped aside, where `put` was killed before another came."""
    aside = _aside(place)
    if aside.exists() and not place.exists():
        aside.rename(place)
    remove(aside)


def remove(folder: Path) -> None:
    """Remove a folder, whose name goes at once: a kill leaves no part of it under that name.

    A file goes too, and of a link the link alone.
    """
    gone = folder.with_name(f".{folder.name.strip('.')}.gone")
    _delete(gone)
    if os.path.lexists(folder):
        folder.rename(gone)
        _delete(gone)


def _delete(place: Path) -> None:
    if place.is_symlink() or place.is_file():
        place.unlink()
    elif place.exists():
        shutil.rmtree(place)


def _aside(place: Path) -> Path:
    return place.with_name(f".{place.name}.aside")


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two folders in one step; False where the system cannot."""
    names = os.fsencode(one), os.fsencode(other)
    system: Any = None if sys.platform == "win32" else ctypes.CDLL(None)
    if hasattr(system, "renameat2"):
        return bool(system.renameat2(_HERE, names[0], _HERE, names[1], _EXCHANGE) == 0)
    if hasattr(system, "renamex_np"):
        return bool(system.renamex_np(*names, _EXCHANGE) == 0)
    return False
