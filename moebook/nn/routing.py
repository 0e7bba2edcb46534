"""Routers, and the balance loss of all routers of a model."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moebook import kernels
from moebook.errors import refuse
from moebook.kernels import Routing, route
from moebook.nn.observe import Decision, Trace


class Router(nn.Module):
    """A linear router without bias, kept in float32 or wider, whatever its host computes in.

    Its weight ``[E, D]`` starts kaiming-uniform with a = sqrt 5, so within 1/sqrt(D) either way
    (PESC as released; the paper: "randomly initialised"). Decisions of a pass go to ``trace``.
    """

    def __init__(
        self,
        width: int,
        experts: int,
        top_k: int,
        *,
        layer: int,
        trace: Trace | None = None,
        combine: str = "renormalised",
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.top_k, self.layer, self.trace, self.combine = top_k, layer, trace, combine
        self.weight = nn.Parameter(torch.empty(experts, width, dtype=dtype, device=device))
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))

    def logits(self, x: Tensor, more: Tensor | None = None) -> Tensor:
        """Return ``W x``, plus ``more [T, E]`` if given, ``[T, E]`` for ``x [..., D]``."""
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x.flatten(0, -2).to(self.weight.dtype), self.weight)
            return logits if more is None else logits + more

    def forward(self, x: Tensor, more: Tensor | None = None) -> Routing:
        """Route the T tokens of ``x [..., D]`` by their `logits`."""
        logits = self.logits(x, more)
        routing = route(logits, self.top_k, combine=self.combine)
        if self.trace is not None and self.trace.open:
            graph = logits if self.training else logits.detach()
            decision = Decision(graph, routing.ids, routing.weights.detach())
            self.trace.decisions[self.layer] = decision
        return routing


def routers(model: nn.Module) -> list[Router]:
    """Return the model's routers in the order of their layers."""
    parts = [module for module in model.modules() if isinstance(module, Router)]
    return sorted(parts, key=lambda router: router.layer)


def balance(
    routers: Sequence[Router],
    attention_mask: Tensor | None = None,
    *,
    first: bool = False,
    form: str = "live",
) -> Tensor:
    """Return ``sum over layers of E * sum_i f_i p_i`` of the last pass, padding left out.

    The number of layers when routing is uniform. Each layer has its own term: pooling f and p over
    layers would let one layer's imbalance cancel another's. Fits gradient accumulation.

    ``attention_mask [B, T]`` is by default the one that the model was called with. With ``first``
    a token's first choice alone counts in f (Switch), not all K; ``form`` is `balance_loss`'s.
    """
    total = torch.zeros((), device=routers[0].weight.device, dtype=routers[0].weight.dtype)
    for router in routers:
        decision = None if router.trace is None else router.trace.decisions.get(router.layer)
        if router.trace is None or decision is None:
            refuse("E-MODEL", f"the router of layer {router.layer} has not run: do a forward pass"
                   " first")  # fmt: skip
        wanted = router.training and router.weight.requires_grad and torch.is_grad_enabled()
        if wanted and not decision.logits.requires_grad:
            refuse("E-GRADIENT", f"the router of layer {router.layer} ran without a graph, so its"
                   " balance loss would be dead: no torch.no_grad() around the forward pass, and"
                   " gradient checkpointing with use_reentrant=False")  # fmt: skip
        mask = router.trace.padding(len(decision.ids), attention_mask)
        mask = None if mask is None else mask.to(decision.ids.device)
        ids = decision.ids[:, :1] if first else decision.ids
        term = kernels.balance_loss(decision.logits, ids, mask=mask, form=form)
        total = total + term.to(total.device)
    return total
