"""Experts in a dense MLP's place: full ones, all trained or some, and PESC's adapters (Fig. 3).

Full ones are fused 3-D weights, as transformers 5 keeps them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moebook.errors import refuse, shown
from moebook.kernels import Bank, Routing, adapters, experts, grouped, split_experts
from moebook.kernels.dispatch import FLOATS, Floating, shapes
from moebook.nn.dropout import dropout
from moebook.nn.passes import evaluating
from moebook.nn.routing import Router
from moebook.settings import Share, Size, checked


class Experts(nn.Module):
    """E gated FFNs, each a copy of one dense MLP at first: sparse upcycling (PESC Eq. 3).

    ``gate_up_proj [E, 2F, D]``, the gate's rows first; ``down_proj [E, D, F]``.
    """

    @checked
    def __init__(self, mlp: nn.Module, experts: Size) -> None:
        super().__init__()
        _check_copied(mlp)
        gate = mlp.gate_proj.weight.detach()  # [F, D]
        up = mlp.up_proj.weight.detach()  # [F, D]
        down = mlp.down_proj.weight.detach()  # [D, F]
        gate_up = torch.cat([gate, up])  # [2F, D]
        # Eq. 3 starts from theta_i = theta_o: each expert is the dense MLP.
        self.gate_up_proj = nn.Parameter(gate_up.repeat(experts, 1, 1))
        self.down_proj = nn.Parameter(down.repeat(experts, 1, 1))
        self.act_fn = mlp.act_fn

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        """Return ``sum_k w_k E_k(x)`` (Eq. 2) for ``x [T, D]``."""
        bank = Bank(self.gate_up_proj, self.down_proj)
        return experts(x, routing, bank, self.act_fn)


def _check_copied(mlp: nn.Module) -> None:
    """Refuse an MLP of which more is to copy than three weights and an activation (E-MODEL)."""
    projections = (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    if any(projection.bias is not None for projection in projections):
        name = type(mlp).__name__
        refuse("E-MODEL", f"{name} has biases: full experts hold none")
    # By their weights alone, so that LoRA on them is seen.
    copied = [partial(F.linear, weight=part.weight) for part in projections]
    check_gated(mlp, *copied, who="full experts")


Part = Callable[[Tensor], Tensor]


@torch.no_grad()
def check_gated(mlp: nn.Module, gate: Part, up: Part, down: Part, *, who: str) -> None:
    """Refuse an MLP that is not ``down(act_fn(gate(x)) * up(x))``, by a try (E-MODEL).

    Who computes it so, by its parts, would leave out a norm inside, or factors.
    """
    name = type(mlp).__name__
    if not callable(getattr(mlp, "act_fn", None)):
        refuse("E-MODEL", f"{name} has no act_fn: {who} need it")
    weight = mlp.gate_proj.weight
    if weight.is_meta:
        return
    width = mlp.gate_proj.in_features  # D
    drawn = torch.randn(8, width, generator=torch.Generator().manual_seed(0))
    # Quantised weights tell no dtype.
    dtype = weight.dtype if weight.dtype in FLOATS else torch.float32
    x = drawn.to(weight.device, dtype)  # [8, D]
    with evaluating(mlp):
        whole = mlp(x[None])[0]  # [8, D], from the [1, 8, D] that an MLP reads
        by_parts = down(mlp.act_fn(gate(x)) * up(x))
    missed = (whole - by_parts).float().norm() / whole.float().norm()
    if missed > (1e-3 if dtype == torch.float32 else 0.05):
        more = "computes more than down_proj(act_fn(gate_proj(x)) * up_proj(x))"
        refuse("E-MODEL", f"{name} {more}, which is all that {who} hold")


class ExpertMoE(nn.Module):
    """Stands in for a dense MLP: a router and E full experts, which read what the MLP reads."""

    def __init__(self, router: Router, experts: Experts) -> None:
        super().__init__()
        _check_pair("ExpertMoE", router, "gate_up_proj", experts.gate_up_proj, "E 2F D")
        self.router = router
        self.experts = experts

    def forward(self, x: Tensor) -> Tensor:
        """Return the mixture's output in the shape of ``x [B, T, D]``."""
        routing = self.router(x)
        # Experts know tokens alone: [B, T, D] goes in as [B * T, D].
        return self.experts(x.flatten(0, -2), routing).view_as(x)


