"""Render the pages aside; they take the place of the book when all of them are there.

Sphinx works in ``_build/work`` and renews there what has changed. Nobody reads that folder, so a
page that is half written harms nobody; it would stay so, however, since Sphinx takes a page that is
newer than its source for done. Hence ``_build/.whole``, a copy of the folder from before: it is
there while Sphinx works, and is where the next build starts if this one is killed or refused.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from moebook import storage
from moebook.errors import refuse
from moebook.lab.run import children
from moebook.storage import folders

RENDER = "from moebook.lab.pages import rendering; rendering.child()"
OPTIONS = ["-W", "-n", "--keep-going"]  # warnings are errors, all of them are told
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_FAULT = re.compile(r"WARNING|ERROR|Error")


def alone(folder: Path, *, wait: bool = False) -> AbstractContextManager[None]:
    """Hold the book of a project: whoever else would build it waits, or is refused (E-LOCKED)."""
    return storage.locked(folder / "_build" / "book.lock", wait=wait)


def render(folder: Path, builder: str = "html", place: str | None = None) -> None:
    """Run Jupyter Book, every warning an error; the whole log stays in ``_build/book.log``.

    The pages come to lie in ``_build/html``, or in the folder of another builder. The caller holds
    the book (`alone`); with a ``place`` of `warm` the renderer is a fork.
    """
    with children.lifeline() as (waiting, _), tempfile.TemporaryFile("w+") as output:
        files = (waiting, output.fileno(), output.fileno())
        renderer = children.start(
            RENDER, builder, folder=folder, files=files, place=place
        )
        status = renderer.wait()
        output.seek(0)
        text = _COLOUR.sub("", output.read())
    log = folder / "_build" / "book.log"
    storage.write(log, text)
    if status:
        lines = text.splitlines() or [f"the renderer ended with status {status}"]
        faults = [line for line in lines if _FAULT.search(line)] or lines[-1:]
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        where = log.relative_to(folder)
        refuse("E-BOOK", f"the book has warnings: {faults[0]}{more}; see {where}")


def child() -> None:
    """Render the project in the working directory with the builder that the command line names."""
    from jupyter_book.cli.main import main

    builder = sys.argv[1]
    build = Path("_build").absolute()
    # A renderer whose parent was killed may have an instant to live: wait for its end.
    with (
        storage.locked(build / "render.lock", wait=True),
        _kept(build / "work") as work,
    ):
        place = ["--path-output", str(work), "--builder", builder]
        main(["build", *OPTIONS, *place, "book"], standalone_mode=False)
        new = build / f".{builder}.new"
        folders.remove(new)
        shutil.copytree(work / "_build" / builder, new)
        folders.mend(build / builder)
        folders.put(new, build / builder)


@contextmanager
def _kept(work: Path) -> Iterator[Path]:
    """Yield a folder as the last block that ended well has left it; whatever else ends one."""
    whole = work.with_name(".whole")
    if whole.exists():
        folders.remove(work)
        whole.rename(work)
    work.mkdir(exist_ok=True)
    work.rename(whole)
    shutil.copytree(whole, work)
    yield work
    folders.remove(whole)
