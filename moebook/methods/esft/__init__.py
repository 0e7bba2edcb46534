"""ESFT: expert-specialised fine-tuning of a mixture (anonymous submission, 2024).

``measure`` -> ``select`` -> ``specialise`` -> train -> ``save`` or ``merge``.
"""

from moebook.methods.esft.arms import (
    Arm,
    arms,
    budget,
    cost,
    full,
    lora,
    mix,
    plan,
    rows,
    sweep,
)
from moebook.methods.esft.comparing import (
    by_arm,
    concentration,
    counts,
    half_mass,
    layers,
    overlap,
    shared_top,
    spread,
    switches,
)
from moebook.methods.esft.config import Config
from moebook.methods.esft.grouping import cooccurrence, group, partition
from moebook.methods.esft.scoring import Scores, Tally, measure, replay, samples
from moebook.methods.esft.selection import Selection, random_selection, select
from moebook.methods.esft.specialising import (
    load,
    merge,
    restore,
    round_trip,
    save,
    specialise,
    trained,
)

__all__ = [
    "Arm",
    "Config",
    "Scores",
    "Selection",
    "Tally",
    "arms",
    "budget",
    "by_arm",
    "concentration",
    "cooccurrence",
    "cost",
    "counts",
    "full",
    "group",
    "half_mass",
    "layers",
    "load",
    "lora",
    "measure",
    "merge",
    "mix",
    "overlap",
    "partition",
    "plan",
    "random_selection",
    "replay",
    "restore",
    "round_trip",
    "rows",
    "samples",
    "save",
    "select",
    "shared_top",
    "specialise",
    "spread",
    "sweep",
    "switches",
    "trained",
]
