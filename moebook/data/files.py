"""Readers of raw rows: JSONL files line by line, fields and messages checked with their place."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from moebook.errors import refuse, refuse_unknown

Row = dict[str, str]
LONGEST_LINE = 50_000_000  # bytes; a longer line is not a row but a mistake
ROLES = {"system": "system", "user": "prompt", "human": "prompt", "assistant": "answer",
         "gpt": "answer"}  # fmt: skip


def objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (`file:line`, object) for each line of a JSONL file that is not blank."""
    refuse_scripts(path)
    if not path.is_file():
        refuse("E-NOFILE", f"{path}: no such file; expected a JSONL file")
    empty = True
    with path.open("rb") as file:
        lines = iter(lambda: file.readline(LONGEST_LINE + 1), b"")
        for number, line in enumerate(lines, start=1):
            where = f"{path}:{number}"
            if text := _decoded(line, where, first=number == 1):
                empty = False
                yield where, _parsed(text, where)
    if empty:
        refuse("E-DATA", f"{path}:1: the file is empty; expected one JSON object a line")


def refuse_scripts(path: str | Path) -> None:
    """Refuse data sets that are programs (E-REMOTECODE): no data set's code is ever run."""
    if str(path).endswith((".py", ".pyc", ".ipynb", ".sh")):
        refuse("E-REMOTECODE", f"{path}: a script is not data; give its output as JSONL or parquet")


def _decoded(line: bytes, where: str, *, first: bool) -> str:
    if len(line) > LONGEST_LINE:
        refuse("E-DATA", f"{where}: line longer than {LONGEST_LINE:,} bytes; one row a line")
    try:
        text = line.decode("utf-8-sig" if first else "utf-8")
    except UnicodeDecodeError as error:
        refuse("E-DATA", f"{where}: invalid UTF-8 at byte {error.start}; save the file as UTF-8")
    return text.strip()


def _parsed(text: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except RecursionError:
        refuse("E-DATA", f"{where}: JSON nested too deeply; expected a flat object")
    except ValueError as error:
        refuse("E-DATA", f"{where}: not JSON ({error}); expected one object a line")
    if not isinstance(value, dict):
        refuse("E-DATA", f"{where}: a row is {type(value).__name__}, expected an object")
    return value


def text(row: Mapping[str, Any], name: str, where: str, default: str | None = None) -> str:
    """Take a text field of a raw row (see `clean`), or the default where it is missing or null."""
    value = row.get(name)
    if value is None and default is not None:
        return default
    if name not in row:
        refuse("E-DATA", f"{where}: field '{name}' is missing; the row has {', '.join(row)}")
    return clean(value, name, where)


def clean(value: object, name: str, where: str) -> str:
    """Return a field's value; refuse anything but text without halves of surrogate pairs."""
    if not isinstance(value, str):
        refuse("E-DATA", f"{where}: field '{name}' is {type(value).__name__}, expected text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        refuse("E-DATA", f"{where}: field '{name}' holds a lone surrogate at {error.start}")
    return value


def exchange(messages: object, where: str) -> Row:
    """Turn messages, whose roles are those of `ROLES`, into system (if any), prompt and answer."""
    if not isinstance(messages, list):
        refuse("E-DATA", f"{where}: messages is {type(messages).__name__}, expected a list")
    turns = [_turn(message, where) for message in messages]
    parts = [part for part, _ in turns]
    if parts not in (["prompt", "answer"], ["system", "prompt", "answer"]):
        wanted = "expected a prompt, an answer and perhaps a system message first: split long talks"
        refuse("E-DATA", f"{where}: messages hold {', '.join(parts) or 'nothing'}; {wanted}")
    return dict(turns)


def _turn(message: Any, where: str) -> tuple[str, str]:
    if not isinstance(message, Mapping):
        refuse("E-DATA", f"{where}: a message is {type(message).__name__}, expected an object")
    role = message.get("role", message.get("from"))
    content = message.get("content", message.get("value"))
    if not isinstance(role, str) or not isinstance(content, str):
        refuse("E-DATA", f"{where}: a message needs role and content as text")
    refuse_unknown(role, ROLES, "E-DATA", f"{where}: unknown chat role '{role}':")
    return ROLES[role], clean(content, ROLES[role], where)
