"""The filter between an executed notebook and the book: what may be shown, and nothing else.

Allowed are text, PNG and SVG figures, tables, and recorded values. Text that a model wrote is
text/plain like any other. Errors and secrets are refused, everything else is left out and counted.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from moebook.errors import refuse
from moebook.notebook import markup, privacy
from moebook.notebook.session import CURVE, GLUE, NOTE, VALUE
from moebook.results import Curve, Value, plain, restored

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_PNG = b"\x89PNG\r\n\x1a\n"
_PNG_CHUNKS = (b"IHDR", b"PLTE", b"tRNS", b"gAMA", b"sRGB", b"pHYs", b"IDAT", b"IEND")
_METADATA = ("kernelspec", "language_info")
_CELL_METADATA = ("tags", "mystnb", "slideshow")


def clean(notebook: Any, folder: Path) -> tuple[Any, dict[str, int]]:
    """Return a copy of an executed notebook that may be published, and what was left out.

    Args:
        notebook: As papermill leaves it (nbformat 4).
        folder: The project, whose absolute paths become relative ones.

    Returns:
        The notebook, and a count by kind: MIME types, ``stderr``, ``path``, ``metadata`` ...

    Raises:
        Refusal: ``E-OUTPUT`` for an error output or a malformed value, ``E-SECRET`` for a secret.
    """
    notebook, dropped = json.loads(json.dumps(notebook)), Counter[str]()
    for number, cell in _code(notebook):
        kept = [_output(output, f"In [{number}]", folder, dropped) for output in cell["outputs"]]
        cell["outputs"] = [output for output in kept if output is not None]
    for cell in notebook["cells"]:
        _forbid_secrets(cell)
        cell["metadata"] = _only(cell["metadata"], _CELL_METADATA)
    dropped["widgets"] += "widgets" in notebook["metadata"]
    notebook["metadata"] = _only(notebook["metadata"], _METADATA)
    return notebook, dict(sorted((+dropped).items()))


def values(notebook: Any) -> tuple[Value, ...]:
    """Harvest the values that a notebook's `Run.record` calls left in its outputs, in order.

    Raises:
        Refusal: ``E-VALUE`` for an output of that type that is not a value.
    """
    found = _outputs(notebook, VALUE)
    return tuple(restored(Value, content, f"In [{number}]") for number, content in found)


def curves(notebook: Any) -> tuple[Curve, ...]:
    """Harvest curves, as `values` does values."""
    found = _outputs(notebook, CURVE)
    return tuple(restored(Curve, content, f"In [{number}]") for number, content in found)


def notes(notebook: Any) -> dict[str, Any]:
    """Gather what a notebook notes of its run: environment, modules, arms, rows, as far as known.

    Raises:
        Refusal: ``E-OUTPUT`` for an output of that type that is not such a part.
    """
    kinds = {"environment": dict, "modules": dict, "rows": dict, "arms": list, "known": list}
    found: dict[str, Any] = {}
    for number, content in _outputs(notebook, NOTE):
        for part, value in content.items() if isinstance(content, dict) else [("", content)]:
            if not isinstance(value, kinds.get(part, ())):
                refuse("E-OUTPUT", f"In [{number}]: malformed note of the run; execute it again")
            found[part] = found.get(part, {}) | value if isinstance(value, dict) else value
    return found


def _outputs(notebook: Any, mime: str) -> Iterator[tuple[int, Any]]:
    """Number of the cell and content, of each output that has a representation of this type."""
    for number, cell in _code(notebook):
        for output in cell["outputs"]:
            if mime in output.get("data", {}):
                yield number, output["data"][mime]


def _code(notebook: Any) -> list[tuple[int, Any]]:
    """Number the code cells from 1, as a fresh kernel does."""
    return list(enumerate((c for c in notebook["cells"] if c["cell_type"] == "code"), start=1))


def _output(output: Any, where: str, folder: Path, dropped: Counter[str]) -> Any | None:
    """Return what may stay of one output, or None."""
    kind = output["output_type"]
    if kind == "error":
        refuse("E-OUTPUT", f"{where} holds an error: {output['ename']}: {output['evalue'][:200]}")
    if kind == "stream":
        if output["name"] != "stdout":
            dropped[output["name"]] += 1
            return None
        return output | {"text": _text(_joined(output["text"]), folder, dropped)}
    data = output.get("data", {})
    kept = {
        mime: _content(mime, _joined(content), folder, dropped) for mime, content in data.items()
    }
    dropped.update(mime for mime, content in kept.items() if content is None)
    kept = {mime: content for mime, content in kept.items() if content is not None}
    hidden = kept.keys() & {VALUE, CURVE, NOTE}
    tag = output.get("metadata", {}).get("scrapbook") if hidden else None
    return output | {"data": kept, "metadata": {"scrapbook": tag} if tag else {}} if kept else None


def _content(mime: str, content: Any, folder: Path, dropped: Counter[str]) -> Any | None:
    """Return one representation of an output as it may be published, or None."""
    match mime:
        case "text/plain":
            return _text(content, folder, dropped)
        case "text/html":
            table = markup.table(content)
            return None if table is None else _text(table, folder, dropped)
        case "image/svg+xml":
            return markup.figure(content)
        case "image/png":
            return _png(content, dropped)
        case _ if mime == f"{GLUE}text/plain":
            return _text(content, folder, dropped)
        case _ if mime == VALUE:
            return plain(restored(Value, content, "a recorded value"))
        case _ if mime == CURVE:
            return plain(restored(Curve, content, "a recorded curve"))
        case _ if mime == NOTE:
            return json.loads(_text(json.dumps(content), folder, dropped))
    return None


def _text(text: str, folder: Path, dropped: Counter[str]) -> str:
    text, controls = _ANSI.subn("", text)
    text, paths = privacy.scrub(text, folder)
    dropped.update({"control": controls, "path": paths})
    return text


def _png(content: str, dropped: Counter[str]) -> str | None:
    """Return a PNG without its metadata chunks; None when it is no PNG."""
    try:
        data = base64.b64decode("".join(content.split()), validate=True)
    except (binascii.Error, ValueError):
        return None
    if not data.startswith(_PNG):
        return None
    kept, place = [_PNG], len(_PNG)
    while place + 12 <= len(data):
        (length,), name = struct.unpack_from(">I", data, place), data[place + 4 : place + 8]
        chunk = data[place : place + 12 + length]
        kept.append(chunk if name in _PNG_CHUNKS else b"")
        dropped["png metadata"] += name not in _PNG_CHUNKS
        place += len(chunk)
    return base64.b64encode(b"".join(kept)).decode()


def _forbid_secrets(cell: Any) -> None:
    """Refuse a cell whose source or text outputs show a secret; pictures are not read."""
    texts = [_joined(cell["source"])]
    for output in cell.get("outputs", []):
        texts.append(_joined(output.get("text", "")))
        texts += [_shown(c) for m, c in output.get("data", {}).items() if m != "image/png"]
    kind = privacy.secret("\n".join(texts))
    if kind is not None:
        place = f"In [{cell['execution_count']}]" if cell["cell_type"] == "code" else "a text cell"
        refuse("E-SECRET", f"{place} shows {kind}; nothing was published: remove it from the cell")


def _joined(content: Any) -> Any:
    """Join the list of lines that the notebook format may use for a text."""
    return "".join(content) if isinstance(content, list) else content


def _shown(content: Any) -> str:
    return content if isinstance(content, str) else json.dumps(content)


def _only(metadata: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: metadata[name] for name in names if metadata.get(name)}
