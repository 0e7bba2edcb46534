"""The reference's pages, one a package: `python -m recipes.reference` writes book/reference*.md.

What is public is what ``__all__`` of a package names, and of the modules that it names. The pages
hold tables of these, but for constants; Sphinx fills in the docstrings when the book is built.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path

from moebook.storage import write
from recipes import codes

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "moebook.kernels": "Routing, experts, adapters and the balance loss as functions of tensors",
    "moebook.nn": "Modules that the methods put into a model",
    "moebook.models": "Loading models, their anatomy, the fingerprint of a base",
    "moebook.data": "Rows: embedded tasks, your own, the hub's; chat formats and encoding",
    "moebook.training": "The training loop",
    "moebook.evaluation": "Evaluation, a row an item",
    "moebook.methods.pesc": "PESC: dense to sparse by adapters",
    "moebook.methods.upcycling": "Sparse upcycling, and where routers start",
    "moebook.methods.rocket": "Rocket: a few examples choose LoRAs",
    "moebook.methods.rivals": "Rocket's rivals on one bank",
    "moebook.methods.esft": "ESFT: a task's experts alone",
    "moebook.together": "The methods on one base and one budget",
    "moebook.analysis": "What routers do",
    "moebook.lab.planning": "What a training needs, before it runs",
    "moebook.errors": "Refusals, and what each code means",
}
INDEX = """\
# Reference

What the package offers, a page a package, written from its docstrings. A name that is not here is
internal, and may change with any version. Shapes are in the [letters of the book](how_to_read.md);
losses are in nats, sizes in bytes, durations in seconds, shares in [0, 1].

| package | what it holds |
|---|---|
"""
NOTE = """
Bad input ends in a `moebook.errors.Refusal`, one line that says what is wrong, where, and what was
expected. It begins with a code; [what each means](reference_errors.md) stands in a table.
"""


def source(name: str) -> Path:
    """Return the file of a module or package."""
    place = ROOT.joinpath(*name.split("."))
    return place / "__init__.py" if place.is_dir() else place.with_suffix(".py")


def exported(name: str) -> list[str]:
    """Return what a module's ``__all__`` names, without importing it."""
    for statement in ast.parse(source(name).read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign):
            (target,) = statement.targets
            if getattr(target, "id", "") == "__all__":
                names: list[str] = ast.literal_eval(statement.value)
                return names
    return []


def modules(package: str) -> Iterator[str]:
    """Yield a package, and the modules among what it names, that have a page together."""
    yield package
    for name in exported(package):
        inner = f"{package}.{name}"
        if source(inner).exists() and exported(inner):
            yield inner


def imported(package: str) -> list[str]:
    """Return the modules of its own that a package imports whole."""
    names: list[str] = []
    for statement in ast.parse(source(package).read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.ImportFrom) and statement.module == package:
            names += [alias.name for alias in statement.names]
    return names


def page(package: str) -> str:
    """Write the page of a package; what it is for stands in its docstring."""
    parts = [f"# {package}\n"]
    if package == "moebook.errors":
        found_by = ", ".join(f"!{code}" for code in [*codes.REFUSALS, *codes.WARNINGS])
        parts.insert(0, f"```{{index}} {found_by}\n```\n\n")
    inside = list(modules(package))
    for module in inside:
        internal = imported(module)
        names = [
            each
            for each in exported(module)
            if f"{module}.{each}" not in inside
            and each not in internal
            and not each.isupper()
        ]
        heading = "" if module == package else f"\n## {module}\n"
        table = _names(module, names) if names else ""
        parts.append(
            f"{heading}\n```{{eval-rst}}\n.. currentmodule:: {module}\n\n{table}"
            f".. automodule:: {module}\n   :members:\n   :no-value:\n```\n"
        )
    if package == "moebook.errors":
        parts.append(_codes("Refusals", codes.REFUSALS))
        parts.append(_codes("Warnings", codes.WARNINGS))
    return "".join(parts)


def _names(module: str, names: list[str]) -> str:
    """Write the table of a module's names, each with the first line of its docstring."""
    loaded = importlib.import_module(module)
    rows = ["   * - name\n     - what it is or does\n"]
    for name in names:
        text = inspect.getdoc(getattr(loaded, name)) or ""
        first = text.partition("\n")[0]
        rows.append(f"   * - :py:obj:`{name}`\n     - {first}\n")
    options = "   :class: autosummary\n   :header-rows: 1\n   :widths: 10 90\n"
    return f".. list-table::\n{options}\n{''.join(rows)}\n"


def _codes(heading: str, meanings: Mapping[str, tuple[str, str]]) -> str:
    """Write the table of codes: what each means, and what to do."""
    rows = [
        f"| `{code}` | {meaning} | {fix} |\n"
        for code, (meaning, fix) in sorted(meanings.items())
    ]
    head = "| code | what it means | what to do |\n|---|---|---|\n"
    return f"\n## {heading}\n\n{head}{''.join(rows)}"


def file(package: str) -> str:
    """Return the name of a package's page."""
    return "reference_" + package.removeprefix("moebook.").replace(".", "_")


def pages() -> dict[str, str]:
    """Return all pages of the reference, by their files' names."""
    lines = [
        f"| [{name}]({file(name)}.md) | {what} |\n" for name, what in PACKAGES.items()
    ]
    index = INDEX + "".join(lines) + NOTE
    return {"reference": index} | {file(name): page(name) for name in PACKAGES}


if __name__ == "__main__":
    for name, text in pages().items():
        write(ROOT / "book" / f"{name}.md", text)
