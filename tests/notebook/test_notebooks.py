"""Every notebook of the book, through papermill at smoke tier, with the tiers that it has."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from moebook import results
from moebook.notebook import runner, sources
from moebook.notebook.session import VALUE

ROOT = Path(__file__).resolve().parents[2]
NAMES = sorted(sources.notebooks(ROOT))


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project's recipes, so that no page of the book is replaced."""
    folder = tmp_path_factory.mktemp("project")
    shutil.copytree(ROOT / "notebooks", folder / "notebooks")
    for name in ("_config.yml", "requirements.lock"):
        shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_at_smoke_tier_and_its_values_are_in_the_page(
    name: str, project: Path
) -> None:
    outcome = runner.run_notebook(name, "smoke", {}, folder=project)
    cells = json.loads(outcome.notebook.read_text())["cells"]
    shown = [
        output["data"][kind]
        for cell in cells
        for output in cell.get("outputs", [])
        for kind in output.get("data", {})
        if kind == VALUE
    ]
    assert outcome.record.scale == "smoke"
    assert [value.to_json() for value in outcome.record.values] == shown
    assert shown


@pytest.mark.parametrize("name", NAMES)
def test_every_tier_of_a_notebook_sets_parameters_that_it_has(name: str) -> None:
    notebook = sources.notebooks(ROOT)[name]
    assert notebook.tiers == list(results.TIERS)
    assert all(notebook.settings(tier)["tier"] == tier for tier in notebook.tiers)
