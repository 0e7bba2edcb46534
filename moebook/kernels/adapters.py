"""adapters: h + scale * sum_k w_k gelu(h D_k) U_k, the experts of PESC (Eq. 7, 8)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from moebook.kernels.dispatch import factor, implementation, shapes
from moebook.kernels.matmul import empty, product
from moebook.kernels.route import Layout, Routing, grouped, lay_out

ENOUGH = 64  # tokens for each of the E * E pairs of experts from which on rows are sorted by pair
PART = 2**18  # numbers of ``h`` up to which neighbouring experts or pairs are computed side by side


def adapters(
    h: Tensor,
    routing: Routing,
    down: Tensor,
    up: Tensor,
    *,
    scale: float | Tensor = 1.0,
    source: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    """Add to each row of ``h`` the weighted outputs of the adapters that its token was routed to.

    ``y = h + scale * sum_k w_k * gelu(source @ down[e_k]) @ up[e_k]``, ``[T, D]``. Where a token's
    weights sum to 1 this is Eq. 7 with Eq. 8 put in, ``sum_i R_i (gelu(h D_i) U_i + h)``; the
    residual is added once. An expert that a token chose twice counts twice.

    ``h [T, D]`` is the output of the shared FFN, ``source [T, D]`` what adapters read, else ``h``;
    ``down [E, D, R]`` and ``up [E, R, D]`` are used in the dtype of ``h``. ``scale`` is a number,
    or a tensor of one, which then has a gradient. ``impl`` is ``"auto"``, ``"torch"`` (products by
    pair of adapters), ``"triton"`` (for K = 2) or ``"reference"``.
    """
    source = h if source is None else source
    factors = {"down": (down, "E D R"), "up": (up, "E R D")}
    inputs = {"h": (h, "T D"), "source": (source, "T D"), **factors, **routing.named()}
    shapes("adapters", inputs, alike=("h", "source"))
    factor("adapters", "scale", scale)
    (experts, _, rank), top_k = down.shape, routing.ids.shape[1]
    fits = top_k == 2 and experts <= 64 and rank <= (32 if h.dtype == torch.float32 else 64)
    unless = "" if fits else "it takes 2 of at most 64 experts, R up to 64 (in float32 32)"
    run = implementation("adapters", impl, _IMPLEMENTATIONS, h, unless=unless)
    y: Tensor = run(h, source, routing, down.to(h.dtype), up.to(h.dtype), scale)
    return y


def reference(
    h: Tensor, source: Tensor, routing: Routing, down: Tensor, up: Tensor, scale: float | Tensor
) -> Tensor:
    """Run every adapter on every token and weight it by its gate, 0 where it was not chosen."""
    gates = h.new_zeros(h.shape[0], down.shape[0])
    gates = gates.scatter_add(1, routing.ids, routing.weights.to(h.dtype))
    outputs = torch.einsum("ter,erd->ted", F.gelu(torch.einsum("td,edr->ter", source, down)), up)
    return h + scale * torch.einsum("te,ted->td", gates, outputs)


def _segments(
    h: Tensor, source: Tensor, routing: Routing, down: Tensor, up: Tensor, scale: float | Tensor
) -> Tensor:
    gates, other = routing.weights.to(h.dtype) * scale, None if source is h else source
    ids, experts = routing.ids, len(down)
    if ids.shape[1] != 2 or len(ids) < ENOUGH * experts**2:
        by, members = routing, [[expert] for expert in range(experts)]
    else:
        ids, swap = ids.sort(dim=1)
        gates, code = gates.gather(1, swap), ids[:, :1] * experts + ids[:, 1:]
        by = grouped(code, gates[:, :1], experts**2)
        members = [[low, high] for low in range(experts) for high in range(experts)]
    layout = lay_out(by, h.dtype, down.shape[1:].numel() * (1 if by is routing else 2))
    y: Tensor = _Segments.apply(h, other, gates, down, up, layout, members)
    return y


_IMPLEMENTATIONS = {"torch": _segments, "reference": reference, "triton": "adapters.run"}


class _Segments(torch.autograd.Function):
    """Rows sorted by expert or pair; all of a part is done while its rows are in the cache.

    ``members`` are the G experts, one or two, of each segment; their factors are one matrix, so a
    row is read and added to once. The gate is applied between the products, on G * R columns, not
    D. Where h is its own source (``other`` is None), its two gradients are one tensor.
    """

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, other: Tensor | None, gates: Tensor, down: Tensor, up: Tensor,
        layout: Layout, members: list[list[int]],
    ) -> Tensor:  # fmt: skip
        source, gate = h if other is None else other, layout.spread(gates)  # [T, D], [P, G]
        pre = h.new_empty(len(gate), gate.shape[1] * down.shape[2])  # [P, G * R]
        y, downs, ups = empty(h.shape, h).copy_(h), down.unbind(), up.unbind()
        for rows, segments in layout.parts(PART // max(h.shape[1], 1)):
            token, before = layout.token[rows], pre[rows]
            read = source.index_select(0, token)
            for group, local in segments:  # [p, D] @ [D, G * R]
                product(read[local], _joined(downs, members[group], 1), out=before[local])
            hidden = _gated(F.gelu(before), gate[rows])
            out = [  # [p, G * R] @ [G * R, D]
                product(hidden[local], _joined(ups, members[group])) for group, local in segments
            ]
            y.index_add_(0, token, torch.cat(out))
        ctx.save_for_backward(source, gate, down, up, pre)
        ctx.layout, ctx.members, ctx.apart = layout, members, other is not None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        source, gate, down, up, pre = ctx.saved_tensors
        layout, members = ctx.layout, ctx.members
        of_h, of_source, _, of_down, of_up, *_ = ctx.needs_input_grad
        d_gate, d_source = torch.empty_like(gate), empty(grad.shape, grad)
        d_source = d_source.zero_() if ctx.apart else d_source.copy_(grad)
        downs, ups = down.unbind(), up.unbind()
        d_down, d_up = _sums(up) if of_down else None, _sums(up) if of_up else None  # [E, R, D]
        for rows, segments in layout.parts(PART // max(grad.shape[1], 1)):
            token, own_gate, before = layout.token[rows], gate[rows], pre[rows]
            read, d_out = source.index_select(0, token), grad.index_select(0, token)  # [p, D]
            d_hidden, active = torch.empty_like(before), F.gelu(before)  # [p, G * R]
            for group, local in segments:  # [p, D] @ [D, G * R]
                product(d_out[local], _joined(ups, members[group]).T, out=d_hidden[local])
            by_expert = (d_hidden * active).unflatten(1, (gate.shape[1], -1))
            torch.sum(by_expert, 2, out=d_gate[rows])  # [p, G, R] to [p, G]
            d_pre = torch.ops.aten.gelu_backward(_gated(d_hidden, own_gate), before)
            hidden, d_rows = _gated(active, own_gate), []
            for group, local in segments:
                experts = members[group]
                if d_up is not None:  # [G * R, p] @ [p, D]
                    _add(d_up, experts, product(hidden[local].T, d_out[local]))
                if d_down is not None:
                    _add(d_down, experts, product(d_pre[local].T, read[local]))
                if of_h or of_source:  # [p, G * R] @ [G * R, D]
                    d_rows.append(product(d_pre[local], _joined(downs, experts, 1).T))
            if d_rows:
                d_source.index_add_(0, token, torch.cat(d_rows))
        d_inputs = (grad, d_source) if ctx.apart else (d_source, None)
        d_gates = d_gate[layout.place].flatten(1)  # [T, K, G] to [T, K * G]
        d_down = None if d_down is None else d_down.to(down.dtype).mT
        d_up = None if d_up is None else d_up.to(up.dtype)
        return *d_inputs, d_gates, d_down, d_up, None, None


def _sums(weight: Tensor) -> Tensor:
    """Return zeros ``[E, R, D]``, in float32 at least, to sum a weight's gradient in."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    return empty(weight.shape, weight.new_empty(0, dtype=wide)).zero_()


def _add(sums: Tensor, experts: list[int], rows: Tensor) -> None:
    """Add a segment's gradient ``[G * R, D]``, one expert's rows below the other's."""
    for expert, part in zip(experts, rows.chunk(len(experts)), strict=True):
        sums[expert].add_(part)


def _joined(matrices: tuple[Tensor, ...], experts: list[int], dim: int = 0) -> Tensor:
    """Return the experts' matrices as one."""
    first, *others = (matrices[expert] for expert in experts)
    return torch.cat([first, *others], dim) if others else first


def _gated(rows: Tensor, gate: Tensor) -> Tensor:
    """Multiply the R columns of each of G experts by its gate ``[p, G]``, in place."""
    rows.unflatten(1, (gate.shape[1], -1)).mul_(gate.unsqueeze(2))
    return rows
