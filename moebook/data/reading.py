"""Files of rows: JSON lines, JSON or parquet are opened, text fields taken, with their places."""

from __future__ import annotations

import glob
import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import datasets

from moebook.errors import Refusal, located, refuse
from moebook.settings import NAMED, checked

Rows = Sequence[tuple[str, Mapping[str, Any]]]  # where a row stands, and the raw row
BATCH = 1000  # rows of a parquet file that are read at once
LONGEST_LINE = 50_000_000  # bytes; a longer line is not a row but a mistake
ENDINGS = (".jsonl", ".json", ".parquet", ".jsonl.gz")
KINDS = f"files that are read end in {', '.join(ENDINGS)}"
SCRIPTS = (".py", ".pyc", ".ipynb", ".sh")
"""Endings of what is no data: no code is ever run."""


@checked
def local(path: Annotated[Path, NAMED]) -> Rows:
    """Open a JSONL, JSON or parquet file in the hub's own form."""
    if path.name.endswith(SCRIPTS):
        data = "give its output as JSONL or parquet"
        refuse("E-REMOTECODE", f"{path}: a script is not data; {data}")
    if not path.is_file():
        refuse("E-NOFILE", f"{path}: no such file; expected JSONL, JSON or parquet")
    if path.suffix in (".parquet", ".json"):
        rows = _columns(path)
    else:
        kinds = "" if path.name.endswith(ENDINGS) else KINDS
        try:
            with located("", fix=kinds):
                rows = list(_lines(path))
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            broken = f"not a whole gzip file ({error})"
            refuse("E-DATA", f"{path}: {broken}; fetch it again")
    if not rows:
        refuse("E-DATA", f"{path}:1: the file is empty; expected at least one row")
    return rows


def _columns(path: Path) -> list[tuple[str, Any]]:
    """Read a parquet or JSON file whole."""
    try:
        if path.suffix == ".json":
            return _json(path)
        # Else brackets in a name would be a pattern, and another file might fit it.
        named = glob.escape(str(path))
        # By default a batch is as long as the first group of rows: none is refused.
        how = {"split": "train", "streaming": True, "batch_size": BATCH}
        table = datasets.load_dataset("parquet", data_files=named, **how)
        return _numbered(path, table)
    except Refusal:
        raise
    except Exception as error:  # StopIteration, RecursionError, pyarrow's own
        kind = path.suffix[1:]
        refuse("E-DATA", f"{path}: not a readable {kind} file ({error!s:.200})")


def _numbered(path: Path, rows: Iterable[Any]) -> list[tuple[str, Any]]:
    """Give rows that stand on no line of their own the place `file:number`."""
    return [(f"{path}:{number}", row) for number, row in enumerate(rows, 1)]


def _json(path: Path) -> list[tuple[str, Any]]:
    """Read objects in a list, as columns or by line; datasets' reader fails on null."""
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError:
        return list(_lines(path))
    if isinstance(content, dict):
        if all(isinstance(column, list) for column in content.values()):
            lines = zip(*content.values(), strict=True)
            content = [dict(zip(content, line, strict=True)) for line in lines]
        else:
            content = [content]
    if not isinstance(content, list) or not all(
        isinstance(row, dict) for row in content
    ):
        raise TypeError("expected objects")
    return _numbered(path, content)


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (`file:line`, object) for each line of a JSONL file that is not blank."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        lines = iter(lambda: file.readline(LONGEST_LINE + 1), b"")
        for number, line in enumerate(lines, start=1):
            where = f"{path}:{number}"
            row = _row(line, "utf-8-sig" if number == 1 else "utf-8", where)
            if row is not None:
                yield where, row


def _row(line: bytes, encoding: str, where: str) -> dict[str, Any] | None:
    """Read a line's object; None where the line is blank."""
    if len(line) > LONGEST_LINE:
        longer = f"line longer than {LONGEST_LINE:,} bytes"
        refuse("E-DATA", f"{where}: {longer}; one row a line")
    try:
        text = line.decode(encoding).strip()
        if not text:
            return None
        value = json.loads(text)
    except UnicodeDecodeError as error:
        invalid = f"invalid UTF-8 at byte {error.start}"
        refuse("E-DATA", f"{where}: {invalid}; save the file as UTF-8")
    except RecursionError:
        refuse("E-DATA", f"{where}: JSON nested too deeply; expected a flat object")
    except ValueError as error:
        refuse("E-DATA", f"{where}: not JSON ({error}); expected one object a line")
    if not isinstance(value, dict):
        kind = type(value).__name__
        refuse("E-DATA", f"{where}: a row is {kind}, expected an object")
    return value


def field(
    row: Mapping[str, Any], name: str, where: str, default: str | None = None
) -> str:
    """Take a text field of a raw row (see `clean`), or the default where it is null."""
    if not isinstance(row, Mapping):
        kind = type(row).__name__
        refuse("E-DATA", f"{where}: a row is {kind}, expected fields by name")
    value = row.get(name)
    if value is None and default is not None:
        return default
    if name not in row:
        refuse_missing(row, name, where)
    return clean(value, name, where)


def refuse_missing(row: Mapping[str, Any], name: str, where: str) -> NoReturn:
    """Refuse a row without a field; the message names its fields, never what they hold."""
    there = ", ".join(map(str, row)) if row else "no fields"
    refuse("E-DATA", f"{where}: field '{name}' is missing; the row has {there}")


def clean(value: object, name: str, where: str) -> str:
    """Return a field's value; refuse all but text without halves of surrogate pairs."""
    if not isinstance(value, str):
        kind = type(value).__name__
        refuse("E-DATA", f"{where}: field '{name}' is {kind}, expected text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        half = f"holds a lone surrogate at {error.start}"
        refuse("E-DATA", f"{where}: field '{name}' {half}")
    return value
