"""What the four papers claim, as data: tables, claims, settings, an audit of sums."""

from moebook.lab.papers.arithmetic import STATUSES, Finding, audit, judge, report
from moebook.lab.papers.printed import (
    OURS,
    PAPERS,
    Claim,
    claim,
    claims,
    frozen,
    table,
    tables,
    wide,
)
