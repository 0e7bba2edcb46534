"""Sparse upcycling with routers that start at random (SU) or at representations (TRSU, CRSU).

``hardest`` -> ``collect`` -> ``trsu`` or ``crsu`` (-> ``scaled``) -> ``upcycle`` -> train with
``balance_loss`` -> ``export``. What the notebook compares stands in ``arms``, ``clouds`` and
``step_zero``.
"""

from moebook.methods.upcycling.arms import LED, MAIN, Arm, arms, quarters, thirds
from moebook.methods.upcycling.centroids import crsu, trsu
from moebook.methods.upcycling.clouds import clouds
from moebook.methods.upcycling.config import Config
from moebook.methods.upcycling.exporting import export
from moebook.methods.upcycling.instances import batches, hardest, perplexities
from moebook.methods.upcycling.prompted import MODES, prompted
from moebook.methods.upcycling.representations import Chunk, Representations, collect, sampled
from moebook.methods.upcycling.starts import Start, cheap_embed, hidden, random, scaled
from moebook.methods.upcycling.step_zero import step_zero
from moebook.methods.upcycling.upcycling import Origin, balance_loss, origin, upcycle

__all__ = [
    "LED",
    "MAIN",
    "MODES",
    "Arm",
    "Chunk",
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
    "origin",
    "perplexities",
    "prompted",
    "quarters",
    "random",
    "sampled",
    "scaled",
    "step_zero",
    "thirds",
    "trsu",
    "upcycle",
]
