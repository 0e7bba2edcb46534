"""A linear layer with N routed LoRAs beside it (Rocket Eq. 8, 9)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moebook.errors import refuse
from moebook.kernels.dispatch import shapes
from moebook.kernels.lora_mixture import lora_mixture
from moebook.nn.dropout import dropout
from moebook.nn.routing import Router
from moebook.settings import Positive, Share, checked


class LoraMixture(nn.Module):
    """Stands in for a linear layer W: ``y = W x + sum_n G_n(x) * scale_n * B_n A_n x``.

    Since a token's gates sum to 1, this is Eq. 8 with experts ``W x + scale_n B_n A_n x``; with one
    expert it is PEFT's LoRA exactly. ``down [N, R, D]`` and ``up [N, O, R]`` are all A and B,
    ``scales`` their N factors ``alpha / r``. The router reads the layer's input x
    (``reads="layer"``), or each expert's own output (``"expert"``): then logit n is
    ``w_n . (W x + scale_n B_n A_n x)`` (Eq. 9). ``dropout`` is the share of x dropped before A.
    """

    @checked
    def __init__(
        self,
        base_layer: nn.Module,
        router: Router,
        down: Tensor,
        up: Tensor,
        scales: Sequence[Positive],
        *,
        reads: Literal["layer", "expert"] = "layer",
        dropout: Share = 0.0,
    ) -> None:
        super().__init__()
        of_router = {"the router's weight": (router.weight, "N D" if reads == "layer" else "N O")}
        factors = {"down": (down, "N R D"), "up": (up, "N O R")}
        sizes = shapes("LoraMixture", factors | of_router, empty="")
        if (base_layer.out_features, base_layer.in_features) != (sizes["O"], sizes["D"]):
            layer = f"{base_layer.in_features} to {base_layer.out_features}"
            own = f"{sizes['D']} to {sizes['O']}"
            refuse(
                "E-SHAPE", f"LoraMixture: the LoRAs go from {own} columns, the layer from {layer}"
            )
        if len(scales) != len(down):
            refuse("E-SHAPE", f"LoraMixture: {len(scales)} scales for {len(down)} LoRAs")
        self.base_layer, self.router = base_layer, router
        self.down, self.up = nn.Parameter(down), nn.Parameter(up)
        self.reads, self.dropout = reads, dropout
        self.only: int | None = None  # the one expert to use for every token
        # One factor for all, after B as PEFT has it, and what each expert differs from it by.
        self.scale = scales[0]
        ratios = torch.tensor([scale / scales[0] for scale in scales], dtype=up.dtype)
        self.register_buffer("ratios", ratios.to(up.device), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[..., O]`` for ``x [..., D]``, in the dtype of the base's output."""
        shapes("LoraMixture", {"x": (x, "... T D"), "down": (self.down, "N R D")}, empty="T")
        base = self.base_layer(x)
        source = x.to(self.down.dtype)
        if self.training and self.dropout:
            source = dropout(source, self.dropout)
        gates = self._gates(x, base, source) * self.ratios
        return lora_mixture(source, base, gates, self.down, self.up, self.scale)

    def _gates(self, x: Tensor, base: Tensor, source: Tensor) -> Tensor:
        """Return each expert's weight ``[..., N]``: 0 where it was not chosen, summing to 1."""
        gates = source.new_zeros(*source.shape[:-1], len(self.down))
        if self.only is not None:
            gates[..., self.only] = 1
            return gates
        by_layer = self.reads == "layer"
        routing = self.router(x) if by_layer else self.router(base, self._own_logits(source))
        weights = routing.weights.to(gates.dtype)
        return gates.flatten(0, -2).scatter(1, routing.ids, weights).view_as(gates)

    def _own_logits(self, source: Tensor) -> Tensor:
        """Return what an expert's output adds to its logit, ``[T, N]``: ``w B h = (B' w) h``."""
        hidden = F.linear(source, self.down.flatten(0, 1)).unflatten(-1, self.down.shape[:2])
        weight = self.router.weight
        with torch.autocast(source.device.type, enabled=False):
            read = torch.einsum("no,nor->nr", weight, self.up.to(weight.dtype))
            rows = hidden.flatten(0, -3).to(read.dtype)
            return torch.einsum("tnr,nr->tn", rows, read) * (self.ratios * self.scale)
