"""JSON, YAML and notebooks from anywhere: a reader each, with limits; every fault is one line.

Of YAML only what versions 1.1 (PyYAML, papermill) and 1.2 take alike is read: ``1:30``,
``on``, ``012``, ``1e-5``, ``1_000`` and dates are refused, and so are tags, anchors and
repeated keys.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, Required

import yaml
from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    with_config,
)
from typing_extensions import TypedDict

from moebook.errors import Refusal, located, refuse, told
from moebook.settings import in_one_line

LARGEST = 2**26  # bytes of a JSON file
LARGEST_YAML = 2**20  # bytes
LARGEST_NOTEBOOK = 2**28  # bytes
DEEPEST = 100  # levels of a JSON or YAML file
_ALIKE = re.compile(
    r"|~|null|Null|NULL|true|True|TRUE|false|False|FALSE|[-+]?(0|[1-9][0-9]*)|0x[0-9a-fA-F]+"
    r"|[-+]?([0-9]+\.[0-9]*|\.[0-9]+)([eE][-+][0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
)
# Of 1.2.
_NUMBER = re.compile(r"0o[0-7]+|[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")


def read_json(path: Path, *, limit: int = LARGEST) -> dict[str, Any]:
    """Read a file that should hold a JSON object of at most ``limit`` bytes; see `json_object`."""
    return json_object(_content(path, limit), path)


def _content(path: Path, limit: int) -> bytes:
    try:
        if not path.is_file():
            refuse("E-NOFILE", f"{path} is missing; expected a file")
        with path.open("rb") as file:
            content = file.read(limit + 1)
    except OSError as error:
        raise told(error, f"{path} cannot be read") from None
    if len(content) > limit:
        refuse(
            "E-LIMIT", f"{path} has more than {limit:,} bytes, the most that is read"
        )
    return content


def json_object(content: bytes, where: object) -> dict[str, Any]:
    """Parse a JSON object from anywhere, or refuse it in one line (E-FORMAT).

    Refused are also repeated keys, halves of surrogate pairs, whole numbers beyond a
    float's range, and more than `DEEPEST` levels. A byte-order mark, NaN and Infinity
    pass.
    """
    try:
        value = json.loads(content.decode("utf-8-sig"), object_pairs_hook=_once)
        level = [value]
        for _ in range(DEEPEST):
            level = list(chain.from_iterable(map(_parts, level)))
    except (ValueError, OverflowError, RecursionError) as error:
        refuse(
            "E-FORMAT",
            f"{where} is no JSON that can be read ({error!s:.200}); restore it",
        )
    if level or not isinstance(value, dict):
        found = f"more than {DEEPEST} levels" if level else type(value).__name__
        refuse("E-FORMAT", f"{where}: expected a JSON object, found {found}")
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        raise ValueError("a key stands twice in one object")
    return content


def _parts(value: Any) -> Iterable[Any]:
    """Return what a JSON value holds, and raise for text and numbers that nothing can write."""
    if isinstance(value, str):
        value.encode()
    elif isinstance(value, int):
        float(value)
    if isinstance(value, dict):
        return [*value, *value.values()]
    return value if isinstance(value, list) else ()


# Of lines, as notebooks may have it.
Text = Annotated[str | list[str], AfterValidator("".join)]
_TEXT = TypeAdapter(Text)


def _bundle(data: dict[str, Any]) -> dict[str, Any]:
    """Join the lines of all representations but those in JSON."""
    joined: dict[str, Any] = {}
    for mime, part in data.items():
        is_json = mime.endswith("json")
        joined[mime] = part if is_json else _TEXT.validate_python(part)
    return joined


def _described(part: Any) -> Any:
    """Give a notebook or cell what the format asks for, be it empty, where tools leave it out."""
    if not isinstance(part, dict):
        return part
    given = {"metadata": {}, **part}
    if "cells" in given:
        return {"nbformat_minor": 4, **given}  # the last one whose cells need no ids
    if given.get("cell_type") == "code":
        return {"execution_count": None, "outputs": [], **given}
    return given


class _Papermill(TypedDict, total=False):
    duration: Annotated[float, Field(ge=0)] | None
    end_time: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\d")] | None


class _Metadata(TypedDict, total=False):
    tags: list[str]
    papermill: _Papermill


class _Output(TypedDict, total=False):
    output_type: Required[Literal["stream", "display_data", "execute_result", "error"]]
    name: str
    text: Text
    ename: str
    evalue: str
    data: Annotated[dict[str, Any], AfterValidator(_bundle)]
    metadata: dict[str, Any]


class _Cell(TypedDict, total=False):
    cell_type: Required[Literal["code", "markdown", "raw"]]
    source: Required[Text]
    metadata: Required[_Metadata]
    execution_count: int | None
    outputs: list[_Output]


@with_config(ConfigDict(strict=True, extra="allow"))
class _Notebook(TypedDict):
    nbformat: Literal[4]
    nbformat_minor: Annotated[int, Field(ge=0)]
    metadata: _Metadata
    cells: list[Annotated[_Cell, BeforeValidator(_described)]]


_NOTEBOOK = TypeAdapter(_Notebook)


def read_ipynb(path: Path) -> dict[str, Any]:
    """Read a notebook, checked in all that is read of one, with its lines joined (E-NOTEBOOK)."""
    notebook = read_json(path, limit=LARGEST_NOTEBOOK)
    with (
        located(path.name, "E-NOTEBOOK", "open and save it in Jupyter"),
        in_one_line([]),
    ):
        return dict(_NOTEBOOK.validate_python(_described(notebook)))


def tags(cell: Mapping[str, Any]) -> list[str]:
    """Return what a notebook's cell is tagged with."""
    marks: list[str] = cell["metadata"].get("tags", [])
    return marks


