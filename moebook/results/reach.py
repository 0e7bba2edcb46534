"""What of the package a notebook reaches: the files that can change its numbers, and no others.

A fix in one method must not call another method's recorded study out of date, nor repeat its
hours of work. So a run is keyed by the modules that its notebook imports, directly or through
others, and by the data files of the packages among them.

Of a module counts what it does: a docstring changes no number, and neither does a refusal, since a
run that was recorded was not refused.

The Triton kernels run on an accelerator alone: a record made without one does not depend on them.
A base that ships with the package, or a paper's tables, count for the notebooks that name them.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
from pathlib import Path

from moebook.results.files import digest

PACKAGE = Path(__file__).parents[1]
FILTER = "moebook.notebook.publish"
"""Reached by every notebook, since it decides what of the outputs is kept."""

CASES = "bench/running.py"
"""Imports the benchmark's other modules by name."""

TRITON = "kernels/_triton"
"""The folder of the Triton kernels. `moebook.kernels.dispatch` imports them by name."""


def package_digest(notebook: Path, *, accelerator: bool = False) -> str:
    """Return one sha256 over the names and contents of all files that a notebook reaches."""
    files = reached(notebook, accelerator=accelerator)
    names = sorted(path.relative_to(PACKAGE) for path in files)
    lines = (f"{name.as_posix()} {_content(PACKAGE / name)}\n" for name in names)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _content(path: Path) -> str | None:
    """Return the sha256 of a file; of a module, without the lines of docstrings and refusals."""
    if path.suffix != ".py":
        return digest(path)
    text = path.read_text(encoding="utf-8")
    left_out = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.stmt) and (_is_said(node) or _is_refusal(node))
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    kept = (line for number, line in enumerate(text.splitlines(), 1) if number not in left_out)
    return hashlib.sha256("\n".join(kept).encode()).hexdigest()


def _is_said(node: ast.stmt) -> bool:
    """Whether a statement is a string that nobody reads but people."""
    value = node.value if isinstance(node, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def _is_refusal(node: ast.stmt) -> bool:
    """Whether all that a statement can do is to refuse: a plain `if`, or a loop over such."""
    if isinstance(node, ast.For):
        return not node.orelse and all(map(_is_refusal, node.body))
    if not isinstance(node, ast.If) or node.orelse:
        return False
    if any(isinstance(part, ast.NamedExpr) for part in ast.walk(node.test)):
        return False
    *before, last = node.body
    call = last.value if isinstance(last, ast.Expr) else None
    refuses = isinstance(call, ast.Call) and ast.unparse(call.func) == "refuse"
    return refuses and all(isinstance(statement, ast.Assign) for statement in before)


def reached(notebook: Path, *, accelerator: bool = False) -> set[Path]:
    """Find the modules that a notebook imports, with all that they import, and their data.

    Imports inside functions count. A data file (anything but Python below a package's folder)
    belongs to the innermost package around it.

    Args:
        notebook: An ``.ipynb`` file.
        accelerator: Whether it runs with one. Then all Triton kernels are reached where the ops
            are, and else none is.
    """
    cells = json.loads(notebook.read_text(encoding="utf-8")).get("cells", [])
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    lines = (line for line in code.splitlines() if not line.lstrip().startswith(("%", "!")))
    todo, files = _imports("\n".join(lines)) | {FILTER}, set[Path]()
    while todo:
        name = todo.pop()
        path = _file(name)
        if path is not None and path not in files:
            files.add(path)
            if path == PACKAGE / CASES:
                todo |= {f"moebook.bench.{other.stem}" for other in path.parent.glob("*.py")}
            todo |= _imports(path.read_text(encoding="utf-8")) | {name.rpartition(".")[0]}
    kernels = PACKAGE / TRITON
    if accelerator and kernels.parent / "__init__.py" in files:
        files |= set(kernels.glob("*.py"))
    elif not accelerator:
        files = {path for path in files if kernels not in path.parents}
    return files | {path for path in _data() if _owner(path) in files and _named(path, code)}


def _imports(code: str) -> set[str]:
    """Names of the package's modules, and perhaps of things in them, that code imports."""
    found = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.split(".")[0] == "moebook"}


def _file(name: str) -> Path | None:
    """The file of a module of the package; None where the name means no module."""
    base = PACKAGE.joinpath(*name.split(".")[1:])
    for path in (base / "__init__.py", base.with_suffix(".py")):
        if name and path.is_file():
            return path
    return None


def _data() -> list[Path]:
    """All files of the package that are no Python, hidden ones and byte code left out."""
    return [
        path
        for path in PACKAGE.rglob("*")
        if path.is_file()
        and path.suffix not in (".py", ".pyc")
        and not any(part.startswith(".") for part in path.relative_to(PACKAGE).parts)
    ]


def _named(path: Path, code: str) -> bool:
    """Say whether code names the base or paper that a data file belongs to; true for other data."""
    folder, *rest = path.relative_to(PACKAGE).parts
    if folder not in ("models", "papers") or len(rest) < 2:
        return True
    return re.search(rf"(?<![\w-]){re.escape(rest[0])}(?![\w-])", code) is not None


def _owner(path: Path) -> Path:
    """The ``__init__.py`` of the innermost package around a file."""
    for folder in path.parents:
        if (folder / "__init__.py").is_file() or folder == PACKAGE:
            break
    return folder / "__init__.py"
