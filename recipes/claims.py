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

from moebook.errors import Refusal, refuse
from moebook.lab import papers
from moebook.lab.papers.printed import FROZEN, SIZED, WRITTEN, frozen_hash

ROOT = Path(__file__).resolve().parents[1]
DEFAULTS = {"under": {}, "exact": False}  # of a claim's fields; None else


def written(folder: Path = ROOT) -> dict[str, dict[str, str]]:
    """Return by claim the hash of what it says, and the time since which it has said that."""
    by_claim = {}
    for paper in (*papers.PAPERS, *papers.OURS):
        now = {claim.id: claim.frozen for claim in papers.claims(paper)}
        since: dict[str, tuple[str, str]] = {}
        for time, entries in _history(folder, f"papers/{paper}/claims.yaml"):
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
    git = ["git", "-C", str(folder)]
    shallow = subprocess.run(
        [*git, "rev-parse", "--is-shallow-repository"],
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    if shallow.stdout.strip() == "true":
        refuse("E-GIT", "the history is cut off here: run git fetch --unshallow first")
    places = [f"moebook/lab/{name}", f"moebook/{name}"]
    log = subprocess.run(
        [*git, "log", "--reverse", "--format=%H %ct", "--", *places],
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    versions = []
    for line in log.stdout.splitlines():
        commit, seconds = line.split()
        listed = subprocess.run(
            [*git, "ls-tree", "-r", "--name-only", commit, "--", *places],
            capture_output=True,
            encoding="utf-8",
            check=True,
        )
        if not listed.stdout:  # it was taken away, as by a revert
            continue
        (path,) = listed.stdout.split()
        shown = subprocess.run(
            [*git, "show", f"{commit}:{path}"],
            capture_output=True,
            encoding="utf-8",
            check=True,
        )
        entries = yaml.load(shown.stdout, Loader=yaml.CSafeLoader)
        time = datetime.fromtimestamp(int(seconds), UTC).isoformat(timespec="seconds")
        versions.append((time, entries))
    return versions


def _hash(entry: dict[str, Any]) -> str:
    names = (*FROZEN, *SIZED)
    return frozen_hash({name: entry.get(name, DEFAULTS.get(name)) for name in names})


def main() -> int:
    """Write the file."""
    path = ROOT / "moebook" / "lab" / "papers" / WRITTEN
    path.write_text(
        json.dumps(written(), indent=1, sort_keys=True) + "\n", encoding="utf-8"
    )
    print(path.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Refusal as refusal:
        print(refusal, file=sys.stderr)
        sys.exit(2)
