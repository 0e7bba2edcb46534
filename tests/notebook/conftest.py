"""A toy project with one notebook, whose last cell ends as a parameter or its seed says."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from moebook import results

REPOSITORY = Path(results.__file__).parents[2]
Mill = Callable[..., tuple[Path, str]]

IMPORTS = """\
import json, os, random, sys, time
from pathlib import Path
import moebook
from IPython.display import HTML, display
from ipykernel import get_connection_info
from moebook import notebook"""

PARAMETERS = """\
tier: str = "cpu"  # scale {smoke, cpu, study}
seed: int = 0  # of everything random [0, 1000]
arms: str = "all"  # names with commas between them, or all
top_k: int = 2  # experts per token [1, 64]
fate: str = "well"  # how the last cell ends {well, error, refusal, killed, slow, secret, twice}"""

MEASURE = """\
transport = json.loads(get_connection_info())["transport"]
print(top_k, transport, os.environ["MOEBOOK_QUIET"], os.environ.get("CANARY_TOKEN"))
print(os.getcwd() + "/notebooks/x.py")
print("a warning", file=sys.stderr)
display(HTML("<table onclick='evil()'><tr><td>1</td></tr></table><script>evil()</script>"))
run.record("toy/mean", 0.125 * top_k, "share", items=[0, 0.25 * top_k])
run.record("toy/here", Path(moebook.__file__).is_relative_to(Path.cwd()), "count")"""

ARMS = """\
chosen = run.arms(arms, {"left": 1.0, "right": 2.0})
run.rows(train=[seed, "row"], test=["row"])
for arm, weight in chosen.items():
    draw = random.Random(f"{seed}/{arm}")
    items = [weight * draw.random() for _ in range(4)]
    run.record(f"toy/{arm}", sum(items) / 4, "nats", items)
    run.curve(f"toy/{arm}", items, "nats")"""

END = """\
if fate == "error" or seed == 13: 1 / 0
if fate == "refusal": run.record("toy/bad", 2, "share")
if fate == "killed": os.kill(os.getpid(), 9)
if fate == "slow" or seed == 60: Path("started").touch(); time.sleep(60)
if fate == "secret": print("hf" + "_" + "a" * 30)
if fate == "twice": run.record("toy/mean", 1, "share")"""

PROTOCOLS = {
    "smoke": "tier: smoke\ntop_k: 1\n",
    "nano": "tier: study\ntop_k: 4\n",
    "study": "tier: study\ntop_k: 8\n",
}


def make_project(folder: Path) -> Path:
    """Write the toy project into an empty folder."""
    (folder / "notebooks").mkdir(parents=True)
    (folder / "_config.yml").touch()
    (folder / "requirements.lock").write_text("torch==2.13.0\n")
    cells = [
        new_markdown_cell("# A toy"),
        new_code_cell(IMPORTS),
        new_code_cell(PARAMETERS, metadata={"tags": ["parameters"]}),
        new_code_cell("run = notebook.begin(In, globals())"),
        *map(new_code_cell, (MEASURE, ARMS, END)),
    ]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook = new_notebook(cells=cells, metadata={"kernelspec": kernel})
    nbformat.write(notebook, folder / "notebooks" / "01_toy.ipynb")
    for name, text in PROTOCOLS.items():
        (folder / "notebooks" / f"01_toy.{name}.yaml").write_text(text)
    return folder


def copy_package(folder: Path) -> Path:
    """Copy the package's modules into a project: they stay put, whoever edits the others."""
    for path in (REPOSITORY / "moebook").rglob("*.py"):
        copy = folder / path.relative_to(REPOSITORY)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    return folder / "moebook"


@pytest.fixture(scope="session")
def mill(tmp_path_factory: pytest.TempPathFactory) -> Mill:
    """Plain papermill on the toy, from another folder, as its command line does."""
    project = make_project(tmp_path_factory.mktemp("mill") / "toy")
    source, copy = project / "notebooks" / "01_toy.ipynb", project.parent / "out.ipynb"
    start = "from papermill.cli import papermill; papermill()"
    command = [sys.executable, "-c", start, str(source), str(copy), "--kernel", "python3"]

    def run(*options: str) -> tuple[Path, str]:
        done = subprocess.run(
            [*command, "--no-progress-bar", *options],
            cwd=project.parent,
            env={**os.environ, "MOEBOOK_QUIET": "1", "PYTHONPATH": str(REPOSITORY)},
            capture_output=True,
            text=True,
        )
        return copy, done.stderr if done.returncode else ""

    return run


@pytest.fixture(scope="session")
def milled(mill: Mill, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What plain papermill leaves of the toy with the parameters of its protocol `nano`, seed 5."""
    copy, errors = mill("-p", "tier", "study", "-p", "top_k", "4", "-p", "seed", "5")
    assert not errors
    return copy.rename(tmp_path_factory.mktemp("milled") / "milled.ipynb")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The toy project for all tests of a module, with modules of its own that kernels load."""
    folder = make_project(tmp_path_factory.mktemp("project") / "toy")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moebook.results.files.PACKAGE", copy_package(folder))
        patch.setenv("PYTHONPATH", str(folder))
        yield folder


@pytest.fixture
def fresh(tmp_path: Path) -> Path:
    """A toy project of one test's own."""
    return make_project(tmp_path / "toy")