class SplitExperts(nn.Module):
    """Stands in for a model's fused experts: all frozen, but for copies of the chosen ones (ESFT).

    The host's module stays whole inside as ``frozen``. Only ``gate_up_proj [N, 2F, D]`` and
    ``down_proj [N, D, F]`` train: copies of the N chosen rows, which may be made wider. Products
    are in the input's dtype. ``slots [E]`` int64 say where an expert lies, -1 for a frozen one.
    """

    slots: Tensor

    @checked
    def __init__(self, frozen: nn.Module, chosen: Sequence[int]) -> None:
        super().__init__()
        experts = len(frozen.down_proj)
        for expert in chosen:
            if not 0 <= expert < experts:
                have = f"chosen names expert {expert}, there are 0 to {experts - 1}"
                refuse("E-RANGE", f"SplitExperts: {have}")
        if len(set(chosen)) < len(chosen):
            refuse(
                "E-RANGE",
                f"SplitExperts: chosen names an expert twice: {shown(chosen)}",
            )
        self.frozen = frozen.requires_grad_(False)

        # Inverse tables: the expert of each place, and the place of each expert.
        # Both follow from ``chosen``, so no checkpoint needs them.
        device = frozen.down_proj.device
        numbers = torch.tensor(list(chosen), dtype=torch.int64, device=device)  # [N]
        slots = torch.full((experts,), -1, device=device)  # [E]
        slots[numbers] = torch.arange(len(chosen), device=device)
        self.register_buffer("chosen", numbers, persistent=False)
        self.register_buffer("slots", slots, persistent=False)

        # A tensor as index copies rows, so the host's own stay as they are.
        self.gate_up_proj = nn.Parameter(frozen.gate_up_proj.detach()[numbers])
        self.down_proj = nn.Parameter(frozen.down_proj.detach()[numbers])

    def forward(
        self, x: Tensor, routing: Routing | Tensor, weights: Tensor | None = None
    ) -> Tensor:
        """Return ``sum_k w_k E_k(x)`` for ``x [T, D]``; transformers gives ids and weights."""
        if weights is not None:
            # What came as ``routing`` is ids [T, K], not sorted by expert yet.
            routing = grouped(routing, weights, len(self.slots))
        frozen = Bank(self.frozen.gate_up_proj, self.frozen.down_proj)
        trained = Bank(self.gate_up_proj, self.down_proj)
        return split_experts(
            x, routing, frozen, trained, self.slots, self.frozen.act_fn
        )

    @torch.no_grad()
    def merged(self) -> nn.Module:
        """Write the trained rows into the host's module and return it."""
        host = self.frozen
        # The copies may be in float32, the host in 16 bits.
        host.gate_up_proj[self.chosen] = self.gate_up_proj.to(host.gate_up_proj.dtype)
        host.down_proj[self.chosen] = self.down_proj.to(host.down_proj.dtype)
        return host


class ChosenRows(nn.Module):
    """A parametrization that lets a gradient through to some rows of a weight ``[E, ...]`` alone.

    What AdamW does not see it does not move, but its weight decay would shrink all rows.
    """

    mask: Tensor

    def __init__(self, chosen: Sequence[int], weight: Tensor) -> None:
        super().__init__()
        mask = torch.zeros(len(weight), 1, 1, dtype=torch.bool, device=weight.device)
        mask[chosen] = True  # [E, 1, 1]
        self.register_buffer("mask", mask, persistent=False)
        frozen_rows = int((~mask).sum())
        self.idle = frozen_rows * weight[0].numel()  # numbers that stay

    def forward(self, weight: Tensor) -> Tensor:
        """Return the weight."""
        # The values are the weight's either way; a frozen row's gradient is cut off.
        return torch.where(self.mask, weight, weight.detach())


