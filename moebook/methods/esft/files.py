"""JSON objects of ESFT's published forms, read strictly."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from moebook.errors import refuse


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object, or refuse with E-NOFILE or E-FORMAT."""
    if not path.is_file():
        refuse("E-NOFILE", f"{path} is missing")
    try:
        found = json.loads(path.read_bytes(), object_pairs_hook=_unique)
    except RecursionError:
        refuse("E-FORMAT", f"{path}: JSON nested too deeply; expected objects in an object")
    except ValueError as error:
        refuse("E-FORMAT", f"{path} is not JSON: {error}")
    if not isinstance(found, dict):
        refuse("E-FORMAT", f"{path}: expected a JSON object")
    return found


def layer_of(key: str, path: Path) -> int:
    """Return the layer that a key names, or refuse one that is not plainly written (E-FORMAT).

    Two spellings of a number, "1" and "01", would be two keys of one layer.
    """
    if not re.fullmatch("0|[1-9][0-9]{0,5}", key):
        refuse("E-FORMAT", f"{path}: '{key[:80]}' is not a layer; expected a number such as 1")
    return int(key)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands twice in one object")
    return found
