"""Files are written whole or not at all; what a run ran, and what counts as changed since."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from unittest.mock import Mock

import pytest

from moebook import results
from moebook.errors import Refusal
from moebook.results import Run, files

CODE = '''"""Say what."""

def f(x):
    """More."""
    # a thought
    if x < 0:
        x = -x
    return x  # behind
'''
FILES = ("__init__.py", "used/__init__.py", "used/rows.csv", "used/weights/model.bin", "idle.py",
         "used/README.md", "papers/__init__.py", "papers/pesc/claims.yaml")  # fmt: skip
LOADED = ("__init__.py", "used/__init__.py", "used/part.py", "papers/__init__.py")
CELLS = [
    {"cell_type": "markdown", "source": "# A toy"},
    {"cell_type": "code", "source": ["steps: int = 100\n", "x = steps"]},
]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A toy package inside a project, all of it but one module loaded."""
    folder = tmp_path / "moebook"
    for name in FILES:
        results.write(folder / name, "")
    results.write(folder / "used" / "part.py", CODE)
    results.write(tmp_path / "notebooks" / "01_toy.ipynb", json.dumps({"cells": CELLS}))
    results.write(tmp_path / "requirements.lock", "torch==2.13.0\n")
    monkeypatch.setattr(files, "PACKAGE", folder)
    for name in [name for name in sys.modules if name.split(".")[0] == "moebook"]:
        monkeypatch.delitem(sys.modules, name)
    for name in LOADED:
        module = ModuleType("moebook." + name.replace("/", "."))
        module.__file__ = str(folder / name)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    files._data.cache_clear()
    return folder


def _run(folder: Path) -> Run:
    notebook = results.source(folder / "notebooks" / "01_toy.ipynb")
    lock = results.digest(folder / "requirements.lock")
    code = {"notebook": notebook, "lock": lock, "modules": results.loaded()}
    return Run("toy", "nano", "study", 0, (), code=code, manifest={"date": "2026-01-02T23:00:00"})


@pytest.mark.parametrize(
    ("old", "new", "matters"),
    [
        ("Say what.", "Say it better.", False), ('    """More."""\n', "", False),
        ("# a thought", "# another", False), ("    # a thought\n", "\n\n", False),
        ("if x < 0:", "if (x) < 0 :", False), ("return x", "return x + 1", True),
        ("x < 0", "x < 1", True), ("return x", "return '''x'''", True),
        ("def f(x)", "def f(x=1)", True), ("def f(x)", "async def f(x)", True),
    ],
)  # fmt: skip
def test_docstrings_comments_and_layout_do_not_count_and_code_does(
    package: Path, old: str, new: str, matters: bool
) -> None:
    run = _run(package.parent)
    assert results.changed(run, package.parent) == ()
    assert old in CODE
    (package / "used" / "part.py").write_text(CODE.replace(old, new, 1))
    assert results.changed(run, package.parent) == (("used.part",) if matters else ())


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("moebook/used/rows.csv", ("used.rows.csv",)), ("moebook/used/__init__.py", ("used",)),
        ("moebook/used/weights/model.bin", ("used.weights.model.bin",)), ("moebook/idle.py", ()),
        ("moebook/used/README.md", ()), ("moebook/papers/pesc/claims.yaml", ()),
        ("requirements.lock", ("lock",)),
    ],
)  # fmt: skip
def test_of_loaded_modules_and_the_data_beside_them_what_changed_is_named_and_nothing_else(
    package: Path, name: str, names: tuple[str, ...]
) -> None:
    loaded = results.loaded()
    assert set(loaded) == {*LOADED, "used/rows.csv", "used/weights/model.bin"}
    assert set(results.loaded(loaded)) == set()
    run, path = _run(package.parent), package.parent / name
    path.write_text("changed = 1")
    assert results.changed(run, package.parent) == names
    path.unlink()
    assert results.changed(run, package.parent) == names


def test_code_of_the_notebook_counts_and_its_prose_does_not(package: Path) -> None:
    run, path = _run(package.parent), package.parent / "notebooks" / "01_toy.ipynb"
    text = path.read_text()
    told = {"cell_type": "markdown", "source": "More."}
    for cells in ([told, CELLS[1], told], [CELLS[1] | {"source": "steps: int = 100\nx = steps"}]):
        path.write_text(json.dumps({"cells": cells}))
        assert results.changed(run, package.parent) == ()
    path.write_text(text.replace("100", "200"))
    assert results.changed(run, package.parent) == ("notebook",)
    path.unlink()
    assert results.changed(run, package.parent) == ("notebook",)


def test_a_run_says_of_which_day_it_is_and_names_the_first_changes(package: Path) -> None:
    run, folder = _run(package.parent), package.parent
    assert results.since(run, folder) == "of 2026-01-02; code unchanged"
    for name in ("used/part.py", "used/__init__.py", "used/rows.csv"):
        (package / name).write_text("changed = 1")
    (folder / "requirements.lock").unlink()
    told = "of 2026-01-02; changed since: lock, used, used.part and 1 more"
    assert results.since(run, folder) == told
    with pytest.raises(Refusal, match="E-RUN: manifest of toy, nano, seed 0 has no date"):
        results.day(Run("toy", "nano", "study", 0, ()))


def test_the_commit_is_gits_or_that_of_a_frozen_copy(tmp_path: Path) -> None:
    assert results.commit(tmp_path) is None
    results.write(tmp_path / "notebooks" / "01_toy.ipynb", "{}")
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    for words in (("init", "-q"), ("add", "."), (*identity, "commit", "-qm", "toy")):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    found = results.commit(tmp_path)
    assert found is not None and (len(found["id"]), found["dirty"]) == (40, False)
    results.write(tmp_path / "book" / "intro.md", "what no run is made of")
    assert results.commit(tmp_path) == found
    results.write(tmp_path / "notebooks" / "01_toy.ipynb", "[]")
    assert results.commit(tmp_path) == found | {"dirty": True}
    results.write(tmp_path / results.FROZEN, "abc\n")
    assert results.commit(tmp_path) == {"id": "abc", "dirty": False}


def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, full = tmp_path / "page.md", OSError(28, "No space left on device")
    results.write(path, "old")
    monkeypatch.setattr("os.fsync", Mock(side_effect=full))
    with pytest.raises(OSError, match="No space"):
        results.write(path, "new")
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["page.md"]


def test_the_project_is_the_nearest_folder_with_a_config(tmp_path: Path) -> None:
    inner = tmp_path / "notebooks" / "deep"
    inner.mkdir(parents=True)
    with pytest.raises(Refusal, match=r"_config\.yml"):
        results.root(inner)
    (tmp_path / "_config.yml").touch()
    assert results.root(inner) == tmp_path
