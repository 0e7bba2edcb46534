"""Public functions and classes, called with hostile values: one line, or the right result.

The tables in `healthy` hold a healthy call of each and what it comes to by another way; `hostile`
makes the hostile values of its arguments. A push makes a tenth of the calls; `MOEBOOK_FAULTS=10`
makes them all.
"""

from importlib import import_module

import pytest

from tests.faults.hostile import FOREIGN, WRONG, outcomes

TABLES = (
    "analysis",
    "data",
    "esft",
    "evaluation",
    "kernels",
    "nn",
    "pesc",
    "rivals",
    "rocket",
    "together",
    "training",
    "upcycling",
)
SHARE = 0.1


@pytest.mark.filterwarnings("ignore")  # numbers that overflow may be told of
@pytest.mark.parametrize("table", TABLES)
def test_a_hostile_value_is_refused_in_one_line_or_the_result_is_right(table, times, figures):
    faults = []
    for name, row in import_module(f"tests.faults.healthy.{table}").ROWS.items():
        for outcome in outcomes(name, row, SHARE * times):
            figures("calls", table, calls=1, **{outcome.what: 1})
            if outcome.what in (FOREIGN, WRONG):
                faults.append(str(outcome))
    assert not faults, "\n".join(faults)
