"""Full experts: E gated FFNs in fused 3-D weights, as transformers 5 keeps them; a router."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moebook.errors import refuse
from moebook.kernels import Bank, Routing, experts
from moebook.nn.routing import Router


class Experts(nn.Module):
    """E gated FFNs, each a copy of one dense MLP at first: sparse upcycling (PESC Eq. 3).

    Attributes:
        gate_up_proj: ``[E, 2F, D]``, the gate's rows first.
        down_proj: ``[E, D, F]``.

    Args:
        mlp: A dense MLP without biases: ``gate_proj``, ``up_proj``, ``down_proj``, ``act_fn``.
        experts: E.

    Raises:
        Refusal: E-MODEL when the MLP's projections have biases.
    """

    def __init__(self, mlp: nn.Module, experts: int) -> None:
        super().__init__()
        projections = [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
        if any(projection.bias is not None for projection in projections):
            refuse("E-MODEL", f"{type(mlp).__name__} has biases: full experts hold none")
        gate, up, down = (projection.weight.detach() for projection in projections)
        self.gate_up_proj = nn.Parameter(torch.cat([gate, up]).repeat(experts, 1, 1))
        self.down_proj = nn.Parameter(down.repeat(experts, 1, 1))
        self.act_fn = mlp.act_fn

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        """Return ``sum_k w_k E_k(x)`` (Eq. 2) for ``x [T, D]``."""
        return experts(x, routing, Bank(self.gate_up_proj, self.down_proj), self.act_fn)


class ExpertMoE(nn.Module):
    """Stands in for a dense MLP: a router and E full experts.

    Args:
        router: Reads what the MLP reads.
        experts: Read the same.
    """

    def __init__(self, router: Router, experts: Experts) -> None:
        super().__init__()
        self.router, self.experts = router, experts

    def forward(self, x: Tensor) -> Tensor:
        """Return the mixture's output in the shape of ``x [B, T, D]``."""
        return self.experts(x.flatten(0, -2), self.router(x)).view_as(x)
