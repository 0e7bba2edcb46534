"""What findings and generated pages are made of: they are made anew when any of it has changed."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Sequence
from pathlib import Path

from moebook import results, runtime

EVIDENCE = ("moebook", "notebooks", "results", "requirements.lock")
"""What findings are made of: the code, protocols and their heads, runs and other records."""
SHOWN = (*EVIDENCE, "book/notebooks", "recipes", "_config.yml")
"""What generated pages are made of: the runs that pages show, too, and what needs a GPU."""
SEAL = "made_of.json"  # beside the generated pages: what they were made of, and their hashes


def digest(folder: Path, parts: Sequence[str] = EVIDENCE) -> str:
    """Hash parts of a project, byte by byte, and the versions of Python and the libraries."""
    places = {part: results.part(folder, part) for part in parts}
    places["moebook"] = results.files.PACKAGE
    found: list[object] = [
        platform.python_version(),
        sorted(runtime.versions().items()),
    ]
    for part, place in places.items():
        if place.is_file():
            found.append((part, results.digest(place)))
        for path in results.files.own(place, "**/*") if place.is_dir() else ():
            if path.is_file() and "__pycache__" not in path.parts:
                found.append(
                    (part, path.relative_to(place).as_posix(), results.digest(path))
                )
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()


def seal(place: Path, made_of: str) -> None:
    """Note what the pages in a folder were made of; after the last of them."""
    results.write(place / SEAL, json.dumps(_seal(place, made_of), indent=1) + "\n")


def is_current(place: Path, made_of: str) -> bool:
    """Whether the pages in a folder are those that were written, and made of the same."""
    try:
        return bool(
            json.loads((place / SEAL).read_text("utf-8")) == _seal(place, made_of)
        )
    except (OSError, ValueError):
        return False


def _seal(place: Path, made_of: str) -> dict[str, object]:
    files = [path for path in sorted(place.iterdir()) if path.suffix in (".md", ".svg")]
    return {
        "made of": made_of,
        "files": {path.name: results.digest(path) for path in files},
    }
