"""Results of executed notebooks: values, runs, pools of runs, and the code that made them."""

from moebook.results.files import FROZEN, commit, digest, loaded, replacing, root, source, write
from moebook.results.pools import COMMITTED, LIVE, Pool, live, pool, pools
from moebook.results.runs import (
    TIERS, UNITS, Curve, Run, Value,
    changed, day, plain, read_run, restored, rounded, since, write_run,
)  # fmt: skip

__all__ = [
    "COMMITTED", "FROZEN", "LIVE", "TIERS", "UNITS", "Curve", "Pool", "Run", "Value",
    "changed", "commit", "day", "digest", "live", "loaded", "plain", "pool", "pools", "read_run",
    "replacing", "restored", "root", "rounded", "since", "source", "write", "write_run",
]  # fmt: skip
