"""Of which code a run is, and what of it has changed since: shown, never forbidden.

A run keeps the hashes of the modules that it really loaded, of the data files beside them, and of
its notebook's code. Comments and docstrings change no number and do not count; nor does what the
papers print, which no run is made of.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Container
from datetime import date
from pathlib import Path
from typing import Any

from moebook.errors import refuse
from moebook.results.files import digest, root
from moebook.results.runs import Run

PACKAGE = Path(__file__).parents[1]
CODE = ("moebook", "notebooks", "requirements.lock")
FROZEN = ".commit"
"""File at the top of a frozen copy of the project: the commit that it was exported from."""


def loaded(known: Container[str] = ()) -> dict[str, str]:
    """Hash the package's modules that this process has loaded, and the data files beside them.

    Args:
        known: Names that are left out.

    Returns:
        Path below the package (``methods/pesc/crafting.py``) to hash.
    """
    modules = [m for name, m in list(sys.modules.items()) if name.split(".")[0] == PACKAGE.name]
    files = [Path(module.__file__) for module in modules if module.__file__]
    data = [path for file in files if file.name == "__init__.py" for path in _data(file.parent)]
    names = {path.relative_to(PACKAGE).as_posix(): path for path in sorted({*files, *data})}
    return {name: _hash(path) for name, path in names.items() if name not in known}


@functools.cache
def _data(package: Path) -> tuple[Path, ...]:
    """Data files of a package that belong to none inside it; none of what the papers print."""
    found: list[Path] = []
    for path in package.iterdir() if package.name != "papers" else ():
        if path.is_dir() and not (path / "__init__.py").is_file():
            found += [file for file in path.rglob("*") if file.is_file()]
        elif path.is_file():
            found.append(path)
    return tuple(path for path in found if path.suffix not in (".py", ".pyc", ".md"))


def _hash(path: Path) -> str:
    return _code(path.read_text(encoding="utf-8")) if path.suffix == ".py" else str(digest(path))


@functools.lru_cache(maxsize=1024)
def _code(text: str) -> str:
    """Hash what a module does: its syntax tree without docstrings."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [part for part in body if not _is_said(part)]  # type: ignore[attr-defined]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()


def _is_said(node: ast.stmt) -> bool:
    """Whether a statement is a string that nobody reads but people."""
    value = node.value if isinstance(node, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def source(notebook: Path) -> str | None:
    """Hash the code cells of a notebook's source, its parameters' defaults among them.

    Of an executed copy: without the cell that papermill injected.
    """
    if not notebook.is_file():
        return None
    cells = json.loads(notebook.read_text(encoding="utf-8")).get("cells", [])
    own = [c for c in cells if "injected-parameters" not in c.get("metadata", {}).get("tags", [])]
    code = ["".join(cell["source"]) for cell in own if cell["cell_type"] == "code"]
    return hashlib.sha256("\n\n".join(code).encode()).hexdigest()


def changed(run: Run, folder: Path | None = None) -> tuple[str, ...]:
    """Name what differs now from what a run ran: ``notebook``, ``lock``, and modules by name.

    Args:
        run: With the hashes of its code.
        folder: The project; found from the working directory by default.
    """
    folder = folder or root()
    (path, *_) = [*sorted((folder / "notebooks").glob(f"[0-9][0-9]_{run.notebook}.ipynb")), Path()]
    now = {"notebook": source(path), "lock": digest(folder / "requirements.lock")}
    parts = [part for part in now if part in run.code and run.code[part] != now[part]]
    for name, value in run.code.get("modules", {}).items():
        file = PACKAGE / name
        if not file.is_file() or _hash(file) != value:
            parts.append(name.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
    return tuple(parts)


def since(run: Run, folder: Path | None = None, most: int = 3) -> str:
    """Say of which day a run is and what has changed since, the first names only."""
    parts = changed(run, folder)
    names = ", ".join(parts[:most]) + (f" and {len(parts) - most} more" * (len(parts) > most))
    return f"of {day(run)}; " + (f"changed since: {names}" if parts else "code unchanged")


def day(run: Run) -> date:
    """Return the day on which a run ended (UTC).

    Raises:
        Refusal: ``E-RUN`` when its manifest has no date.
    """
    try:
        return date.fromisoformat(run.manifest["date"][:10])
    except (KeyError, TypeError, ValueError):
        refuse("E-RUN", f"manifest of {run.notebook}, {run.protocol}, seed {run.seed} has no date")


def commit(folder: Path) -> dict[str, Any] | None:
    """Return the git commit and whether what runs differs from it (dirty); None without git."""
    if (folder / FROZEN).is_file():
        return {"id": (folder / FROZEN).read_text(encoding="utf-8").strip(), "dirty": False}
    head = _git(folder, "rev-parse", "HEAD")
    status = _git(folder, "status", "--porcelain", "--", *CODE)
    return None if head is None or status is None else {"id": head, "dirty": bool(status)}


def _git(folder: Path, *arguments: str) -> str | None:
    """Ask git about a project; None without git, or when it fails."""
    command = ["git", "-C", str(folder), *arguments]
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
