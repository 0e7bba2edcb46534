"""The filter between an executed notebook and the book: what may be shown, and nothing else.

Allowed are plain text, PNG figures, tables of the elements and attributes named here, and recorded
values. Errors and secrets are refused, everything else is left out and counted.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
import struct
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lxml.html
from lxml import etree

from moebook.errors import refuse
from moebook.notebook.harvest import code_cells
from moebook.notebook.session import GLUE, NOTE, RECORDED
from moebook.results.runs import plain, restored

_ANSI = re.compile(
    r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]"
)
_PNG = b"\x89PNG\r\n\x1a\n"
_PNG_CHUNKS = (b"IHDR", b"PLTE", b"tRNS", b"gAMA", b"sRGB", b"pHYs", b"IDAT", b"IEND")
_METADATA = ("kernelspec", "language_info")
_CELL_METADATA = ("tags", "mystnb", "slideshow")

_SECRET_NAME = re.compile(
    r"(?i)(^|_)(TOKEN|SECRET|PASS(WORD|WD|PHRASE)?|CREDENTIAL|COOKIE|AUTH|(API)?KEY|PAT)S?(_|$)"
)
_SECRET_TEXT = {
    "a Hugging Face token": r"\bhf_[A-Za-z0-9]{20,}",
    "a GitHub token": r"\b(?:gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,})",
    "a GitLab token": r"\bglpat-[\w-]{20,}",
    "an API key": r"\b(?:sk|pk|rk)-[A-Za-z0-9_-]{20,}",
    "an AWS key": r"\bA(?:KIA|SIA)[0-9A-Z]{16}\b",
    "a Google key": r"\bAIza[\w-]{30,}",
    "a Slack token": r"\bxox[abeprs]-[\w-]{10,}",
    "a signed web token": r"\beyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]{10,}",
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----",
    "a password in an address": r"\b[a-z][a-z0-9+.-]*://[^\s/:@]+:[^\s/@]+@",
}
_SHORTEST = 8  # a variable's value is looked for from this length on; shorter ones are too common

_TOPS = "home|root|Users|tmp|var|opt|usr|etc|private|mnt|media|srv|run|work|workspace|content|data"
_PATH = re.compile(
    rf"(?<![\w.:/~-])(?:/(?:{_TOPS})(?:/[\w.@+=-]+)+/?|[A-Za-z]:(?:\\[\w.@+=-]+){{2,}})", re.ASCII
)

_ELEMENTS = frozenset(
    "table thead tbody tfoot tr th td caption colgroup col div p br b i em strong sub sup code"
    " small span".split()
)
_SILENT = ("script", "style", "iframe", "object", "template", "noscript", "svg", "math")
_ATTRIBUTES = ("class", "colspan", "rowspan", "scope", "border")


def clean(notebook: Any, folder: Path) -> tuple[Any, dict[str, int]]:
    """Return a copy of an executed notebook that may be published, and what was left out.

    That is counted by kind: MIME types, ``stderr``, ``path``, ``metadata`` ...
    """
    notebook, dropped = json.loads(json.dumps(notebook)), Counter[str]()
    for number, cell in code_cells(notebook):
        outputs = [_output(output, f"In [{number}]", folder, dropped) for output in cell["outputs"]]
        cell["outputs"] = [output for output in outputs if output is not None]
    for cell in notebook["cells"]:
        _forbid_secrets(cell)
        cell["metadata"] = _only(cell["metadata"], _CELL_METADATA)
    dropped["widgets"] += "widgets" in notebook["metadata"]
    notebook["metadata"] = _only(notebook["metadata"], _METADATA)
    return notebook, dict(sorted((+dropped).items()))


def _output(output: Any, where: str, folder: Path, dropped: Counter[str]) -> Any | None:
    kind = output["output_type"]
    if kind == "error":
        refuse("E-OUTPUT", f"{where} holds an error: {output['ename']}: {output['evalue'][:200]}")
    if kind == "stream":
        if output["name"] != "stdout":
            dropped[output["name"]] += 1
            return None
        return output | {"text": _text(output["text"], folder, dropped)}
    data = {mime: _allowed(mime, x, folder, dropped) for mime, x in output.get("data", {}).items()}
    dropped.update(mime for mime, content in data.items() if content is None)
    data = {mime: content for mime, content in data.items() if content is not None}
    hidden = data.keys() & {*RECORDED, NOTE}
    metadata = _only(output.get("metadata", {}), ("scrapbook",) if hidden else ())
    return output | {"data": data, "metadata": metadata} if data else None


def _allowed(mime: str, content: Any, folder: Path, dropped: Counter[str]) -> Any | None:
    if mime in ("text/plain", f"{GLUE}text/plain"):
        return _text(content, folder, dropped)
    if mime == "text/html":
        table = reduced_table(content)
        return None if table is None else _text(table, folder, dropped)
    if mime == "image/png":
        return _png(content, dropped)
    if mime in RECORDED:
        return plain(
            restored(RECORDED[mime], content, f"a recorded {RECORDED[mime].__name__.lower()}")
        )
    return json.loads(_text(json.dumps(content), folder, dropped)) if mime == NOTE else None


def _text(text: str, folder: Path, dropped: Counter[str]) -> str:
    text, controls = _ANSI.subn("", text)
    text, paths = scrub(text, folder)
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
    chunks, place = [_PNG], len(_PNG)
    while place + 12 <= len(data):
        (length,), name = struct.unpack_from(">I", data, place), data[place + 4 : place + 8]
        chunk = data[place : place + 12 + length]
        chunks.append(chunk if name in _PNG_CHUNKS else b"")
        dropped["png metadata"] += name not in _PNG_CHUNKS
        place += len(chunk)
    return base64.b64encode(b"".join(chunks)).decode()


def _forbid_secrets(cell: Any) -> None:
    """Refuse a cell whose source or text outputs show a secret; pictures are not read."""
    texts = [cell["source"]]
    for output in cell.get("outputs", []):
        texts.append(output.get("text", ""))
        contents = (c for mime, c in output.get("data", {}).items() if mime != "image/png")
        texts += [c if isinstance(c, str) else json.dumps(c) for c in contents]
    if kind := secret("\n".join(texts)):
        place = f"In [{cell['execution_count']}]" if cell["cell_type"] == "code" else "a text cell"
        refuse("E-SECRET", f"{place} shows {kind}; nothing was published: remove it from the cell")


def _only(metadata: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: metadata[name] for name in names if metadata.get(name)}


def environment() -> dict[str, str]:
    """Return this process's environment without variables whose name or value suggests a secret."""
    return {k: v for k, v in os.environ.items() if not _SECRET_NAME.search(k) and not secret(v, {})}


