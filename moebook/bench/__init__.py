"""How fast the ops are: beside what a user would pick instead, and beside the hardware's floor.

All contenders of a case take turns in one process on the same inputs, so that the medians of their
ratios mean something on a machine that is slow for a while, where their seconds do not.
"""

from moebook.bench.accuracy import errors
from moebook.bench.report import curves, judge, reached, recorded, regrown, remeasured
from moebook.bench.running import OPS, ceilings, growth, installed, measure, roles
