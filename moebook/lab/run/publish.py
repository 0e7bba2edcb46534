"""What an executed notebook left: what of it may be shown, and the run of its values and curves.

Shown are plain text, PNG figures, tables of the elements and attributes named here, and
recorded values. Errors and secrets are refused, everything else is left out and
counted.
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
from html import unescape
from pathlib import Path
from typing import Any, NoReturn

import lxml.html
from lxml import etree

from moebook import storage
from moebook.errors import located, refuse, refuse_unknown, shown
from moebook.lab import records
from moebook.lab.records.runs import Run, plain, restored
from moebook.lab.run import parameters, sources
from moebook.lab.run.session import (
    ABSENT,
    CURVE,
    GLUE,
    NOTE,
    RECORDED,
    VALUE,
    injected,
)
from moebook.lab.run.sources import Notebook

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
    rf"(?<![\w.:/~-])(?:/(?:{_TOPS})(?:/[\w.@+=-]+)+/?|[A-Za-z]:(?:\\[\w.@+=-]+){{2,}})",
    re.ASCII,
)

_ELEMENTS = frozenset(
    "table thead tbody tfoot tr th td caption colgroup col div p br b i em strong sub sup code"
    " small span".split()
)
_SILENT = ("script", "style", "iframe", "object", "template", "noscript", "svg", "math")
LINE = 30  # characters of a cell beyond which it is text to be read
_ATTRIBUTES = ("class", "colspan", "rowspan", "scope", "border")


def code_cells(notebook: Any) -> list[tuple[int, Any]]:
    """Number the code cells from 1, as a fresh kernel does, which runs no empty ones."""
    run_by_kernel: list[Any] = []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code" and cell["source"].strip():
            run_by_kernel.append(cell)
    return list(enumerate(run_by_kernel, start=1))


def clean(notebook: Any, folder: Path) -> tuple[Any, dict[str, int]]:
    """Return a copy of an executed notebook that may be published, and what was left out.

    That is counted by kind: MIME types, ``stderr``, ``path``, ``metadata`` ...
    """
    notebook = json.loads(json.dumps(notebook))
    dropped = Counter[str]()
    for number, cell in code_cells(notebook):
        outputs: list[Any] = []
        for output in cell["outputs"]:
            allowed = _output(output, f"In [{number}]", folder, dropped)
            if allowed is not None:
                outputs.append(allowed)
        cell["outputs"] = outputs
    for cell in notebook["cells"]:
        if cell.pop("attachments", None):
            dropped["attachments"] += 1
        _forbid_secrets(cell)
        cell["metadata"] = _only(cell["metadata"], _CELL_METADATA)
    if "widgets" in notebook["metadata"]:
        dropped["widgets"] += 1
    notebook["metadata"] = _only(notebook["metadata"], _METADATA)
    # Only kinds of which something was left out; `+` takes away the counts of 0.
    return notebook, dict(sorted((+dropped).items()))


def _output(output: Any, where: str, folder: Path, dropped: Counter[str]) -> Any | None:
    """Return what of one output may be shown, or None; count what is left out."""
    _forbid_error(output, where)
    if output["output_type"] == "stream":
        if output["name"] != "stdout":
            dropped[output["name"]] += 1
            return None
        return output | {"text": _text(output["text"], folder, dropped)}
    data: dict[str, Any] = {}
    for mime, content in output.get("data", {}).items():
        allowed = _allowed(mime, content, folder, dropped)
        if allowed is None:
            dropped[mime] += 1
        else:
            data[mime] = allowed
    if not data:
        return None
    # {glue} finds values, curves and notes by the name in the key `scrapbook`.
    hidden = data.keys() & {*RECORDED, NOTE}
    keys = ("scrapbook",) if hidden else ()
    metadata = _only(output.get("metadata", {}), keys)
    return output | {"data": data, "metadata": metadata}


def _forbid_error(output: Any, where: str) -> None:
    if output["output_type"] == "error":
        error = f"{output.get('ename')}: {output.get('evalue', '')[:200]}"
        refuse("E-OUTPUT", f"{where} holds an error: {error}")


def _allowed(
    mime: str, content: Any, folder: Path, dropped: Counter[str]
) -> Any | None:
    """Return what of one representation of an output may be shown, or None."""
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
    if mime == NOTE:
        if isinstance(content, dict) and "parameters" in content:
            return content  # the cells show these values as they are
        return json.loads(_text(json.dumps(content), folder, dropped))
    return None


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
    chunks = [_PNG]
    place = len(_PNG)
    # A chunk is the length of its data (4 bytes), its name (4), its data, a checksum (4).
    while place + 12 <= len(data):
        (length,) = struct.unpack_from(">I", data, place)
        name = data[place + 4 : place + 8]
        chunk = data[place : place + 12 + length]
        if name in _PNG_CHUNKS:
            chunks.append(chunk)
        else:
            dropped["png metadata"] += 1
        place += len(chunk)
    return base64.b64encode(b"".join(chunks)).decode()


def _forbid_secrets(cell: Any) -> None:
    """Refuse a cell whose source or text outputs show a secret; pictures are not read."""
    texts = [cell["source"]]
    for output in cell.get("outputs", []):
        texts.append(output.get("text", ""))
        for mime, content in output.get("data", {}).items():
            if mime != "image/png":
                texts += _strings(content)
    kind = secret("\n".join(texts))
    if kind:
        is_code = cell["cell_type"] == "code"
        place = f"In [{cell['execution_count']}]" if is_code else "a text cell"
        fix = "nothing was published: remove it from the cell"
        refuse("E-SECRET", f"{place} shows {kind}; {fix}")


def _strings(content: Any) -> Iterator[str]:
    """Yield the texts of an output, as they stand there and as a browser shows them."""
    if isinstance(content, str):
        yield content
        yield unescape(content)
    elif isinstance(content, Mapping):
        for name, part in content.items():
            yield name
            yield from _strings(part)
    elif isinstance(content, list):
        for part in content:
            yield from _strings(part)


def _only(metadata: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: metadata[name] for name in names if metadata.get(name)}


def environment() -> dict[str, str]:
    """Return this process's environment without what suggests a secret by name or value."""
    open_variables: dict[str, str] = {}
    for name, value in os.environ.items():
        if not _SECRET_NAME.search(name) and not secret(value, {}):
            open_variables[name] = value
    return open_variables


