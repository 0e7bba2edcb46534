"""The project's files: where they are, how they are written, and the hashes of its code.

Comments and docstrings change no number and are not hashed; nor is what the papers
print, since no run is made of it.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import os
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from filelock import lock_descriptor

from moebook.errors import Refusal, placed, refuse
from moebook.storage.documents import formed, read_ipynb, tags

PACKAGE = Path(__file__).parents[1]
SHIPPED = PACKAGE / "shipped"  # in an installed wheel: notebooks, results and the lock
CODE = ("moebook", "notebooks", "requirements.lock")
WRITTEN = ("_build", "book", "results", "runs")  # folders that commands write to
DATA = (
    ".csv",
    ".json",
    ".jsonl",
    ".mplstyle",
    ".safetensors",
    ".sha256",
    ".txt",
    ".yaml",
)
KINDS = (*DATA, ".md", ".py")  # of files in the package
_OWN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_COPY = re.compile(r"-Copy\d*(\.|$)")  # as Jupyter names one
LOOK = 0.02  # seconds between two tries of a lock
NO_LINK = getattr(os, "O_NOFOLLOW", 0)  # where the system knows that flag
FROZEN = ".commit"  # at the top of a frozen copy: the commit that it was exported from


def root(start: Path | None = None) -> Path:
    """Find the project: the nearest folder with ``_config.yml``, from the working directory up.

    Where there is none, an installed wheel serves the working directory (see `part`). A
    link in it through which we would write outside of it is refused.
    """
    begin = (start or Path.cwd()).resolve()
    above = [
        path for path in (begin, *begin.parents) if (path / "_config.yml").is_file()
    ]
    if not above and not SHIPPED.is_dir():
        fix = "run inside a checkout of moebook"
        refuse("E-PATH", f"no _config.yml in {begin} or above; {fix}")
    folder = above[0] if above else begin
    for path in _links(folder):
        target = os.path.realpath(path)
        if not Path(target).is_relative_to(folder):
            problem = f"{path} leads out of the project, to {target}"
            refuse("E-PATH", f"{problem}; make it a folder")
    return folder


def _links(folder: Path) -> Iterator[Path]:
    """Find the links in the folders that commands write to, down to two levels below."""
    for name in WRITTEN:
        for below in ("", "/*", "/*/*"):
            for path in folder.glob(name + below):
                if path.is_symlink():
                    yield path


def checkout() -> Path:
    """Find the project, which must be a checkout: the command adds to what it holds."""
    folder = root()
    if not (folder / "_config.yml").is_file():
        refuse(
            "E-PATH",
            f"{folder} is no checkout of moebook, which this command needs: clone it",
        )
    return folder


def part(folder: Path, name: str) -> Path:
    """Return ``notebooks``, ``results`` or the lock of a project, or what the wheel has of it."""
    own = folder / name
    return own if own.exists() else SHIPPED / name


@contextmanager
def locked(path: Path, *, wait: bool = False, patience: float = 1.0) -> Iterator[None]:
    """Hold a lock file for the length of the block: whoever else asks waits, or is refused.

    A refusal comes after a second of ``patience``: a `sweep` holds every lock for an
    instant. The file tells who holds it, and goes with the lock, unless it was renamed
    or its holder killed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT | NO_LINK, 0o600)
    with open(handle, "r+", errors="replace") as file:
        if wait:
            lock_descriptor(handle, poll_interval=LOOK)
        else:
            while not lock_descriptor(handle, blocking=False):
                patience -= LOOK
                if patience < 0:
                    holder = file.read(20) or "?"
                    refuse("E-LOCKED", f"{path} is held by process {holder}; wait")
                time.sleep(LOOK)
        if _names(path, file):
            try:
                with placed(path):
                    file.truncate(0)
                    os.write(handle, str(os.getpid()).encode())
                yield
            finally:
                if _names(path, file):
                    path.unlink()
            return
    with locked(path, wait=wait):  # its last holder has removed or renamed it meanwhile
        yield


def _names(path: Path, file: IO[str]) -> bool:
    """Whether a path still leads to the file that was opened by it."""
    with suppress(FileNotFoundError):
        return os.path.samestat(path.lstat(), os.fstat(file.fileno()))
    return False


