"""What an executed notebook left: what of it may be shown, and the run of its values and curves.

Shown are plain text, PNG figures, tables of the elements and attributes named here, and recorded
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
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import lxml.html
from lxml import etree

from moebook import results
from moebook.errors import located, refuse, refuse_unknown, shown
from moebook.notebook import parameters, sources
from moebook.notebook.session import CURVE, GLUE, NOTE, RECORDED, VALUE, injected
from moebook.notebook.sources import Notebook
from moebook.results.runs import Run, plain, restored

NOTES: dict[str, type[dict] | type[list] | type[str]] = {
    "parameters": dict,  # as `begin` checked them
    "cells": dict,  # the hash of each cell that ran, by its number
    "begun": str,  # when, unless the runner knows
    "environment": dict,
    "modules": dict,
    "rows": dict,
    "files": dict,
    "arms": list,
    "known": list,
}

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


def code_cells(notebook: Any) -> list[tuple[int, Any]]:
    """Number the code cells from 1, as a fresh kernel does, which runs no empty ones."""
    code = (cell for cell in notebook["cells"] if cell["cell_type"] == "code")
    return list(enumerate((cell for cell in code if cell["source"].strip()), start=1))


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
    _forbid_error(output, where)
    if output["output_type"] == "stream":
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


def _forbid_error(output: Any, where: str) -> None:
    if output["output_type"] == "error":
        error = f"{output.get('ename')}: {output.get('evalue', '')[:200]}"
        refuse("E-OUTPUT", f"{where} holds an error: {error}")


def _allowed(mime: str, content: Any, folder: Path, dropped: Counter[str]) -> Any | None:
    if mime in ("text/plain", f"{GLUE}text/plain"):
        return _text(content, folder, dropped)
    if mime == "text/html":
        table = reduced_table(content)
        return None if table is None else _text(table, folder, dropped)
    if mime == "image/png":
        return _png(content, dropped)
    if mime in RECORDED:
        kind = RECORDED[mime]
        return plain(restored(kind, content, f"a recorded {kind.__name__.lower()}"))
    if mime == NOTE and isinstance(content, dict) and "parameters" in content:
        return content  # the cells show these values as they are
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


def values(notebook: Any, mime: str = VALUE) -> tuple[Any, ...]:
    """Return what a notebook's `Run.record` calls left, or those of `Run.curve`, in order."""
    return tuple(restored(RECORDED[mime], x, where) for where, x in _outputs(notebook, mime))


def notes(notebook: Any) -> dict[str, Any]:
    """Gather what a notebook notes of its run, by the names in `NOTES`."""
    facts: dict[str, Any] = {name: kind() for name, kind in NOTES.items()}
    for where, content in _outputs(notebook, NOTE):
        for name, fact in content.items() if isinstance(content, dict) else [("", content)]:
            if not isinstance(fact, NOTES.get(name, ())):
                refuse("E-OUTPUT", f"{where}: malformed note of the run; execute it again")
            if name == "parameters" and facts[name]:
                refuse("E-OUTPUT", f"{where} begins a second run; a notebook holds one")
            facts[name] = facts[name] | fact if isinstance(fact, dict) else fact
    return facts


