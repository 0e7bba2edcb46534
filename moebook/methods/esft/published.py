"""The JSON that the authors published: scores of experts, and the experts chosen by them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from moebook.errors import located, refuse
from moebook.settings import Kind, settings
from moebook.storage import read_json

ByLayer = dict[int, Annotated[dict[int, float], Field(min_length=1)]]


@settings
class PublishedScores:
    """A file of scores: by layer, the score of each expert by its number."""

    token_scores: ByLayer
    gate_scores: ByLayer


def from_json(kind: type[Kind], path: str | os.PathLike[str]) -> Kind:
    """Make settings from a JSON object in a file; keys that are numbers become numbers."""
    content = read_json(Path(os.path.expanduser(path)))
    with located(path):
        return kind(**{name: _numbered(value) for name, value in content.items()})


def _numbered(value: Any) -> Any:
    """Make keys that are digits numbers, at any depth, but for two that become one."""
    if not isinstance(value, dict):
        return value
    numbered = {}
    for key, content in value.items():
        is_number = key.isdecimal() and len(key) < 10
        numbered[int(key) if is_number else key] = _numbered(content)
    if len(numbered) < len(value):
        refuse("E-FORMAT", "a key stands twice in one object")
    return numbered
