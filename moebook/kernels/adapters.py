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

ENOUGH = 16
"""Tokens for each of the E * E ordered pairs of experts from which on pairs are grouped."""


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
    ids, swap = routing.ids.sort(dim=1)
    passes = _passes(ids, len(down), h.dtype)
    other = None if source is h else source
    y: Tensor = _Segments.apply(h, other, gates.gather(1, swap), down, up, passes)
    return y


class _Pass(NamedTuple):
    """Tokens grouped by the pair of experts that two of their choices are, or by one expert.

    Attributes:
        choices: Columns of the sorted ids, one or two.
        layout: Of the tokens.
        groups: (the experts, rows of the layout, how many of them are tokens).
    """

    choices: slice
    layout: Layout
    groups: list[tuple[list[int], slice, int]]


def _passes(ids: Tensor, experts: int, dtype: torch.dtype) -> list[_Pass]:
    """Group by pairs where they have enough tokens: a row is then moved once for two experts."""
    width = 2 if len(ids) >= ENOUGH * experts**2 else 1
    passes = []
    for first in range(0, ids.shape[1], width):
        chosen = ids[:, first : first + width]
        steps = [experts**place for place in range(chosen.shape[1])]
        code = (chosen * torch.tensor(steps, device=ids.device)).sum(1, keepdim=True)
        routing = grouped(code, code, experts ** len(steps))
        layout, counts = lay_out(routing, dtype), routing.counts.tolist()
        groups = [
            ([code // step % experts for step in steps], rows, counts[code])
            for code, rows in layout.segments
        ]
        passes.append(_Pass(slice(first, first + width), layout, groups))
    return passes


class _Segments(torch.autograd.Function):
    """Tokens sorted by pairs of experts; all of a pair is done while its rows are in the cache.

    Kept for the backward pass: the inputs and the pre-activation ``[T * K, R]``. The gate is
    applied between the two products, on R columns instead of D. The factors of both experts are
    one matrix, and each row is read once and written once for both. Where h is its own source
    (``other`` is None), its two gradients are one tensor from the start.
    """

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, other: Tensor | None, gates: Tensor, down: Tensor, up: Tensor,
        passes: list[_Pass],
    ) -> Tensor:  # fmt: skip
        source, base, y = h if other is None else other, h, empty(h.shape, h)
        kept = []
        for choices, layout, groups in passes:
            gate = layout.spread(gates[:, choices])
            pre = h.new_empty(len(gate), gate.shape[1] * down.shape[2])
            for pair, rows, tokens in groups:
                token = layout.token[rows]
                read = source.index_select(0, token)
                torch.mm(read, torch.cat([down[e] for e in pair], 1), out=pre[rows])
                hidden = _gated(F.gelu(pre[rows]), gate[rows])
                out = read if base is source else base.index_select(0, token)
                out.addmm_(hidden, torch.cat([up[e] for e in pair]))
                y.index_copy_(0, token[:tokens], out[:tokens])
            base = y
            kept += [gate, pre]
        ctx.save_for_backward(source, down, up, *kept)
        ctx.passes, ctx.apart = passes, other is not None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        source, down, up, *kept = ctx.saved_tensors
        wide, d_gates = torch.promote_types(down.dtype, torch.float32), []  # of sums of groups
        d_down, d_up = (torch.zeros_like(part, dtype=wide) for part in (down, up))
        base, d_source = None if ctx.apart else grad, empty(grad.shape, grad)
        for (_, layout, groups), gate, pre in zip(ctx.passes, kept[::2], kept[1::2], strict=True):
            d_gate = torch.empty_like(gate)
            for pair, rows, tokens in groups:
                token = layout.token[rows]
                read, d_out = source.index_select(0, token), grad.index_select(0, token)
                active, d_hidden = F.gelu(pre[rows]), d_out @ torch.cat([up[e] for e in pair]).T
                torch.sum((d_hidden * active).unflatten(1, (len(pair), -1)), 2, out=d_gate[rows])
                d_second = _gated(active, gate[rows]).T @ d_out
                d_pre = torch.ops.aten.gelu_backward(_gated(d_hidden, gate[rows]), pre[rows])
                d_first = d_pre.T @ read
                for e, second, first in zip(
                    pair, d_second.chunk(len(pair)), d_first.chunk(len(pair)), strict=True
                ):
                    d_up[e] += second
                    d_down[e] += first.T
                if base is None:
                    d_out.zero_()
                elif base is d_source:
                    torch.index_select(base, 0, token, out=d_out)
                d_out.addmm_(d_pre, torch.cat([down[e] for e in pair], 1).T)
                d_source.index_copy_(0, token[:tokens], d_out[:tokens])
            base = d_source
            d_gates.append(d_gate[layout.place.flatten()])
        d_inputs = (grad, d_source) if ctx.apart else (d_source, None)
        d_factors = (d_down.to(down.dtype), d_up.to(up.dtype))
        return *d_inputs, torch.cat(d_gates, 1), *d_factors, None


def _gated(rows: Tensor, gate: Tensor) -> Tensor:
    """Multiply the columns of each expert by its gate, in place."""
    rows.unflatten(1, (gate.shape[1], -1)).mul_(gate.unsqueeze(2))
    return rows
