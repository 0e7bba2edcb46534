"""Rocket: K shots choose LoRAs from a bank and rows from open data for a mixture of LoRAs.

``bank.load`` -> ``scoring.log_perplexity``, ``scoring.accuracy``, ``scoring.scores`` ->
``selection.similarity``, ``selection.select`` -> ``augmentation.choose`` -> ``mixture.build`` ->
`training.fit` -> ``save``. Steps are called qualified, by module and function.
"""

from moebook.methods.rocket import (
    apply,
    augment,
    bank,
    choose,
    loras,
    measure,
    pipeline,
    score,
)
from moebook.methods.rocket.apply import load, save
from moebook.methods.rocket.config import Config

__all__ = [
    "Config",
    "augmentation",
    "bank",
    "load",
    "loras",
    "mixture",
    "save",
    "scoring",
    "selection",
]
