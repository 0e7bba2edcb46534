"""PESC: parameter-efficient sparsity crafting, dense to sparse (Wu et al., EMNLP 2024).

``craft`` (or ``prepare``, which adds the host's tuning) -> train with ``balance_loss`` -> ``save``.
"""

from moebook.methods.pesc.apply import (
    adapter_norm,
    craft,
    full_experts,
    load,
    prepare,
    save,
    trained,
)
from moebook.methods.pesc.config import GROUPS, Config, reading, root
from moebook.methods.pesc.measure import (
    approximation_error,
    balance_gradient,
    balance_loss,
    cost,
    counts,
    matched,
    printed_sizes,
)

__all__ = [
    "Config",
    "adapter_norm",
    "approximation_error",
    "balance_loss",
    "counts",
    "craft",
    "full_experts",
    "load",
    "matched",
    "prepare",
    "save",
    "trained",
]
