"""Where records lie, and how they are read, written and hashed.

``results/<name>/<tier>/`` holds the committed records (study, gpu, paper);
``book/notebooks/NN_name.*`` the live one that the book's page shows.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from moebook.errors import refuse
from moebook.results.values import Record

COMMITTED = ("study", "gpu", "paper")
"""The tiers whose records are kept in the repository; the others live beside the page."""


def root(start: Path | None = None) -> Path:
    """Find the project: the nearest folder at or above ``start`` that holds ``_config.yml``.

    Args:
        start: Where to begin; the working directory by default.

    Raises:
        Refusal: ``E-PATH`` when there is none.
    """
    begin = (start or Path.cwd()).resolve()
    for folder in (begin, *begin.parents):
        if (folder / "_config.yml").is_file():
            return folder
    refuse("E-PATH", f"no _config.yml in {begin} or above; run inside a checkout of moebook")


def write(path: Path, text: str) -> None:
    """Write a text file at once or not at all: to a temporary name beside it, then a rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def digest(path: Path) -> str | None:
    """Return the sha256 of a file's bytes in hex; None when there is no such file."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def record_path(folder: Path, stem: str, tier: str) -> Path:
    """Name the record file of notebook ``NN_name`` at a tier; the manifest lies beside it."""
    if tier in COMMITTED:
        return folder / "results" / stem[3:] / tier / "record.json"
    return folder / "book" / "notebooks" / f"{stem}.record.json"


def records(name: str, folder: Path | None = None) -> dict[str, Record]:
    """Read all records of a notebook: the committed ones and the live one, by tier.

    Args:
        name: Short name of the notebook, such as ``pesc``; one without records gives ``{}``.
        folder: The project; found from the working directory by default.

    Raises:
        Refusal: ``E-RECORD`` or ``E-VALUE`` for a file that does not hold what it should.
    """
    folder = folder or root()
    paths = [folder / "results" / name / tier / "record.json" for tier in COMMITTED]
    paths += sorted((folder / "book" / "notebooks").glob(f"[0-9][0-9]_{name}.record.json"))
    found = [read(path) for path in paths if path.is_file()]
    return {record.scale: record for record in found}


def read(path: Path) -> Record:
    """Read one record file together with the manifest beside it.

    Raises:
        Refusal: ``E-RECORD`` or ``E-VALUE`` when either file is missing or malformed.
    """
    manifest = _json(path.with_name(path.name.replace("record.json", "manifest.json")))
    if not isinstance(manifest, dict):
        refuse("E-RECORD", f"the manifest beside {path} is not a JSON object")
    return Record.from_json(_json(path), manifest, str(path))


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        refuse("E-RECORD", f"{path} is missing; run the notebook again with --force")
    except ValueError as error:
        refuse("E-RECORD", f"{path} is not JSON ({error}); run the notebook again with --force")
