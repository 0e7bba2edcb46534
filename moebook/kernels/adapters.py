"""adapters: h + scale * sum_k w_k gelu(h D_k) U_k, the experts of PESC (Eq. 7, 8)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from moebook.errors import refuse
from moebook.kernels.dispatch import implementation
from moebook.kernels.memory import empty
from moebook.kernels.route import Routing, check_routing, grouped
from moebook.kernels.segments import Layout, lay_out

ENOUGH = 64
"""Tokens for each of the E * E ordered pairs of experts from which on rows are sorted by pair."""


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
        impl: ``"auto"``, ``"torch"`` (products over the rows of each pair of adapters),
            ``"triton"`` or ``"reference"`` (every adapter on every token, then masked).

    Returns:
        ``[T, D]`` in the dtype of ``h``; ``down`` and ``up`` are used in that dtype.

    Raises:
        Refusal: E-SHAPE, E-DTYPE or E-DEVICE when the arguments do not fit one another, E-IMPL for
            an ``impl`` that is unknown or cannot run.
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
    if not h.is_floating_point():
        refuse("E-DTYPE", f"adapters: h is {h.dtype}, expected floating point")
    if source.dtype != h.dtype:
        refuse("E-DTYPE", f"adapters: source is {source.dtype}, h is {h.dtype}: cast one")
    if not down.is_floating_point():
        refuse("E-DTYPE", f"adapters: down is {down.dtype}, expected floating point")
    if not up.is_floating_point():
        refuse("E-DTYPE", f"adapters: up is {up.dtype}, expected floating point")
    if (devices := {part.device for part in (source, down, up)}) != {h.device}:
        names = ", ".join(sorted(map(str, devices)))
        refuse("E-DEVICE", f"adapters: source, down and up lie on {names}, h on {h.device}")


def _segments(
    h: Tensor, source: Tensor, routing: Routing, down: Tensor, up: Tensor, scale: float
) -> Tensor:
    gates, other = routing.weights.to(h.dtype) * scale, None if source is h else source
    ids, experts = routing.ids, len(down)
    if ids.shape[1] != 2 or len(ids) < ENOUGH * experts**2:
        layout = lay_out(routing, h.dtype)
        groups = [_Group([e], rows, int(routing.counts[e])) for e, rows in layout.segments]
    else:
        ids, swap = ids.sort(dim=1)
        gates, code = gates.gather(1, swap), ids[:, :1] * experts + ids[:, 1:]
        pairs = grouped(code, code, experts**2)
        layout = lay_out(pairs, h.dtype)
        groups = [
            _Group(list(divmod(pair, experts)), rows, int(pairs.counts[pair]))
            for pair, rows in layout.segments
        ]
    y: Tensor = _Segments.apply(h, other, gates, down, up, layout, groups)
    return y


class _Group(NamedTuple):
    """Rows of a layout whose tokens all go to the same one or two experts, each token once.

    Attributes:
        experts: One, or the pair.
        rows: Of the layout.
        tokens: How many of the rows are tokens; the others only fill up.
    """

    experts: list[int]
    rows: slice
    tokens: int


class _Segments(torch.autograd.Function):
    """Rows sorted by expert or pair; all of a group is done while its rows are in the cache.

    Kept for the backward pass: the inputs and the pre-activation ``[T * K, R]``. The gate is
    applied between the two products, on R columns instead of D. The factors of a pair are one
    matrix, and a row is read once and written once for both. Where h is its own source (``other``
    is None), its two gradients are one tensor from the start.
    """

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, other: Tensor | None, gates: Tensor, down: Tensor, up: Tensor,
        layout: Layout, groups: list[_Group],
    ) -> Tensor:  # fmt: skip
        source, gate, y = h if other is None else other, layout.spread(gates), empty(h.shape, h)
        pre = h.new_empty(len(gate), gate.shape[1] * down.shape[2])
        base = h if layout.place.shape[1] == 1 else y.copy_(h)
        for experts, rows, tokens in groups:
            token = layout.token[rows]
            read = source.index_select(0, token)
            torch.mm(read, _joined(down, experts, 1), out=pre[rows])
            hidden = _gated(F.gelu(pre[rows]), gate[rows])
            out = read if source is base else base.index_select(0, token)
            out.addmm_(hidden, _joined(up, experts, 0))
            y.index_copy_(0, token[:tokens], out[:tokens])
        ctx.save_for_backward(source, gate, down, up, pre)
        ctx.layout, ctx.groups, ctx.apart = layout, groups, other is not None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        source, gate, down, up, pre = ctx.saved_tensors
        wide = torch.promote_types(down.dtype, torch.float32)  # of sums over groups
        d_down, d_up = (torch.zeros_like(part, dtype=wide) for part in (down, up))
        d_gate, d_source = torch.empty_like(gate), empty(grad.shape, grad)
        if ctx.apart:
            base = d_source.zero_()
        else:
            base = grad if ctx.layout.place.shape[1] == 1 else d_source.copy_(grad)
        for experts, rows, tokens in ctx.groups:
            token, number = ctx.layout.token[rows], len(experts)
            read, d_out = source.index_select(0, token), grad.index_select(0, token)
            active, d_hidden = F.gelu(pre[rows]), d_out @ _joined(up, experts, 0).T
            torch.sum((d_hidden * active).unflatten(1, (number, -1)), 2, out=d_gate[rows])
            d_ups = (_gated(active, gate[rows]).T @ d_out).chunk(number)
            d_pre = torch.ops.aten.gelu_backward(_gated(d_hidden, gate[rows]), pre[rows])
            d_downs = (d_pre.T @ read).chunk(number)
            for expert, first, second in zip(experts, d_downs, d_ups, strict=True):
                d_down[expert] += first.T
                d_up[expert] += second
            if base is not grad:
                torch.index_select(base, 0, token, out=d_out)
            d_out.addmm_(d_pre, _joined(down, experts, 1).T)
            d_source.index_copy_(0, token[:tokens], d_out[:tokens])
        d_inputs = (grad, d_source) if ctx.apart else (d_source, None)
        d_gates = d_gate[ctx.layout.place].flatten(1)
        return *d_inputs, d_gates, d_down.to(down.dtype), d_up.to(up.dtype), None, None


def _joined(factors: Tensor, experts: list[int], dim: int) -> Tensor:
    """Return the factors of a group's experts as one matrix."""
    if len(experts) == 1:
        return factors[experts[0]]
    return torch.cat([factors[expert] for expert in experts], dim)


def _gated(rows: Tensor, gate: Tensor) -> Tensor:
    """Multiply the columns of each expert by its gate, in place."""
    rows.unflatten(1, (gate.shape[1], -1)).mul_(gate.unsqueeze(2))
    return rows
