"""PESC: parameter-efficient sparsity crafting, dense to sparse (Wu et al., EMNLP 2024).

``craft`` (or ``prepare``, which adds the host's tuning) -> train with ``balance_loss`` -> ``save``.
"""

from moebook.methods.pesc.config import GROUPS, Config, reading, root
from moebook.methods.pesc.crafting import craft, full_experts
from moebook.methods.pesc.measuring import (
    approximation_error,
    balance_gradient,
    balance_loss,
    cost,
    counts,
    implied_width,
    printed_sizes,
)
from moebook.methods.pesc.tuning import adapter_norm, load, merge_lora, prepare, save, trained

__all__ = [
    "GROUPS",
    "Config",
    "adapter_norm",
    "approximation_error",
    "balance_gradient",
    "balance_loss",
    "cost",
    "counts",
    "craft",
    "full_experts",
    "implied_width",
    "load",
    "merge_lora",
    "prepare",
    "printed_sizes",
    "reading",
    "root",
    "save",
    "trained",
]
