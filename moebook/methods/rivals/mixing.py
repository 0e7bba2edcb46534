"""Three ways to mix N LoRAs, by weights for a task, an example or a token; one linear layer of it.

With weights ``w``, and ``s_i = alpha_i / R`` folded in as ``sqrt s_i`` on each factor:

- ``factors``: ``(sum_i w_i B_i)(sum_i w_i A_i)``. A lone LoRA at w acts with ``w^2``; w and -w are
  the same model; cross terms ``B_i A_j`` appear.
- ``outputs``: ``sum_i w_i B_i A_i``. Exact as one LoRA of rank N R.
- ``root`` (PEFT's ``linear``): factors with ``sqrt |w_i|``, the sign on A: the wanted diagonal, and
  cross terms still.

Where all share A, the first two are the same for weights that sum to 1. On N independent LoRAs the
uniform mean of factors has 0.73, 0.52, 0.35 and 0.16 of the norm of the mean of outputs for
N = 2, 4, 8 and 38.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moebook.errors import refuse
from moebook.kernels import route
from moebook.kernels.dispatch import shapes
from moebook.kernels.lora_mixture import lora_mixture
from moebook.methods.rocket.bank import Bank
from moebook.methods.rocket.loras import Lora, check_alike, check_widths
from moebook.nn import dropout
from moebook.settings import Seed, checked

Mix = Literal["factors", "outputs", "root"]


class Stack(NamedTuple):
    """Alike LoRAs as tensors, with one factor for all on the product B A."""

    scale: float
    rank: int
    down: dict[str, Tensor]  # A [N, R, D] by path of the linear layer
    up: dict[str, Tensor]  # B [N, O, R]


def stack(bank: Bank, mix: Mix) -> Stack:
    """Fold the scales of a bank's LoRAs, pad them where that is exact, and stack them.

    The first one's scale stays a factor on the product, as PEFT has it; what another's differs from
    it by goes onto its A and B, the square root on each. For ``outputs`` a lower rank or a missing
    layer is filled up with zeros, which is exact; for the others it would be a choice: refused.
    """
    if not bank:
        refuse("E-BANK", "the bank is empty: nothing to mix")
    loras = list(bank.values())
    check_widths(loras)
    if mix == "outputs":
        loras = _padded(loras)
    check_alike(loras)
    scale = loras[0].scale
    # s_i B_i A_i = scale (root_i B_i)(root_i A_i), root_i = sqrt(s_i / scale).
    rooted = [(lora, math.sqrt(lora.scale / scale)) for lora in loras]
    down: dict[str, Tensor] = {}
    up: dict[str, Tensor] = {}
    for path in loras[0].down:
        # [N, R, D] and [N, O, R].
        down[path] = torch.stack([lora.down[path] * root for lora, root in rooted])
        up[path] = torch.stack([lora.up[path] * root for lora, root in rooted])
    return Stack(scale, loras[0].rank, down, up)


def _padded(loras: Sequence[Lora]) -> list[Lora]:
    """Give all LoRAs the highest rank and all layers by zeros; what each computes stays."""
    rank = max(lora.rank for lora in loras)
    # By path, a LoRA that adapts it: it tells the shapes there.
    owners: dict[str, Lora] = {}
    for lora in loras:
        owners |= dict.fromkeys(lora.down, lora)

    def filled(lora: Lora) -> Lora:
        if lora.rank == rank and lora.down.keys() == owners.keys():
            return lora
        down: dict[str, Tensor] = {}
        up: dict[str, Tensor] = {}
        for path, owner in owners.items():
            a = owner.down[path]
            b = owner.up[path]
            down[path] = a.new_zeros(rank, a.shape[1])
            up[path] = b.new_zeros(b.shape[0], rank)
        # Rows of A and columns of B that are 0 add nothing to B A.
        for path in lora.down:
            down[path][: lora.rank] = lora.down[path]
            up[path][:, : lora.rank] = lora.up[path]
        # alpha grows with the rank, so that s = alpha / R stays.
        alpha = lora.scale * rank
        return replace(
            lora, rank=rank, alpha=alpha, rank_stabilised=False, down=down, up=up
        )

    return [filled(lora) for lora in loras]


@checked
def fresh_like(bank: Bank, *, seed: Seed) -> dict[str, Lora]:
    """Make untrained LoRAs of a bank's shapes: A Kaiming-uniform with a = sqrt 5, B zero (PEFT)."""
    # Drawn from a child of the seed. By the seed itself A would repeat the numbers that routers
    # are drawn from, and by `training.fit`'s way of mixing it those of the first dropout.
    (child,) = np.random.SeedSequence(seed).spawn(1)
    generator = torch.Generator().manual_seed(int(child.generate_state(1)[0]))

    def started(lora: Lora) -> Lora:
        down: dict[str, Tensor] = {}
        for path, a in lora.down.items():
            # 1 / sqrt D, which is sqrt(6 / ((1 + a^2) D)) for a = sqrt 5.
            bound = a.shape[1] ** -0.5
            fresh = torch.empty(a.shape)
            down[path] = fresh.uniform_(-bound, bound, generator=generator)
        up = {path: torch.zeros(b.shape) for path, b in lora.up.items()}
        return replace(lora, down=down, up=up, provenance={})

    return {name: started(lora) for name, lora in bank.items()}


