"""The notebooks of the project: ``notebooks/NN_name.ipynb``, their parameters and protocols.

A protocol is a YAML file beside the notebook, ``NN_name.<protocol>.yaml``: one flat mapping of
parameter to scalar, which plain ``papermill -f`` reads too. Its ``tier`` says which scale it
belongs to. The tier that the parameters cell declares as its default needs no file. A notebook
``NN_name_findings.ipynb`` reads pools of runs and trains nothing: it has no protocols.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from moebook import results
from moebook.errors import nearest, refuse
from moebook.notebook import parameters
from moebook.notebook.parameters import Parameter, Scalar

_STEM = re.compile(r"\d\d_([a-z0-9_]+)")
_FLAT = (
    yaml.StreamStartToken, yaml.StreamEndToken, yaml.DocumentStartToken, yaml.DocumentEndToken,
    yaml.BlockMappingStartToken, yaml.BlockEndToken, yaml.KeyToken, yaml.ValueToken,
    yaml.ScalarToken,
)  # fmt: skip


@dataclass(frozen=True)
class Notebook:
    """A notebook's source and what its parameters cell declares.

    Args:
        path: ``.../notebooks/NN_name.ipynb``.
        title: Its first heading.
        parameters: Name to declaration, in the cell's order; ``tier`` is always among them.
    """

    path: Path
    title: str
    parameters: dict[str, Parameter]

    @property
    def name(self) -> str:
        """The short name: ``pesc`` for ``01_pesc.ipynb``."""
        return self.path.stem[3:]

    @property
    def findings(self) -> bool:
        """Whether it reads the pools of another notebook, and has nothing to run at a scale."""
        return self.name.endswith("_findings")

    @property
    def protocols(self) -> list[str]:
        """Names of its protocols: the tiers in their order, where `study` stands for its own."""
        files = self.path.parent.glob(f"{self.path.stem}.*.yaml")
        names = {path.name.split(".")[1] for path in files} | {str(self.parameters["tier"].default)}
        order = {tier: place for place, tier in enumerate(results.TIERS)}
        return sorted(names, key=lambda name: (order.get(name, order["study"]), name))

    def settings(self, protocol: str) -> dict[str, Scalar]:
        """Read and check what a protocol sets, the parameter ``tier`` included.

        Raises:
            Refusal: ``E-PROTOCOL`` for one that the notebook lacks, ``E-CONFIG``, ``E-PARAMETER``,
                ``E-TYPE`` or ``E-RANGE`` for a file that breaks the rules.
        """
        file = self.path.with_name(f"{self.path.stem}.{protocol}.yaml")
        if protocol not in self.protocols:
            known = nearest(protocol, self.protocols)
            refuse("E-PROTOCOL", f"{self.name} has no protocol '{protocol}' ({file.name}); {known}")
        found = read_flat(file) if file.is_file() else {}
        for name, (value, where) in found.items():
            parameters.check(self.parameters, {name: value}, where)
        settings = {name: value for name, (value, _) in found.items()}
        tier = settings.setdefault("tier", self.parameters["tier"].default)
        if tier != protocol and (protocol in results.TIERS or tier not in results.COMMITTED):
            wanted = protocol if protocol in results.TIERS else ", ".join(results.COMMITTED)
            refuse("E-CONFIG", f"{file.name}: tier = {tier!r}; expected {wanted}")
        return settings


def design(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters that runs of one protocol share: all but seed, arms and device."""
    return {k: v for k, v in parameters.items() if k not in ("seed", "arms", "device")}


def notebooks(folder: Path) -> dict[str, Notebook]:
    """Read all notebooks of the project, by short name, in the order of their numbers.

    Raises:
        Refusal: ``E-NOTEBOOK`` for one that cannot be read, or a short name used twice.
    """
    paths = [p for p in sorted((folder / "notebooks").glob("*.ipynb")) if _STEM.fullmatch(p.stem)]
    found: dict[str, Notebook] = {}
    for path in paths:
        notebook = read(path)
        if notebook.name in found:
            refuse("E-NOTEBOOK", f"{found[notebook.name].path.name} and {path.name} share a name")
        found[notebook.name] = notebook
    return found


def find(folder: Path, name: str) -> Notebook:
    """Return the notebook with that short name, or refuse with the nearest one."""
    paths = sorted((folder / "notebooks").glob("*.ipynb"))
    known = {match[1]: path for path in paths if (match := _STEM.fullmatch(path.stem))}
    if not known:
        refuse("E-NOFILE", f"no notebooks/NN_name.ipynb in {folder}")
    if name not in known:
        refuse("E-NOTEBOOK", f"unknown notebook '{name}': {nearest(name, known)}")
    return read(known[name])


