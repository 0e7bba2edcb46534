"""adapters: h + scale * sum_k w_k gelu(h D_k) U_k, the experts of PESC (Eq. 7, 8)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from moebook.errors import refuse
from moebook.kernels.dispatch import implementation
from moebook.kernels.route import Routing, check_routing
from moebook.kernels.segments import Layout, lay_out


def adapters(
    h: Tensor,
    routing: Routing,
    down: Tensor,
    up: Tensor,
    *,
    scale: float = 1.0,
    source: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    """Add to each row of ``h`` the weighted outputs of the adapters that its token was routed to.

    ``y = h + scale * sum_k w_k * gelu(source @ down[e_k]) @ up[e_k]``. Where a token's weights sum
    to 1 this is Eq. 7 with Eq. 8 put in, ``sum_i R_i (gelu(h D_i) U_i + h)``; the residual is added
    once.

    Args:
        h: ``[T, D]`` output of the shared FFN.
        routing: Where the T tokens go, from `route`.
        down: ``[E, D, R]``.
        up: ``[E, R, D]``.
        scale: Factor on the adapters' output (1 in Eq. 8).
        source: ``[T, D]`` what the adapters read; ``h`` by default, ``dropout(h)`` in training.
        impl: ``"auto"``, ``"torch"`` (one product per adapter and direction over its own rows),
            ``"triton"`` or ``"reference"`` (every adapter on every token, then masked).

    Returns:
        ``[T, D]`` in the dtype of ``h``; ``down`` and ``up`` are used in that dtype.

    Raises:
        Refusal: E-SHAPE or E-DEVICE when the arguments do not fit one another, E-IMPL for an
            ``impl`` that is unknown or cannot run.
    """
    source = h if source is None else source
    _check(h, source, down, up)
    check_routing("adapters", routing, h, len(down))
    run = implementation("adapters", impl, {"torch": _segments, "reference": reference}, h)
    y: Tensor = run(h, source, routing, down.to(h.dtype), up.to(h.dtype), scale)
    return y


def reference(
    h: Tensor, source: Tensor, routing: Routing, down: Tensor, up: Tensor, scale: float
) -> Tensor:
    """Run every adapter on every token and weight it by its gate, 0 where it was not chosen."""
    gates = h.new_zeros(h.shape[0], down.shape[0])
    gates = gates.scatter(1, routing.ids, routing.weights.to(h.dtype))
    outputs = torch.einsum("ter,erd->ted", F.gelu(torch.einsum("td,edr->ter", source, down)), up)
    return h + scale * torch.einsum("te,ted->td", gates, outputs)


def _check(h: Tensor, source: Tensor, down: Tensor, up: Tensor) -> None:
    fits = h.dim() == 2 and source.shape == h.shape and down.dim() == up.dim() == 3
    if not fits or down.shape[1] != h.shape[1] or up.shape != down.mT.shape:
        got = ", ".join(str(tuple(part.shape)) for part in (h, source, down, up))
        refuse(
            "E-SHAPE",
            f"adapters: expected h and source [T, D], down [E, D, R], up [E, R, D]; got {got}",
        )
    if (devices := {part.device for part in (source, down, up)}) != {h.device}:
        names = ", ".join(sorted(map(str, devices)))
        refuse("E-DEVICE", f"adapters: source, down and up lie on {names}, h on {h.device}")


def _segments(
    h: Tensor, source: Tensor, routing: Routing, down: Tensor, up: Tensor, scale: float
) -> Tensor:
    gates = routing.weights.to(h.dtype) * scale
    other = None if source is h else source
    y: Tensor = _Segments.apply(h, other, gates, down, up, lay_out(routing, h.dtype))
    return y


class _Segments(torch.autograd.Function):
    """Slots sorted by expert; all that one adapter does is done while its rows are in the cache.

    Kept for the backward pass: the inputs and the pre-activation ``[T * K, R]``. The gate is
    applied between the two products, on R columns instead of D. Each adapter's rows are added to
    the output as they come: a buffer ``[T * K, D]`` would cost more than the products. Where h is
    its own source (``other`` is None), its two gradients are one tensor from the start.
    """

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, other: Tensor | None, gates: Tensor, down: Tensor, up: Tensor,
        layout: Layout,
    ) -> Tensor:  # fmt: skip
        source, gate = h if other is None else other, layout.spread(gates)
        pre = h.new_empty(len(layout.token), down.shape[2])
        y = h.clone()
        for expert, rows in layout.segments:
            token = layout.token[rows]
            torch.mm(source.index_select(0, token), down[expert], out=pre[rows])
            hidden = F.gelu(pre[rows]).mul_(gate[rows])
            y.index_add_(0, token, hidden @ up[expert])
        ctx.save_for_backward(source, gate, down, up, pre)
        ctx.layout, ctx.apart = layout, other is not None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        source, gate, down, up, pre = ctx.saved_tensors
        d_source = torch.zeros_like(source) if ctx.apart else grad.clone()
        d_gate = torch.empty_like(gate)
        d_down, d_up = torch.zeros_like(down), torch.zeros_like(up)
        for expert, rows in ctx.layout.segments:
            token = ctx.layout.token[rows]
            d_out, active = grad.index_select(0, token), F.gelu(pre[rows])
            torch.mm((active * gate[rows]).T, d_out, out=d_up[expert])
            d_hidden = d_out @ up[expert].T
            torch.sum(d_hidden * active, 1, keepdim=True, out=d_gate[rows])
            d_pre = torch.ops.aten.gelu_backward(d_hidden.mul_(gate[rows]), pre[rows])
            torch.mm(source.index_select(0, token).T, d_pre, out=d_down[expert])
            d_source.index_add_(0, token, d_pre @ down[expert].T)
        d_gates = d_gate[ctx.layout.place].squeeze(-1)
        d_inputs = (grad, d_source) if ctx.apart else (d_source, None)
        return *d_inputs, d_gates, d_down, d_up, None
