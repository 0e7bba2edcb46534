"""adapters: h + scale * sum_k w_k gelu(h D_k) U_k, the experts of PESC (Eq. 7, 8)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from moebook.errors import refuse
from moebook.kernels.dispatch import implementation
from moebook.kernels.route import Routing


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
        impl: ``"auto"``, ``"torch"`` (sorted segments, one product per expert and direction) or
            ``"reference"`` (every adapter on every token, then masked).

    Returns:
        ``[T, D]`` in the dtype of ``h``; ``down`` and ``up`` are used in that dtype.

    Raises:
        Refusal: E-SHAPE when the shapes do not fit one another, E-IMPL for an unknown ``impl``.
    """
    source = h if source is None else source
    _check(h, source, routing, down, up)
    run = implementation("adapters", impl, {"torch": _segments, "reference": reference})
    return run(h, source, routing, down.to(h.dtype), up.to(h.dtype), scale)


def reference(
    h: Tensor, source: Tensor, routing: Routing, down: Tensor, up: Tensor, scale: float
) -> Tensor:
    """Run every adapter on every token and weight it by its gate, 0 where it was not chosen."""
    gates = h.new_zeros(h.shape[0], down.shape[0])
    gates = gates.scatter(1, routing.ids, routing.weights.to(h.dtype))
    outputs = torch.einsum("ter,erd->ted", F.gelu(torch.einsum("td,edr->ter", source, down)), up)
    return h + scale * torch.einsum("te,ted->td", gates, outputs)


def _check(h: Tensor, source: Tensor, routing: Routing, down: Tensor, up: Tensor) -> None:
    fits = h.dim() == 2 and source.shape == h.shape and down.dim() == up.dim() == 3
    fits = fits and down.shape[1] == h.shape[1] and up.shape == down.mT.shape
    fits = fits and routing.ids.shape[0] == h.shape[0] and len(routing.counts) == down.shape[0]
    if not fits:
        refuse(
            "E-SHAPE",
            "adapters: expected h and source [T, D], ids [T, K], counts [E], down [E, D, R],"
            f" up [E, R, D]; got {tuple(h.shape)}, {tuple(source.shape)},"
            f" {tuple(routing.ids.shape)}, {tuple(routing.counts.shape)}, {tuple(down.shape)},"
            f" {tuple(up.shape)}",
        )


def _segments(
    h: Tensor, source: Tensor, routing: Routing, down: Tensor, up: Tensor, scale: float
) -> Tensor:
    gates = routing.weights.to(h.dtype) * scale
    return _Segments.apply(h, source, gates, down, up, routing.order, routing.counts)


def _slices(counts: Tensor) -> Iterator[tuple[int, slice]]:
    """Yield each expert that has rows, with its rows in sorted order."""
    start = 0
    for expert, count in enumerate(counts.tolist()):
        if count:
            yield expert, slice(start, start + count)
        start += count


def _combine(rows: Tensor, order: Tensor, shape: torch.Size) -> Tensor:
    """Sum each token's K rows, taken back from sorted order: ``[T * K, D]`` to ``[T, D]``."""
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    return F.embedding_bag(place.view(shape), rows, mode="sum")


class _Segments(torch.autograd.Function):
    """Slots sorted by expert, so that each adapter is one small dense product over its own rows.

    Kept for the backward pass: the inputs and the pre-activation ``[T * K, R]``. The gate is
    applied between the two products, on R columns instead of D.
    """

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, source: Tensor, gates: Tensor, down: Tensor, up: Tensor,
        order: Tensor, counts: Tensor,
    ) -> Tensor:  # fmt: skip
        token = order // gates.shape[1]
        gate = gates.flatten()[order].unsqueeze(1)
        slices = list(_slices(counts))
        pre = h.new_empty(len(order), down.shape[2])
        for expert, rows in slices:
            torch.mm(source[token[rows]], down[expert], out=pre[rows])
        hidden = F.gelu(pre).mul_(gate)
        out = h.new_empty(len(order), h.shape[1])
        for expert, rows in slices:
            torch.mm(hidden[rows], up[expert], out=out[rows])
        ctx.save_for_backward(source, gates, down, up, order, pre)
        ctx.slices = slices
        return _combine(out, order, gates.shape).add_(h)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        source, gates, down, up, order, pre = ctx.saved_tensors
        token = order // gates.shape[1]
        gate = gates.flatten()[order].unsqueeze(1)
        active = F.gelu(pre)
        weighted = active * gate
        d_weighted = torch.empty_like(pre)
        d_down, d_up = torch.zeros_like(down), torch.zeros_like(up)
        for expert, rows in ctx.slices:
            d_out = grad[token[rows]]
            torch.mm(d_out, up[expert].T, out=d_weighted[rows])
            torch.mm(weighted[rows].T, d_out, out=d_up[expert])
        d_gate = torch.empty_like(gates).flatten()
        d_gate[order] = (d_weighted * active).sum(1)
        d_pre = torch.ops.aten.gelu_backward(d_weighted.mul_(gate), pre)
        d_rows = source.new_empty(len(order), source.shape[1])
        for expert, rows in ctx.slices:
            torch.mm(source[token[rows]].T, d_pre[rows], out=d_down[expert])
            torch.mm(d_pre[rows], down[expert].T, out=d_rows[rows])
        d_source = _combine(d_rows, order, gates.shape)
        return grad, d_source, d_gate.view_as(gates), d_down, d_up, None, None
