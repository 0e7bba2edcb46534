"""Results of executed notebooks: values, runs, and what code made them; pools are in `store`."""

from moebook.results.documents import (
    formed,
    read_ipynb,
    read_json,
    read_places,
    read_yaml,
)
from moebook.results.files import (
    checkout,
    commit,
    digest,
    locked,
    part,
    replacing,
    root,
    sweep,
    write,
)
from moebook.results.runs import (
    TIERS,
    UNITS,
    Curve,
    Run,
    Value,
    plain,
    read_run,
    since,
    write_run,
)