def secret(text: str, variables: Mapping[str, str] | None = None) -> str | None:
    """Say what kind of secret a text shows, or None.

    A secret is also the value of a variable with a name such as TOKEN; ``variables``
    are this process's if None.
    """
    for kind, pattern in _SECRET_TEXT.items():
        if re.search(pattern, text):
            return kind
    if variables is None:
        variables = os.environ
    for name, value in variables.items():
        secretive = _SECRET_NAME.search(name) and len(value) >= _SHORTEST
        if secretive and value in text:
            return f"the value of the environment variable {name}"
    return None


def scrub(text: str, folder: Path) -> tuple[str, int]:
    """Make absolute paths relative inside the project, else ``.../name``; count them."""
    text, count = re.subn(rf"{re.escape(str(folder))}(?:/|(?![\w.-]))", "", text)
    places = {sys.prefix, tempfile.gettempdir(), str(Path.home())} - {"/", ""}
    patterns: list[re.Pattern[str]] = []
    for place in places:
        patterns.append(re.compile(rf"{re.escape(place)}(?:[/\\][\w.@+=-]+)+"))
    patterns.append(_PATH)
    for pattern in patterns:
        text, replaced = pattern.subn(_name_alone, text)
        count += replaced
    return text, count


def _name_alone(path: re.Match[str]) -> str:
    """Return the last name of a path that was found, behind dots."""
    *_, name = re.findall(r"[^/\\]+", path[0])
    return f".../{name}"


def reduced_table(text: str) -> str | None:
    """Return the HTML of a table (pandas') with text, structure and classes only, else None.

    What pandas writes as NaN is a dash: nothing was measured there. Cells of text have the class
    ``prose``, so that a phone does not set them a word a line.
    """
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
    for cell in tree.iter("td"):
        if cell.text == "NaN":
            cell.text = ABSENT
        elif len(cell.text_content()) > LINE:
            cell.set("class", "prose")
    tree.attrib.clear()
    written: str = etree.tostring(tree, method="html", encoding="unicode")
    return written.removeprefix("<body>").removesuffix("</body>").strip()