def read(path: Path) -> Notebook:
    """Read one notebook's parameters cell and title; nothing of it is executed.

    Raises:
        Refusal: ``E-NOTEBOOK`` when it is not a notebook of format 4 with one cell tagged
            ``parameters`` that declares ``tier``.
    """
    where = f"notebooks/{path.name}"
    cells = _cells(path, where)
    tagged = [c for c in cells if "parameters" in c.get("metadata", {}).get("tags", [])]
    if len(tagged) != 1:
        refuse("E-NOTEBOOK", f"{where}: expected one cell tagged 'parameters', found {len(tagged)}")
    declared = parameters.parse(_text(tagged[0]), where)
    if "tier" not in declared:
        refuse("E-NOTEBOOK", f'{where} must declare tier: str = "cpu"  # {{smoke, cpu, ...}}')
    lines = [line for c in cells if c.get("cell_type") == "markdown" for line in _lines(c)]
    titles = [line[2:].strip() for line in lines if line.startswith("# ")]
    return Notebook(path, titles[0] if titles else "", declared)


def _cells(path: Path, where: str) -> list[dict[str, Any]]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        refuse("E-NOTEBOOK", f"{where} is not JSON ({error}); it may be cut off")
    if not isinstance(data, dict) or data.get("nbformat") != 4 or "cells" not in data:
        refuse("E-NOTEBOOK", f"{where}: expected nbformat 4; convert it with jupyter nbconvert")
    cells: list[dict[str, Any]] = data["cells"]
    if not isinstance(cells, list) or not all(map(_is_cell, cells)):
        refuse("E-NOTEBOOK", f"{where}: malformed cells; open and save it in Jupyter")
    return cells


def _is_cell(cell: object) -> bool:
    metadata = cell.get("metadata", {}) if isinstance(cell, dict) else None
    return isinstance(metadata, dict) and isinstance(metadata.get("tags", []), list)


def _text(cell: dict[str, Any]) -> str:
    source = cell.get("source", "")
    return source if isinstance(source, str) else "".join(source)


def _lines(cell: dict[str, Any]) -> list[str]:
    return _text(cell).splitlines()


def read_flat(path: Path) -> dict[str, tuple[Any, str]]:
    """Read a YAML file of one flat mapping: name to value and the place of its line.

    Tags, anchors, lists, nested mappings and repeated keys are refused, each with file:line:col,
    because papermill would turn some of them into code.

    Raises:
        Refusal: ``E-CONFIG``.
    """
    text = _decode(path)
    try:
        tokens = list(yaml.scan(text, Loader=yaml.SafeLoader))
        for token in tokens:
            if not isinstance(token, _FLAT):
                refuse("E-CONFIG", f"{_at(path, token.start_mark)}: {_kind(token)} is not allowed")
        if sum(isinstance(token, yaml.BlockMappingStartToken) for token in tokens) > 1:
            refuse("E-CONFIG", f"{path.name}: expected one flat mapping of name: value")
        return _pairs(path, yaml.compose(text, Loader=yaml.SafeLoader))
    except yaml.MarkedYAMLError as error:
        refuse("E-CONFIG", f"{_at(path, error.problem_mark)}: {error.problem}")
    except (yaml.YAMLError, ValueError) as error:
        refuse("E-CONFIG", f"{path.name}: {error}")


def _pairs(path: Path, node: yaml.Node | None) -> dict[str, tuple[Any, str]]:
    if node is not None and not isinstance(node, yaml.MappingNode):
        refuse("E-CONFIG", f"{_at(path, node.start_mark)}: expected name: value")
    found: dict[str, tuple[Any, str]] = {}
    for key, value in node.value if node is not None else []:
        where = _at(path, key.start_mark)
        if key.value in found:
            refuse("E-CONFIG", f"{where}: {key.value} is given twice")
        found[key.value] = (yaml.SafeLoader("").construct_object(value), where)
    return found


def _decode(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        refuse("E-CONFIG", f"{path.name}: not UTF-8 at byte {error.start}")


def _at(path: Path, mark: yaml.Mark | None) -> str:
    return path.name if mark is None else f"{path.name}:{mark.line + 1}:{mark.column + 1}"


def _kind(token: yaml.Token) -> str:
    return f"YAML {type(token).__name__.removesuffix('Token').lower()}"
