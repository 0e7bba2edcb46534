"""ESFT: expert-specialised fine-tuning of a mixture (anonymous submission, 2024).

``measure`` -> ``select`` -> ``specialise`` -> train -> ``save`` or ``merge``.
"""

from moebook.methods.esft import grouping
from moebook.methods.esft.arms import arms, budget, cost, full, lora, mix, plan, rows, start, sweep
from moebook.methods.esft.comparing import (
    at_equal_accuracy,
    by_arm,
    concentration,
    counts,
    front,
    half_mass,
    layers,
    overlap,
    spread,
    switches,
)
from moebook.methods.esft.grouping import cooccurrence, group, partition
from moebook.methods.esft.scoring import (
    Config,
    Scores,
    Selection,
    measure,
    published,
    random_selection,
    replay,
    samples,
    select,
)
from moebook.methods.esft.specialising import (
    load,
    merge,
    restore,
    round_trip,
    save,
    specialise,
    trained,
)
