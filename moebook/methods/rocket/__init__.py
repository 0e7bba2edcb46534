"""Rocket: K shots choose LoRAs from a bank and rows from open data for a mixture of LoRAs.

``bank.open`` or ``bank.train`` -> ``scoring.perplexity``, ``scoring.accuracy``, ``scoring.scores``
-> ``selection.similarity``, ``selection.select`` -> ``augmentation.choose`` -> ``mixture.build`` ->
`training.fit` -> ``save``. Steps are called qualified, by module and function.
"""

from moebook.methods.rocket import (
    arms,
    attachment,
    augmentation,
    bank,
    catalogue,
    embedded,
    encoders,
    findings,
    loras,
    mixture,
    pipeline,
    rationales,
    sampling,
    scoring,
    selection,
    studies,
)
from moebook.methods.rocket.config import Config
from moebook.methods.rocket.mixture import load, save

__all__ = [
    "Config",
    "arms",
    "attachment",
    "augmentation",
    "bank",
    "catalogue",
    "embedded",
    "encoders",
    "findings",
    "load",
    "loras",
    "mixture",
    "pipeline",
    "rationales",
    "sampling",
    "save",
    "scoring",
    "selection",
    "studies",
]
