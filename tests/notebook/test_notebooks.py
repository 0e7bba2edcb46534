"""Every notebook of the book through papermill, with the protocols that it has."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from moebook import results
from moebook.notebook import runner, sources
from moebook.notebook.session import VALUE
from moebook.results import Run

ROOT = Path(__file__).resolve().parents[2]
FOUND = sources.notebooks(ROOT)
RUN = [name for name, notebook in FOUND.items() if not notebook.findings]
ARMED = [name for name in RUN if "arms" in FOUND[name].parameters]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project's recipes beside its pools, so that nothing of it is replaced."""
    folder = tmp_path_factory.mktemp("project")
    for name in ("notebooks", "results"):
        shutil.copytree(ROOT / name, folder / name)
    for name in ("_config.yml", "requirements.lock"):
        shutil.copy(ROOT / name, folder / name)
    return folder


def _run(name: str, project: Path, protocol: str = "smoke", **overrides: str) -> Run:
    """Run a notebook; what its file holds must be what its page shows."""
    outcome = runner.run_notebook(name, protocol, overrides, folder=project)
    assert outcome is not None
    cells = json.loads(outcome.notebook.read_text())["cells"]
    outputs = [output.get("data", {}) for cell in cells for output in cell.get("outputs", [])]
    shown = [data[VALUE] for data in outputs if VALUE in data]
    assert [json.loads(json.dumps(results.plain(value))) for value in outcome.run.values] == shown
    return outcome.run


@pytest.mark.parametrize("name", RUN)
def test_a_notebook_runs_at_smoke_and_its_values_are_in_the_page(name: str, project: Path) -> None:
    run = _run(name, project)
    assert run.values and run.tier == "smoke"
    assert run.manifest["known_arms"] == list(run.arms), "at smoke every cell is run"


@pytest.mark.parametrize("name", ARMED)
def test_a_notebook_with_arms_runs_with_a_single_one(name: str, project: Path) -> None:
    arm = str(FOUND[name].parameters["arms"].default).split(",")[0]
    run = _run(name, project, arms=arm)
    assert run.values and run.arms == (arm,)


@pytest.mark.parametrize("name", [name for name in FOUND if name not in RUN])
def test_findings_are_drawn_from_the_pools_that_are_there(name: str, project: Path) -> None:
    assert _run(name, project, "cpu").protocol == "cpu"


@pytest.mark.parametrize("name", RUN)
def test_every_protocol_of_a_notebook_sets_parameters_that_it_has(name: str) -> None:
    notebook = FOUND[name]
    tiers = [notebook.settings(protocol)["tier"] for protocol in notebook.protocols]
    assert set(tiers) == set(results.TIERS)
