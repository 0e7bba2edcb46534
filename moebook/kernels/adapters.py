"""adapters: h + scale * sum_k w_k gelu(h D_k) U_k, the experts of PESC (Eq. 7, 8)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from moebook.errors import refuse
from moebook.kernels.arguments import alike, floating, together
from moebook.kernels.dispatch import implementation
from moebook.kernels.memory import empty
from moebook.kernels.products import product
from moebook.kernels.route import Routing, check_routing, grouped
from moebook.kernels.segments import Layout, lay_out

ENOUGH = 64
"""Tokens for each of the E * E ordered pairs of experts from which on rows are sorted by pair."""
PART = 2**18
"""Numbers of ``h`` up to which neighbouring experts or pairs are computed side by side."""


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
    once. An expert that a token chose twice counts twice.

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
    gates = gates.scatter_add(1, routing.ids, routing.weights.to(h.dtype))
    outputs = torch.einsum("ter,erd->ted", F.gelu(torch.einsum("td,edr->ter", source, down)), up)
    return h + scale * torch.einsum("te,ted->td", gates, outputs)


def _check(h: Tensor, source: Tensor, down: Tensor, up: Tensor) -> None:
    fits = h.dim() == 2 and source.shape == h.shape and down.dim() == up.dim() == 3
    fits = fits and down.shape[1] == h.shape[1] and up.shape == down.mT.shape
    if not fits or 0 in down.shape[1:]:
        got = ", ".join(str(tuple(part.shape)) for part in (h, source, down, up))
        refuse(
            "E-SHAPE",
            "adapters: expected h and source [T, D >= 1], down [E, D, R >= 1], up [E, R, D]; got"
            f" {got}",
        )
    floating("adapters", {"h": h, "source": source, "down": down, "up": up})
    alike("adapters", {"h": h, "source": source})
    together("adapters", {"h": h, "source": source, "down": down, "up": up})


def _segments(
    h: Tensor, source: Tensor, routing: Routing, down: Tensor, up: Tensor, scale: float
) -> Tensor:
    gates, other = routing.weights.to(h.dtype) * scale, None if source is h else source
    ids, experts = routing.ids, len(down)
    if ids.shape[1] != 2 or len(ids) < ENOUGH * experts**2:
        by, members = routing, [[expert] for expert in range(experts)]
    else:
        ids, swap = ids.sort(dim=1)
        gates, code = gates.gather(1, swap), ids[:, :1] * experts + ids[:, 1:]
        by = grouped(code, code, experts**2)
        members = [[low, high] for low in range(experts) for high in range(experts)]
    layout = lay_out(by, h.dtype, down.shape[1:].numel() * (1 if by is routing else 2))
    parts = _parts(layout, members, PART // max(h.shape[1], 1))
    y: Tensor = _Segments.apply(h, other, gates, down, up, layout, parts)
    return y


class _Part(NamedTuple):
    """Neighbouring groups of rows, whose tokens go to the same expert or pair of experts.

    Attributes:
        experts: One, or a pair, of each group.
        sizes: Rows of each group.
    """

    experts: list[list[int]]
    sizes: list[int]

    def each(self, *tensors: Tensor) -> Iterator[tuple[Any, ...]]:
        """Yield of each group its experts and its rows of the tensors."""
        return zip(self.experts, *(rows.split(self.sizes) for rows in tensors), strict=True)


def _parts(layout: Layout, members: list[list[int]], most: int) -> list[_Part]:
    """Join neighbouring groups up to so many rows: then calls cost less than what they do."""
    parts: list[_Part] = []
    for group, rows in layout.segments:
        size = rows.stop - rows.start
        if not parts or sum(parts[-1].sizes) + size > most:
            parts.append(_Part([], []))
        parts[-1].experts.append(members[group])
        parts[-1].sizes.append(size)
    return parts


def _cut(parts: list[_Part], *tensors: Tensor) -> Iterator[tuple[Any, ...]]:
    """Yield each part and its rows of the tensors."""
    sizes = [sum(part.sizes) for part in parts]
    return zip(parts, *(rows.split(sizes) for rows in tensors), strict=True)


class _Segments(torch.autograd.Function):
    """Rows sorted by expert or pair; all of a part is done while its rows are in the cache.

    Kept for the backward pass: the inputs and the pre-activation ``[T * K, R]``. The gate is
    applied between the two products, on R columns instead of D. The factors of a pair are one
    matrix, and a row is read once and added to once for both; rows that only fill a segment up have
    a gate of 0 and add nothing. Where h is its own source (``other`` is None), its two gradients
    are one tensor from the start.
    """

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, other: Tensor | None, gates: Tensor, down: Tensor, up: Tensor,
        layout: Layout, parts: list[_Part],
    ) -> Tensor:  # fmt: skip
        source, gate = h if other is None else other, layout.spread(gates)
        pre = h.new_empty(len(gate), gate.shape[1] * down.shape[2])
        y, downs, ups = empty(h.shape, h).copy_(h), down.unbind(), up.unbind()
        for part, token, own, before in _cut(parts, layout.token, gate, pre):
            for experts, read, out in part.each(source.index_select(0, token), before):
                product(read, _joined([downs[expert] for expert in experts], 1), out=out)
            out = [
                product(hidden, _joined([ups[expert] for expert in experts]))
                for experts, hidden in part.each(_gated(F.gelu(before), own))
            ]
            y.index_add_(0, token, _joined(out))
        ctx.save_for_backward(source, gate, down, up, pre)
        ctx.layout, ctx.parts, ctx.apart = layout, parts, other is not None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        source, gate, down, up, pre = ctx.saved_tensors
        of_h, of_source, _, of_down, of_up, *_ = ctx.needs_input_grad
        d_gate, d_source = torch.empty_like(gate), empty(grad.shape, grad)
        d_source = d_source.zero_() if ctx.apart else d_source.copy_(grad)
        downs, ups = down.unbind(), up.unbind()
        d_down, d_up = (_Sum(up) if needed else None for needed in (of_down, of_up))
        cut = _cut(ctx.parts, ctx.layout.token, gate, pre, d_gate)
        for part, token, own, before, d_own in cut:
            read, d_out = source.index_select(0, token), grad.index_select(0, token)
            d_hidden, active = torch.empty_like(before), F.gelu(before)
            for experts, d_y, out in part.each(d_out, d_hidden):
                product(d_y, _joined([ups[expert] for expert in experts]).T, out=out)
            torch.sum((d_hidden * active).unflatten(1, (own.shape[1], -1)), 2, out=d_own)
            d_pre = torch.ops.aten.gelu_backward(_gated(d_hidden, own), before)
            d_rows = []
            for experts, x, d_y, hidden, d in part.each(read, d_out, _gated(active, own), d_pre):
                if d_up:
                    d_up.add(experts, product(hidden.T, d_y))
                if d_down:
                    d_down.add(experts, product(d.T, x))
                if of_h or of_source:
                    d_rows.append(product(d, _joined([downs[expert] for expert in experts], 1).T))
            if d_rows:
                d_source.index_add_(0, token, _joined(d_rows))
        d_inputs = (grad, d_source) if ctx.apart else (d_source, None)
        d_gates = d_gate[ctx.layout.place].flatten(1)
        d_weights = d_down and d_down.total().mT, d_up and d_up.total()
        return *d_inputs, d_gates, *d_weights, None, None


class _Sum:
    """A weight's gradient ``[E, R, D]``, summed over groups in float32 at least."""

    def __init__(self, weight: Tensor) -> None:
        wide = torch.promote_types(weight.dtype, torch.float32)
        self.weight, self.memory = weight, empty(weight.shape, weight.new_empty(0, dtype=wide))
        self.parts, self.written = self.memory.unbind(), [False] * len(weight)

    def add(self, experts: list[int], rows: Tensor) -> None:
        """Add a group's gradient, the rows of its experts one below the other."""
        for expert, part in zip(experts, rows.chunk(len(experts)), strict=True):
            if self.written[expert]:
                self.parts[expert].add_(part)
            else:
                self.parts[expert].copy_(part)
                self.written[expert] = True

    def total(self) -> Tensor:
        """Return the sum, in the weight's dtype; zero for the experts that no group has."""
        for part, written in zip(self.parts, self.written, strict=True):
            if not written:
                part.zero_()
        if self.memory.dtype == self.weight.dtype:
            return self.memory
        return empty(self.memory.shape, self.weight).copy_(self.memory)


def _joined(matrices: list[Tensor], dim: int = 0) -> Tensor:
    """Return matrices as one."""
    return matrices[0] if len(matrices) == 1 else torch.cat(matrices, dim)


def _gated(rows: Tensor, gate: Tensor) -> Tensor:
    """Multiply the columns of each expert by its gate, in place."""
    if gate.shape[1] == 1:
        return rows.mul_(gate)
    rows.unflatten(1, (gate.shape[1], -1)).mul_(gate.unsqueeze(2))
    return rows
