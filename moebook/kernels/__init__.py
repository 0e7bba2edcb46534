"""The ops: each is one file with its meaning in plain PyTorch (`reference`) and a fast path."""

from moebook.kernels.adapters import adapters
from moebook.kernels.balance_loss import balance_loss
from moebook.kernels.experts import Bank, experts, split_experts
from moebook.kernels.route import Routing, grouped, route

__all__ = [
    "Bank",
    "Routing",
    "adapters",
    "balance_loss",
    "experts",
    "grouped",
    "route",
    "split_experts",
]
