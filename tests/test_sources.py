"""What sources look like: notebooks without outputs that tell a story, modules finished."""

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from recipes import install

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
RUN = [path for path in NOTEBOOKS if not path.stem.endswith("_findings")]
SEVERAL = re.compile(r"\bseeds\b")  # a run has one; several are a pool's
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|NotImplementedError)\b")
MODULES = sorted(
    path
    for top in ("moebook", "recipes", "workshop")
    for path in (ROOT / top).rglob("*.py")
)
BEGIN = "begin("  # ends the frame: imports and parameters, which come first
# Calls that teach, as methods do.
SHOWN = {
    "bench",
    "experiment",
    "experiments.pipeline.selected",
    "fit",
    "together",
    "training.fit",
    "evaluation.evaluate",
}

DEFINES = (ast.ClassDef, ast.FunctionDef)
Cell = dict[str, Any]


def code(cell: Cell) -> str:
    """Source of a cell, without the lines of IPython's own syntax."""
    lines = "".join(cell["source"]).splitlines()
    return "\n".join(line for line in lines if not line.lstrip().startswith(("%", "!")))


def code_cells(notebook: dict[str, Any]) -> list[Cell]:
    """The code cells, without the one that installs the package where the notebook stands alone."""
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return [cell for cell in cells if "install" not in cell["metadata"].get("tags", [])]


def frame(codes: list[Cell]) -> int:
    """How many code cells the frame has: parameters and imports, up to `begin`."""
    begins = (number for number, cell in enumerate(codes, 1) if BEGIN in code(cell))
    return next(begins, 0)


def cell_problems(number: int, cell: Cell, in_frame: bool) -> Iterator[str]:
    """What is wrong with one code cell; numbers count code cells from 0."""
    where = f"code cell {number}: "
    nodes = list(ast.walk(ast.parse(code(cell))))
    if cell.get("outputs") or cell.get("execution_count") is not None:
        yield f"{where}holds outputs"
    imports = any(isinstance(node, ast.Import | ast.ImportFrom) for node in nodes)
    if imports and not in_frame:
        yield f"{where}imports after `begin`"
    calls = {ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)}
    draws = any(call.startswith("plotting.") for call in calls - {"plotting.style"})
    described = cell["metadata"].get("mystnb", {})
    for part, name in (("figure", "name"), ("figure", "caption"), ("image", "alt")):
        if draws and not described.get(part, {}).get(name):
            yield f"{where}its figure has no {name}"


def folding_problems(notebook: dict[str, Any]) -> Iterator[str]:
    """A page shows the code that calls or builds a method and folds what prepares and draws."""
    codes = code_cells(notebook)
    framed = frame(codes)
    imported = [
        node for cell in codes[:framed] for node in ast.walk(ast.parse(code(cell)))
    ]
    methods = [
        node
        for node in imported
        if "moebook.methods" in (getattr(node, "module", "") or "")
    ]
    shown = set(SHOWN)
    for node in methods:
        shown |= {name.asname or name.name for name in node.names}
    # What the page itself defines is there to be seen at work.
    for cell in codes[framed:]:
        nodes = ast.walk(ast.parse(code(cell)))
        shown |= {node.name for node in nodes if isinstance(node, DEFINES)}
    for number, cell in enumerate(codes):
        nodes = list(ast.walk(ast.parse(code(cell))))
        calls = {ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)}
        draws = any(
            call.startswith(("plotting.", "speed."))
            for call in calls - {"plotting.style"}
        )
        builds = any(isinstance(node, DEFINES) for node in nodes)
        teaches = builds or bool(
            {*calls, *(call.partition(".")[0] for call in calls)} & shown
        )
        folded = "hide-input" in cell["metadata"].get("tags", [])
        if folded == (teaches and not draws and number >= framed):
            yield f"code cell {number} is {'folded' if folded else 'open'}"


def notebook_problems(notebook: dict[str, Any]) -> Iterator[str]:
    """Everything that keeps a notebook from being a recipe that tells its story."""
    cells = notebook["cells"]
    codes = code_cells(notebook)
    framed = frame(codes)
    for number, cell in enumerate(codes):
        yield from cell_problems(number, cell, number < framed)
    tagged = [
        i
        for i, cell in enumerate(codes)
        if "parameters" in cell["metadata"].get("tags", [])
    ]
    if len(tagged) != 1 or tagged[0] >= framed:
        yield "one code cell before `begin`, and no other, is tagged `parameters`"
    if not 2 <= framed <= 3:
        yield "neither the second nor the third code cell calls `begin`"
    if not any(
        code(cell).startswith("# ") for cell in cells if cell["cell_type"] == "markdown"
    ):
        yield "no title"
    positions = [i for i, cell in enumerate(cells) if cell["cell_type"] == "code"]
    # The cell that installs the package stands before the frame.
    installs = len(positions) - len(codes)
    for i in positions[installs + framed :]:
        neighbours = cells[i - 1 : i] + cells[i + 1 : i + 2]
        if [cell["cell_type"] for cell in neighbours] != ["markdown", "markdown"]:
            yield f"cell {i}: a question before it or a reading after it is missing"


