"""How fast the ops are: beside what a user would pick instead, and beside the hardware's floor.

All contenders of a case run in one process, in turns, on the same inputs; a machine that is slow
for a while is slow for all of them, so the medians of their ratios mean something where their
seconds do not.
"""

from moebook.bench.accuracy import errors
from moebook.bench.report import curves, judge, reached, recorded, regrown, remeasured
from moebook.bench.running import OPS, ceilings, growth, installed, measure, roles

__all__ = [
    "OPS", "ceilings", "curves", "errors", "growth", "installed", "judge", "measure", "reached",
    "recorded", "regrown", "remeasured", "roles",
]  # fmt: skip
