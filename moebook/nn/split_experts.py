"""Experts of which some train: the host's own frozen bank, and a parameter for the chosen ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from moebook.kernels import Bank, Routing, grouped, split_experts


class SplitExperts(nn.Module):
    """Stands in for a model's fused experts: all frozen, but for copies of the chosen ones.

    The host's module stays whole inside, so that the base can be put back as it was. Only the two
    parameters made here receive gradients and optimizer state.

    Attributes:
        frozen: The host's module, ``gate_up_proj [E, 2F, D]`` and ``down_proj [E, D, F]``.
        gate_up_proj: ``[N, 2F, D]``, copies of the chosen rows.
        down_proj: ``[N, D, F]``, the same.
        slots: ``[E]`` int64, where an expert lies in the two, -1 for a frozen one.

    Args:
        frozen: Fused gated experts without biases, with their activation as ``act_fn``.
        chosen: Numbers of the N experts that train.
        dtype: Of the trained copies; the products are computed in that of the input.
    """

    slots: Tensor

    def __init__(self, frozen: nn.Module, chosen: Sequence[int], *, dtype: torch.dtype) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        device = frozen.down_proj.device
        self.register_buffer("chosen", torch.tensor(chosen, device=device), persistent=False)
        slots = torch.full((len(frozen.down_proj),), -1, device=device)
        slots[self.chosen] = torch.arange(len(chosen), device=device)
        self.register_buffer("slots", slots, persistent=False)
        self.gate_up_proj = nn.Parameter(frozen.gate_up_proj.detach()[self.chosen].to(dtype))
        self.down_proj = nn.Parameter(frozen.down_proj.detach()[self.chosen].to(dtype))

    def forward(
        self, x: Tensor, routing: Routing | Tensor, weights: Tensor | None = None
    ) -> Tensor:
        """Return ``sum_k w_k E_k(x)`` for ``x [T, D]``.

        Args:
            x: ``[T, D]``.
            routing: From a router of `moebook.nn`; or the chosen ids ``[T, K]``, as the blocks of
                transformers call their experts.
            weights: ``[T, K]``, with ids alone.
        """
        if weights is not None:
            routing = grouped(routing, weights, len(self.slots))
        frozen = Bank(self.frozen.gate_up_proj, self.frozen.down_proj)
        trained = Bank(self.gate_up_proj, self.down_proj)
        return split_experts(x, routing, frozen, trained, self.slots, self.frozen.act_fn)

    @torch.no_grad()
    def merged(self) -> nn.Module:
        """Write the trained rows into the host's module and return it."""
        self.frozen.gate_up_proj[self.chosen] = self.gate_up_proj.to(self.frozen.gate_up_proj.dtype)
        self.frozen.down_proj[self.chosen] = self.down_proj.to(self.frozen.down_proj.dtype)
        return self.frozen

    def extra_repr(self) -> str:
        """Return what ``print(model)`` shows."""
        return f"experts={len(self.slots)}, trained={self.chosen.tolist()}"
