"""What findings and generated pages are made of: they are made anew when any of it has changed."""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from moebook import runtime, storage
from moebook.errors import Refusal
from moebook.lab import records

EVIDENCE = ("moebook", "notebooks", "results", "requirements.lock")
"""What findings are made of: the code, protocols and their heads, runs and other records."""
COMMITTED = (*EVIDENCE, "book/found", "recipes", "_config.yml")
"""What generated pages are made of that show no run of this build."""
SHOWN = (*COMMITTED, "book/notebooks")
"""What all generated pages are made of: the runs that the notebooks' pages show, too."""
_HEADING = re.compile("^#.*$", re.MULTILINE)
SEAL = "made_of.json"  # beside the generated pages: what they were made of, and their hashes


def digest(folder: Path, parts: Sequence[str] = EVIDENCE) -> str:
    """Hash parts of a project (`_shown_elsewhere`), the versions of Python and of libraries."""
    places = {part: storage.part(folder, part) for part in parts}
    places["moebook"] = storage.files.PACKAGE
    content: list[object] = [
        platform.python_version(),
        sorted(runtime.versions().items()),
    ]
    for part, place in places.items():
        if place.is_file():
            content.append((part, storage.digest(place)))
        paths = storage.files.own(place, "**/*") if place.is_dir() else []
        for path in paths:
            if path.is_file() and "__pycache__" not in path.parts:
                name = path.relative_to(place).as_posix()
                content.append((part, name, _shown_elsewhere(path)))
    return storage.text_digest(json.dumps(content))


def _shown_elsewhere(path: Path) -> str | None:
    """Hash what findings and generated pages may show of a file: mostly all of it.

    A sentence between a notebook's headings is shown on its own page alone. When it changes, the
    executed copy changes, and the note in the run beside the copy that says which copy it is of.
    What cannot be read counts by its bytes, as other files do.
    """
    with suppress(Refusal):
        if path.suffix == ".ipynb":
            return _notebook_digest(path)
        if path.suffix == ".parquet" and path.with_suffix(".ipynb").is_file():
            run = records.read_run(path)
            noted = {**run.manifest, "executed": None}
            plain = records.runs.packed(replace(run, manifest=noted))
            return hashlib.sha256(plain).hexdigest()
    return storage.digest(path)


def _notebook_digest(path: Path) -> str:
    """Hash a notebook's code, tags, outputs and headings."""
    cells: list[object] = []
    for cell in storage.read_ipynb(path)["cells"]:
        if cell["cell_type"] == "code":
            outputs = cell.get("outputs", [])
            cells.append((cell["source"], storage.tags(cell), outputs))
        else:
            cells.append(_HEADING.findall(cell["source"]))
    return storage.text_digest(json.dumps(cells))


def seal(place: Path, made_of: str) -> None:
    """Note what the pages in a folder were made of; after the last of them."""
    storage.write(place / SEAL, json.dumps(_seal(place, made_of), indent=1) + "\n")


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
        "files": {path.name: storage.digest(path) for path in files},
    }