def sweep(folder: Path) -> None:
    """Remove the locks and half-written files that killed processes left in a folder.

    A lock of ours holds the number of a process, or nothing yet. The folder may be a
    user's, with others' ``uv.lock`` or ``requirements.lock`` in it, which stay.
    """
    locks = [path for path in folder.glob("*.lock") if _holds_a_number(path)]
    half_written = folder.glob(".*.part")
    for path in (*locks, *half_written):
        # Who takes a lock removes its file at the end; one that is held stays.
        with suppress(Refusal, OSError), locked(path, patience=0):
            pass


def _holds_a_number(path: Path) -> bool:
    with suppress(OSError), path.open("rb") as file:
        return re.fullmatch(rb"\d{0,20}", file.read(21)) is not None
    return False


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary name beside a file, which takes its place when the block ends well."""
    temporary = path.with_name(f".{path.name}.part")
    with placed(path), locked(temporary, wait=True):
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


def text_digest(text: str) -> str:
    """Return the sha256 of a text in hex."""
    return hashlib.sha256(text.encode()).hexdigest()


def source(notebook: Path) -> str | None:
    """Hash what a notebook's code cells do: see `cells_digest`. None when there is no such file."""
    return cells_digest(read_ipynb(notebook)["cells"]) if notebook.is_file() else None


def cells_digest(cells: Iterable[Mapping[str, Any]]) -> str:
    """Hash the statements of a notebook's code cells, one after the other.

    Comments, layout, empty cells and text cells do not count, nor do the cells that
    papermill injected or that install the package.
    """
    statements: list[str] = []
    for cell in cells:
        marks = set(tags(cell))
        apart = marks & {"injected-parameters", "install"}
        if cell["cell_type"] == "code" and not apart:
            statements += _cell_statements(cell["source"])
    return text_digest("\n".join(statements))


def cell_digest(text: str) -> str:
    """Hash what one cell does, given as it was written or as IPython keeps it (``In[3]``)."""
    return text_digest("\n".join(_cell_statements(text)))


@functools.lru_cache(maxsize=4096)
def _cell_statements(text: str) -> tuple[str, ...]:
    """Write out the statements of a cell; one that is no Python, even to IPython, is its text."""
    module = _parsed(text) or _parsed(_without_magics(text))
    if module is None:
        return (text.strip(),)
    statements = _Docstrings().visit(module).body
    return tuple(_written(statement) for statement in statements)


def _parsed(text: str) -> ast.Module | None:
    """Parse Python; None where it is none. What it warns of is its author's business."""
    with warnings.catch_warnings(action="ignore"):
        try:
            return ast.parse(text)
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            return None


def _without_magics(text: str) -> str:
    """Turn IPython's own syntax (``%time``, ``!ls``, ``x?``) into calls, as a kernel does."""
    from IPython.core.inputtransformer2 import TransformerManager

    with suppress(SyntaxError):
        return str(TransformerManager().transform_cell(text))
    return text


def loaded(known: Container[str] = ()) -> dict[str, str]:
    """Hash loaded modules and data files beside them, by path in the package; no ``known`` ones."""
    paths: set[Path] = set()
    for name, module in sys.modules.copy().items():
        ours = name.split(".")[0] == PACKAGE.name
        if not ours or not module.__file__:
            continue
        path = Path(module.__file__)
        paths.add(path)
        if path.name == "__init__.py":
            paths.update(_data(path.parent))
    digests: dict[str, str] = {}
    for path in sorted(paths):
        name = path.relative_to(PACKAGE).as_posix()
        if name not in known:
            digests[name] = code_digest(path)
    return digests


@functools.cache
def _data(package: Path) -> tuple[Path, ...]:
    """List a package's own data files, but none of what the papers print or a wheel ships."""
    if package.name == "papers":
        return ()
    paths: list[Path] = []
    for path in own(package):
        if path.is_file():
            paths.append(path)
        elif path != SHIPPED and not (path / "__init__.py").is_file():
            paths += own(path, "**/*")
    return tuple(path for path in paths if path.suffix in DATA and path.is_file())


