"""ESFT: expert-specialised fine-tuning of a mixture (anonymous submission, 2024).

``measure`` -> ``select`` -> ``specialise`` -> train -> ``save`` or ``merge``.
"""

from moebook.methods.esft import grouping
from moebook.methods.esft.alignment import mix, rows
from moebook.methods.esft.apply import (
    full,
    load,
    lora,
    merge,
    restore,
    round_trip,
    save,
    specialise,
    trained,
)
from moebook.methods.esft.choose import Selection, random_selection, select
from moebook.methods.esft.compare import (
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
from moebook.methods.esft.config import Config
from moebook.methods.esft.grouping import cooccurrence, group, partition
from moebook.methods.esft.moved import export, moved
from moebook.methods.esft.replay import published, replay
from moebook.methods.esft.score import Scores, measure, samples

__all__ = [
    "Config",
    "Scores",
    "Selection",
    "cooccurrence",
    "export",
    "group",
    "load",
    "lora",
    "measure",
    "merge",
    "mix",
    "moved",
    "partition",
    "published",
    "random_selection",
    "replay",
    "restore",
    "round_trip",
    "samples",
    "save",
    "select",
    "specialise",
    "trained",
]