def check_run(executed: Any, given: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Refuse an executed notebook unless a fresh kernel ran all of it once, in order, as it stands.

    ``given`` are the parameters that it should have run with: those that were asked for, or that
    its cells show. They are compared with the ``facts`` that the kernel noted (`notes`).

    Raises:
        Refusal: ``E-OUTPUT`` where a cell failed or did not run in its order; ``E-RUN`` where a
            cell was changed after it ran; ``E-PARAMETER`` where the kernel had other values.
    """
    again = "restart the kernel and run all"
    for number, cell in code_cells(executed):
        for output in cell["outputs"]:
            _forbid_error(output, f"In [{number}]")
        if (count := cell["execution_count"]) != number:
            ran = "did not run" if count is None else f"ran as In [{count}], not as In [{number}]"
            refuse("E-OUTPUT", f"code cell {number} {ran}; {again}")
    if not facts["parameters"]:
        refuse("E-RUN", f"no note of `notebook.begin` says with which parameters it ran; {again}")
    for name in sorted(given.keys() | facts["parameters"].keys()):
        asked = given.get(name, "absent")
        had = facts["parameters"].get(name, "absent")
        if asked != had:
            why = "a cell changed it, or its cell was changed later"
            found = f"{name} should be {shown(asked)}, and the kernel had {shown(had)}"
            refuse("E-PARAMETER", f"{found}: {why}; {again}")
    if odd := _other_cell(executed, facts["cells"]):
        refuse("E-RUN", f"In [{odd}] is not the cell that ran, or its output is gone; {again}")


def _other_cell(executed: Any, noted: Mapping[str, str]) -> str | None:
    """Find a cell, up to the last one that the kernel noted, whose hash is not the noted one."""
    sources = {str(number): cell["source"] for number, cell in code_cells(executed)}
    if gone := noted.keys() - sources.keys():
        return min(gone)
    last = max(map(int, noted), default=0)
    for number in map(str, range(1, last + 1)):
        if noted.get(number) != results.files.cell_digest(sources[number]):
            return number
    return None


def _outputs(notebook: Any, mime: str) -> Iterator[tuple[str, Any]]:
    for number, cell in code_cells(notebook):
        for output in cell.get("outputs", []):
            if mime in output.get("data", {}):
                yield f"In [{number}]", output["data"][mime]


def seconds(executed: Any) -> dict[str, Any]:
    """Read the time of the run and of each code cell, as papermill measured them."""
    took = {str(number): cell["metadata"].get("papermill", {}).get("duration")
            for number, cell in code_cells(executed)}  # fmt: skip
    total = executed["metadata"].get("papermill", {}).get("duration")
    return {"seconds": total, "cell_seconds": took}


def harvest(
    executed: Any, source: Notebook, protocol: str, folder: Path, manifest: Mapping[str, Any]
) -> Run:
    """Make a run of what an executed notebook left; the ``manifest`` has all ``parameters``.

    It is refused unless the kernel had these and ran what the notebook shows (`check_run`).
    """
    facts, given = notes(executed), manifest["parameters"]
    check_run(executed, given, facts)
    lock = results.digest(results.part(folder, "requirements.lock"))
    code = {"notebook": results.files.cells_digest(executed["cells"]), "lock": lock}
    known = {"environment": facts["environment"], "known_arms": facts["known"]}
    known |= {"files": facts["files"]} if facts["files"] else {}
    return Run(
        notebook=source.name,
        protocol=protocol,
        tier=given["tier"],
        seed=given.get("seed", 0),
        values=values(executed),
        curves=values(executed, CURVE),
        arms=tuple(facts["arms"]),
        settings=sources.design(given),
        rows=facts["rows"],
        code={**code, "modules": facts["modules"]},
        manifest={**manifest, **known},
    )


def read_notebook(path: Path, folder: Path) -> Run:
    """Read an executed notebook as a run whose protocol is unknown (``mine``)."""
    if not path.is_file():
        refuse("E-NOFILE", f"no file {path}; give an executed notebook, such as my_run.ipynb")
    beside = path.with_suffix(".parquet")  # as `moebook run` leaves it: it knows cost and day
    if beside.is_file():
        run = results.read_run(beside)
        if run.manifest.get("executed") == results.digest(path):
            return replace(run, protocol="mine")
    source = sources.read(path)
    executed = results.read_ipynb(path)
    recorded = values(executed)
    if not recorded:
        refuse("E-RUN", f"{path.name} holds no recorded values; execute it first")
    name, known = recorded[0].name.split("/")[0], sources.notebooks(folder)
    refuse_unknown(name, known, "E-NOTEBOOK", f"{path.name} records values of '{name}';")
    given = dict[str, object]()
    for cell in executed["cells"]:
        # papermill's cell is tagged, also in copies whose other metadata are gone
        if "injected-parameters" in cell["metadata"].get("tags", []):
            given |= injected(cell["source"], path.name)
    parameters.check(source.parameters, given, path.name)
    manifest = {"parameters": source.defaults | given, "overrides": {}, "peak_memory": None}
    manifest |= _papermills(executed)
    with located(path.name):
        run = harvest(executed, source, "mine", folder, manifest)
    return replace(run, notebook=name)


def _papermills(executed: Any) -> dict[str, Any]:
    """Read when papermill ended and what it measured, unless a kernel has begun after that."""
    end = executed["metadata"].get("papermill", {}).get("end_time")
    if end and notes(executed)["begun"] <= end:
        return seconds(executed) | {"date": end}
    return {"seconds": None, "cell_seconds": {}}