def values(notebook: Any, mime: str = VALUE) -> tuple[Any, ...]:
    """Return what a notebook's `Run.record` calls left, or those of `Run.curve`, in order."""
    kind = RECORDED[mime]
    outputs = _outputs(notebook, mime)
    return tuple(restored(kind, content, where) for where, content in outputs)


def warned(notebook: Any) -> list[str]:
    """Return our own warnings (W-IDLE, W-BASE ...) that cells left, in order, each once."""
    lines: dict[str, None] = {}
    for _, cell in code_cells(notebook):
        lines |= dict.fromkeys(_warnings(cell))
    return list(lines)


def unreadable(notebook: Any) -> list[str]:
    """Say what a reader cannot read in figures (W-FIGURE), each with the name of its figure."""
    faults: dict[str, None] = {}
    for number, cell in code_cells(notebook):
        named = cell["metadata"].get("mystnb", {}).get("figure", {})
        name = named.get("name", f"of In [{number}]")
        for line in _warnings(cell):
            code, _, fault = line.partition(": ")
            if code == "W-FIGURE":
                faults[f"figure {name}: {fault}"] = None
    return list(faults)


def _warnings(cell: Any) -> Iterator[str]:
    """Yield our own warnings that a cell left."""
    for output in cell.get("outputs", []):
        if output.get("name") == "stderr":
            yield from re.findall(r"Warning: (W-[A-Z]+: .*)", output["text"])


def notes(notebook: Any) -> dict[str, Any]:
    """Gather what a notebook notes of its run, by the names in `NOTES`."""
    facts: dict[str, Any] = {name: kind() for name, kind in NOTES.items()}
    for where, content in _outputs(notebook, NOTE):
        if not isinstance(content, dict):
            _refuse_note(where)
        for name, fact in content.items():
            if name not in NOTES or not isinstance(fact, NOTES[name]):
                _refuse_note(where)
            if name == "parameters" and facts[name]:
                refuse("E-OUTPUT", f"{where} begins a second run; a notebook holds one")
            if isinstance(fact, dict):
                facts[name] = facts[name] | fact
            else:
                facts[name] = fact
    return facts


def _refuse_note(where: str) -> NoReturn:
    refuse("E-OUTPUT", f"{where}: malformed note of the run; execute it again")


def check_run(
    executed: Any, given: Mapping[str, Any], facts: Mapping[str, Any]
) -> None:
    """Refuse an executed notebook unless a fresh kernel ran all of it once, in order, as it stands.

    The kernel notes cells when it records. Those behind the last recorded value are held to
    their order alone: what is changed there after the run moves no value.

    ``given`` are the parameters that it should have run with: those that were asked
    for, or that its cells show. They are compared with the ``facts`` that the kernel
    noted (`notes`).

    Raises:
        Refusal: ``E-OUTPUT`` where a cell failed or did not run in its order; ``E-RUN``
            where a cell up to the last recorded value was changed after it ran;
            ``E-PARAMETER`` where the kernel had other values.
    """
    again = "restart the kernel and run all"
    for number, cell in code_cells(executed):
        for output in cell["outputs"]:
            _forbid_error(output, f"In [{number}]")
        count = cell["execution_count"]
        if count is None:
            refuse("E-OUTPUT", f"code cell {number} did not run; {again}")
        if count != number:
            ran = f"ran as In [{count}], not as In [{number}]"
            refuse("E-OUTPUT", f"code cell {number} {ran}; {again}")
    noted = facts["parameters"]
    if not noted:
        missing = "no note of `begin` says with which parameters it ran"
        refuse("E-RUN", f"{missing}; {again}")
    for name in sorted(given.keys() | noted.keys()):
        asked = given.get(name, "absent")
        had = noted.get(name, "absent")
        if asked != had:
            pair = f"{name} should be {shown(asked)}, and the kernel had {shown(had)}"
            why = "a cell changed it, or its cell was changed later"
            refuse("E-PARAMETER", f"{pair}: {why}; {again}")
    odd = _other_cell(executed, facts["cells"])
    if odd:
        why = "is not the cell that ran, or its output is gone"
        refuse("E-RUN", f"In [{odd}] {why}; {again}")


