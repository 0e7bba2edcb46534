"""Routers, and the trace of what they decided in a model's last forward pass."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moebook.errors import refuse
from moebook.kernels import Routing, route


@dataclass(frozen=True)
class Decision:
    """What one router decided for the tokens of one forward pass.

    Attributes:
        logits: ``[T, E]``; with its graph when the router was in training mode, else without.
        ids: ``[T, K]`` chosen experts.
    """

    logits: Tensor
    ids: Tensor


class Trace:
    """The decisions of all routers of a model in its last forward pass, and its padding mask.

    Two hooks on the decoder open the trace before a pass and close it after. So each pass replaces
    the one before (no graph outlives its step), and the second run of a layer that gradient
    checkpointing makes during the backward pass finds it closed and records nothing. The mask comes
    from the decoder's own arguments, since decoder layers hand none to their MLPs.
    """

    def __init__(self) -> None:
        self.decisions: dict[int, Decision] = {}
        self.attention_mask: Tensor | None = None
        self._open = False

    def __reduce__(self) -> tuple[type[Trace], tuple[()]]:
        """Copy as an empty trace: a copied model has not run yet."""
        return (Trace, ())

    def follow(self, decoder: nn.Module) -> None:
        """Register the two hooks on a model's decoder."""
        decoder.register_forward_pre_hook(self._begin, with_kwargs=True)
        decoder.register_forward_hook(self._end, always_call=True)

    def record(self, layer: int, logits: Tensor, ids: Tensor) -> None:
        """Keep a router's decision under its layer's number, if a pass is under way."""
        if self._open:
            self.decisions[layer] = Decision(logits, ids)

    def padding(self, rows: int, attention_mask: Tensor | None = None) -> Tensor | None:
        """Return the mask ``[T]`` of the ``rows`` tokens of a pass, true where a token is real.

        Args:
            rows: B times the tokens of one sequence in this pass.
            attention_mask: ``[B, S]`` to use instead of the recorded one. With a KV cache, S covers
                the past too: the last columns belong to this pass.

        Returns:
            None where there is no mask, or none of the form ``[B, S]`` (packed sequences have a
            block mask and no padding): then every token counts.
        """
        mask = self.attention_mask if attention_mask is None else attention_mask
        if mask is None or mask.dim() != 2:
            return None
        length = rows // max(len(mask), 1)
        if length * len(mask) != rows or length > mask.shape[1]:
            shape = tuple(mask.shape)
            refuse(
                "E-SHAPE", f"attention_mask {shape} does not fit the {rows} tokens of the last pass"
            )
        return mask[:, mask.shape[1] - length :].reshape(-1).bool()

    def _begin(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
        self.attention_mask = mask if isinstance(mask, Tensor) else None
        self.decisions = {}
        self._open = True

    def _end(self, decoder: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._open = False


class Router(nn.Module):
    """A linear router without bias, kept in float32 or wider, whatever its host computes in.

    Starts kaiming-uniform with a = sqrt 5, so within 1/sqrt(D) either way (PESC as released; the
    paper says "randomly initialised").

    Args:
        width: D, width of what it reads.
        experts: E.
        top_k: K.
        layer: Number of the decoder layer it serves.
        trace: Where its decisions are recorded.
        combine: Combine weights, see `moebook.kernels.route`.
        dtype, device: Of the weight ``[E, D]``.
    """

    def __init__(
        self,
        width: int,
        experts: int,
        top_k: int,
        *,
        layer: int,
        trace: Trace,
        combine: str = "renormalised",
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.top_k, self.layer, self.trace, self.combine = top_k, layer, trace, combine
        self.weight = nn.Parameter(torch.empty(experts, width, dtype=dtype, device=device))
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Routing:
        """Route the tokens of ``x [..., D]``, flattened to ``[T, D]``; autocast is off in here."""
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x.flatten(0, -2).to(self.weight.dtype), self.weight)
            routing = route(logits, self.top_k, combine=self.combine)
        self.trace.record(self.layer, logits if self.training else logits.detach(), routing.ids)
        return routing

    def extra_repr(self) -> str:
        """Return what ``print(model)`` shows."""
        experts, width = self.weight.shape
        return f"width={width}, experts={experts}, top_k={self.top_k}, layer={self.layer}"


def routers(model: nn.Module) -> list[Router]:
    """Return the model's routers in the order of their layers."""
    found = [module for module in model.modules() if isinstance(module, Router)]
    return sorted(found, key=lambda router: router.layer)
