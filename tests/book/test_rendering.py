"""The book is rendered aside: a build killed at any moment leaves the old one whole."""

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from moebook.lab.pages import book, rendering
from moebook.storage import folders
from tests.book.conftest import PAGES, write_edition
from tests.refusals import refused

TIMES = int(os.environ.get("MOEBOOK_FAULTS", "1"))  # as many kills more
ROOT = Path(__file__).parents[2]
RENDER = """
import sys
from pathlib import Path
from moebook.lab.pages import rendering
rendering.render(Path.cwd(), place=sys.argv[1] or None)"""


def editions(project):
    """The editions that the rendered pages name; a page that is not whole fails."""
    numbers = set()
    for path in (project / "_build" / "html").glob("*.html"):
        text = path.read_text(encoding="utf-8")
        made_by_sphinx = path.name in ("index.html", "genindex.html", "search.html")
        assert made_by_sphinx or "</html>" in text
        numbers |= set(map(int, re.findall(r"This is edition (\d+)\.", text)))
    assert len(list((project / "_build" / "html").glob("page_*.html"))) == PAGES
    return numbers


def start(project, place):
    """Start a build as a process of its own, whose renderer is a fork if there is a place."""
    command = [sys.executable, "-c", RENDER, place or ""]
    return subprocess.Popen(
        command, cwd=project, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )


def renderers(project):
    """The processes that work in a project."""
    for path in Path("/proc").glob("[0-9]*/cwd"):
        try:
            if path.readlink() == project and int(path.parts[2]) != os.getpid():
                yield int(path.parts[2])
        except OSError:
            continue


def used(pid):
    """The seconds of CPU that a process has used; none where it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return 0.0
    user, system = stat.rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def assert_that_renderers_end(project):
    """Renderers whose parent was killed end before they have worked for a second.

    It is a second of their CPU, as a busy machine may let them wait for long.
    """
    begun = {pid: used(pid) for pid in renderers(project)}
    while left := list(renderers(project)):
        assert all(used(pid) - begun.get(pid, 0) < 1 for pid in left)
        time.sleep(0.05)


@pytest.mark.timeout(300 * TIMES)
@pytest.mark.parametrize(
    ("kills", "forked"),
    [
        (2, True),
        *(
            pytest.param(5 * TIMES, forked, marks=pytest.mark.soak)
            for forked in (True, False)
        ),
    ],
)
def test_a_killed_build_leaves_the_old_book_whole_and_nobody_who_writes_on(
    project, warmed, kills, forked
):
    place = warmed if forked else None
    begun = time.monotonic()
    assert start(project, place).wait() == 0
    # By this seed the first kill is early and of the parent alone, the second of all.
    took = time.monotonic() - begun
    draw = random.Random(21)
    shown = 0
    assert editions(project) == {0}
    for number in range(1, kills + 1):
        write_edition(project, number)
        process = start(project, place)
        time.sleep(draw.uniform(0.3, 1.1) * took)  # from the first page that is read on
        victims = [process.pid, *(renderers(project) if draw.random() < 0.5 else ())]
        for pid in dict.fromkeys(victims):
            os.kill(pid, signal.SIGKILL)
        process.wait()
        assert_that_renderers_end(project)
        (edition,) = editions(project)
        assert edition in (shown, number)
        shown = edition
    assert start(project, place).wait() == 0
    assert editions(project) == {kills}
    left = sorted(path.name for path in (project / "_build").iterdir())
    assert left == ["book.log", "html", "work"]


def test_a_build_that_was_refused_is_refused_again_and_the_old_book_stands(
    project, warmed
):
    render = partial(rendering.render, project, place=warmed)
    render()
    page = project / "book" / "page_3.md"
    whole = page.read_text()
    page.write_text(whole + "\n{ref}`no-such-place`\n")
    for _ in range(2):
        refused("the book has warnings: .*page_3.*no-such-place", render)
        assert editions(project) == {0}
        assert "no-such-place" not in (project / "_build/html/page_3.html").read_text()
    page.write_text(whole)
    other = project / "_build" / "html" / "page_4.html"
    before = other.stat().st_mtime_ns
    render()
    assert other.stat().st_mtime_ns == before, (
        "what has not changed is not rendered again"
    )


def test_of_two_builds_at_once_the_second_is_refused(project):
    with rendering.alone(project):
        refused(
            f"E-LOCKED: .*book.lock is held by process {os.getpid()}; wait",
            book.make,
            "smoke",
            None,
            project,
        )
    assert not (project / "_build" / "html").exists()


def folder(place, text):
    place.mkdir()
    for name in "ab":
        (place / name).write_text(text)
    return place


@pytest.mark.parametrize("system", ["exchanges", "renames"])
def test_no_reader_meets_half_of_a_folder_that_takes_anothers_place(
    tmp_path, monkeypatch, system
):
    if system == "renames":
        monkeypatch.setattr(folders, "_exchange", lambda *_: False)
    place = folder(tmp_path / "html", "old")
    stop = threading.Event()
    met = set()

    def read():
        while not stop.is_set():
            try:
                met.add((folders.present(place) / "a").read_text())
            except FileNotFoundError:
                met.add("gone")

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(300):
        folders.put(folder(tmp_path / "new", f"text {number}"), place)
        assert [path.name for path in tmp_path.iterdir()] == ["html"]
    stop.set()
    reader.join()
    assert (place / "b").read_text() == "text 299"
    assert "" not in met
    assert len(met) > 10
    assert system == "renames" or "gone" not in met


def test_a_folder_that_stepped_aside_comes_back_after_a_kill(tmp_path, monkeypatch):
    place = folder(tmp_path / "html", "old")
    monkeypatch.setattr(folders, "_exchange", lambda *_: False)

    def rename(path, target, plain=Path.rename):
        if path.name == "new":
            raise KeyboardInterrupt
        return plain(path, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "rename", rename)
        folders.put(folder(tmp_path / "new", "new"), place)
    assert not place.exists()
    assert (folders.present(place) / "a").read_text() == "old"
    folders.mend(place)
    assert (place / "a").read_text() == "old"
    folders.put(tmp_path / "new", place)
    folders.mend(place)
    assert [path.name for path in tmp_path.iterdir()] == ["html"]
    assert (place / "a").read_text() == "new"