class Adapters(nn.Module):
    """E bottleneck adapters held in two tensors, ``down [E, D, R]`` and ``up [E, R, D]``.

    ``up`` starts at zero, so that at first every adapter adds nothing. ``down`` starts
    kaiming-uniform with a = sqrt 5, or at zero too (``down_init="zero"``, the paper's "omega_0 is
    initialised to zero", read literally). Then neither ever receives a gradient, since that of
    ``up`` is a multiple of gelu(0) = 0, that of ``down`` of ``up`` = 0.

    The output is multiplied by ``scale`` in training and by ``served_scale`` in evaluation mode
    (the released code merges with another). ``dropout`` is the share of inputs dropped before
    ``down`` in training, with one mask a token. The released code draws one for each of its K
    adapters.
    """

    @checked
    def __init__(
        self,
        width: Size,
        experts: Size,
        adapter_width: Size,
        *,
        scale: float = 1.0,
        served_scale: float = 1.0,
        dropout: Share = 0.0,
        down_init: Literal["kaiming", "zero"] = "kaiming",
        dtype: Floating = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.scale = scale
        self.served_scale = served_scale
        self.dropout = dropout
        # Eq. 8: W_down and W_up of all E.
        down = torch.zeros(experts, width, adapter_width, dtype=dtype, device=device)
        up = torch.zeros(experts, adapter_width, width, dtype=dtype, device=device)
        self.down = nn.Parameter(down)
        self.up = nn.Parameter(up)
        if down_init == "kaiming":
            # Kaiming's bound sqrt(6 / ((1 + a^2) D)) with a = sqrt 5.
            bound = 1 / math.sqrt(width)
            nn.init.uniform_(self.down, -bound, bound)

    def forward(self, h: Tensor, routing: Routing) -> Tensor:
        """Return ``h [T, D]`` plus the weighted adapters' outputs."""
        source = None  # h itself
        if self.training and self.dropout:
            source = dropout(h, self.dropout)
        # Eq. 8 has no scale: 1, the default.
        scale = self.scale if self.training else self.served_scale
        return adapters(h, routing, self.down, self.up, scale=scale, source=source)


class AdapterMoE(nn.Module):
    """Stands in for a dense MLP: the MLP once a token, routed adapters on its output.

    The router reads what the MLP ``shared`` reads, the adapters what it puts out.
    """

    def __init__(self, shared: nn.Module, router: Router, adapters: Adapters) -> None:
        super().__init__()
        _check_pair("AdapterMoE", router, "down", adapters.down, "E D R")
        self.shared = shared
        self.router = router
        self.adapters = adapters

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Return ``h + scale * sum_k w_k adapter_k(h)`` with ``h = shared(x)``.

        x is ``[B, T, D]``. What ``shared`` puts out beside h follows in a tuple.
        """
        routing = self.router(x)  # Eq. 9
        # E(x) of Eq. 7: all experts share it, so it is computed once.
        h = self.shared(x)
        # Eq. 7 with Eq. 8 put in; h stands outside the sum where gates sum to 1.
        if isinstance(h, Tensor):
            return self.adapters(h.flatten(0, -2), routing).view_as(h)
        # The MoE blocks of GPT-OSS and Llama 4 put out their router's scores, too.
        h, *scores = h
        return self.adapters(h.flatten(0, -2), routing).view_as(h), *scores


def _check_pair(
    module: str, router: Router, name: str, weight: Tensor, dims: str
) -> None:
    """Refuse a router and experts of different numbers E or widths D."""
    named = {"the router's weight": (router.weight, "E D"), name: (weight, dims)}
    shapes(module, named)
