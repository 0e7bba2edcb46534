"""A reader's executed notebook beside the book's runs and the papers: one ledger of the three.

The reader's notebook may come from ``moebook run``, from plain papermill or from an afternoon in
Jupyter: its values are the outputs of `Run.record`, its parameters the parameters cell with what
papermill injected, its machine and versions the output of `begin`. Where the manifest of this very
file (by its hash) is beside it, that says all but the values.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from moebook import papers, results
from moebook.errors import nearest, refuse
from moebook.notebook import manifest as manifests
from moebook.notebook import publish, sources
from moebook.notebook.session import injected
from moebook.notebook.verdicts import verdict
from moebook.results import TIERS, Record

UNKNOWN = "unknown"
PAPERMILLS = "injected-parameters"


def compare(path: Path, folder: Path | None = None) -> str:
    """Put an executed notebook beside the book's records and the papers' numbers.

    Args:
        path: The reader's executed notebook.
        folder: The project with the book's records; found from the working directory by default.

    Returns:
        Text: what was compared, differences in parameters, versions and hardware, then the ledger.

    Raises:
        Refusal: E-NOFILE, E-NOTEBOOK, E-PARAMETER or E-RECORD for a file that is no executed
            notebook of this book, or a malformed manifest; E-VERDICT for a value that its claim
            does not allow.
    """
    mine = read(path)
    book = results.records(mine.notebook, folder)
    other = _nearest(mine, book)
    lines = [f"{path.name}: notebook {mine.notebook}, tier {mine.scale}, {len(mine.values)} values"]
    if other is None:
        lines.append("the book has no record of this notebook yet")
    else:
        manifests.check(other.manifest, f"manifest of {other.notebook} ({other.scale})")
        lines.append(f"beside the book's run at tier {other.scale}; differences (yours | book's):")
        lines.extend(_differences(mine.manifest, other.manifest) or ["  none"])
    return "\n".join([*lines, "", *_ledger(mine, book)])


def read(path: Path) -> Record:
    """Read a reader's executed notebook as a record; its manifest holds what can be known.

    Raises:
        Refusal: E-NOFILE, E-NOTEBOOK, E-PARAMETER or E-RECORD as in `compare`.
    """
    if not path.is_file():
        refuse("E-NOFILE", f"no file {path}; give an executed notebook, such as my_run.ipynb")
    source = sources.read(path)
    notebook = json.loads(path.read_text(encoding="utf-8"))
    if not all(map(_whole, notebook["cells"])):
        refuse("E-NOTEBOOK", f"{path.name} has a cell without outputs; open and save it in Jupyter")
    values = publish.values(notebook)
    if not values:
        refuse("E-RECORD", f"{path.name} holds no recorded values; execute it first")
    name = values[0].name.split("/")[0]
    known = {claim.run for claim in papers.claims()}
    if name not in known:
        refuse("E-NOTEBOOK", f"{path.name} records values of '{name}'; {nearest(name, known)}")
    manifest = _beside(path)
    if manifest.get("hashes", {}).get("executed") != results.digest(path):
        manifest = _own(notebook)
    declared = {name: parameter.default for name, parameter in source.parameters.items()}
    parameters = declared | (manifest.get("parameters") or _injected(notebook, path.name))
    return Record(name, parameters["tier"], values, {**manifest, "parameters": parameters})


def _whole(cell: Mapping[str, Any]) -> bool:
    """Whether a cell has what a notebook's format asks of it and is read here."""
    outputs = cell.get("outputs") if cell.get("cell_type") == "code" else []
    return (
        {"cell_type", "source"} <= set(cell)
        and isinstance(outputs, list)
        and all(isinstance(o, dict) and isinstance(o.get("data", {}), dict) for o in outputs)
    )


def _beside(path: Path) -> dict[str, Any]:
    """Read the manifest beside a notebook, of a live page or of a committed run; {} without one."""
    committed = path.name == "notebook.ipynb"
    beside = path.with_name("manifest.json" if committed else f"{path.stem}.manifest.json")
    if not beside.is_file():
        return {}
    try:
        found = json.loads(beside.read_text(encoding="utf-8"))
    except ValueError as error:
        refuse("E-RECORD", f"{beside} is not JSON ({error}); run the notebook again or remove it")
    if not isinstance(found, dict):
        refuse("E-RECORD", f"{beside} is no JSON object; run the notebook again or remove it")
    manifests.check(found, str(beside))
    return found


def _own(notebook: Mapping[str, Any]) -> dict[str, Any]:
    """What a notebook itself says of its machine, versions and time."""
    seconds = notebook.get("metadata", {}).get("papermill", {}).get("duration")
    cost = {"seconds": seconds} if seconds else {}
    return {"environment": publish.environment(notebook), **cost}


def _injected(notebook: Mapping[str, Any], where: str) -> dict[str, Any]:
    """What papermill set: its cell stays where its metadata are gone, as in the book's copies."""
    tags = [cell.get("metadata", {}).get("tags", []) for cell in notebook["cells"]]
    tagged = [c for c, own in zip(notebook["cells"], tags, strict=True) if PAPERMILLS in own]
    if not tagged:
        return {}
    try:
        return injected("".join(tagged[-1]["source"]))
    except (SyntaxError, ValueError) as error:
        refuse("E-PARAMETER", f"{where}: the injected cell is not name = value lines ({error})")


def _nearest(mine: Record, book: Mapping[str, Record]) -> Record | None:
    """The book's record at the reader's tier, else at the next lower one, else the lowest."""
    place = TIERS.index(mine.scale)
    order = sorted(
        book, key=lambda tier: (TIERS.index(tier) > place, abs(TIERS.index(tier) - place))
    )
    return book[order[0]] if order else None


def _differences(mine: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    ours, theirs = dict(_facts(mine)), dict(_facts(other))
    lines = []
    for name in dict.fromkeys([*ours, *theirs]):
        a, b = ours.get(name, UNKNOWN), theirs.get(name, UNKNOWN)
        if a != b:
            lines.append(f"  {name}: {a} | {b}")
    return lines


def _facts(manifest: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What a result may depend on: parameters, versions, hardware, and the code's hashes."""
    environment = manifest.get("environment", {})
    for name, value in manifest.get("parameters", {}).items():
        yield f"parameter {name}", value
    for name, value in environment.get("versions", {}).items():
        yield f"version of {name}", value
    for name, value in environment.items():
        if name != "versions":
            yield name, value
    for name in ("notebook", "package", "lock"):
        if name in manifest.get("hashes", {}):
            yield f"hash of the {name}", str(manifest["hashes"][name])[:12]
    if "seconds" in manifest:
        yield "seconds", round(manifest["seconds"], 1)


def _ledger(mine: Record, book: Mapping[str, Record]) -> Iterator[str]:
    for claim in papers.claims():
        if claim.run != mine.notebook:
            continue
        yield f"{claim.id}: {claim.sentence}"
        yield f"  paper  {claim.printed} ({claim.where})"
        yield f"  book   {verdict(claim, book.values()).badge}"
        yield f"  yours  {verdict(claim, [mine]).badge}"
