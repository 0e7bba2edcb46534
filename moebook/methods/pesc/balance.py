"""Eq. 10 for a crafted model: one term a sparse layer, from its last forward pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from moebook import nn as mnn
from moebook.methods.pesc.crafting import origin
from moebook.nn.balancing import balance


def balance_loss(model: nn.Module, attention_mask: Tensor | None = None) -> Tensor:
    """Return ``alpha * E * sum_i f_i p_i``, summed over sparse layers, of the last pass (Eq. 10).

    Each layer has its own term ("for each sparse transformer block"); pooling f and p over the
    layers would let one layer's imbalance cancel another's. See `moebook.kernels.balance_loss` for
    f, p and the released form. Fits ``training.fit(..., penalty=pesc.balance_loss)``, gradient
    accumulation and gradient checkpointing (the non-reentrant kind, transformers' default: the
    recorded logits then belong to the same graph as the output; the reentrant kind runs layers
    without a graph).

    Args:
        model: A crafted model that has run forward.
        attention_mask: ``[B, T]``, 1 for real tokens; by default the one the model was called with.

    Returns:
        A scalar; 0 for the dense arm and for ``balance="none"``.

    Raises:
        Refusal: E-MODEL for a model that PESC did not make or that has not run yet; E-GRADIENT when
            the routers should train but the pass left no graph.
    """
    config, found = origin(model).config, mnn.routers(model)
    if config.balance == "none" or not found:
        return torch.zeros((), device=next(model.parameters()).device)
    return config.balance_weight * balance(found, attention_mask, form=config.balance)


def balance_gradient(model: nn.Module, batch: Mapping[str, Any]) -> tuple[float, float]:
    """Run one batch and return what the balance loss is, and how hard it pulls at the routers.

    Args:
        model: Crafted, in training mode, with trainable routers; their gradients are changed.
        batch: What the model is called with, ``input_ids`` and ``attention_mask`` ``[B, T]``.

    Returns:
        `balance_loss`, mean over sparse layers, and the norm of its gradient over all routers.
    """
    model(**batch)
    found = mnn.routers(model)
    value = balance_loss(model) / len(found)
    value.backward()
    norm = torch.stack([router.weight.grad.norm() for router in found]).norm()
    return value.item(), norm.item()
