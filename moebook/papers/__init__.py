"""What the four papers claim, as data: tables, claims, settings, and an audit of their sums."""

from moebook.papers.arithmetic import STATUSES, Finding, audit, judge, report
from moebook.papers.printed import OURS, PAPERS, Claim, claim, claims, frozen, table, tables, wide
