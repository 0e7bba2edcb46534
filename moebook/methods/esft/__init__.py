"""ESFT: expert-specialised fine-tuning of a mixture (anonymous submission, 2024).

``measure`` -> ``select`` -> ``specialise`` -> train -> ``save`` or ``merge``.
"""

from moebook.methods.esft.baselines import full, lora
from moebook.methods.esft.comparing import concentration, half_mass, overlap, shared_top, switches
from moebook.methods.esft.config import Config
from moebook.methods.esft.costing import cost
from moebook.methods.esft.grouping import cooccurrence, group, ungroup
from moebook.methods.esft.planning import Arm, arms, budget, plan
from moebook.methods.esft.published import replay
from moebook.methods.esft.routing import layers
from moebook.methods.esft.sampling import mix, rows, samples
from moebook.methods.esft.scoring import Scores, Tally, measure
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
from moebook.methods.esft.subsets import partition
from moebook.methods.esft.sweeping import sweep
from moebook.methods.esft.tabling import by_arm, counts, spread

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
    "ungroup",
]
