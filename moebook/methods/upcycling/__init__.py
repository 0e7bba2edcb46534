"""Sparse upcycling with routers that start at random (SU) or at representations (TRSU, CRSU).

``hardest`` -> ``collect`` -> ``trsu`` or ``crsu`` (-> ``scaled``) -> ``upcycle`` -> train with
``balance_loss`` -> ``export``.
"""

from moebook.methods.upcycling.centroids import crsu, trsu
from moebook.methods.upcycling.config import Config
from moebook.methods.upcycling.exporting import export
from moebook.methods.upcycling.instances import batches, hardest, perplexities
from moebook.methods.upcycling.representations import Chunk, Representations, collect, sampled
from moebook.methods.upcycling.starts import Start, cheap_embed, hidden, random, scaled
from moebook.methods.upcycling.upcycling import Origin, balance_loss, origin, upcycle

__all__ = [
    "Chunk",
    "Config",
    "Origin",
    "Representations",
    "Start",
    "balance_loss",
    "batches",
    "cheap_embed",
    "collect",
    "crsu",
    "export",
    "hardest",
    "hidden",
    "origin",
    "perplexities",
    "random",
    "sampled",
    "scaled",
    "trsu",
    "upcycle",
]
