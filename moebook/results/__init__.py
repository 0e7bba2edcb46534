"""Results of executed notebooks: values, records, the files that hold them, and their day."""

from moebook.results.files import (
    COMMITTED,
    digest,
    read,
    record_path,
    records,
    root,
    write,
)
from moebook.results.freshness import changed, commit, current, day
from moebook.results.reach import package_digest
from moebook.results.values import TIERS, UNITS, Record, Value, rounded

__all__ = [
    "COMMITTED",
    "TIERS",
    "UNITS",
    "Record",
    "Value",
    "changed",
    "commit",
    "current",
    "day",
    "digest",
    "package_digest",
    "read",
    "record_path",
    "records",
    "root",
    "rounded",
    "write",
]
