"""The record of when claims were written is what git's history says."""

import subprocess
from pathlib import Path

import pytest
import yaml

from moebook import storage
from moebook.lab import papers
from moebook.lab.papers.printed import FOLDER, WRITTEN
from recipes import claims
from tests.refusals import refused

FIRST = "3231a0c"  # the commit that began with claims


def test_the_record_of_when_claims_were_written_is_that_of_the_history():
    git = ["git", "-C", str(claims.ROOT), "merge-base", "--is-ancestor", FIRST, "HEAD"]
    if subprocess.run(git, capture_output=True).returncode:
        pytest.skip("git's history does not reach back to the first claims")
    recorded = storage.read_json(Path(FOLDER / WRITTEN))
    found = claims.written()
    assert {name: found.get(name) for name in recorded} == recorded


def test_an_entry_of_the_history_has_the_hash_that_its_claim_has():
    for paper in (*papers.PAPERS, *papers.OURS):
        entries = yaml.safe_load((FOLDER / paper / "claims.yaml").read_text("utf-8"))
        hashes = {entry["id"]: claims._hash(entry) for entry in entries}
        assert hashes == {claim.id: claim.frozen for claim in papers.claims(paper)}


def test_a_claim_that_is_not_committed_and_a_folder_without_git_are_refused(
    tmp_path, monkeypatch
):
    refused("E-GIT: .*; run this in a clone", claims.written, tmp_path)
    (tmp_path / "moebook" / "lab" / "papers").mkdir(parents=True)
    record = {claim.id: {} for claim in papers.claims()}
    left_out = record.popitem()[0]
    monkeypatch.setattr(claims, "ROOT", tmp_path)
    monkeypatch.setattr(claims, "written", lambda: record)
    refused(f"E-GIT: {left_out} is not committed as it stands", claims.main)
    assert not list(tmp_path.rglob("*.json"))


def test_a_file_may_be_taken_away_and_a_history_that_is_cut_off_is_refused(tmp_path):
    def git(*words, place=tmp_path / "whole"):
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *who, *words], cwd=place, check=True)

    (tmp_path / "whole").mkdir()
    git("init", "-q")
    name = "papers/pesc/claims.yaml"
    listed = tmp_path / "whole" / "moebook" / "lab" / name
    listed.parent.mkdir(parents=True)
    for turn in range(2):
        listed.write_text("- {id: pesc.a}")
        git("add", ".")
        git("commit", "-qm", "here")
        if not turn:
            git("rm", "-q", str(listed))
            git("commit", "-qm", "gone")
            listed.parent.mkdir(parents=True, exist_ok=True)
    versions = claims._history(tmp_path / "whole", name)
    assert [entries for _, entries in versions] == 2 * [[{"id": "pesc.a"}]]
    whole = f"file://{tmp_path / 'whole'}"
    git("clone", "-q", "--depth", "1", whole, "cut", place=tmp_path)
    refused("E-GIT: .*unshallow", claims._history, tmp_path / "cut", name)


def test_a_claim_has_stood_since_the_commit_that_made_it_what_it_is(
    tmp_path, monkeypatch
):
    versions = [
        ("0", [{"id": "pesc.a", "value": "y"}]),
        ("1", [{"id": "pesc.a", "value": "x"}]),
        ("2", [{"id": "pesc.a", "value": "y"}]),
        ("3", [{"id": "pesc.a", "value": "y", "why": "Other words."}]),
    ]
    _, (last,) = versions[-1]
    one = type("Claim", (), {"id": "pesc.a", "frozen": claims._hash(last)})
    monkeypatch.setattr(claims, "_history", lambda folder, path: versions)
    monkeypatch.setattr(
        claims.papers, "claims", lambda paper: [one] if paper == "pesc" else []
    )
    assert claims.written(tmp_path) == {"pesc.a": {"frozen": one.frozen, "since": "2"}}
    versions += [("4", []), ("5", [last])]  # taken out, and put back
    assert claims.written(tmp_path) == {"pesc.a": {"frozen": one.frozen, "since": "5"}}
