"""Rocket: K shots choose LoRAs from a bank and rows from open data for a mixture of LoRAs.

``bank.load`` -> ``score.log_perplexity``, ``score.accuracy``, ``score.scores`` ->
``choose.similarity``, ``choose.select`` -> ``augment.choose`` -> ``apply.build`` ->
`training.fit` -> ``save``. Steps are called qualified, by module and function.
"""

from moebook.methods.rocket import (
    apply,
    augment,
    bank,
    case,
    choose,
    loras,
    measure,
    score,
)
from moebook.methods.rocket.apply import load, save
from moebook.methods.rocket.config import Config

__all__ = [
    "Config",
    "apply",
    "augment",
    "bank",
    "case",
    "choose",
    "load",
    "loras",
    "save",
    "score",
]
