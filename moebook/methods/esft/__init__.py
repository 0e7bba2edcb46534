"""ESFT: expert-specialised fine-tuning of a mixture (anonymous submission, 2024).

``measure`` -> ``select`` -> ``specialise`` -> train -> ``save`` or ``merge``.
"""

from moebook.methods.esft.config import Config
from moebook.methods.esft.scoring import Scores, Tally, measure
from moebook.methods.esft.selection import Selection, random_selection, select
from moebook.methods.esft.specialising import merge, restore, specialise, trained
from moebook.methods.esft.storage import load, save

__all__ = [
    "Config",
    "Scores",
    "Selection",
    "Tally",
    "load",
    "measure",
    "merge",
    "random_selection",
    "restore",
    "save",
    "select",
    "specialise",
    "trained",
]
