"""Files are written whole or not at all; what a run ran, and what counts as changed since."""

import gc
import json
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from unittest.mock import Mock

import pytest
from IPython.core.inputtransformer2 import TransformerManager

from moebook import storage
from moebook.errors import Refusal
from moebook.lab import records
from moebook.lab.records import Run
from moebook.storage import files
from tests.history import commit
from tests.refusals import refused

CODE = '''"""Say what."""

def f(x):
    """More."""
    # a thought
    if x < 0:
        x = -x
    return x  # behind
'''
FILES = (
    "__init__.py",
    "used/__init__.py",
    "used/rows.csv",
    "used/weights/model.safetensors",
    "idle.py",
    "used/README.md",
    "lab/__init__.py",
    "lab/papers/__init__.py",
    "lab/papers/pesc/claims.yaml",
)
LOADED = (
    "__init__.py",
    "lab/__init__.py",
    "lab/papers/__init__.py",
    "used/__init__.py",
    "used/part.py",
)
CELLS = [
    {"cell_type": "markdown", "source": "# A toy"},
    {"cell_type": "code", "source": ["steps: int = 100\n", "x = steps"]},
]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A toy package inside a project, all of it but one module loaded."""
    folder = tmp_path / "moebook"
    for name in FILES:
        storage.write(folder / name, "")
    storage.write(folder / "used" / "part.py", CODE)
    text = json.dumps({"nbformat": 4, "cells": CELLS})
    storage.write(tmp_path / "notebooks" / "01_toy.ipynb", text)
    storage.write(tmp_path / "requirements.lock", "torch==2.13.0\n")
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
    notebook = storage.files.source(folder / "notebooks" / "01_toy.ipynb")
    lock = storage.digest(folder / "requirements.lock")
    code = {"notebook": notebook, "lock": lock, "modules": storage.files.loaded()}
    return Run(
        "toy",
        "nano",
        "study",
        0,
        (),
        code=code,
        manifest={"date": "2026-01-02T23:00:00"},
    )


PART = "moebook/used/part.py"
NOTEBOOK = "notebooks/01_toy.ipynb"
USED = ("used.part",)
MORE = '{"cell_type": "markdown", "source": "More."}'
CELL = ("notebook",)
EMPTY = '{"cell_type": "code", "source": " "}'
REMARK = '{"cell_type": "code", "source": "# a remark"}'
MAGIC = '{"cell_type": "code", "source": "%time x"}'
NO_PYTHON = '{"cell_type": "code", "source": "x = = 1"}'
SPLIT = '{"cell_type": "code", "source": "x = steps"}'


@pytest.mark.parametrize(
    ("name", "old", "new", "names"),
    [
        (PART, "Say what.", "Say it better.", ()),
        (PART, '    """More."""\n', "", ()),
        (PART, "# a thought", "# another", ()),
        (PART, "    # a thought\n", "\n\n", ()),
        (PART, "if x < 0:", "if (x) < 0 :", ()),
        (PART, "return x", "return x + 1", USED),
        (PART, "x < 0", "x < 1", USED),
        (PART, "return x", "return '''x'''", USED),
        (PART, "def f(x)", "def f(x=1)", USED),
        (PART, "def f(x)", "async def f(x)", USED),
        (NOTEBOOK, "[{", f"[{MORE}, {{", ()),
        (NOTEBOOK, "}]", f"}}, {MORE}]", ()),
        (NOTEBOOK, "# A toy", "# Another", ()),
        (NOTEBOOK, "= 100", "= 200", ("notebook",)),
        (
            NOTEBOOK,
            '["steps: int = 100\\n", "x = steps"]',
            '"steps: int = 100\\nx = steps"',
            (),
        ),
        (NOTEBOOK, "x = steps", "x=(steps)  # of them", ()),
        (NOTEBOOK, "x = steps", "x = steps + 1", CELL),
        (NOTEBOOK, "}]", f"}}, {EMPTY}, {REMARK}]", ()),
        (NOTEBOOK, "}]", f"}}, {MAGIC}]", CELL),
        (NOTEBOOK, 'x = steps"]}', f'"]}}, {SPLIT}', ()),
        (NOTEBOOK, "}]", f"}}, {NO_PYTHON}]", CELL),
        ("moebook/used/__init__.py", "", "more = 1", ("used",)),
        ("moebook/used/rows.csv", "", "more", ("used.rows.csv",)),
        (
            "moebook/used/weights/model.safetensors",
            "",
            "more",
            ("used.weights.model.safetensors",),
        ),
        ("moebook/idle.py", "", "more = 1", ()),
        ("moebook/used/README.md", "", "more", ()),
        ("moebook/lab/papers/pesc/claims.yaml", "", "more", ()),
        ("requirements.lock", "", "more", ("lock",)),
    ],
)
def test_code_and_data_count_and_comments_layout_and_prose_do_not(
    package, name, old, new, names
):
    run = _run(package.parent)
    path = package.parent / name
    assert records.runs.changed(run, package.parent) == ()
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    assert records.runs.changed(run, package.parent) == names


def test_a_run_says_what_it_loaded_of_which_day_it_is_and_names_the_first_changes(
    package,
):
    loaded = storage.files.loaded()
    assert set(loaded) == {*LOADED, "used/rows.csv", "used/weights/model.safetensors"}
    assert set(storage.files.loaded(loaded)) == set()
    run = _run(package.parent)
    folder = package.parent
    for name in ("idle.py", "used/README.md", "lab/papers/pesc/claims.yaml"):
        (package / name).unlink()
    assert records.since(run, folder) == "of 2026-01-02; code unchanged"
    for name in (NOTEBOOK, "requirements.lock", PART, "moebook/used/rows.csv"):
        (folder / name).unlink()
    assert records.runs.changed(run, folder) == (
        "notebook",
        "lock",
        "used.part",
        "used.rows.csv",
    )
    more = "of 2026-01-02; changed since: notebook, lock, used.part and 1 more"
    assert records.since(run, folder) == more
    with pytest.raises(
        Refusal, match="E-RUN: manifest of toy, nano, seed 0 has no date"
    ):
        records.runs.day(Run("toy", "nano", "study", 0, ()))


def test_what_is_loaded_is_listed_while_others_import(package, monkeypatch):
    monkeypatch.setattr(
        sys, "modules", sys.modules | {f"other{i}": sys for i in range(9000)}
    )
    load = lambda *_: sys.modules.update({f"late{len(sys.modules)}": sys})  # noqa: E731
    gc.callbacks.append(load)  # as a thread may, wherever the garbage collector runs
    try:
        assert "used/weights/model.safetensors" in storage.files.loaded()
    finally:
        gc.callbacks.remove(load)


def test_the_commit_is_gits_or_that_of_a_frozen_copy(tmp_path):
    assert storage.commit(tmp_path) is None
    storage.write(tmp_path / "notebooks" / "01_toy.ipynb", "{}")
    commit(tmp_path)
    found = storage.commit(tmp_path)
    assert found is not None
    assert (len(found["id"]), found["dirty"]) == (40, False)
    storage.write(tmp_path / "book" / "intro.md", "what no run is made of")
    assert storage.commit(tmp_path) == found
    storage.write(tmp_path / "notebooks" / "01_toy.ipynb", "[]")
    assert storage.commit(tmp_path) == found | {"dirty": True}
    storage.write(tmp_path / storage.files.FROZEN, "abc\n")
    assert storage.commit(tmp_path) == {"id": "abc", "dirty": False}


def test_a_file_at_a_commit_is_the_projects_own_in_a_larger_repository(tmp_path):
    project = tmp_path / "parts" / "moebook"
    storage.write(project / "notebooks" / "toy.yaml", "ours")
    storage.write(project / "notebooks" / "alone.yaml", "ours alone")
    storage.write(tmp_path / "notebooks" / "toy.yaml", "theirs")
    commit(tmp_path)
    known = storage.commit(project)
    held = {
        "toy.yaml": "ours",
        "alone.yaml": "ours alone",
        "none.yaml": None,
        ".": None,
    }
    for name, text in held.items():
        assert files.at(known, project / "notebooks" / name, project) == text


def test_the_project_has_a_config_and_a_failed_write_leaves_the_old_file(
    tmp_path, monkeypatch
):
    path = tmp_path / "deep" / "_config.yml"
    full = OSError(28, "No space left on device")
    refused(r"_config\.yml", storage.root, path.parent / "inner")
    storage.write(path, "old")
    assert storage.root(path.parent / "inner") == path.parent
    (path.parent / "notes").symlink_to(tmp_path)
    (path.parent / "runs").mkdir()
    (path.parent / "runs" / "mine").symlink_to(path.parent / "notes")
    refused(
        r"E-PATH: .*/runs/mine leads out of the project, to ", storage.root, path.parent
    )
    for link in ("notes", "runs/mine"):
        (path.parent / link).unlink()
    (path.parent / "runs").rmdir()
    monkeypatch.setattr("os.fsync", Mock(side_effect=full))
    with pytest.raises(OSError, match="No space"):
        storage.write(path, "new")
    assert path.read_text() == "old"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": ' + b"[" * 99 + b"]" * 99 + b"}", None),
        (b'\xef\xbb\xbf{"a": [NaN, Infinity, 1e30, "\\ud83d\\ude00"]}', None),
        (
            b'{"a": ' + b"[" * 100 + b"]" * 100 + b"}",
            "E-FORMAT: .*more than 100 levels",
        ),
        (b"[" * 10**6, "E-FORMAT: .*recursion"),
        (b"[]", "E-FORMAT: .*expected a JSON object, found list"),
        (b'{"a": 1, "b": {"c": 1, "c": 1}}', "E-FORMAT: .*twice"),
        (b'{"a": 1', "E-FORMAT: .*line 1"),
        (b'{"a": "\xff"}', "E-FORMAT: .*position 7"),
        (b'{"\\ud800": 1}', "E-FORMAT: .*surrogate"),
        (b'{"a": %s}' % (b"9" * 400), "E-FORMAT: .*too large"),
        (b'{"a": %s}' % (b"9" * 5000), "E-FORMAT: .*limit"),
        (b"{" + b" " * 10**6, "E-LIMIT: .*100,000 bytes"),
    ],
)
def test_one_reader_takes_json_objects_and_refuses_what_is_none(
    content, message, tmp_path
):
    path = tmp_path / "some.json"
    refused("E-NOFILE", storage.read_json, path)
    path.write_bytes(content)
    if message is None:
        assert set(storage.read_json(path, limit=10**5)) == {"a"}
        return
    limit = 10**5 if "LIMIT" in message else 10**7
    refusal = refused(message, storage.read_json, path, limit=limit)
    assert "some.json" in str(refusal)
    assert len(str(refusal)) < 500


SAME_CELLS = [
    ("  x = 1", "x = 1"),
    ("x = 'a'", 'x = "a"'),
    ("x = u'a'", "x = 'a'"),
    ("f(1,\n  2)", "f(1, 2)"),
    ("x = (1)", "x = 1"),
    ("x = 1;", "x = 1"),
    ("x = '\\d'", "x = '\\\\d'"),
    ("'''Say.'''\nx = 1", "x = 1"),
    ("!ls\nx = 1  # one", "!ls\nx = (1)"),
    ("x = 1 +", "x = 1 + "),
]
OTHER_CELLS = [
    ("%time x", "%time y"),
    ("!ls", "!ls -l"),
    ("x?", "x??"),
    ("%%bash\nls", "%%bash\nls -l"),
    ("x = (1)", "x = (1,)"),
    ("x = 1", "x = True"),
    ("x = 1", "x = 1.0"),
    ("x = ''", "x = f''"),
    ("f('')", "f()"),
    ("x = 1 +", "x = 2 +"),
    ("x = 1\x00", "x = 2\x00"),
]


@pytest.mark.parametrize(("before", "after"), SAME_CELLS)
def test_a_cell_written_in_another_way_has_the_same_hash(before, after):
    assert files.cell_digest(before) == files.cell_digest(after)


@pytest.mark.parametrize(("before", "after"), OTHER_CELLS)
def test_a_cell_that_does_something_else_has_another_hash(before, after):
    assert files.cell_digest(before) != files.cell_digest(after)


def test_a_cell_that_a_kernel_keeps_is_the_one_that_was_written():
    shell = TransformerManager()
    for text in (
        "%time x",
        "!ls\ny = 1",
        "x?",
        "  x = 1",
        "%%bash\nls",
        "x = 1  # one",
    ):
        assert files.cell_digest(shell.transform_cell(text)) == files.cell_digest(text)


WRITTEN = '''\
@decorator
def f(a, *b, c: int = 1, **d) -> str:
    """Say."""
    return f"{a!r:>{c}} {b=} {{}}" "" + "x" + f(*b, **d)

class A(B): x: int = -1.5e-3
'''
BY_311 = "1df24eab1acb0ee0482abe24c36fa696ea450ba10693afb34b218aba010800ae"  # ast.dump's, hashed


def test_a_modules_hash_is_that_of_the_dump_of_python_311_under_any_python():
    assert files._code(WRITTEN) == BY_311


LEFT = (
    ".DS_Store .x.swp .#part.py x~ rows.csv~ rows-Copy1.csv rows-Copy.csv ._rows.csv"
    " .ipynb_checkpoints/rows.csv __pycache__/x.pyc Thumbs.db desktop.ini rows.csv.bak"
)
FOREIGN = [*LEFT.split(), "a name", "rows (1).csv", "Icon\r"]


@pytest.mark.parametrize("name", FOREIGN)
def test_what_editors_desktops_and_jupyter_leave_is_no_part_of_the_package(
    package, name
):
    before = storage.files.loaded(), storage.files.code(package)
    for place in ("", "used", "used/weights"):
        storage.write(package / place / name, "left")
    files._data.cache_clear()
    assert (storage.files.loaded(), storage.files.code(package)) == before


def test_the_kinds_of_files_that_count_are_those_that_a_wheel_has():
    root = Path(storage.__file__).parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["moebook"]
    assert {f"**/*{kind}" for kind in files.KINDS if kind != ".py"} == set(patterns)
    ours = [path for path in files.own(root / "moebook", "**/*") if path.is_file()]
    kinds = {path.suffix for path in ours if "__pycache__" not in path.parts}
    assert kinds <= {*files.KINDS}


def test_a_sweep_takes_our_locks_and_no_others(tmp_path):
    (tmp_path / "uv.lock").write_text("version = 1\n")
    (tmp_path / "held.lock").write_text("123")
    (tmp_path / "begun.lock").touch()
    (tmp_path / ".run.parquet.part").write_bytes(b"PAR1")
    storage.sweep(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["uv.lock"]
    assert (tmp_path / "uv.lock").read_text() == "version = 1\n"
