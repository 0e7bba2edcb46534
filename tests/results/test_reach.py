"""A notebook's run depends on what it reaches of the package, and on nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moebook.results import reach

FILES = {
    "__init__.py": "",
    "readme.txt": "of the whole",
    "base.py": "",
    "used/__init__.py": "from moebook.used.part import x",
    "used/part.py": "def f():\n    import moebook.base\nx = 1",
    "used/idle.py": "",
    "used/rows.csv": "1",
    "used/weights/model.bin": "2",
    "other/__init__.py": "",
    "other/rows.csv": "3",
}


@pytest.fixture
def notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A toy package, and a notebook that imports some of it."""
    package = tmp_path / "moebook"
    for name, text in FILES.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    monkeypatch.setattr(reach, "PACKAGE", package)
    cells = [
        {"cell_type": "markdown", "source": "import moebook.other"},
        {"cell_type": "code", "source": ["%matplotlib inline\n", "from moebook import used\n"]},
        {"cell_type": "code", "source": "import numpy"},
    ]
    path = tmp_path / "toy.ipynb"
    path.write_text(json.dumps({"cells": cells}))
    return path


def test_imports_are_followed_through_modules_and_functions(notebook: Path) -> None:
    found = {path.relative_to(reach.PACKAGE).as_posix() for path in reach.reached(notebook)}
    assert found == {
        "__init__.py", "readme.txt", "base.py", "used/__init__.py", "used/part.py",
        "used/rows.csv", "used/weights/model.bin",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "matters"),
    [("used/part.py", True), ("used/weights/model.bin", True), ("base.py", True),
     ("used/idle.py", False), ("other/__init__.py", False), ("other/rows.csv", False)],
)  # fmt: skip
def test_the_digest_changes_with_a_file_that_is_reached_only(
    notebook: Path, name: str, matters: bool
) -> None:
    before = reach.package_digest(notebook)
    (reach.PACKAGE / name).write_text("changed = 1")
    assert (reach.package_digest(notebook) != before) is matters


GUARDED = """
def f(x):
    if x < 0:
        got = str(x)
        refuse("E-RANGE", f"x is {got}")
    return x
"""
LOOP = """    for y in (x, 2):
        if not y:
            refuse("E-RANGE", "0")
    return x"""
TEXT = "return '''\n    a\n    '''"


@pytest.mark.parametrize(
    ("old", "new", "matters"),
    [
        ("def f(x):\n", "def f(x):\n    'Say what.'\n", False),
        ("    if x < 0:\n", "    if x < 1 or x == 7:\n", False),
        ("    return x", LOOP, False),
        ("return x", "return x + 1", True),
        ("return x", TEXT, True),
        ("    return x", "    if x < 3:\n        x = 3\n    return x", True),
        ("    if x < 0:\n", "    if (x := x + 1) < 0:\n", True),
        ("    return x", "    else:\n        x += 1\n    return x", True),
        ("        got = str(x)\n", "        got = str(x)\n        print(got)\n", True),
    ],
)
def test_docstrings_and_refusals_do_not_count(
    notebook: Path, old: str, new: str, matters: bool
) -> None:
    part = reach.PACKAGE / "used" / "part.py"
    part.write_text(GUARDED)
    before = reach.package_digest(notebook)
    assert old in GUARDED
    part.write_text(GUARDED.replace(old, new, 1))
    assert (reach.package_digest(notebook) != before) is matters


def test_triton_kernels_are_reached_with_an_accelerator_and_never_without(notebook: Path) -> None:
    folder = reach.PACKAGE / "kernels"
    (folder / "_triton").mkdir(parents=True)
    for name in ("__init__.py", "_triton/__init__.py", "_triton/op.py"):
        (folder / name).touch()
    part = reach.PACKAGE / "used" / "part.py"
    for code in ("", "import moebook.kernels", "from moebook.kernels._triton import op"):
        part.write_text(f"x = 1\n{code}")
        names = {"kernels/_triton/__init__.py", "kernels/_triton/op.py"}
        for accelerator, wanted in ((False, set()), (True, names if code else set())):
            files = reach.reached(notebook, accelerator=accelerator)
            found = {path.relative_to(reach.PACKAGE).as_posix() for path in files}
            assert {name for name in found if "_triton" in name} == wanted
    before = [reach.package_digest(notebook, accelerator=flag) for flag in (False, True)]
    (folder / "_triton" / "op.py").write_text("changed = 1")
    after = [reach.package_digest(notebook, accelerator=flag) for flag in (False, True)]
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, False]


@pytest.mark.parametrize("package", ["models", "papers"])
def test_a_base_or_a_paper_is_reached_where_it_is_named_and_only_there(
    notebook: Path, package: str
) -> None:
    folder = reach.PACKAGE / package
    for name in ("nano", "nano-moe"):
        (folder / name).mkdir(parents=True)
        (folder / name / "weights").touch()
    (folder / "__init__.py").touch()
    content = json.loads(notebook.read_text())
    for code, wanted in (("", set()), ('base = "nano-moe"', {"nano-moe"}), ("nano", {"nano"})):
        content["cells"][2]["source"] = f"import moebook.{package}\n{code}"
        notebook.write_text(json.dumps(content))
        found = {path.parent.name for path in reach.reached(notebook) if path.name == "weights"}
        assert found == wanted


def test_a_notebook_of_the_book_reaches_its_method_and_the_weights_it_runs_on() -> None:
    root = Path(__file__).parents[2]
    found = {
        path.relative_to(reach.PACKAGE).as_posix()
        for path in reach.reached(root / "notebooks" / "01_pesc.ipynb")
    }
    assert {"methods/pesc/crafting.py", "models/nano/model.safetensors", "data/isa.jsonl",
            "notebook/publish.py", "training/fit.py"} <= found  # fmt: skip
    assert not {"cli.py", "notebook/runner.py", "papers/pesc/claims.yaml"} & found


def test_the_kernels_notebook_reaches_the_cases_of_the_benchmark() -> None:
    root = Path(__file__).parents[2]
    found = reach.reached(root / "notebooks" / "05_kernels.ipynb")
    assert set((reach.PACKAGE / "bench").glob("*.py")) <= found
    assert reach.PACKAGE / "methods" / "rocket" / "scoring.py" in found