def secret(text: str, variables: Mapping[str, str] | None = None) -> str | None:
    """Say what kind of secret a text shows, or None; also the value of a variable such as TOKEN."""
    for kind, pattern in _SECRET_TEXT.items():
        if re.search(pattern, text):
            return kind
    for name, value in (os.environ if variables is None else variables).items():
        if _SECRET_NAME.search(name) and len(value) >= _SHORTEST and value in text:
            return f"the value of the environment variable {name}"
    return None


def scrub(text: str, folder: Path) -> tuple[str, int]:
    """Make absolute paths relative inside the project, else ``.../name``; count them too."""
    text, count = re.subn(rf"{re.escape(str(folder))}(?:/|(?![\w.-]))", "", text)
    places = {sys.prefix, tempfile.gettempdir(), str(Path.home())} - {"/", ""}
    below = (re.compile(rf"{re.escape(place)}(?:[/\\][\w.@+=-]+)+") for place in places)
    for pattern in (*below, _PATH):
        text, more = pattern.subn(lambda found: ".../" + re.findall(r"[^/\\]+", found[0])[-1], text)
        count += more
    return text, count


def reduced_table(text: str) -> str | None:
    """Return the HTML of a table (pandas') with text, structure and classes only, else None."""
    parser = lxml.html.HTMLParser(huge_tree=True)
    tree = lxml.html.document_fromstring(f"<body>{text}", parser).body
    etree.strip_elements(tree, *_SILENT, etree.Comment, etree.PI, with_tail=False)
    for element in list(tree.iterdescendants()):
        if element.tag not in _ELEMENTS:
            element.drop_tag()  # its contents stay
        for name in set(element.attrib) - set(_ATTRIBUTES):
            del element.attrib[name]
    if tree.find(".//table") is None:
        return None
    tree.attrib.clear()
    written: str = etree.tostring(tree, method="html", encoding="unicode")
    return written.removeprefix("<body>").removesuffix("</body>").strip()
