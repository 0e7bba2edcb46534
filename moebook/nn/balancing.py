"""The balance loss of all routers of a model, from its last forward pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moebook import kernels
from moebook.errors import refuse
from moebook.nn.routing import Decision, Router


def balance(
    found: Sequence[Router],
    attention_mask: Tensor | None = None,
    *,
    first: bool = False,
    form: str = "live",
) -> Tensor:
    """Return ``sum over layers of E * sum_i f_i p_i`` of the last pass, padding left out.

    Each layer has its own term: pooling f and p over layers would let one layer's imbalance cancel
    another's. Fits gradient accumulation and gradient checkpointing of the non-reentrant kind.

    Args:
        found: Routers that have run forward, at least one.
        attention_mask: ``[B, T]``, 1 for real tokens; by default the one the model was called with.
        first: Count in f a token's first choice alone (Switch), not all K of its slots.
        form: See `moebook.kernels.balance_loss`.

    Returns:
        A scalar: the number of layers when routing is uniform.

    Raises:
        Refusal: E-MODEL for a router that has not run; E-GRADIENT when it should train but the pass
            left no graph.
    """
    total = torch.zeros((), device=found[0].weight.device, dtype=found[0].weight.dtype)
    for router in found:
        decision = _decision(router)
        mask = router.trace.padding(len(decision.ids), attention_mask)
        mask = None if mask is None else mask.to(decision.ids.device)
        ids = decision.ids[:, :1] if first else decision.ids
        term = kernels.balance_loss(decision.logits, ids, mask=mask, form=form)
        total = total + term.to(total.device)
    return total


def _decision(router: Router) -> Decision:
    decision = router.trace.decisions.get(router.layer)
    if decision is None:
        layer = f"the router of layer {router.layer}"
        refuse("E-MODEL", f"{layer} has not run: do a forward pass first")
    wanted = router.training and router.weight.requires_grad and torch.is_grad_enabled()
    if wanted and not decision.logits.requires_grad:
        refuse(
            "E-GRADIENT",
            f"the router of layer {router.layer} ran without a graph, so its balance loss"
            " would be dead: no torch.no_grad() around the forward pass, and gradient"
            " checkpointing with use_reentrant=False",
        )
    return decision
