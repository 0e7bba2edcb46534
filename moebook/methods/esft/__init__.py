"""ESFT: expert-specialised fine-tuning of a mixture (anonymous submission, 2024).

``measure`` -> ``select`` -> ``specialise`` -> train -> ``save`` or ``merge``.
"""

from moebook.methods.esft.baselines import full, lora
from moebook.methods.esft.comparing import half_mass, shared_top
from moebook.methods.esft.config import Config
from moebook.methods.esft.grouping import cooccurrence, group, ungroup
from moebook.methods.esft.published import replay
from moebook.methods.esft.sampling import mix, samples
from moebook.methods.esft.scoring import Scores, Tally, measure
from moebook.methods.esft.selection import Selection, random_selection, select
from moebook.methods.esft.specialising import merge, restore, specialise, trained
from moebook.methods.esft.storage import load, save
from moebook.methods.esft.subsets import partition
from moebook.methods.esft.sweeping import sweep

__all__ = [
    "Config",
    "Scores",
    "Selection",
    "Tally",
    "cooccurrence",
    "full",
    "group",
    "half_mass",
    "load",
    "lora",
    "measure",
    "merge",
    "mix",
    "partition",
    "random_selection",
    "replay",
    "restore",
    "samples",
    "save",
    "select",
    "shared_top",
    "specialise",
    "sweep",
    "trained",
    "ungroup",
]
