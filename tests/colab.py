"""Install and run a notebook as in Colab: `python -m tests.colab FOLDER`, a new one.

A virtual environment gets the versions that Colab's kernel is made of. The notebook's first cell
installs this checkout's wheel in it, under a running kernel; that kernel is restarted; what it is
made of must be as before. Then papermill runs the whole notebook there at smoke, and its figures
are counted. Packages come from pip's index: torch is the one that PIP_CONSTRAINT or the index
names, and where no index answers there is nothing to test.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import nbformat

from moebook import __version__
from recipes import install

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK = "01_pesc"
FIGURES = 3  # fewest that the notebook draws at smoke
# Of Colab's runtime 2026.01: googlecolab/backend-info, pip-freeze.txt at bd8aaa4.
KERNEL = {
    "ipykernel": "6.17.1",
    "ipython": "7.34.0",
    "jupyter_client": "7.4.9",
    "jupyter_core": "5.9.1",
    "matplotlib-inline": "0.2.1",
    "nest-asyncio": "1.6.0",
    "prompt_toolkit": "3.0.52",
    "psutil": "5.9.5",
    "pyzmq": "26.2.1",
    "tornado": "6.5.1",
    "traitlets": "5.7.1",
}
# Others that are there before; pip may replace what our floors exclude, as numpy 2.0.
BESIDE = {
    "matplotlib": "3.10.0",
    "nbclient": "0.10.4",
    "nbformat": "5.10.4",
    "numpy": "2.0.2",
    "pandas": "2.2.2",
    "packaging": "25.0",
    "pyarrow": "18.1.0",
    "scikit-learn": "1.6.1",
    "scipy": "1.16.3",
}
# Run in the environment: the first cell under a kernel, then that kernel restarted.
DRIVER = """
import json, sys
from jupyter_client.manager import start_new_kernel

cell, after = json.loads(sys.argv[1])
manager, client = start_new_kernel(kernel_name="python3")

def run(code):
    reply = client.execute_interactive(code, timeout=3000)
    assert reply["content"]["status"] == "ok", reply["content"]

run(cell)
manager.restart_kernel(now=False)
client.wait_for_ready(timeout=120)
run(cell)
run(after)
client.stop_channels()
manager.shutdown_kernel()
"""
AFTER = """
import matplotlib.pyplot as plt
import moebook
from moebook.lab.run import begin
plt.plot([1, 2])
print("moebook", moebook.__version__, "after a restart")
"""


def shell(*command: object, **changed: object) -> str:
    """Run a command, and return what it prints; a failing one ends this program."""
    ran = subprocess.run(
        [str(word) for word in command], stdout=subprocess.PIPE, text=True, **changed
    )
    if ran.returncode:
        sys.exit(f"{command[:4]} ended with {ran.returncode}:\n{ran.stdout[-4000:]}")
    return ran.stdout


def versions(python: Path) -> dict[str, str]:
    """Return the versions of what an environment's kernel is made of."""
    code = "import sys; from importlib.metadata import version"
    code += "; print(*map(version, sys.argv[1:]))"
    found = shell(python, "-c", code, *KERNEL).split()
    return dict(zip(KERNEL, found, strict=True))


def environment(folder: Path) -> Path:
    """Make an environment with Colab's versions, whose kernels are told from others."""
    shell(sys.executable, "-m", "venv", folder)
    python = folder / "bin" / "python"
    pins = [f"{name}=={version}" for name, version in (KERNEL | BESIDE).items()]
    shell(python, "-m", "pip", "install", "-q", *pins)
    site = Path(
        shell(python, "-c", "import site; print(site.getsitepackages()[0])")[:-1]
    )
    (site / "google" / "colab").mkdir(parents=True)
    (site / "google" / "colab" / "__init__.py").touch()
    (site / "colab.pth").write_text("import google.colab\n")
    shell(python, "-m", "ipykernel", "install", "--prefix", folder)
    return python


def first_cell(wheel: Path) -> tuple[str, nbformat.NotebookNode]:
    """Return the cell that installs, and its notebook, with this wheel for the released one."""
    text = (ROOT / "notebooks" / f"{NOTEBOOK}.ipynb").read_text(encoding="utf-8")
    here = f"moebook[{install.EXTRAS}] @ {wheel.as_uri()}"
    notebook = nbformat.reads(text.replace(install.PACKAGE, here), as_version=4)
    cells = [
        cell.source
        for cell in notebook.cells
        if "install" in cell.metadata.get("tags", [])
    ]
    assert len(cells) == 1 and here in cells[0]
    return cells[0], notebook


def main(folder: Path) -> None:
    """Go the whole way in a folder, and print what came of it."""
    folder = folder.resolve()
    python = environment(folder / "venv")
    before = versions(python)
    assert before == KERNEL, before
    pip = [python, "-m", "pip"]
    shell(*pip, "wheel", "-q", "--no-deps", "-w", folder, ROOT)
    wheel = folder / f"moebook-{__version__}-py3-none-any.whl"
    cell, notebook = first_cell(wheel)

    place = {"cwd": folder, "env": os.environ | {"JUPYTER_PATH": ""}}
    print(shell(python, "-c", DRIVER, json.dumps([cell, AFTER]), **place))
    after = versions(python)
    assert after == before, f"pip replaced what the kernel is made of: {after}"

    nbformat.write(notebook, folder / f"{NOTEBOOK}.ipynb")
    smoke = ROOT / "notebooks" / f"{NOTEBOOK}.smoke.yaml"
    run = [python, "-m", "papermill", f"{NOTEBOOK}.ipynb", "out.ipynb", "-f", smoke]
    shell(*run, "--kernel", "python3", "--no-progress-bar", **place)
    done = nbformat.read(folder / "out.ipynb", as_version=4)
    outputs = [each for cell in done.cells for each in cell.get("outputs", [])]
    figures = sum("image/png" in each.get("data", {}) for each in outputs)
    assert figures >= FIGURES, f"{figures} figures"
    shell(*pip, "check")
    print(f"{NOTEBOOK} ran at smoke with {figures} figures under", json.dumps(after))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
