"""The project's files: where they are, how they are written, and the hashes of its code.

Comments and docstrings change no number and are not hashed; nor is what the papers print, since no
run is made of it.
"""

from __future__ import annotations

import ast
import fcntl
import functools
import hashlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from moebook.errors import Refusal, refuse
from moebook.results.documents import formed, read_ipynb

PACKAGE = Path(__file__).parents[1]
SHIPPED = PACKAGE / "shipped"  # in an installed wheel: notebooks, results and the lock
CODE = ("moebook", "notebooks", "requirements.lock")
WRITTEN = ("_build", "book", "results", "runs")  # folders that commands write to
FROZEN = ".commit"  # at the top of a frozen copy: the commit that it was exported from


def root(start: Path | None = None) -> Path:
    """Find the project: the nearest folder with ``_config.yml``, from the working directory up.

    Where there is none, an installed wheel serves the working directory (see `part`). A link in it
    through which we would write outside of it is refused.
    """
    begin = (start or Path.cwd()).resolve()
    above = [path for path in (begin, *begin.parents) if (path / "_config.yml").is_file()]
    if not above and not SHIPPED.is_dir():
        refuse("E-PATH", f"no _config.yml in {begin} or above; run inside a checkout of moebook")
    folder = above[0] if above else begin
    for path in (path for name in WRITTEN for below in ("", "/*", "/*/*")
                 for path in folder.glob(name + below) if path.is_symlink()):  # fmt: skip
        if not Path(target := os.path.realpath(path)).is_relative_to(folder):
            refuse("E-PATH", f"{path} leads out of the project, to {target}; make it a folder")
    return folder


def checkout() -> Path:
    """Find the project, which must be a checkout: the command adds to what it holds."""
    folder = root()
    if not (folder / "_config.yml").is_file():
        refuse("E-PATH", f"{folder} is no checkout of moebook, which this command needs: clone it")
    return folder


def part(folder: Path, name: str) -> Path:
    """Return ``notebooks``, ``results`` or the lock of a project, or what the wheel has of it."""
    own = folder / name
    return own if own.exists() else SHIPPED / name


@contextmanager
def locked(path: Path, *, wait: bool = False, patience: float = 1.0) -> Iterator[None]:
    """Hold a lock file for the length of the block: whoever else asks waits, or is refused.

    A refusal comes after a second of ``patience``: a `sweep` holds every lock for an instant. The
    file tells who holds it, and goes with the lock, unless it was renamed or its holder killed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    with open(handle, "r+", errors="replace") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
                break
            except BlockingIOError:
                if (patience := patience - 0.02) < 0:
                    refuse("E-LOCKED", f"{path} is held by process {file.read(20) or '?'}; wait")
                time.sleep(0.02)
        if _names(path, file):
            file.truncate(0)
            print(os.getpid(), end="", file=file, flush=True)
            try:
                yield
            finally:
                if _names(path, file):
                    path.unlink()
            return
    with locked(path, wait=wait):  # its last holder has removed or renamed it meanwhile
        yield


def _names(path: Path, file: IO[str]) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(path.lstat(), os.fstat(file.fileno()))
    return False


def sweep(folder: Path) -> None:
    """Remove the locks and half-written files that killed processes left in a folder."""
    for left in (*folder.glob("*.lock"), *folder.glob(".*.part")):
        with suppress(Refusal, OSError), locked(left, patience=0):
            pass


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary name beside a file, which takes its place when the block ends well."""
    temporary = path.with_name(f".{path.name}.part")
    with locked(temporary, wait=True):
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)


def write(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all; text as UTF-8."""
    with replacing(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def digest(path: Path) -> str | None:
    """Return the sha256 of a file's bytes in hex; None when there is no such file."""
    if not path.is_file():
        return None
    with path.open("rb") as file:  # weights do not fit into memory twice
        return hashlib.file_digest(file, "sha256").hexdigest()


def source(notebook: Path) -> str | None:
    """Hash the code cells of a notebook, without those that papermill injected or that install."""
    if not notebook.is_file():
        return None
    cells = [cell for cell in read_ipynb(notebook)["cells"] if cell["cell_type"] == "code"]
    apart = {"injected-parameters", "install"}
    code = [c["source"] for c in cells if apart.isdisjoint(c["metadata"].get("tags", []))]
    return hashlib.sha256("\n\n".join(code).encode()).hexdigest()


def loaded(known: Container[str] = ()) -> dict[str, str]:
    """Hash loaded modules and data files beside them, by path in the package; no ``known`` ones."""
    modules = [m for name, m in sys.modules.copy().items() if name.split(".")[0] == PACKAGE.name]
    files = [Path(module.__file__) for module in modules if module.__file__]
    data = [path for file in files if file.name == "__init__.py" for path in _data(file.parent)]
    names = {path.relative_to(PACKAGE).as_posix(): path for path in sorted({*files, *data})}
    return {name: code_digest(path) for name, path in names.items() if name not in known}


@functools.cache
def _data(package: Path) -> tuple[Path, ...]:
    """List a package's own data files, but none of what the papers print."""
    parts = (path for path in package.iterdir() if not (path / "__init__.py").is_file())
    own = (path for path in parts if path.name != "__pycache__")
    files = (file for path in own for file in (path, *path.rglob("*")) if file.is_file())
    kept = (path for path in files if path.suffix not in (".py", ".md"))
    return tuple(kept) if package.name != "papers" else ()


def code_digest(path: Path) -> str:
    """Hash what a module does, or the bytes of another file."""
    return _code(path.read_text(encoding="utf-8")) if path.suffix == ".py" else str(digest(path))


def code(folder: Path, by: Callable[[Path], str | None] = code_digest) -> str:
    """Hash what all files below a folder do, or hold (``by=digest``, which is quicker)."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix != ".pyc"]
    names = [(path.relative_to(folder).as_posix(), by(path)) for path in files]
    return hashlib.sha256(repr(names).encode()).hexdigest()


@functools.lru_cache(maxsize=1024)
def _code(text: str) -> str:
    """Hash a module's syntax tree without docstrings."""
    return hashlib.sha256(ast.dump(_Docstrings().visit(ast.parse(text))).encode()).hexdigest()


class _Docstrings(ast.NodeTransformer):
    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        value = node.value.value if isinstance(node.value, ast.Constant) else None
        return None if isinstance(value, str) else node


def commit(folder: Path) -> dict[str, Any] | None:
    """Return the git commit and whether the code differs from it (dirty); None without git."""
    if (folder / FROZEN).is_file():
        with formed(folder / FROZEN):
            name = (folder / FROZEN).read_text(encoding="ascii").strip()
            int(name, 16)
            return {"id": name, "dirty": False}
    command = ["git", "-C", str(folder), "status", "--porcelain=2", "--branch", "--", *CODE]
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    head = re.search(r"^# branch.oid ([0-9a-f]+)$", done.stdout, re.M)
    return {"id": head[1], "dirty": bool(re.search("^[^#]", done.stdout, re.M))} if head else None
