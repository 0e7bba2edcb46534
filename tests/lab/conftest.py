"""A toy project with one notebook, whose last cell ends as a parameter or its seed says."""

import json
import os
import shutil
import warnings
from pathlib import Path

import matplotlib.pyplot as plt
import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from papermill.translators import PythonTranslator

from moebook import storage
from moebook.lab.records import runs
from moebook.lab.run import pace, session, sources
from moebook.lab.run.session import NOTE

REPOSITORY = Path(storage.__file__).parents[2]

IMPORTS = """\
import json, os, random, sys, time
from pathlib import Path
import moebook
from IPython.display import HTML, display
from ipykernel import get_connection_info
from moebook.lab.run import begin"""

PARAMETERS = """\
tier: str = "cpu"  # scale {smoke, cpu, study}
seed: int = 0  # of everything random [0, 1000]
arms: str = "all"  # names with commas between them, or all
top_k: int = 2  # experts per token [1, 64]
fate: str = "well"  # the end {well, error, refusal, killed, dies, memory, slow, secret}"""

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
if fate == "dies": os.write(2, b"cuda error\\n\\nbad_free\\n"); os._exit(7)
if fate == "memory": raise MemoryError
if fate == "slow" or seed == 60: Path("started").touch(); time.sleep(60)
if fate == "secret": print("hf" + "_" + "a" * 30)"""

TORCH = """\
class cuda:
    is_available = staticmethod(bool)
manual_seed = lambda seed: None
get_num_threads = lambda: 1"""

PROTOCOLS = {
    "smoke": "tier: smoke\ntop_k: 1\n",
    "nano": "tier: study\ntop_k: 4\n",
    "study": "tier: study\ntop_k: 8\n",
}
TOY = (IMPORTS, PARAMETERS, (MEASURE, ARMS, END), PROTOCOLS)


def make_project(folder, imports, parameters, sources, protocols):
    """Write a project of one notebook, with these cells and protocols, into an empty folder."""
    (folder / "notebooks").mkdir(parents=True)
    (folder / "_config.yml").touch()
    (folder / "requirements.lock").write_text("torch==2.13.0\n")
    declared = new_code_cell(parameters, metadata={"tags": ["parameters"]})
    code = map(new_code_cell, ("run = begin(In, globals())", *sources))
    cells = [new_markdown_cell("# A toy"), new_code_cell(imports), declared, *code]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook = new_notebook(cells=cells, metadata={"kernelspec": kernel})
    nbformat.write(notebook, folder / "notebooks" / "01_toy.ipynb")
    for name, text in protocols.items():
        (folder / "notebooks" / f"01_toy.{name}.yaml").write_text(text)
    return folder


def ran(notebook, **parameters):
    """Give a notebook the counts and the note of `begin` with which a kernel leaves it."""
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(code, start=1):
        cell["execution_count"] = number
    texts = {
        number: "".join(cell["source"]) for number, cell in enumerate(code, start=1)
    }
    hashes = {
        str(number): storage.files.cell_digest(text) for number, text in texts.items()
    }
    note = {
        "parameters": parameters,
        "cells": hashes,
        "begun": "2026-11-27T09:23:57+00:00",
    }
    code[0]["outputs"] = [new_output("display_data", {NOTE: note}), *code[0]["outputs"]]


@pytest.fixture
def make():
    return make_project


@pytest.fixture(scope="session")
def light(tmp_path_factory):
    """A PYTHONPATH with this package and a stand-in for torch, two seconds of every kernel."""
    folder = tmp_path_factory.mktemp("light")
    (folder / "torch.py").write_text(TORCH)
    return f"{folder}{os.pathsep}{REPOSITORY}"


@pytest.fixture(scope="module", autouse=True)
def environment():
    """The kernels find this package, and a secret to keep from them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(REPOSITORY))
        patch.setenv("CANARY_TOKEN", "canary-in-the-environment")
        yield patch


@pytest.fixture(scope="module")
def project(tmp_path_factory, environment):
    """The toy project for all tests of a module, with a copy of the package that stays as it is."""
    folder = make_project(tmp_path_factory.mktemp("project") / "toy", *TOY)
    heavy = shutil.ignore_patterns("__pycache__", "*.safetensors", "*.json*")
    shutil.copytree(REPOSITORY / "moebook", folder / "moebook", ignore=heavy)
    environment.setattr("moebook.storage.files.PACKAGE", folder / "moebook")
    environment.setenv("PYTHONPATH", str(folder))
    return folder


@pytest.fixture
def fresh(tmp_path):
    """A toy project of one test's own."""
    return make_project(tmp_path / "toy", *TOY)


@pytest.fixture(scope="session")
def recipes(tmp_path_factory):
    """A copy of the book's notebooks beside its pools, so that nothing of it is replaced."""
    folder = tmp_path_factory.mktemp("recipes")
    for name in ("notebooks", "results"):
        shutil.copytree(REPOSITORY / name, folder / name)
    for name in ("_config.yml", "requirements.lock"):
        shutil.copy(REPOSITORY / name, folder / name)
    return folder


@pytest.fixture
def here(recipes, monkeypatch):
    """Run all cells in this process, which has imported all libraries already."""
    left = []
    monkeypatch.setattr(session, "_leave", lambda _, bundle: left.append(bundle))
    monkeypatch.setattr(pace, "pace", lambda: 200.0)  # which takes a second
    unpacked = runs._unpacked

    def committed(path, content):
        """The run that this process may have read already, by its place in the repository."""
        if path.is_relative_to(recipes):
            path = REPOSITORY / path.relative_to(recipes)
        return unpacked(path, content)

    monkeypatch.setattr(runs, "_unpacked", committed)
    monkeypatch.chdir(recipes)

    def run(name, settings):
        left.clear()
        cells = json.loads(sources.find(REPOSITORY, name).path.read_text())["cells"]
        code = []
        for cell in cells:
            if cell["cell_type"] == "code":
                code.append("".join(cell["source"]))
            if "parameters" in cell["metadata"].get("tags", []):
                code.append(f"# Parameters\n{PythonTranslator.codify(settings)}")
        names = {"In": []}
        for source in code:
            names["In"].append(source)
            exec(source, names)
        return list(left)

    with plt.rc_context(), warnings.catch_warnings(action="ignore"):
        yield run
