"""A reader's executed notebook beside the book's runs and the papers: one ledger of the three.

The reader's notebook may come from ``moebook run``, from plain papermill or from an afternoon in
Jupyter: its values are the outputs of `Run.record`, its parameters the parameters cell with what
papermill injected, its machine and versions the output of `begin`. Where there is a manifest beside
it, that says all but the values.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from moebook import papers, results
from moebook.errors import nearest, refuse
from moebook.notebook import publish, sources
from moebook.notebook.session import injected
from moebook.notebook.verdicts import verdict
from moebook.results import TIERS, Record

UNKNOWN = "unknown"


def compare(path: Path, folder: Path | None = None) -> str:
    """Put an executed notebook beside the book's records and the papers' numbers.

    Args:
        path: The reader's executed notebook.
        folder: The project with the book's records; found from the working directory by default.

    Returns:
        Text: what was compared, differences in parameters, versions and hardware, then the ledger.

    Raises:
        Refusal: E-NOFILE, E-NOTEBOOK or E-RECORD for a file that is no executed notebook of this
            book; E-VERDICT for a value that its claim does not allow.
    """
    mine = read(path)
    book = results.records(mine.notebook, folder)
    other = _nearest(mine, book)
    lines = [f"{path.name}: notebook {mine.notebook}, tier {mine.scale}, {len(mine.values)} values"]
    if other is None:
        lines.append("the book has no record of this notebook yet")
    else:
        lines.append(f"beside the book's run at tier {other.scale}; differences (yours | book's):")
        lines.extend(_differences(mine.manifest, other.manifest) or ["  none"])
    return "\n".join([*lines, "", *_ledger(mine, book)])


def read(path: Path) -> Record:
    """Read a reader's executed notebook as a record; its manifest holds what can be known.

    Raises:
        Refusal: E-NOFILE, E-NOTEBOOK or E-RECORD as in `compare`.
    """
    if not path.is_file():
        refuse("E-NOFILE", f"no file {path}; give an executed notebook, such as my_run.ipynb")
    source = sources.read(path)
    notebook = json.loads(path.read_text(encoding="utf-8"))
    values = publish.values(notebook)
    if not values:
        refuse("E-RECORD", f"{path.name} holds no recorded values; execute it first")
    name = values[0].name.split("/")[0]
    known = {claim.run for claim in papers.claims()}
    if name not in known:
        refuse("E-NOTEBOOK", f"{path.name} records values of '{name}'; {nearest(name, known)}")
    manifest = _manifest(path, notebook)
    declared = {name: parameter.default for name, parameter in source.parameters.items()}
    parameters = manifest.get("parameters", declared | _injected(notebook))
    return Record(name, parameters["tier"], values, {**manifest, "parameters": parameters})


def _manifest(path: Path, notebook: Mapping[str, Any]) -> dict[str, Any]:
    beside = path.with_suffix(".manifest.json")
    if beside.is_file():
        found: dict[str, Any] = json.loads(beside.read_text(encoding="utf-8"))
        return found
    seconds = notebook["metadata"].get("papermill", {}).get("duration")
    cost = {"seconds": seconds} if seconds else {}
    return {"environment": publish.environment(notebook), **cost}


def _injected(notebook: Mapping[str, Any]) -> dict[str, Any]:
    """What papermill set: its cell stays where its metadata are gone, as in the book's copies."""
    tagged = [
        c for c in notebook["cells"] if "injected-parameters" in c["metadata"].get("tags", ())
    ]
    return injected("".join(tagged[-1]["source"])) if tagged else {}


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
