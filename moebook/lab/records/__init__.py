"""What executed notebooks measured: values, runs, and what code made them; pools are in `store`."""

from moebook.lab.records.runs import (
    TIERS,
    UNITS,
    Curve,
    Run,
    Value,
    minus,
    plain,
    read_run,
    since,
    within,
    word,
    write_run,
)
