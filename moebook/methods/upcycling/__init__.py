"""Sparse upcycling with routers that start at random (SU) or at representations (TRSU, CRSU).

``hardest`` -> ``collect`` -> ``trsu`` or ``crsu`` (-> ``scaled``) -> ``upcycle`` -> train with
``balance_loss`` -> ``save`` or ``export``. ``arms``, ``clouds``, ``step_zero`` serve the notebook.
"""

from moebook.methods.upcycling.config import LED, MAIN, Arm, Config, arms, quarters, thirds
from moebook.methods.upcycling.exporting import export
from moebook.methods.upcycling.instances import batches, hardest, perplexities
from moebook.methods.upcycling.representations import Representations, clouds, collect, sampled
from moebook.methods.upcycling.starts import (
    MODES,
    Start,
    cheap_embed,
    crsu,
    hidden,
    prompted,
    random,
    scaled,
    trsu,
)
from moebook.methods.upcycling.upcycling import (
    Origin,
    balance_loss,
    load,
    origin,
    save,
    step_zero,
    upcycle,
)

__all__ = [
    "LED",
    "MAIN",
    "MODES",
    "Arm",
    "Config",
    "Origin",
    "Representations",
    "Start",
    "arms",
    "balance_loss",
    "batches",
    "cheap_embed",
    "clouds",
    "collect",
    "crsu",
    "export",
    "hardest",
    "hidden",
    "load",
    "origin",
    "perplexities",
    "prompted",
    "quarters",
    "random",
    "sampled",
    "save",
    "scaled",
    "step_zero",
    "thirds",
    "trsu",
    "upcycle",
]
