"""Generated parts of the pages: nothing is lost, nothing passes unescaped, ages read well."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from moebook.notebook import badge, fragments
from moebook.papers.arithmetic import Finding
from moebook.results import Record

ROOT = Path(__file__).parents[2]


def _finding(place: str, status: str, explanation: str) -> Finding:
    return Finding("pesc", place, "average", "1.0", "1.1", status, explanation, "Table 1")


def test_the_audit_shows_every_finding_and_folds_those_of_one_cause() -> None:
    differs = [_finding(f"row {number}", "differs", "a <mean>") for number in range(3)]
    page = fragments.audit([*differs, _finding("row 9", "agrees", "as it should")])
    assert all(f"row {number}" in page for number in (0, 1, 2, 9))
    assert page.count("and 2 more") == 1
    assert "a &lt;mean&gt;" in page and "<mean>" not in page


def test_a_row_escapes_what_it_names() -> None:
    assert fragments.row({"a": "<b>x</b>"}, {"paper": 'P"'}, "i<") == (
        '<tr id="i&lt;" data-paper="P&quot;"><td data-label="a"><b>x</b></td></tr>'
    )


def test_without_records_the_page_says_so(tmp_path: Path) -> None:
    assert fragments.records(tmp_path) == "No run has been recorded yet.\n"


def test_a_record_is_listed_with_its_cost_age_and_changes(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "notebooks", tmp_path / "notebooks")
    folder = tmp_path / "results" / "pesc" / "study"
    folder.mkdir(parents=True)
    manifest = {
        "date": "2026-01-02T00:00:00+00:00", "seconds": 3900.0, "hashes": {},
        "peak_memory": 2_000_000_000, "parameters": {"seeds": 2},
        "commit": {"id": "abcdef0123", "dirty": True},
        "environment": {"cpu": "A & B", "cores": 2, "accelerator": None},
    }  # fmt: skip
    value = {"name": "pesc/x", "value": 1.0, "unit": "ratio", "seed": 0}
    record = {"notebook": "pesc", "scale": "study", "values": [value]}
    (folder / "record.json").write_text(json.dumps(record))
    (folder / "manifest.json").write_text(json.dumps(manifest))
    page = fragments.records(tmp_path)
    facts = (
        "1 h 5 min", "2.0 GB", "2 seeds", "A &amp; B", "of 2026-01-02", "package", "abcdef0 with",
    )  # fmt: skip
    for fact in facts:
        assert fact in page


def test_the_evidence_names_the_day_and_what_changed(tmp_path: Path) -> None:
    (tmp_path / "requirements.lock").write_text("torch==2.13.0\n")
    record = Record("pesc", "study", (), {"date": "2026-01-02T23:00:00+00:00", "hashes": {}})
    assert badge.evidence(record, tmp_path).startswith("of 2026-01-02; changed since: ")
