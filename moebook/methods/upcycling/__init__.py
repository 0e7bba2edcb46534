"""Sparse upcycling with routers that start at random (SU) or at representations (TRSU, CRSU).

``hardest`` -> ``collect`` -> ``trsu`` or ``crsu`` (-> ``scaled``, ``levelled``) -> ``upcycle`` ->
train with ``balance_loss`` -> ``save`` or ``export``. ``arms``, ``clouds``, ``step_zero`` serve the
notebook.
"""

from moebook.methods.upcycling.apply import balance_loss, load, save, upcycle
from moebook.methods.upcycling.config import (
    LED,
    Config,
    arms,
    doublings,
    quarters,
    thirds,
)
from moebook.methods.upcycling.exporting import export
from moebook.methods.upcycling.measure import behind_norms, step_zero
from moebook.methods.upcycling.representations import batches, clouds, collect, hardest
from moebook.methods.upcycling.starts import (
    MODES,
    crsu,
    levelled,
    prompted,
    scaled,
    su,
    trsu,
)

__all__ = [
    "Config",
    "balance_loss",
    "batches",
    "clouds",
    "collect",
    "crsu",
    "export",
    "hardest",
    "load",
    "prompted",
    "save",
    "scaled",
    "step_zero",
    "su",
    "trsu",
    "upcycle",
]
