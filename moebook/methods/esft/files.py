"""JSON objects of ESFT's published forms, read strictly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from moebook.errors import refuse


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object, or refuse with E-NOFILE or E-FORMAT."""
    if not path.is_file():
        refuse("E-NOFILE", f"{path} is missing")
    try:
        found = json.loads(path.read_bytes(), object_pairs_hook=_unique)
    except ValueError as error:
        refuse("E-FORMAT", f"{path} is not JSON: {error}")
    if not isinstance(found, dict):
        refuse("E-FORMAT", f"{path}: expected a JSON object")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands twice in one object")
    return found
