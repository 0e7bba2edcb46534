"""Sizes of the fault tests and the record of what they found, which the book shows.

`MOEBOOK_FAULTS` multiplies every count, so that 10 makes the long run of what CI samples.
`MOEBOOK_FAULTS_RECORD` names the JSON file that takes a session's figures; parts of the file that
the session did not run stay as they were.
"""

import json
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from moebook import runtime, storage

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def times() -> int:
    """What a test multiplies its counts by."""
    return int(os.environ.get("MOEBOOK_FAULTS", "1"))


@pytest.fixture(scope="session")
def figures(times: int) -> Iterator[Callable[..., None]]:
    """Count by part and kind: ``figures("mutations", "config.json", refused=1)``.

    Call it before what it counts is asserted; a count of 0 names what did not happen.
    """
    start = time.monotonic()
    counts = defaultdict(lambda: defaultdict(Counter))
    yield lambda part, kind, **more: counts[part][kind].update(more)
    name = os.environ.get("MOEBOOK_FAULTS_RECORD")
    if name and counts:
        path = Path(name)
        record = json.loads(path.read_text()) if path.exists() else {}
        facts = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "times": times,
            "seconds": round(time.monotonic() - start),
            "commit": storage.commit(ROOT),
            "versions": runtime.versions(),
        }
        record |= {part: facts | {"kinds": kinds} for part, kinds in counts.items()}
        path.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
