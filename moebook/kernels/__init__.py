"""The ops: each is one file with its meaning in plain PyTorch (`reference`) and a fast path."""

from moebook.kernels.adapters import adapters
from moebook.kernels.balance_loss import balance_loss
from moebook.kernels.bank_scoring import bank_scoring
from moebook.kernels.clusters import clusters
from moebook.kernels.experts import Bank, experts, split_experts
from moebook.kernels.groups import groups
from moebook.kernels.lora_mixture import lora_mixture
from moebook.kernels.route import Routing, grouped, route
from moebook.kernels.similarity import Largest, duplicates, largest, nearest_rows

__all__ = [
    "Bank", "Largest", "Routing", "adapters", "balance_loss", "bank_scoring", "clusters",
    "duplicates", "experts", "grouped", "groups", "largest", "lora_mixture", "nearest_rows",
    "route", "split_experts",
]  # fmt: skip
