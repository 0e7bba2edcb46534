"""The five studies of three seeds, recorded before a run was one file: nothing of them was lost."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from moebook import papers, results
from moebook.notebook import verdicts
from moebook.results import Pool

ROOT = Path(__file__).parents[2]
BEFORE = json.loads(Path(__file__).with_name("converted.json").read_text())
"""Of the records as they were: a hash of all values by notebook and seed, and all verdicts."""


def converted(name: str) -> Pool:
    pool = results.pool(name, "nano", ROOT)
    assert pool is not None
    return Pool(name, "nano", tuple(run for run in pool.runs if run.seed < 3))


@pytest.mark.parametrize("which", BEFORE["values"])
def test_every_value_and_item_of_a_converted_run_is_what_it_was(which: str) -> None:
    name, seed = which.split("/")
    (run,) = (run for run in converted(name).runs if run.seed == int(seed))
    rows = sorted(
        [v.name, v.value, v.unit, None if v.items is None else list(v.items)] for v in run.values
    )
    assert hashlib.sha256(json.dumps(rows).encode()).hexdigest() == BEFORE["values"][which]
    assert run.manifest["parameters"]["seeds"] == 3
    assert run.manifest["date"].startswith("2026-11-22")


def test_every_committed_run_is_a_small_file() -> None:
    assert max(path.stat().st_size for path in (ROOT / "results").rglob("*.parquet")) < 500_000


def satterthwaite(effects: np.ndarray) -> tuple[float, float] | None:
    """The interval that the verdicts rested on then."""
    if effects.size == 1:
        return None
    variance = parts = 0.0
    for means in (effects.mean(axis=1), effects.mean(axis=0)):
        if len(means) > 1:
            share = float(means.var(ddof=1)) / len(means)
            variance, parts = variance + share, parts + share**2 / (len(means) - 1)
    middle = float(effects.mean())
    degrees = variance**2 / parts if parts else 1.0
    half = float(stats.t.ppf(0.975, degrees)) * math.sqrt(variance)
    return middle - half, middle + half


def test_under_the_interval_of_then_all_verdicts_are_those_of_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(verdicts, "interval", satterthwaite)
    pools = {name: converted(name) for name in {claim.run for claim in papers.claims()}}
    now: dict[str, list[str]] = {}
    for claim in papers.claims():
        now.setdefault(str(verdicts.row(claim, [pools[claim.run]]).label), []).append(claim.id)
    assert now == BEFORE["verdicts"]
