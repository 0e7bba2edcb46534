"""The record of when claims were written is what git's history says."""

import subprocess
from pathlib import Path

import pytest

from moebook import storage
from moebook.lab.papers.printed import FOLDER, WRITTEN
from recipes import claims

FIRST = "3231a0c"  # the commit that began with claims


def test_the_record_of_when_claims_were_written_is_that_of_the_history():
    git = ["git", "-C", str(claims.ROOT), "merge-base", "--is-ancestor", FIRST, "HEAD"]
    if subprocess.run(git, capture_output=True).returncode:
        pytest.skip("git's history does not reach back to the first claims")
    recorded = storage.read_json(Path(FOLDER / WRITTEN))
    found = claims.written()
    assert {name: found.get(name) for name in recorded} == recorded


def test_a_claim_has_stood_since_the_commit_that_made_it_what_it_is(
    tmp_path, monkeypatch
):
    versions = [
        ("1", [{"id": "pesc.a", "value": "x"}]),
        ("2", [{"id": "pesc.a", "value": "y"}]),
        ("3", [{"id": "pesc.a", "value": "y", "why": "Other words."}]),
    ]
    one = type("Claim", (), {"id": "pesc.a", "frozen": claims._hash(versions[2][1][0])})
    monkeypatch.setattr(claims, "_history", lambda folder, path: versions)
    monkeypatch.setattr(
        claims.papers, "claims", lambda paper: [one] if paper == "pesc" else []
    )
    assert claims.written(tmp_path) == {"pesc.a": {"frozen": one.frozen, "since": "2"}}
