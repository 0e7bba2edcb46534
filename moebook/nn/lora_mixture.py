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
        named = {
            "down": (down, "N R D"),
            "up": (up, "N O R"),
            "the router's weight": (
                router.weight,
                "N D" if reads == "layer" else "N O",
            ),
        }
        sizes = shapes("LoraMixture", named, empty="")
        layer = f"{base_layer.in_features} to {base_layer.out_features}"
        own = f"{sizes['D']} to {sizes['O']}"
        if layer != own:
            have = f"the LoRAs go from {own} columns, the layer from {layer}"
            refuse("E-SHAPE", f"LoraMixture: {have}")
        if len(scales) != len(down):
            refuse(
                "E-SHAPE", f"LoraMixture: {len(scales)} scales for {len(down)} LoRAs"
            )
        self.base_layer = base_layer
        self.router = router
        self.down = nn.Parameter(down)
        self.up = nn.Parameter(up)
        self.reads = reads
        self.dropout = dropout
        self.only: int | None = None  # the one expert to use for every token
        # One factor for all, after B as in PEFT, and each expert's ratio to it.
        self.scale = scales[0]
        ratios = torch.tensor([scale / scales[0] for scale in scales], dtype=up.dtype)
        self.register_buffer("ratios", ratios.to(up.device), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[..., O]`` for ``x [..., D]``, in the dtype of the base's output."""
        shapes(
            "LoraMixture",
            {"x": (x, "... T D"), "down": (self.down, "N R D")},
            empty="T",
        )
        base = self.base_layer(x)  # W x, [..., O]
        source = x.to(self.down.dtype)
        if self.training and self.dropout:
            source = dropout(source, self.dropout)
        # Eq. 8: sum_n G_n (W x + scale_n B_n A_n x). W x stands outside, since the G_n
        # sum to 1; of scale_n = scale * ratio_n the ratio goes on the gate.
        gates = self._gates(x, base, source) * self.ratios
        return lora_mixture(source, base, gates, self.down, self.up, self.scale)

    def _gates(self, x: Tensor, base: Tensor, source: Tensor) -> Tensor:
        """Return each expert's weight ``[..., N]``: 0 where it was not chosen, summing to 1."""
        gates = source.new_zeros(*source.shape[:-1], len(self.down))
        if self.only is not None:
            gates[..., self.only] = 1
            return gates
        if self.reads == "layer":
            routing = self.router(x)
        else:  # Eq. 9: w_n . (W x) by the router, and what the expert adds
            routing = self.router(base, self._own_logits(source))
        # Eq. 9: the softmax over the k largest logits; the others, at minus infinity in
        # the paper, stay 0.
        weights = routing.weights.to(gates.dtype)  # [T, K]
        return gates.flatten(0, -2).scatter(1, routing.ids, weights).view_as(gates)

    def _own_logits(self, source: Tensor) -> Tensor:
        """Return what an expert's output adds to its logit, ``[T, N]``.

        ``scale_n w_n . (B_n A_n x)`` is ``scale_n (B_n' w_n) . (A_n x)``: R columns, not O.
        """
        hidden = F.linear(source, self.down.flatten(0, 1))  # [..., N * R]
        hidden = hidden.unflatten(-1, self.down.shape[:2])  # [..., N, R]
        weight = self.router.weight  # [N, O], float32 or wider
        with torch.autocast(source.device.type, enabled=False):
            # B_n' w_n, [N, R]: once a pass, not once a token.
            read = torch.einsum("no,nor->nr", weight, self.up.to(weight.dtype))
            rows = hidden.flatten(0, -3).to(read.dtype)  # [T, N, R]
            logits = torch.einsum("tnr,nr->tn", rows, read)  # [T, N]
            return logits * (self.ratios * self.scale)
