"""Of which day a record is, and whether what it ran has changed since."""

from __future__ import annotations

import os
import subprocess
from datetime import date
from pathlib import Path
from typing import Any

from moebook.errors import refuse
from moebook.results.files import digest, root
from moebook.results.reach import package_digest
from moebook.results.values import Record

CODE = ("moebook", "notebooks", "requirements.lock")


def day(record: Record) -> date:
    """Return the day on which the record's run ended (UTC).

    Raises:
        Refusal: ``E-RECORD`` when its manifest has no date.
    """
    try:
        return date.fromisoformat(record.manifest["date"][:10])
    except (KeyError, TypeError, ValueError):
        refuse("E-RECORD", f"manifest of {record.notebook} ({record.scale}) has no UTC date")


def changed(record: Record, folder: Path | None = None) -> tuple[str, ...]:
    """Name what differs now from what the record ran: of ``notebook``, ``package``, ``lock``.

    Args:
        record: With its manifest.
        folder: The project; found from the working directory by default.
    """
    then = record.manifest.get("hashes", {})
    accelerator = bool(record.manifest.get("environment", {}).get("accelerator"))
    now = current(record.notebook, folder or root(), accelerator=accelerator)
    return tuple(part for part, value in now.items() if then.get(part) != value)


def current(name: str, folder: Path, *, accelerator: bool = False) -> dict[str, str | None]:
    """Return the hashes of the notebook's source, what it reaches of the package, and the lock.

    Args:
        name: Short name of the notebook.
        folder: The project.
        accelerator: Whether the run has one, and with it reaches the Triton kernels.
    """
    sources = sorted((folder / "notebooks").glob(f"[0-9][0-9]_{name}.ipynb"))
    return {
        "notebook": digest(sources[0]) if sources else None,
        "package": package_digest(sources[0], accelerator=accelerator) if sources else None,
        "lock": digest(folder / "requirements.lock"),
    }


def commit(folder: Path) -> dict[str, Any] | None:
    """Return the git commit and whether what runs differs from it (dirty); None without git."""
    head = _git(folder, "rev-parse", "HEAD")
    status = _git(folder, "status", "--porcelain", "--", *CODE)
    return None if head is None or status is None else {"id": head, "dirty": bool(status)}


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(folder), *arguments]
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
