"""The ops: each is one file with its meaning in plain PyTorch (`reference`) and a fast path.

Named here are those that mixtures run; those that search and score have modules of their own.
"""

from moebook.kernels.adapters import adapters
from moebook.kernels.balance_loss import balance_loss
from moebook.kernels.experts import Bank, experts, split_experts
from moebook.kernels.route import Routing, grouped, route
