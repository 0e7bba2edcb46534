"""Where the project is, and how its files are written and hashed."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moebook.errors import refuse


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


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary name beside a file, which takes its place when the block ends well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write(path: Path, text: str) -> None:
    """Write a text file at once or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def digest(path: Path) -> str | None:
    """Return the sha256 of a file's bytes in hex; None when there is no such file."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