def halves(weights: Tensor, mix: Mix) -> tuple[Tensor, Tensor]:
    """Return the factors on A and on B that weights stand for."""
    # Factors: (sum_i w_i B_i)(sum_i w_i A_i).
    if mix == "factors":
        return weights, weights
    # Outputs: sum_i w_i B_i A_i.
    if mix == "outputs":
        return torch.ones_like(weights), weights
    # Root: the term i = j is (root_i B_i)(sign_i root_i A_i) = w_i B_i A_i.
    root = weights.abs().sqrt()
    return weights.sign() * root, root


def joined(
    down: Tensor, up: Tensor, weights: Tensor, mix: Mix
) -> tuple[Tensor, Tensor]:
    """Mix ``A [N, R, D]`` and ``B [N, O, R]`` to one LoRA for weights ``[.., N]``.

    Returns ``[.., R, D]`` and ``[.., O, R]``; for outputs, whose weights are ``[N]``,
    the rank is N R.
    """
    on_down, on_up = halves(weights, mix)
    if mix == "outputs":
        # All A below one another, all w_n B_n side by side: their product is the sum.
        weighted = on_up[:, None, None] * up  # [N, O, R]
        return down.flatten(0, 1), weighted.transpose(0, 1).flatten(1)
    # A = sum_n w_n A_n and B = sum_n w_n B_n.
    one = torch.einsum("...n,nrd->...rd", on_down, down)
    return one, torch.einsum("...n,nor->...or", on_up, up)


@checked
def merged(
    bank: Bank,
    weights: Tensor | Mapping[str, Tensor],
    *,
    mix: Mix,
    name: str = "merged",
) -> Lora:
    """Mix a bank to one LoRA by weights ``[N]``, the same in all layers or by a layer's path."""
    parts = stack(bank, mix)
    by_path = (
        weights if isinstance(weights, Mapping) else dict.fromkeys(parts.down, weights)
    )
    _check_weights(by_path, parts)
    factors = {
        path: joined(down, parts.up[path], by_path[path].to(down), mix)
        for path, down in parts.down.items()
    }
    # A base that one LoRA does not tell is that of the others.
    base = next((lora.base for lora in bank.values() if lora.base), None)
    return as_lora(factors, parts.scale, name=name, base=base)


def _check_weights(by_path: Mapping[str, Tensor], parts: Stack) -> None:
    """Refuse weights unless every layer has one finite number for each LoRA."""
    lacking = sorted(parts.down.keys() - by_path.keys())
    if lacking:
        refuse("E-KEYS", f"merged: no weights are given for layer {lacking[0]}")
    for path, down in parts.down.items():
        weights = by_path[path]
        shapes("merged", {"A": (down, "N R D"), "weights": (weights, "N")}, empty="")
        if not weights.isfinite().all():
            refuse("E-NONFINITE", f"merged: weights of {path} hold NaN or infinity")


def as_lora(
    factors: Mapping[str, tuple[Tensor, Tensor]],
    scale: float,
    *,
    name: str,
    base: str | None,
) -> Lora:
    """Make a LoRA of A and B by path and the factor on B A."""
    rank = len(next(iter(factors.values()))[0])  # rows of A; N R for outputs
    down = {path: a.detach().cpu().clone() for path, (a, _) in factors.items()}
    up = {path: b.detach().cpu().clone() for path, (_, b) in factors.items()}
    # alpha = scale R, since a LoRA's scale is alpha / R.
    return Lora(name, rank, scale * rank, down, up, base)


