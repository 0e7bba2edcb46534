"""PESC: parameter-efficient sparsity crafting, dense to sparse (Wu et al., EMNLP 2024).

``craft`` (or ``prepare``, which adds the host's tuning) -> train with ``balance_loss`` -> ``save``.
"""

from moebook.methods.pesc.approximation import Approximation, approximation_error, full_experts
from moebook.methods.pesc.balance import balance_loss
from moebook.methods.pesc.benchmarks import GROUPS, by_benchmark, root
from moebook.methods.pesc.config import Config
from moebook.methods.pesc.counting import Counts, counts, implied_width
from moebook.methods.pesc.crafting import craft
from moebook.methods.pesc.storage import load, save
from moebook.methods.pesc.tuning import merge_lora, prepare, trained

__all__ = [
    "GROUPS",
    "Approximation",
    "Config",
    "Counts",
    "approximation_error",
    "balance_loss",
    "by_benchmark",
    "counts",
    "craft",
    "full_experts",
    "implied_width",
    "load",
    "merge_lora",
    "prepare",
    "root",
    "save",
    "trained",
]
