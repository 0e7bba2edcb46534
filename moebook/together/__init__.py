"""The four methods on one base: what all share, budgets that are equal, and combinations.

The arms are `experiments.together`; ``transfer`` and ``costs`` measure them.
"""

from moebook.methods import esft
from moebook.methods import upcycling as up
from moebook.together import budget, combining
from moebook.together.budget import KINDS
from moebook.together.measure import costs, forgotten, stored, texts, transfer
from moebook.together.setup import Config, Setup

__all__ = [
    "Config",
    "Setup",
    "costs",
    "forgotten",
    "stored",
    "texts",
    "transfer",
]