def strongest(scores: Tensor, top_k: int) -> Tensor:
    """Return weights ``[..., N]``: the softmax over a token's k largest scores, 0 elsewhere."""
    routing = route(scores.flatten(0, -2), top_k)  # ids and weights [T, k]
    weights = (
        torch.zeros_like(scores).flatten(0, -2).scatter(1, routing.ids, routing.weights)
    )
    return weights.view_as(scores)


def check_choice(count: int, bank: Bank) -> None:
    """Refuse to choose more LoRAs than the bank holds."""
    if count > len(bank):
        refuse(
            "E-RANGE",
            f"k is {count}, expected 1 to {len(bank)} (N, the LoRAs of the bank)",
        )


class Fixed(nn.Module):
    """Weights that no input changes: one task's, ``[N]``, which do not train."""

    def __init__(self, weights: Tensor) -> None:
        super().__init__()
        self.weights = nn.Parameter(weights.clone(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the weights ``[N]``, whatever x is."""
        return self.weights


class Mixed(nn.Module):
    """Stands in for a linear layer W with N LoRAs beside it: ``y = W x + scale * mix(w(x)) x``.

    ``weigh`` is a module that reads ``x [B, T, D]`` and returns w: ``[N]`` for the task,
    ``[B, 1, N]`` for each example, or ``[B, T, N]`` for each token. ``down [N, R, D]`` and
    ``up [N, O, R]`` are A and B. ``dropout`` is the share of x dropped before A in training, one
    mask for all LoRAs.
    """

    def __init__(
        self,
        base_layer: nn.Module,
        down: Tensor,
        up: Tensor,
        scale: float,
        weigh: nn.Module,
        *,
        mix: Mix,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.weigh = weigh
        self.down = nn.Parameter(down)
        self.up = nn.Parameter(up)
        self.scale = scale
        self.mix = mix
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[..., O]`` for ``x [..., D]``, in the dtype of the base's output."""
        base = self.base_layer(x)
        source = x.to(self.down.dtype)  # a host in 16 bits has LoRAs in float32
        if self.training and self.dropout:
            source = dropout(source, self.dropout)
        # The weights are of x as it is: dropout is for the LoRAs alone.
        weights = self.weigh(x).to(source.dtype)
        if self.mix == "outputs":
            # y = W x + s sum_n w_n B_n A_n x, the weights as gates [..., N].
            gates = weights.expand(*x.shape[:-1], -1)
            return lora_mixture(source, base, gates, self.down, self.up, self.scale)
        of_task = weights.dim() == 1  # [N]
        # At T = 1 an example's weights are its token's, and either way gives the same.
        of_token = not of_task and weights.shape[-2] == x.shape[-2]  # [B, T, N]
        if of_token:
            delta = self._by_token(source, weights)
        else:
            # One LoRA for the task, or for each example, [B, R, D] and [B, O, R].
            merged = weights if of_task else weights.squeeze(-2)
            down, up = joined(self.down, self.up, merged, self.mix)
            delta = source @ down.mT @ up.mT
        # y = W x + s B A x.
        return (base + self.scale * delta).to(base.dtype)

    def _by_token(self, x: Tensor, weights: Tensor) -> Tensor:
        """Mix factors for each token in N R columns: the mixed A itself is never formed."""
        on_down, on_up = halves(weights, self.mix)  # [..., N] each

        # sum_n w_n A_n x, by all A at once.
        of_all = F.linear(x, self.down.flatten(0, 1))  # [..., N R]
        of_each = of_all.unflatten(-1, self.down.shape[:2])  # [..., N, R]
        low = (on_down.unsqueeze(-1) * of_each).sum(-2, keepdim=True)  # [..., 1, R]

        # sum_n w_n B_n low, by all B at once.
        weighted = (on_up.unsqueeze(-1) * low).flatten(-2)  # [..., N R]
        columns = self.up.transpose(0, 1).flatten(1)  # [O, N R]
        return F.linear(weighted, columns)
