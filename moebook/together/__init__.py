"""The four methods on one base: arms that start equal, budgets that are equal, and combinations.

``Setup`` -> ``arms`` -> ``train`` -> ``score``, ``transfer``, ``costs``.
"""

from moebook.methods import esft
from moebook.methods import upcycling as up
from moebook.together import budget, combining
from moebook.together.arms import PAIRS, Arm, Trained, arms, bank_rank, train
from moebook.together.budget import KINDS
from moebook.together.measure import costs, forgotten, stored, texts, transfer
from moebook.together.setup import Config, Setup

__all__ = [
    "Arm",
    "Config",
    "Setup",
    "Trained",
    "arms",
    "bank_rank",
    "costs",
    "forgotten",
    "stored",
    "texts",
    "train",
    "transfer",
]
