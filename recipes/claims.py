"""When each claim was written as it stands: ``python -m recipes.claims`` writes `WRITTEN`.

Read from git's history of ``claims.yaml``, so that the ledger can tell a claim that was written, or
changed, after the runs that decide it. Runs since then keep the hashes of their claims themselves.
"""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from moebook import storage
from moebook.errors import Refusal, refuse
from moebook.lab import papers
from moebook.lab.papers.printed import FROZEN, PRESUPPOSES, SIZED, WRITTEN, frozen_hash

ROOT = Path(__file__).resolve().parents[1]
DEFAULTS = {"under": {}, "exact": False}  # of a claim's fields; None else


def written(folder: Path = ROOT) -> dict[str, dict[str, str]]:
    """Return by claim the hash of what it says, and the time since which it has said that."""
    by_claim = {}
    for paper in (*papers.PAPERS, *papers.OURS):
        now = {claim.id: claim.frozen for claim in papers.claims(paper)}
        since: dict[str, tuple[str, str]] = {}
        for time, entries in _history(folder, f"papers/{paper}/claims.yaml"):
            # A claim that was taken out and put back says it since then.
            there = {entry["id"] for entry in entries}
            since = {name: since[name] for name in since if name in there}
            for entry in entries:
                says = _hash(entry)
                if since.get(entry["id"], ("", ""))[0] != says:
                    since[entry["id"]] = says, time
        for name, says in now.items():
            then, time = since.get(name, ("", ""))
            if then == says:
                by_claim[name] = {"frozen": says, "since": time}
    return by_claim


def _history(folder: Path, name: str) -> list[tuple[str, list[dict[str, Any]]]]:
    """Read all versions of a file, the oldest first, each with the time of its commit (UTC).

    Until November 2026 the papers stood outside the laboratory.
    """
    if _git(folder, "rev-parse", "--is-shallow-repository").strip() == "true":
        refuse("E-GIT", "the history is cut off here: run git fetch --unshallow first")
    places = [f"moebook/lab/{name}", f"moebook/{name}"]
    log = _git(folder, "log", "--reverse", "--format=%H %ct", "--", *places)
    versions = []
    for line in log.splitlines():
        commit, seconds = line.split()
        listed = _git(folder, "ls-tree", "-r", "--name-only", commit, "--", *places)
        if not listed:  # it was taken away, as by a revert
            continue
        (path,) = listed.split()
        shown = _git(folder, "show", f"{commit}:{path}")
        entries = yaml.load(shown, Loader=yaml.CSafeLoader)
        time = datetime.fromtimestamp(int(seconds), UTC).isoformat(timespec="seconds")
        versions.append((time, entries))
    return versions


def _git(folder: Path, *words: str) -> str:
    """Return what git says in a folder; E-GIT where it cannot."""
    command = ["git", "-C", str(folder), *words]
    try:
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", check=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", "") or str(error)
        why = f"git cannot read its history: {said.strip()}"
        refuse("E-GIT", f"{folder}: {why}; run this in a clone of moebook")
    return done.stdout


def _hash(entry: dict[str, Any]) -> str:
    """Hash what an entry says, with the limits of sizes as floats, as `papers.Claim` reads them."""
    names = (*FROZEN, *SIZED, PRESUPPOSES)
    says = {name: entry.get(name, DEFAULTS.get(name)) for name in names}
    if says["times"]:
        says["times"] = [float(limit) for limit in says["times"]]
    return frozen_hash(says)


def main() -> int:
    """Write the file, which knows every claim: E-GIT for one that is not committed as it stands."""
    path = ROOT / "moebook" / "lab" / "papers" / WRITTEN
    record = written()
    for claim in papers.claims():
        if claim.id not in record:
            fix = "commit claims.yaml, then run this again"
            refuse("E-GIT", f"{claim.id} is not committed as it stands: {fix}")
    storage.write(path, json.dumps(record, indent=1, sort_keys=True) + "\n")
    print(path.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Refusal as refusal:
        print(refusal, file=sys.stderr)
        sys.exit(2)
