"""Coarser mixtures from a fine one: experts bound in groups that share a gate (Fig. 7, App. C)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from inspect import signature
from itertools import chain, combinations, product
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import SkipValidation
from torch import Tensor, nn
from torch.nn.utils import parametrize

from moebook.analysis.routers import decisions
from moebook.errors import refuse
from moebook.kernels.dispatch import shapes
from moebook.methods.esft.apply import Origin
from moebook.methods.esft.choose import Group
from moebook.models.anatomy import sparse_layers
from moebook.models.checkpoint import origin_or_none
from moebook.nn import Router
from moebook.settings import FINITE, checked

# Similarities are whole multiples of 1 / UNIT: sums are exact, ties are real ties.
UNIT = 2**40
# Groups that are looked at: there are 635,376 of 4 in 64 experts, 4.4e9 of 8.
LARGEST_SEARCH = 2_000_000


def cooccurrence(
    model: nn.Module, batches: Iterable[Mapping[str, Any]]
) -> dict[int, Tensor]:
    """Count how often two experts of a layer serve the same token (Appendix C); no padding.

    By layer ``[E, E]`` float64, symmetric; 0 on the diagonal, as an expert's company is others.
    """
    counts: dict[int, Tensor] = {}
    for batch in batches:
        for layer, seen in decisions(model, batch).items():
            ids = seen.real().ids.cpu()  # [T, K]
            chosen = torch.zeros(len(ids), seen.logits.shape[-1]).double()
            chosen.scatter_(1, ids, 1.0)  # [T, E], 1 where a token chose an expert
            # App. C: a token adds 1 to each pair of the experts that it chose.
            counts[layer] = counts.get(layer, 0) + chosen.T @ chosen
    if not any(matrix.any() for matrix in counts.values()):
        refuse("E-DATA", "no real token was counted: no expert occurred")
    return {layer: matrix.fill_diagonal_(0) for layer, matrix in counts.items()}


@checked
def similarity(cooccurrence: Annotated[Tensor, FINITE]) -> NDArray[np.int64]:
    """Return the cosines of all pairs of rows, in units of 1 / UNIT, ``[E, E]``; diagonal 0."""
    shapes("similarity", {"cooccurrence": (cooccurrence, "E E")}, empty="")
    # An unused expert's row of zeros stays one, so it is like none.
    rows = nn.functional.normalize(cooccurrence.detach().double(), dim=1)
    # App. C: the cosine of rows i and j.
    alike = np.rint((rows @ rows.T).numpy() * UNIT).astype(np.int64)
    np.fill_diagonal(alike, 0)
    # The product may differ across the diagonal by rounding.
    return np.maximum(alike, alike.T)


@checked
def partition(cooccurrence: Annotated[Tensor, FINITE], size: int) -> tuple[Group, ...]:
    """Split experts into groups, greedily the most alike first (Appendix C).

    Two experts are as alike as the cosine of their rows in the co-occurrence matrix ``[E, E]``; an
    unused one is like none. Of all groups of the given size among the experts left, that with the
    largest mean pairwise similarity is taken, of equal ones the first by numbers. More than
    `LARGEST_SEARCH` are refused.
    """
    shapes("partition", {"cooccurrence": (cooccurrence, "E E")}, empty="")
    _check_size(size, len(cooccurrence))
    alike = similarity(cooccurrence)
    left = np.arange(len(cooccurrence))
    groups: list[Group] = []
    while len(left):
        candidates = np.array(list(combinations(left.tolist(), size)))  # [C, size]
        # All candidates have as many pairs, so sums rank as the means of App. C do.
        total = np.zeros(len(candidates), int)  # [C]
        for one, other in combinations(candidates.T, 2):
            total = total + alike[one, other]
        # Of equals argmax takes the first, and candidates stand in order of numbers.
        groups.append(tuple(candidates[total.argmax()].tolist()))
        left = np.setdiff1d(left, groups[-1])
    return tuple(groups)


@checked
def group(
    model: nn.Module, counts: SkipValidation[Mapping[int, Tensor]], size: int
) -> dict[int, tuple[Group, ...]]:
    """Bind a mixture's experts in groups that share one gate, in place (Sec. 6.3, Appendix C).

    The gate vector of a group is the mean of its members', and one parameter from then on: a token
    takes a whole group or none of it. It still takes K experts, of K / size groups. The softmax
    stays over all E experts, so members have equal gates. ``counts`` are of `cooccurrence`,
    ``[E, E]`` a layer, ``size`` is experts a group. Returns groups by layer, for `select`.
    """
    layers = sparse_layers(model)
    if origin_or_none(model, Origin) is not None:
        refuse("E-MODEL", "the model is specialised: group it first, then specialise")
    check(model, [size])
    for layer in layers:
        if layer.index not in counts:
            known = f"{[*counts]}, expected those of `cooccurrence`"
            refuse("E-KEYS", f"counts lack layer {layer.index}: they have {known}")
        if len(counts[layer.index]) != len(layer.router.weight):
            have = f"{len(counts[layer.index])} experts, the model has {len(layer.router.weight)}"
            refuse("E-SHAPE", f"layer {layer.index}: counts are of {have}")
    # All groups are formed before a router changes: a refusal leaves the model alone.
    groups = {layer.index: partition(counts[layer.index], size) for layer in layers}
    for layer in layers:
        gate = _SharedGate(groups[layer.index])
        parametrize.register_parametrization(layer.router, "weight", gate)
    return groups


def check(model: nn.Module, sizes: Iterable[int]) -> None:
    """Refuse a model whose experts `group` cannot bind: routers must be plain ``[E, D]``."""
    for size, layer in product(sizes, sparse_layers(model)):
        router = layer.router
        where = f"layer {layer.index}"
        if parametrize.is_parametrized(router, "weight"):
            refuse("E-MODEL", f"{where}: its experts are grouped already")
        if not _is_plain(router):
            kind = type(router).__name__
            refuse(
                "E-MODEL",
                f"{where}: {kind} chooses by more than gate vectors in one weight",
            )
        _check_size(size, layer.count, router.top_k)


def _is_plain(router: nn.Module) -> bool:
    """Whether a router chooses by the products of its tokens with one ``weight``, and no more.

    Not so where it holds another tensor, such as a bias, where the block passes it one (HY-V3,
    AFMoE), where it chooses among groups of experts first, or where it samples in
    training and masks what lies far from the best (Phi-MoE's sparsemixer).
    """
    if isinstance(router, Router):
        return True
    tensors = [
        name for name, _ in chain(router.named_parameters(), router.named_buffers())
    ]
    takes = signature(router.forward).parameters
    greedy = getattr(router, "topk_method", "greedy") == "greedy"
    sparsemixer = hasattr(router, "router_jitter_noise")
    alone = tensors == ["weight"] and len(takes) == 1
    return alone and greedy and not sparsemixer


def _check_size(size: int, experts: int, top_k: int = 0) -> None:
    """Refuse groups that are no whole part of E and of K, or too many to look at all of them."""
    if size < 1 or experts % size or top_k % size:
        whole = f"{experts} experts" + (f" and of {top_k} per token" if top_k else "")
        refuse("E-RANGE", f"the group size is {size}, no divisor of {whole}")
    number = math.comb(experts, size)
    if number > LARGEST_SEARCH:
        refuse(
            "E-RANGE",
            f"{number:,} groups of {size}, at most {LARGEST_SEARCH:,} are tried",
        )


class _SharedGate(nn.Module):
    """A router's weight ``[E, D]`` as rows of a weight ``[E / size, D]``, one a group."""

    owner: Tensor

    def __init__(self, groups: tuple[Group, ...]) -> None:
        super().__init__()
        owner: dict[int, int] = {}
        for number, members in enumerate(groups):
            owner |= dict.fromkeys(members, number)
        # [E], the group of each expert.
        numbers = torch.tensor([owner[expert] for expert in range(len(owner))])
        self.register_buffer("owner", numbers, persistent=False)

    def forward(self, shared: Tensor) -> Tensor:
        return shared[self.owner]  # [E, D]

    def right_inverse(self, weight: Tensor) -> Tensor:
        """Start each group at the mean of its members' gate vectors."""
        # It runs on registration, while the buffer is still on the CPU.
        self.owner = self.owner.to(weight.device)
        groups = range(int(self.owner.max()) + 1)
        return torch.stack([weight[self.owner == number].mean(0) for number in groups])
