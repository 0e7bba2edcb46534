"""Parameter-efficient experts: a shared FFN, E adapters on its output, a router (PESC Fig. 3)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moebook.kernels import Routing, adapters
from moebook.nn.routing import Router


class Adapters(nn.Module):
    """E bottleneck adapters held in two tensors, ``down [E, D, R]`` and ``up [E, R, D]``.

    ``up`` starts at zero, so that at first every adapter adds nothing. ``down`` starts
    kaiming-uniform with a = sqrt 5, or at zero too (``down_init="zero"``, the paper's "omega_0 is
    initialised to zero", read literally): then neither ever receives a gradient, since that of
    ``up`` is a multiple of gelu(0) = 0, that of ``down`` of ``up`` = 0.

    The output is multiplied by ``scale`` in training and by ``served_scale`` in evaluation mode
    (the released code merges with another). ``dropout`` is the share of inputs dropped before
    ``down`` in training: one mask a token; the released code draws one for each of its K adapters.
    """

    def __init__(
        self,
        width: int,
        experts: int,
        adapter_width: int,
        *,
        scale: float = 1.0,
        served_scale: float = 1.0,
        dropout: float = 0.0,
        down_init: str = "kaiming",
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.scale, self.served_scale, self.dropout = scale, served_scale, dropout
        at = {"dtype": dtype, "device": device}
        self.down = nn.Parameter(torch.zeros(experts, width, adapter_width, **at))
        self.up = nn.Parameter(torch.zeros(experts, adapter_width, width, **at))
        if down_init == "kaiming":
            bound = 1 / math.sqrt(width)  # what kaiming with a = sqrt 5 gives for D inputs
            nn.init.uniform_(self.down, -bound, bound)

    def forward(self, h: Tensor, routing: Routing) -> Tensor:
        """Return ``h [T, D]`` plus the weighted adapters' outputs."""
        source = F.dropout(h, self.dropout) if self.training and self.dropout else None
        scale = self.scale if self.training else self.served_scale
        return adapters(h, routing, self.down, self.up, scale=scale, source=source)


class AdapterMoE(nn.Module):
    """Stands in for a dense MLP: the MLP once a token, routed adapters on its output.

    The router reads what the MLP ``shared`` reads, the adapters what it puts out.
    """

    def __init__(self, shared: nn.Module, router: Router, adapters: Adapters) -> None:
        super().__init__()
        self.shared, self.router, self.adapters = shared, router, adapters

    def forward(self, x: Tensor) -> Tensor:
        """Return ``h + scale * sum_k w_k A_k(h)``, ``h = shared(x)``, in the shape of ``x``."""
        h = self.shared(x)
        return self.adapters(h.flatten(0, -2), self.router(x)).view_as(h)
