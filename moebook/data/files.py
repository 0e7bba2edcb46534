"""Reader of users' own JSONL files: every row checked, every refusal with file and line.

Three forms of a row are known: `prompt` and `answer`; `instruction`, `input` and `output` (Rocket);
`messages` (ESFT). `system`, `rationale`, `task`, `domain` and `id` may stand beside them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from moebook.data import chat
from moebook.errors import refuse

Row = dict[str, str]
LONGEST_LINE = 50_000_000  # bytes; a longer line is not a row but a mistake
OPTIONAL = ("system", "rationale", "task", "domain")


def read(path: str | Path) -> list[Row]:
    """Read a JSONL file into rows with prompt, answer, task and domain.

    A byte-order mark, CRLF and empty lines are accepted. The task is the file's name and the
    domain `own` where a row does not say.

    Raises:
        Refusal: E-NOFILE, E-REMOTECODE (a script), else E-DATA with file:line for an empty file,
            bad JSON, a missing or mistyped field, invalid UTF-8, a lone surrogate, an unknown chat
            role, a repeated id or row, a line above 50 MB.
    """
    path = Path(path)
    rows: list[Row] = []
    seen: dict[object, str] = {}
    for where, raw in objects(path):
        row = {"task": path.stem, "domain": "own"} | _row(raw, where)
        for key in (("id", repr(raw.get("id"))), tuple(sorted(row.items()))):
            if key == ("id", "None"):
                continue
            if key in seen:
                what = f"id {key[1]}" if key[0] == "id" else "this row"
                refuse("E-DATA", f"{where}: {what} is already at {seen[key]}; remove one")
            seen[key] = where
        rows.append(row)
    return rows


def objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (`file:line`, object) for each line of a JSONL file that is not blank."""
    refuse_scripts(path)
    if not path.is_file():
        refuse("E-NOFILE", f"{path}: no such file; expected a JSONL file")
    found = False
    with path.open("rb") as file:
        number = 0
        while line := file.readline(LONGEST_LINE + 1):
            number += 1
            if text := _decoded(line, f"{path}:{number}", first=number == 1):
                found = True
                yield f"{path}:{number}", _parsed(text, f"{path}:{number}")
    if not found:
        refuse("E-DATA", f"{path}:1: the file is empty; expected one JSON object a line")


def refuse_scripts(path: str | Path) -> None:
    """Refuse data sets that are programs (E-REMOTECODE): no data set's code is ever run."""
    if str(path).endswith((".py", ".pyc", ".ipynb", ".sh")):
        refuse(
            "E-REMOTECODE",
            f"{path}: a script is not data and is never run; give its output as JSONL or parquet",
        )


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
    """Take a text field of a raw row, or the default where it is missing or null.

    Raises:
        Refusal: E-DATA with `where` when it is missing without default, of another type, or holds
            half of a surrogate pair, which no tokenizer can encode.
    """
    value = row.get(name)
    if value is None and default is not None:
        return default
    if name not in row:
        refuse("E-DATA", f"{where}: field '{name}' is missing; the row has {', '.join(row)}")
    if not isinstance(value, str):
        refuse("E-DATA", f"{where}: field '{name}' is {type(value).__name__}, expected text")
    return clean(value, name, where)


def clean(value: str, name: str, where: str) -> str:
    """Return the value; refuse one with half of a surrogate pair (E-DATA)."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        refuse("E-DATA", f"{where}: field '{name}' holds a lone surrogate at {error.start}")
    return value


def _row(raw: Mapping[str, Any], where: str) -> Row:
    """Bring one of the three forms to prompt and answer, with the optional fields it has."""
    if "messages" in raw:
        found = chat.exchange(raw["messages"], where)
        row = {name: clean(value, name, where) for name, value in found.items()}
    elif "instruction" in raw:
        context = text(raw, "input", where, default="")
        prompt = text(raw, "instruction", where) + (f"\n{context}" if context else "")
        row = {"prompt": prompt, "answer": text(raw, "output", where)}
    else:
        row = {name: text(raw, name, where) for name in ("prompt", "answer")}
    for name in ("prompt", "answer"):
        if not row[name].strip():
            refuse("E-DATA", f"{where}: {name} is empty; every row needs both")
    return row | {name: text(raw, name, where) for name in OPTIONAL if raw.get(name) is not None}
