"""Results of executed notebooks: values, runs and pools of them, their files, and their day."""

from moebook.results.files import digest, replacing, root, write
from moebook.results.freshness import FROZEN, changed, commit, day, loaded, since, source
from moebook.results.pools import COMMITTED, LIVE, Pool, live, pool, pools
from moebook.results.runs import Run, curve_from, plain, read_run, value_from, write_run
from moebook.results.values import TIERS, UNITS, Curve, Value, rounded

__all__ = [
    "COMMITTED",
    "FROZEN",
    "LIVE",
    "TIERS",
    "UNITS",
    "Curve",
    "Pool",
    "Run",
    "Value",
    "changed",
    "commit",
    "curve_from",
    "day",
    "digest",
    "live",
    "loaded",
    "plain",
    "pool",
    "pools",
    "read_run",
    "replacing",
    "root",
    "rounded",
    "since",
    "source",
    "value_from",
    "write",
    "write_run",
]