def unfinished(path: Path) -> list[str]:
    """Lines of a module that say that something is left to do."""
    lines = enumerate(path.read_text().splitlines(), 1)
    return [f"line {i}: {line.strip()}" for i, line in lines if UNFINISHED.search(line)]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_a_recipe_without_outputs(path):
    notebook = json.loads(path.read_text())
    assert [*notebook_problems(notebook), *folding_problems(notebook)] == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_alone_first_installs_the_released_wheel_and_only_in_colab(path):
    first = next(
        c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"
    )
    assert first["metadata"] == {"tags": ["install", "remove-cell"]}
    ran, shell = [], SimpleNamespace(run_line_magic=lambda *words: ran.append(words))
    for modules in ({}, {"google.colab": None}):
        with pytest.MonkeyPatch.context() as patch:
            for name, module in modules.items():
                patch.setitem(sys.modules, name, module)
            exec("".join(first["source"]), {"get_ipython": lambda: shell})
        assert ran == [("pip", f"install -q '{install.PACKAGE}'")] * len(modules)


def test_the_address_of_the_repository_is_decided_in_one_place():
    for path, text in install.texts().items():
        assert path.read_text(encoding="utf-8") == text, "python -m recipes.install"
    config = yaml.safe_load((ROOT / "_config.yml").read_text())
    assert config["repository"]["url"] == install.REPOSITORY
    owner = install.REPOSITORY.removeprefix("https://").removesuffix("/moebook")
    for path in (*ROOT.glob("*.*"), *(ROOT / "book").glob("*.md")):
        if not path.is_file():
            continue
        named = owner in path.read_text(encoding="utf-8")
        decided = path.name in ("pyproject.toml", "CHANGELOG.md")
        assert not named or decided or path in install.texts(), path.name


@pytest.mark.parametrize("path", RUN, ids=lambda path: path.stem)
def test_a_notebook_that_runs_knows_one_seed(path):
    cells = code_cells(json.loads(path.read_text()))
    assert not SEVERAL.search(" ".join(map(code, cells)))


def test_modules_are_finished_and_no_drawer_for_everything():
    left = {str(path.relative_to(ROOT)): unfinished(path) for path in MODULES}
    assert {name: lines for name, lines in left.items() if lines} == {}
    drawers = {"utils", "helpers", "common", "base", "manager"}
    assert [
        path for path in MODULES if path.stem in drawers or path.parent.name in drawers
    ] == []


def behind_the_frame(*sources: str) -> dict[str, Any]:
    """A notebook of these code cells behind the usual frame."""
    frame = ("from moebook import plotting", "steps: int = 1", "run = begin(In, {})")
    cells: list[Cell] = [
        {"cell_type": "markdown", "metadata": {}, "source": "# A title"}
    ]
    for source in (*frame, *sources):
        cells.append(
            {"cell_type": "code", "metadata": {}, "source": source, "outputs": []}
        )
        cells.append(
            {"cell_type": "markdown", "metadata": {}, "source": "What it means."}
        )
    cells[3]["metadata"] = {"tags": ["parameters"]}
    return {"cells": cells}


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("import os", "imports after"),
        ("if steps:\n    from os import path", "imports after"),
        ("figure = plotting.curves(history)", "no name, its figure has no caption"),
        ("figure = plotting.curves(history)", "no alt"),
        ("plotting.style()", ""),
    ],
)
def test_a_fault_in_a_cell_is_found(source, problem):
    problems = ", ".join(notebook_problems(behind_the_frame(source)))
    assert problem in problems.replace("code cell 3: ", "")
    assert bool(problem) == bool(problems)


def test_plumbing_that_is_open_and_a_method_that_is_folded_are_found():
    layer = "class Layer:\n    pass"
    loop = "def train(model):\n    pass"
    fit = "training.fit(model)"
    notebook = behind_the_frame(fit, layer, loop, fit, layer, loop, "x = 1")
    for place in (7, 9, 11):
        notebook["cells"][place]["metadata"] = {"tags": ["hide-input"]}
    found = [f"code cell {number} is open" for number in (0, 1, 2, 9)]
    found += [f"code cell {number} is folded" for number in (3, 4, 5)]
    assert sorted(folding_problems(notebook)) == sorted(found)


def test_outputs_missing_text_and_a_missing_frame_are_found():
    broken = behind_the_frame("x = 1")
    broken["cells"][7]["outputs"] = [{"output_type": "stream", "text": "1"}]
    del broken["cells"][8]
    del broken["cells"][3]["metadata"]["tags"]
    broken["cells"][5]["source"] = "x = 0"
    problems = "\n".join(notebook_problems(broken))
    for fault in ("holds outputs", "after it is missing", "tagged `para", "`begin`"):
        assert fault in problems


def test_unfinished_work_is_found(tmp_path):
    path = tmp_path / "module.py"
    path.write_text("x = 1\n# TO" + "DO: more\n")
    assert unfinished(path) == ["line 2: # TO" + "DO: more"]
