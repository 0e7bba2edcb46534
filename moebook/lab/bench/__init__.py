"""How fast the ops are, in turns with what a user would pick and with a floor."""

from moebook.lab.bench.report import (
    curves,
    judge,
    reached,
    recorded,
    regrown,
    remeasured,
    told,
)
from moebook.lab.bench.running import (
    OPS,
    ceilings,
    errors,
    growth,
    installed,
    measure,
    roles,
)
