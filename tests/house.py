"""Count the house: ``python tests/house.py`` prints the sizes that CONTRIBUTING.md promises."""

from __future__ import annotations

import ast
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "moebook"
SINCE = {  # what the house's second design did not know of, which is counted apart
    "rivals": ("methods/rivals", "methods/rivals"),
    "together": ("together", "together"),
    "pools of runs": ("results/store.py notebook/study.py notebook/findings.py",
                      "notebook/test_study.py notebook/test_findings.py"),
    "designs of studies": ("notebook/heads.py", ""),
    "plans": ("planning notebook/plans.py bench/calibration.py",
              "planning notebook/test_plans.py"),
    "shards and clusters": (
        "training/sharding.py cluster.py methods/rocket/shards.py bench/scaling.py",
        "training/test_sharding.py training/courses.py methods/rocket/test_rocket_shards.py"),
    "programs and judges": (
        "evaluation/code.py evaluation/sandbox.py evaluation/inside.py evaluation/judge.py",
        "evaluation/test_code.py evaluation/hostile.py evaluation/test_judge.py"),
    "teaching": ("notebook/moving.py notebook/doctor.py",
                 "book/test_moving.py book/test_editions.py notebook/test_doctor.py"),
    "benchmarks out of a folder": ("", "evaluation/test_benchmarks.py"),
    "make gpu": ("", "recipes/test_gpu.py"),
    "generated faults": ("", "faults"),
}  # fmt: skip
Function = ast.FunctionDef | ast.AsyncFunctionDef


def files(place: str) -> list[Path]:
    """A Python file of the project, or those below a folder."""
    path = ROOT / place
    return [path] if path.is_file() else sorted(path.rglob("*.py"))


def lines(path: Path) -> int:
    """Lines of a file, as ``wc -l`` counts them."""
    return path.read_text(encoding="utf-8").count("\n")


@cache
def trees() -> dict[Path, ast.Module]:
    """The package's files, parsed."""
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in files(PACKAGE)}


def functions(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Each function's lines, docstring apart, and its name."""
    for node in ast.walk(tree):
        if isinstance(node, Function):
            told = node.body[0] if ast.get_docstring(node, clean=False) is not None else None
            docstring = told.end_lineno - told.lineno + 1 if told else 0
            yield node.end_lineno - node.lineno + 1 - docstring, node.name


def module(path: Path) -> str:
    """Dotted name of a file of the package."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Each of our other modules that a file imports, and whether inside a function."""
    names, bodies = set(map(module, trees())) - {module(path)}, ast.walk(trees()[path])
    inside = {n for body in bodies if isinstance(body, Function) for n in ast.walk(body)}
    for node in ast.walk(trees()[path]):
        targets = []
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            parts = [f"{node.module}.{alias.name}" for alias in node.names]
            targets = [part if part in names else node.module for part in parts]
        yield from ((name, node in inside) for name in targets if name in names)


def cycle() -> list[str]:
    """The modules of one cycle of imports, or nothing."""
    graph = {module(p): [name for name, inside in imports(p) if not inside] for p in trees()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def reach(notebook: str) -> tuple[int, int]:
    """Our modules that a notebook's first code cell loads, and their lines."""
    cells = json.loads((ROOT / "notebooks" / notebook).read_text(encoding="utf-8"))["cells"]
    imports = next(c for c in cells if "from moebook" in "".join(c["source"]))
    first = "".join(imports["source"])
    show = "import sys; print(*(m.__file__ for n, m in sys.modules.items() if n[:7] == 'moebook'))"
    command = [sys.executable, "-c", f"{first}\n{show}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = [Path(name) for name in done.stdout.split()]
    return len(loaded), sum(map(lines, loaded))


def main() -> None:
    """Print the counts."""
    for number, top in enumerate((PACKAGE, "tests")):
        since = {name: {path for place in made[number].split() for path in files(f"{top}/{place}")}
                 for name, made in SINCE.items()}  # fmt: skip
        then = set(files(top)).difference(*since.values())
        sizes = {"in all": set(files(top)), "without what came since": then} | since
        print(f"{top}: " + "; ".join(f"{name} {sum(map(lines, paths))} lines in {len(paths)} files"
                                     for name, paths in sizes.items() if paths))  # fmt: skip
    for top in ("recipes", "workshop"):
        print(f"{top}: {sum(map(lines, files(top)))} lines in {len(files(top))} files")
    long = [module(path) for path in trees() if lines(path) > 400]
    short = [module(path) for path in trees() if lines(path) < 60 and path.name != "__init__.py"]
    sizes = sorted(function for tree in trees().values() for function in functions(tree))
    inner = [(module(path), name) for path in trees() for name, inside in imports(path) if inside]
    outside = [f"{ours}->{name}" for ours, name in inner if ours != f"{PACKAGE}.cli"]
    print(f"files over 400 lines: {len(long)} {' '.join(long)}")
    print(f"files under 60 lines: {len(short)} {' '.join(short)}")
    print(f"functions: {len(sizes)}, median {statistics.median(s for s, _ in sizes):g} lines, "
          f"longest {sizes[-1][0]} ({sizes[-1][1]})")  # fmt: skip
    print(f"imports of our own inside functions, outside cli: {len(outside)} {' '.join(outside)}")
    print(f"cycles: {' -> '.join(cycle()) or 'none'}")
    modules, reached = reach("01_pesc.ipynb")
    print(f"the PESC notebook reaches {modules} modules with {reached} lines")
    since = [f"--ignore=tests/{place}" for made in SINCE.values() for place in made[1].split()]
    print("tests without what came since: pytest -n logical --dist worksteal", *since)


if __name__ == "__main__":
    main()