# Of libyaml, which is faster, where PyYAML was built with it; a test holds both to the same trees.
_SAFE: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_SAFE):
    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen: set[str] = set()
        for key, _ in node.value:
            name = str(key.value)
            if name in seen:
                _stop(key, f"{key.value} is given twice")
            seen.add(name)
        return super().construct_mapping(node, deep)


def _stop(part: Any, problem: str) -> NoReturn:
    raise yaml.MarkedYAMLError(problem=problem, problem_mark=part.start_mark)


def _refuse_tags_anchors_and_depth(text: str) -> None:
    depth = 0
    for event in yaml.parse(text, Loader=_SAFE):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:  # the reader, which calls itself for each, would crash
            _stop(event, f"lists and mappings stand within one another {DEEPEST} deep")
        for kind in ("anchor", "tag"):
            if getattr(event, kind, None):
                _stop(event, f"a YAML {kind} is not allowed")


def _refuse_what_is_not_read_alike(node: Any) -> None:
    if isinstance(node, yaml.MappingNode):
        for part in chain.from_iterable(node.value):  # keys and values
            _refuse_what_is_not_read_alike(part)
    elif isinstance(node, yaml.SequenceNode):
        for part in node.value:
            _refuse_what_is_not_read_alike(part)
    elif not node.style and not _is_read_alike(node):  # neither quoted nor a block
        problem = f"YAML 1.1 and 1.2 do not read '{node.value}' alike"
        fix = "quote a text, write numbers as 90 or 1.0e-5, and true or false"
        _stop(node, f"{problem}; {fix}")


def _is_read_alike(scalar: Any) -> bool:
    if scalar.tag.endswith(":str"):
        return not _NUMBER.fullmatch(scalar.value)  # which 1.2 would take for one
    return bool(_ALIKE.fullmatch(scalar.value))


def read_yaml(path: Path, text: str | None = None) -> Any:
    """Read a YAML file, or the part of it that is given, or refuse it at its line (E-CONFIG)."""
    return read_places(path, text)[0]


def read_places(path: Path, text: str | None = None) -> tuple[Any, list[str]]:
    """Read YAML, and the place (``file:line:column``) of each item of its top level."""
    name = f"{path.parent.name}/{path.name}"
    try:
        if text is None:
            text = _content(path, LARGEST_YAML).decode("utf-8-sig")
        _refuse_tags_anchors_and_depth(text)
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is not None:
            _refuse_what_is_not_read_alike(node)
        content = None if node is None else loader.construct_document(node)
    except UnicodeDecodeError as error:
        refuse("E-CONFIG", f"{name}: not UTF-8 at byte {error.start}")
    except yaml.MarkedYAMLError as error:
        refuse("E-CONFIG", f"{_at(name, error.problem_mark)}: {error.problem}")
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        refuse("E-CONFIG", f"{name}: {error}")
    items = node.value if isinstance(node, yaml.CollectionNode) else []
    tops = (item[0] if isinstance(item, tuple) else item for item in items)
    return content, [_at(name, top.start_mark) for top in tops]


@contextmanager
def formed(path: Path) -> Iterator[Any]:
    """Give a YAML file's content to a block, or refuse what it does not find in any file."""
    try:
        yield read_yaml(path) if path.suffix in (".yaml", ".yml") else None
    except Refusal:
        raise
    except Exception as error:
        # A key, a type, an encoding: whatever a damaged file brings.
        reason = f"{type(error).__name__}: {error}"[:200]
        refuse(
            "E-FORMAT",
            f"{path} does not hold what is read from it ({reason}); restore it",
        )


def _at(name: str, mark: yaml.Mark | None) -> str:
    return name if mark is None else f"{name}:{mark.line + 1}:{mark.column + 1}"
