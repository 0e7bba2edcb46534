"""Coarser mixtures from a fine one: experts bound in groups that share a gate (Fig. 7, App. C)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from moebook.errors import refuse
from moebook.methods.esft.routing import (
    Decisions,
    Sparse,
    check_layers,
    experts_of,
    observe,
    sparse_layers,
)
from moebook.methods.esft.specialising import Origin
from moebook.methods.esft.subsets import Group, partition
from moebook.models.checkpoint import origin_or_none


def cooccurrence(model: nn.Module, batches: Iterable[Mapping[str, Any]]) -> dict[int, Tensor]:
    """Count how often two experts of a layer serve the same token (Appendix C).

    Args:
        model: A mixture.
        batches: As for `measure`; padding does not count.

    Returns:
        Layer -> ``[E, E]`` float64, symmetric. The diagonal is 0: an expert's company is others.

    Raises:
        Refusal: Those of `measure`.
    """
    layers = sparse_layers(model)
    counts = {
        layer.index: torch.zeros(experts_of(layer), experts_of(layer)).double() for layer in layers
    }

    def note(layer: int, seen: Decisions) -> None:
        ids = seen.ids[seen.mask].cpu()
        chosen = torch.zeros(len(ids), len(counts[layer])).double().scatter_(1, ids, 1.0)
        counts[layer] += chosen.T @ chosen

    observe(model, batches, note)
    for matrix in counts.values():
        if not matrix.any():
            refuse("E-DATA", "no real token was counted: no expert occurred")
        matrix.fill_diagonal_(0)
    return counts


def group(
    model: nn.Module, counts: Mapping[int, Tensor], size: int
) -> dict[int, tuple[Group, ...]]:
    """Bind a mixture's experts in groups that share one gate, in place (Sec. 6.3, Appendix C).

    The gate vector of a group is the mean of its members', and one parameter from then on: also
    where routers train, a token takes a whole group or none of it. A token still runs through K
    experts, of K / size groups. The softmax stays over all E experts, as the host has it, so that
    the gates of a group's members are equal and each is a part of the group's.

    Args:
        model: A mixture whose router is a plain weight ``[E, D]`` (not one with a bias for the
            choice or with device groups).
        counts: From `cooccurrence`.
        size: Experts a group, a divisor of E and of K.

    Returns:
        Layer -> groups, to be handed to `select`.

    Raises:
        Refusal: E-RANGE for a size that does not fit, E-KEYS for counts of other layers, E-MODEL
            for another router or a specialised model; the model is untouched then.
    """
    layers = sparse_layers(model)
    if origin_or_none(model, Origin) is not None:
        refuse("E-MODEL", "the model is specialised: group it first, then specialise")
    check_layers("the co-occurrence counts", counts, layers)
    check(model, [size])
    groups = {layer.index: partition(counts[layer.index], size) for layer in layers}
    for layer in layers:
        gate = _SharedGate(groups[layer.index])
        parametrize.register_parametrization(layer.router, "weight", gate)
    return groups


def check(model: nn.Module, sizes: Iterable[float]) -> None:
    """Refuse a model whose experts `group` cannot bind in groups of these sizes, before any count.

    Raises:
        Refusal: E-RANGE for a size that does not fit, E-MODEL for a dense model, another router or
            one that is grouped already.
    """
    for size, layer in product(sizes, sparse_layers(model)):
        _check_router(layer, size)


def ungroup(model: nn.Module) -> nn.Module:
    """Make the shared gates plain weights again, equal within a group, for `save_pretrained`.

    Raises:
        Refusal: E-MODEL when the model is not grouped.
    """
    for layer in sparse_layers(model):
        if not parametrize.is_parametrized(layer.router, "weight"):
            refuse("E-MODEL", f"layer {layer.index}: its experts are not grouped")
        parametrize.remove_parametrizations(layer.router, "weight")
    return model


class _SharedGate(nn.Module):
    """A router's weight ``[E, D]`` as rows of a weight ``[E / size, D]``, one a group."""

    owner: Tensor

    def __init__(self, groups: tuple[Group, ...]) -> None:
        super().__init__()
        self.groups = groups
        owner = torch.empty(sum(map(len, groups)), dtype=torch.long)
        for number, members in enumerate(groups):
            owner[list(members)] = number
        self.register_buffer("owner", owner, persistent=False)

    def forward(self, shared: Tensor) -> Tensor:
        return shared[self.owner]

    def right_inverse(self, weight: Tensor) -> Tensor:
        """Start each group at the mean of its members' gate vectors."""
        self.owner = self.owner.to(weight.device)
        return torch.stack([weight[list(members)].mean(0) for members in self.groups])


def _check_router(layer: Sparse, size: float) -> None:
    router, where = layer.router, f"layer {layer.index}"
    if parametrize.is_parametrized(router, "weight"):
        refuse("E-MODEL", f"{where}: its experts are grouped already")
    if hasattr(router, "e_score_correction_bias") or getattr(router, "topk_method", "greedy") != (
        "greedy"
    ):
        refuse("E-MODEL", f"{where}: {type(router).__name__} chooses by more than its gate vectors")
    top_k, experts = getattr(router, "top_k", None), experts_of(layer)
    if not isinstance(top_k, int):
        refuse("E-MODEL", f"{where}: {type(router).__name__} does not say its top_k")
    if size < 1 or experts % size or top_k % size:
        refuse(
            "E-RANGE",
            f"{where}: the group size is {size}, expected a divisor of {experts} (experts) and of"
            f" {top_k} (experts per token)",
        )
