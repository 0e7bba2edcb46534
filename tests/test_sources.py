"""What sources look like: notebooks without outputs that tell a story, modules of readable size."""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
RUN = [path for path in NOTEBOOKS if not path.stem.endswith("_findings")]
SEVERAL = re.compile(r"\bseeds\b")  # a run has one; several are a pool's
MODULES = sorted(path for top in ("moebook", "recipes") for path in (ROOT / top).rglob("*.py"))
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
FRAME = 3  # imports, parameters and `notebook.begin` come first, one after the other

Cell = dict[str, Any]


def code(cell: Cell) -> str:
    """Source of a cell, without the lines of IPython's own syntax."""
    lines = "".join(cell["source"]).splitlines()
    return "\n".join(line for line in lines if not line.lstrip().startswith(("%", "!")))


def code_lines(cell: Cell) -> int:
    """Number of lines of a cell that are neither blank nor a comment."""
    lines = (line.strip() for line in "".join(cell["source"]).splitlines())
    return sum(bool(line) and not line.startswith("#") for line in lines)


def code_cells(notebook: dict[str, Any]) -> list[Cell]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def cell_problems(number: int, cell: Cell) -> Iterator[str]:
    """What is wrong with one code cell; numbers count code cells from 0."""
    where, nodes = f"code cell {number}: ", list(ast.walk(ast.parse(code(cell))))
    if cell.get("outputs") or cell.get("execution_count") is not None:
        yield f"{where}holds outputs"
    if any(isinstance(node, DEFINITIONS) for node in nodes):
        yield f"{where}defines a function or class"
    if number != 1 and code_lines(cell) > 12:  # the parameters cell has a line for each
        yield f"{where}{code_lines(cell)} lines of code"
    if number and any(isinstance(node, ast.Import | ast.ImportFrom) for node in nodes):
        yield f"{where}imports after the first code cell"
    calls = {ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)}
    draws = any(call.startswith("plotting.") for call in calls - {"plotting.style"})
    described = cell["metadata"].get("mystnb", {})
    for part, name in (("figure", "name"), ("figure", "caption"), ("image", "alt")):
        if draws and not described.get(part, {}).get(name):
            yield f"{where}its figure has no {name}"


def notebook_problems(notebook: dict[str, Any]) -> Iterator[str]:
    """Everything that keeps a notebook from being a recipe that tells its story."""
    cells, codes = notebook["cells"], code_cells(notebook)
    for number, cell in enumerate(codes):
        yield from cell_problems(number, cell)
    tagged = [i for i, cell in enumerate(codes) if "parameters" in cell["metadata"].get("tags", [])]
    if tagged != [1]:
        yield "the second code cell, and no other, is tagged `parameters`"
    if len(codes) < FRAME or "notebook.begin(" not in code(codes[2]):
        yield "the third code cell does not call `notebook.begin`"
    if not any(code(cell).startswith("# ") for cell in cells if cell["cell_type"] == "markdown"):
        yield "no title"
    positions = [i for i, cell in enumerate(cells) if cell["cell_type"] == "code"]
    for i in positions[FRAME:]:
        neighbours = cells[i - 1 : i] + cells[i + 1 : i + 2]
        if [cell["cell_type"] for cell in neighbours] != ["markdown", "markdown"]:
            yield f"cell {i}: a question before it or a reading after it is missing"


def module_problems(path: Path) -> list[str]:
    """What is too long or left undone in a module of the package; docstrings may be long."""
    text = path.read_text()
    lines = text.splitlines()
    problems = [f"{len(lines)} lines, at most 400"] if len(lines) > 400 else []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0 if ast.get_docstring(node) is None else min(1, len(node.body) - 1)]
            length = (node.end_lineno or 0) - first.lineno + 1 + node.body[0].lineno - node.lineno
            if length > 60:
                problems.append(f"line {node.lineno}: {node.name} has {length} lines, at most 60")
    left = re.compile(r"\b(TODO|FIXME|XXX|NotImplementedError)\b")
    return problems + [f"line {i}: {x.strip()}" for i, x in enumerate(lines, 1) if left.search(x)]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_a_recipe_without_outputs(path):
    assert list(notebook_problems(json.loads(path.read_text()))) == []


def test_the_notebooks_that_run_are_short_and_know_one_seed():
    cells = {path.stem: code_cells(json.loads(path.read_text())) for path in RUN}
    lines = {name: sum(map(code_lines, codes)) for name, codes in cells.items()}
    assert len(lines) == 8 and sum(lines.values()) <= 1390, lines
    assert not [name for name, codes in cells.items() if SEVERAL.search(" ".join(map(code, codes)))]


def test_modules_are_of_readable_size_finished_and_no_drawer_for_everything():
    problems = {str(path.relative_to(ROOT)): module_problems(path) for path in MODULES}
    assert {name: several for name, several in problems.items() if several} == {}
    drawers = {"utils", "helpers", "common", "base", "manager"}
    assert [path for path in MODULES if path.stem in drawers or path.parent.name in drawers] == []