def _other_cell(executed: Any, noted: Mapping[str, str]) -> str | None:
    """Find a cell, up to the last one that the kernel noted, whose hash is not the noted one."""
    texts = {str(number): cell["source"] for number, cell in code_cells(executed)}
    gone = noted.keys() - texts.keys()
    if gone:
        return min(gone, key=lambda number: (len(number), number))
    last = max(map(int, noted), default=0)
    for number in map(str, range(1, last + 1)):
        if noted.get(number) != storage.files.cell_digest(texts[number]):
            return number
    return None


def _outputs(notebook: Any, mime: str) -> Iterator[tuple[str, Any]]:
    """Yield the outputs of one MIME type, each with the cell that it stands in."""
    for number, cell in code_cells(notebook):
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if mime in data:
                yield f"In [{number}]", data[mime]


def seconds(executed: Any) -> dict[str, Any]:
    """Read the time of the run and of each code cell, as papermill measured them."""
    by_cell: dict[str, float | None] = {}
    for number, cell in code_cells(executed):
        by_cell[str(number)] = cell["metadata"].get("papermill", {}).get("duration")
    total = executed["metadata"].get("papermill", {}).get("duration")
    return {"seconds": total, "cell_seconds": by_cell}


def harvest(
    executed: Any,
    source: Notebook,
    protocol: str,
    folder: Path,
    manifest: Mapping[str, Any],
) -> Run:
    """Make a run of what an executed notebook left; the ``manifest`` has all ``parameters``.

    It is refused unless the kernel had these and ran what the notebook shows
    (`check_run`).
    """
    facts = notes(executed)
    given = manifest["parameters"]
    check_run(executed, given, facts)
    noted = {"environment": facts["environment"], "known_arms": facts["known"]}
    if facts["files"]:
        noted["files"] = facts["files"]
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
        code={
            "notebook": storage.files.cells_digest(executed["cells"]),
            "lock": storage.digest(storage.part(folder, "requirements.lock")),
            "modules": facts["modules"],
        },
        manifest={**manifest, **noted},
    )


def read_notebook(path: Path, folder: Path) -> Run:
    """Read an executed notebook as a run whose protocol is unknown (``mine``)."""
    if not path.is_file():
        refuse(
            "E-NOFILE",
            f"no file {path}; give an executed notebook, such as my_run.ipynb",
        )
    # As `moebook run` leaves it: it knows cost and day.
    beside = path.with_suffix(".parquet")
    if beside.is_file():
        run = records.read_run(beside)
        if run.manifest.get("executed") == storage.digest(path):
            return replace(run, protocol="mine")
    source = sources.read(path)
    executed = storage.read_ipynb(path)
    recorded = values(executed)
    if not recorded:
        refuse("E-RUN", f"{path.name} holds no recorded values; execute it first")
    # Values are named pesc/sparse/accuracy: the notebook's name comes first.
    name, *_ = recorded[0].name.split("/")
    known = sources.notebooks(folder)
    refuse_unknown(
        name, known, "E-NOTEBOOK", f"{path.name} records values of '{name}';"
    )
    given: dict[str, object] = {}
    for cell in executed["cells"]:
        # papermill's cell is tagged, also in copies whose other metadata are gone
        if "injected-parameters" in storage.tags(cell):
            given |= injected(cell["source"], path.name)
    given = parameters.check(source.parameters, given, path.name)
    manifest = {
        "parameters": source.defaults | given,
        "overrides": {},
        "peak_memory": None,
        **_papermills(executed),
    }
    with located(path.name):
        run = harvest(executed, source, "mine", folder, manifest)
    return replace(run, notebook=name)


def _papermills(executed: Any) -> dict[str, Any]:
    """Read when papermill ended and what it measured, unless a kernel has begun after that."""
    end = executed["metadata"].get("papermill", {}).get("end_time")
    if end and notes(executed)["begun"] <= end:
        return seconds(executed) | {"date": end}
    return {"seconds": None, "cell_seconds": {}}
