"""Whether a machine is ready for the book: what it has, what it lacks, and what to do about it."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError
from nbformat.v4 import new_code_cell, new_notebook
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from moebook.errors import FULL, Refusal, lacks_memory, no_memory, told
from moebook.lab.records import store
from moebook.lab.run import runner
from moebook.lab.run.sources import size
from moebook.lab.run.verifying import Finding
from moebook.storage import files

# Bytes that must be free: more than `make book` takes on two cores.
MEMORY = 3e9
DISK = 2e9
SCRATCH = 1e9
TESTED = "Linux"  # the system that the tests run on
SECONDS = 120  # that the smoke cell may take: importing torch from a cold disk takes most of it
SMOKE = """\
from moebook import data, models, training
model, tokenizer = models.load("nano")
rows = data.encode(data.draw(["sums"], "train", 8, 0), tokenizer, max_length=64)
training.fit(model, rows, steps=2, batch=4, lr=1e-3, pad_id=tokenizer.pad_token_id)"""


def examine(folder: Path) -> Iterator[Finding]:
    """Check what runs in a folder need, one finding after the other."""
    yield _system()
    yield Finding("Python", (), f"{platform.python_version()}, {platform.machine()}")
    yield _packages()
    yield _line_ends(folder)
    scratch = tempfile.gettempdir()
    yield _room(
        f"disk, {folder}", shutil.disk_usage(folder).free, DISK, "delete something"
    )
    yield _room(
        f"disk, {scratch}", shutil.disk_usage(scratch).free, SCRATCH, "or set TMPDIR"
    )
    yield _room(
        "memory", psutil.virtual_memory().available, MEMORY, "close other programs"
    )
    yield _sandbox()
    yield _smoke(folder)


def _system() -> Finding:
    """Name the operating system, and what of the package is tested on it."""
    name = f"{platform.system()} {platform.release()}"
    if platform.system() == TESTED:
        return Finding("operating system", (), f"{name}, on which everything is tested")
    elsewhere = (
        f"everything is tested on {TESTED}; on macOS and Windows one notebook, at smoke"
    )
    return Finding("operating system", (), f"{name}: {elsewhere}")


def _room(name: str, free: float, needed: float, fix: str) -> Finding:
    there = f"{size(int(free))} are free"
    lacks = f"{there}, {size(int(needed))} are needed: {fix}"
    return Finding(name, () if free >= needed else (lacks,), there)


def _packages() -> Finding:
    """Compare what is installed with the ranges that the package declares."""
    installed: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]
        if name:  # else an interrupted installation left its folder without metadata
            # Of several the first is imported.
            installed.setdefault(canonicalize_name(name), distribution.version)
    needed = 0
    wrong: list[str] = []
    for text in importlib.metadata.requires("moebook") or ():
        need = Requirement(text)
        if need.marker is not None and not need.marker.evaluate({"extra": ""}):
            continue  # for an extra, or another system
        needed += 1
        version = installed.get(canonicalize_name(need.name))
        if not version or not need.specifier.contains(version, prereleases=True):
            wrong.append(f"{need} (found {version or 'none'})")
    fix = f"expected {', '.join(wrong)}; pip install -U moebook"
    return Finding("packages", (fix,) if wrong else (), f"{needed} are in range")


def _line_ends(folder: Path) -> Finding:
    """Look for Windows' line ends in texts whose bytes are hashed, of the package and a project."""
    paths = files.own(files.PACKAGE, "**/*")
    if (folder / "_config.yml").is_file():
        paths.append(folder / "requirements.lock")
        paths.append(folder / "results" / store.SEALS)
        paths += files.own(folder / "results", "**/*")
    suffixes = {*files.DATA, ".lock", ""} - {".safetensors"}
    texts: list[Path] = []
    for path in dict.fromkeys(paths):
        if path.suffix in suffixes and path.is_file():
            texts.append(path)
    wrong = [path for path in texts if b"\r\n" in path.read_bytes()]
    if not wrong:
        return Finding("line ends", (), f"right in {len(texts)} texts")
    more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    problem = f"{wrong[0]}{more} have Windows' (CRLF), and other hashes"
    fix = "delete them, then bring them back: git restore ."
    return Finding("line ends", (f"{problem}: {fix}",))


def _sandbox() -> Finding:
    """Say whether programs that a model wrote can be judged here; nothing else needs a sandbox."""
    from moebook.evaluation import sandbox  # behind which is all of lm-eval

    try:
        sandbox.ready()
    except Refusal as refusal:
        lacks = f"HumanEval and MBPP are refused here, all else runs: {refusal.message}"
        return Finding("sandbox (optional)", (), lacks)
    return Finding("sandbox (optional)", (), "HumanEval and MBPP can be judged")


def _smoke(folder: Path) -> Finding:
    """Run one cell in a kernel: load the embedded base and train it for two steps."""
    start = time.perf_counter()
    try:
        with runner.staging() as place, runner.kernel(folder, place, place) as manager:
            failure = _failure(manager)
    except (Refusal, OSError) as error:
        failure = f"no kernel: {told(error)}"
    done = f"trained two steps in {time.perf_counter() - start:.0f} s"
    return Finding("smoke cell", (failure,) if failure else (), done)


def _failure(manager: runner.Kernel) -> str:
    """Execute the smoke cell; say what went wrong, with its remedy, or nothing."""
    notebook = new_notebook(cells=[new_code_cell(SMOKE)])
    client = NotebookClient(notebook, km=manager, timeout=SECONDS)
    try:
        with client.setup_kernel():  # `client.execute` would take Ctrl-C for itself
            client.execute_cell(notebook.cells[0], 0)
    except CellTimeoutError:
        return f"took longer than {SECONDS} seconds; try again on mains"
    except CellExecutionError as error:
        if error.ename == Refusal.__name__:
            return str(error.evalue)  # which has its own remedy
        raised = f"{error.ename}: {error.evalue}"
        if lacks_memory(raised):
            return no_memory(raised)
        if any(f"[Errno {code}]" in raised for code in FULL):
            return f"{raised}; make room there"
        return f"{raised}; reinstall the packages"
    except RuntimeError:
        return f"no kernel: it {manager.ending}{manager.last_words}; free memory and try again"
    return ""
