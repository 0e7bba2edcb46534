"""The cell that installs the package in Colab: `python -m recipes.install` writes it everywhere.

pyproject.toml holds the repository's address and no other file decides it: the cell takes the wheel
of this version's release from there, and the pages and settings that name the address follow.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

from moebook import __version__
from moebook.storage import write

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))[
    "project"
]
REPOSITORY: str = PROJECT["urls"]["Repository"]
EXTRAS = "notebook,evaluate"
WHEEL = f"moebook-{__version__}-py3-none-any.whl"
PACKAGE = f"moebook[{EXTRAS}] @ {REPOSITORY}/releases/download/v{__version__}/{WHEEL}"
CELL = f"""\
import sys

if "google.colab" in sys.modules:
    package = "{PACKAGE}"
    get_ipython().run_line_magic("pip", f"install -q '{{package}}'")"""
NAMING = (
    "_config.yml",
    "README.md",
    "book/own.md",
    "book/how_to_rerun.md",
    "book/teaching.md",
)
"""Files that name the address, or a package's at it."""
ADDRESS = re.compile(
    r"https://github\.com/[\w.-]+/moebook(?=[\s`'\"/#]|$)", re.MULTILINE
)


def installing(text: str) -> str:
    """Return a notebook's text with our lines in its cell tagged ``install``, if it has one."""
    notebook = json.loads(text)
    lines = CELL.splitlines(keepends=True)
    for cell in notebook["cells"]:
        if "install" in cell["metadata"].get("tags", []):
            cell["source"] = lines
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def texts() -> dict[Path, str]:
    """Return what each file should hold that depends on the address."""
    contents = {}
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        contents[path] = installing(path.read_text(encoding="utf-8"))
    for name in NAMING:
        path = ROOT / name
        contents[path] = ADDRESS.sub(REPOSITORY, path.read_text(encoding="utf-8"))
    return contents


if __name__ == "__main__":
    for path, text in texts().items():
        if path.read_text(encoding="utf-8") != text:
            write(path, text)
