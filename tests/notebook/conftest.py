"""A toy project with one notebook, whose last cell ends as a parameter says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

IMPORTS = """\
import json, os, sys, time
from pathlib import Path
from IPython.display import HTML, display
from ipykernel import get_connection_info
from moebook import notebook"""

PARAMETERS = """\
tier: str = "cpu"  # scale {smoke, cpu, study}
top_k: int = 2  # experts per token [1, 64]
fate: str = "well"  # how the last cell ends {well, error, refusal, killed, slow, secret, twice}"""

MEASURE = """\
transport = json.loads(get_connection_info())["transport"]
print(top_k, transport, os.environ["MOEBOOK_QUIET"], os.environ.get("CANARY_TOKEN"))
print(os.getcwd() + "/notebooks/x.py")
print("a warning", file=sys.stderr)
display(HTML("<table onclick='evil()'><tr><td>1</td></tr></table><script>evil()</script>"))
run.record("toy/mean", 0.25 * top_k, "share", items=[0, 0.5 * top_k])
run.record("toy/seeded", top_k, "count", seed=0)"""

END = """\
if fate == "error": 1 / 0
if fate == "refusal": run.record("toy/bad", 2, "share")
if fate == "killed": os.kill(os.getpid(), 9)
if fate == "slow": Path("started").touch(); time.sleep(60)
if fate == "secret": print("hf" + "_" + "a" * 30)
if fate == "twice": run.record("toy/seeded", 1, "count", seed=0)"""


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
        new_code_cell(MEASURE),
        new_code_cell(END),
    ]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook = new_notebook(cells=cells, metadata={"kernelspec": kernel})
    nbformat.write(notebook, folder / "notebooks" / "01_toy.ipynb")
    (folder / "notebooks" / "01_toy.smoke.yaml").write_text("tier: smoke\ntop_k: 1\n")
    (folder / "notebooks" / "01_toy.study.yaml").write_text("tier: study\ntop_k: 4\n")
    return folder


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A stand-in for the files of the package, so that its hash stays put during the tests."""
    folder = tmp_path_factory.mktemp("package")
    (folder / "notebook.py").write_text("x = 1\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moebook.results.reach.PACKAGE", folder)
        yield folder


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, package: Path) -> Path:
    """The toy project, for all tests of a module."""
    return make_project(tmp_path_factory.mktemp("project") / "toy")


@pytest.fixture
def fresh(tmp_path: Path) -> Path:
    """A toy project of one test's own."""
    return make_project(tmp_path / "toy")
