"""Generated parts of the pages: nothing is lost, nothing passes unescaped, ages read well."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from moebook.notebook import pages
from moebook.papers.arithmetic import Finding
from moebook.results import Run, Value, write_run

ROOT = Path(__file__).parents[2]


def _finding(place: str, status: str, explanation: str) -> Finding:
    return Finding("pesc", place, "average", "1.0", "1.1", status, explanation, "Table 1")


def test_the_audit_shows_every_finding_and_folds_those_of_one_cause() -> None:
    differs = [_finding(f"row {number}", "differs", "a <mean>") for number in range(3)]
    page = pages.audit([*differs, _finding("row 9", "agrees", "as it should")])
    assert all(f"row {number}" in page for number in (0, 1, 2, 9))
    assert page.count("and 2 more") == 1
    assert "a &lt;mean&gt;" in page and "<mean>" not in page


def _run(seed: int, tier: str = "study", day: int = 2) -> Run:
    manifest = {
        "date": f"2026-01-0{day}T23:00:00+00:00", "seconds": 3900.0, "peak_memory": 2 * 10**9,
        "commit": {"id": "abcdef0123", "dirty": True}, "overrides": {"steps": 10 * day},
        "environment": {"cpu": "A & B", "cores": 2, "accelerator": None},
    }  # fmt: skip
    protocol = "nano" if tier == "study" else tier
    values, code = (Value("pesc/x", 1.0, "ratio"),), {"notebook": "another hash"}
    return Run("pesc", protocol, tier, seed, values, code=code, manifest=manifest)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project whose pesc ran with two seeds as a study, and on its page."""
    shutil.copytree(ROOT / "notebooks", tmp_path / "notebooks")
    for run in (_run(3, day=5), _run(0)):
        write_run(tmp_path / "results" / "pesc" / "nano" / f"{run.seed}.parquet", run)
    write_run(tmp_path / "book" / "notebooks" / "01_pesc.parquet", _run(0, "smoke"))
    return tmp_path


def test_without_runs_the_page_says_so(tmp_path: Path) -> None:
    assert pages.records(tmp_path) == "No run has been recorded yet.\n"


def test_a_pool_is_listed_with_its_seeds_cost_day_and_changes(project: Path) -> None:
    _, pooled, live = pages.records(project).split("<b>PESC</b><br>")
    for fact in (
        "nano (committed)", "2 seeds: 0, 3<", "1 values each", "1 h 5 min, 2.0 GB on A &amp; B",
        "of 2026-01-05; changed since: notebook", "commit abcdef0 with changes",
    ):  # fmt: skip
        assert fact in pooled
    for fact in ("this build (smoke, on its page)", "1 seed: 0<", "of 2026-01-02; "):
        assert fact in live


def test_a_page_leads_from_its_run_to_the_pools_and_what_they_say(project: Path) -> None:
    for path in (project / "notebooks").glob("*_findings.ipynb"):
        path.unlink()
    told = pages.badge(_run(0, "smoke"), project)
    assert "Runs at full size: nano (2 seeds); what they say: [the records](../records.md)" in told
    (project / "notebooks" / "01_pesc_findings.ipynb").touch()
    told = pages.badge(_run(0, "smoke"), project)
    assert "what they say: [the findings](01_pesc_findings.ipynb)" in told
    assert "Runs at" not in pages.badge(replace(_run(0), notebook="esft"), project)


def test_the_badge_tells_cost_seed_and_what_the_reader_set(tmp_path: Path) -> None:
    page = pages.badge(_run(3), tmp_path)
    for fact in ("tier <b>study", "seed <b>3", "ran in <b>1 h 5 min", "peak memory <b>2.0 GB",
                 "2 × A &amp; B", "date <b>2026-01-02", "reader <b>steps = 20"):  # fmt: skip
        assert fact in page
    assert "accelerator" not in page and "numbers mean nothing" not in page
    assert "numbers mean nothing" in pages.badge(_run(3, "smoke"), tmp_path)