def own(folder: Path, pattern: str = "*") -> list[Path]:
    """List what lies in a folder by a pattern, in order, without what is `foreign` there."""
    paths: list[Path] = []
    for path in sorted(folder.glob(pattern)):
        if not any(map(foreign, path.relative_to(folder).parts)):
            paths.append(path)
    return paths


def foreign(name: str) -> bool:
    """Whether an editor, a desktop or Jupyter gave a file or folder its name, and not we.

    So are hidden names (``.DS_Store``, ``.x.swp``, ``.ipynb_checkpoints``), backups
    (``x~``) and copies (``x-Copy1.yaml``, ``x (1).yaml``, any name with a space).
    """
    return not _OWN_NAME.fullmatch(name) or bool(_COPY.search(name))


def code_digest(path: Path) -> str:
    """Hash what a module or a notebook does, or the bytes of another file."""
    if path.suffix == ".py":
        return _code(path.read_text(encoding="utf-8"))
    return str(source(path) if path.suffix == ".ipynb" else digest(path))


def code(folder: Path, by: Callable[[Path], str | None] = code_digest) -> str:
    """Hash what our files below a folder do, or hold (``by=digest``, which is quicker)."""
    digests: list[tuple[str, str | None]] = []
    for path in own(folder, "**/*"):
        if path.suffix in KINDS and path.is_file():
            digests.append((path.relative_to(folder).as_posix(), by(path)))
    return text_digest(repr(digests))


@functools.lru_cache(maxsize=1024)
def _code(text: str) -> str:
    """Hash a module's syntax tree without docstrings."""
    tree = _Docstrings().visit(ast.parse(text))
    return text_digest(_written(tree))


class _Docstrings(ast.NodeTransformer):
    """Leaves out the statements that are a text alone."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        value = node.value.value if isinstance(node.value, ast.Constant) else None
        return None if isinstance(value, str) else node


def _written(node: object) -> str:
    """Write out a syntax tree as Python 3.11's `ast.dump` does, whatever the Python.

    Later ones have fields that were not there (``type_params``), leave empty ones out,
    or end a format with an empty text; a hash that was recorded under one must be found
    under another.
    """
    if isinstance(node, list):
        return f"[{', '.join(map(_written, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields: list[str] = []
    for name in node._fields:
        value = getattr(node, name, None)
        if isinstance(node, ast.JoinedStr):
            value = [part for part in node.values if getattr(part, "value", None) != ""]
        absent = value is None and getattr(type(node), name, ...) is None
        later = name == "type_params" and not value
        if not absent and not later and name != "kind":  # of a text: u"" is ""
            fields.append(f"{name}={_written(value)}")
    return f"{type(node).__name__}({', '.join(fields)})"


def at(known: Mapping[str, Any] | None, path: Path, folder: Path) -> str | None:
    """Return what a file of a project held at a commit, as `commit` gives it; None where unknown.

    That is so without git, and where the history does not reach back or had no such
    file.
    """
    if not known:
        return None
    # "./" counts from the project's folder, which may be a part of the repository.
    place = f"{known['id']}:./{path.relative_to(folder).as_posix()}"
    command = ["git", "-C", str(folder), "cat-file", "blob", place]
    try:
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", check=True
        )
    except (OSError, ValueError, subprocess.CalledProcessError):
        return None
    return done.stdout


def commit(folder: Path, of: Sequence[str] = CODE) -> dict[str, Any] | None:
    """Return the git commit and whether the code differs from it (dirty); None without git.

    ``of`` names the files and folders that are compared.
    """
    frozen = folder / FROZEN
    if frozen.is_file():
        with formed(frozen):
            name = frozen.read_text(encoding="ascii").strip()
            int(name, 16)  # raises where it is no hash
            return {"id": name, "dirty": False}
    status = ["status", "--porcelain=2", "--branch", "--", *of]
    command = ["git", "-C", str(folder), *status]
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    head = re.search(r"^# branch.oid ([0-9a-f]+)$", done.stdout, re.M)
    if head is None:
        return None
    # A line a file; others begin with #.
    changes = re.search("^[^#]", done.stdout, re.M)
    return {"id": head[1], "dirty": bool(changes)}
