"""adapters: h + scale * sum_k w_k gelu(h D_k) U_k, the experts of PESC (Eq. 7, 8)."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from moebook.kernels.dispatch import factor, implementation, lowered, shapes
from moebook.kernels.matmul import empty, product
from moebook.kernels.route import Layout, Routing, grouped, lay_out

# Tokens for each of the E * E pairs of experts from which on rows are sorted by pair.
ENOUGH = 64
# Numbers of ``h`` up to which neighbouring experts or pairs are computed side by side.
PART = 2**18
# What the Triton kernel holds at most.
MOST_EXPERTS = 64
MOST_RANK = 64
MOST_RANK_FLOAT32 = 32


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
    """Add to each row of ``h`` the weighted outputs of its token's adapters.

    ``y = h + scale * sum_k w_k * gelu(source @ down[e_k]) @ up[e_k]``, ``[T, D]``. Where a
    token's weights sum to 1 this is Eq. 7 with Eq. 8 put in,
    ``sum_i R_i (gelu(h D_i) U_i + h)``; the residual is added once. An expert that a token
    chose twice counts twice.

    ``h [T, D]`` is the output of the shared FFN, ``source [T, D]`` what adapters read, else
    ``h``; ``down [E, D, R]`` and ``up [E, R, D]`` are used in the dtype of ``h``, under autocast
    in autocast's. ``scale`` is a number, or a tensor of one, which then has a gradient. ``impl``
    is ``"auto"``, ``"torch"`` (products by pair of adapters), ``"triton"`` (for K = 2) or
    ``"reference"``.

    >>> from moebook.kernels import route
    >>> h, routing = torch.ones(3, 4), route(torch.zeros(3, 2), top_k=1)
    >>> down, up = torch.ones(2, 4, 1), torch.zeros(2, 1, 4)
    >>> torch.equal(adapters(h, routing, down, up), h)  # ``up`` starts at zero
    True
    """
    source = h if source is None else source
    inputs = {
        "h": (h, "T D"),
        "source": (source, "T D"),
        "down": (down, "E D R"),
        "up": (up, "E R D"),
        **routing.named(),
    }
    shapes("adapters", inputs, alike=("h", "source"))
    factor("adapters", "scale", scale)
    reads_itself = source is h
    h = lowered(h)
    source = h if reads_itself else lowered(source)

    experts, _, rank = down.shape
    most_rank = MOST_RANK_FLOAT32 if h.dtype == torch.float32 else MOST_RANK
    two_a_token = routing.ids.shape[1] == 2
    if two_a_token and experts <= MOST_EXPERTS and rank <= most_rank:
        unless = ""
    else:
        unless = "it takes 2 of at most 64 experts, R up to 64 (in float32 32)"
    run = implementation("adapters", impl, _IMPLEMENTATIONS, h, unless=unless)
    y: Tensor = run(h, source, routing, down.to(h.dtype), up.to(h.dtype), scale)
    return y


def reference(
    h: Tensor,
    source: Tensor,
    routing: Routing,
    down: Tensor,
    up: Tensor,
    scale: float | Tensor,
) -> Tensor:
    """Run every adapter on every token, weighted by its gate, 0 if not chosen."""
    gates = h.new_zeros(h.shape[0], down.shape[0])  # [T, E]
    gates = gates.scatter_add(1, routing.ids, routing.weights.to(h.dtype))
    # Eq. 8 without its residual: gelu(h D_i) U_i.
    hidden = F.gelu(torch.einsum("td,edr->ter", source, down))  # [T, E, R]
    outputs = torch.einsum("ter,erd->ted", hidden, up)  # [T, E, D]
    # Eq. 7; h, the residual, stands outside the sum where gates sum to 1.
    return h + scale * torch.einsum("te,ted->td", gates, outputs)


def _segments(
    h: Tensor,
    source: Tensor,
    routing: Routing,
    down: Tensor,
    up: Tensor,
    scale: float | Tensor,
) -> Tensor:
    """Sort rows by expert, or by pair of experts where there are enough of each pair."""
    # On K numbers a token, not D; a scale that is a tensor gets its gradient here.
    gates = routing.weights.to(h.dtype) * scale  # [T, K]
    other = None if source is h else source
    experts = len(down)
    numbers = down.shape[1:].numel()  # of one factor
    tokens, top_k = routing.ids.shape
    if top_k != 2 or tokens < ENOUGH * experts**2:
        members = [[expert] for expert in range(experts)]
        layout = lay_out(routing, h.dtype, numbers)
    else:
        # A pair (low, high) is number low * E + high; its two gates go with it.
        ids, swap = routing.ids.sort(dim=1)
        gates = gates.gather(1, swap)
        pair = ids[:, :1] * experts + ids[:, 1:]  # [T, 1]
        members = [list(pair) for pair in itertools.product(range(experts), repeat=2)]
        # Of this routing the order and the counts alone are read: any weight will do.
        by_pair = grouped(pair, gates[:, :1], experts**2)
        layout = lay_out(by_pair, h.dtype, 2 * numbers)
    y: Tensor = _Segments.apply(h, other, gates, down, up, layout, members)
    return y


_IMPLEMENTATIONS = {
    "torch": _segments,
    "reference": reference,
    "triton": "adapters.run",
}


class _Segments(torch.autograd.Function):
    """Rows sorted by expert or pair; all of a part is done while its rows are in the cache.

    ``members`` are the G experts, one or two, of each segment; their factors are one
    matrix, so a row is read and added to once. The gate is applied between the products, on
    G * R columns, not D. Where h is its own source (``other`` is None), its two gradients
    are one tensor.
    """

    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,  # [T, D]
        other: Tensor | None,  # [T, D], the source if apart
        gates: Tensor,  # [T, K]
        down: Tensor,  # [E, D, R]
        up: Tensor,  # [E, R, D]
        layout: Layout,
        members: list[list[int]],  # experts of each segment
    ) -> Tensor:
        source = h if other is None else other  # [T, D]
        gate = layout.spread(gates)  # [P, G]
        pre = h.new_empty(len(gate), gate.shape[1] * down.shape[2])  # [P, G * R]
        y = empty(h.shape, h).copy_(h)  # the residual
        downs = down.unbind()
        ups = up.unbind()
        for rows, segments in layout.parts(PART // max(h.shape[1], 1)):
            token = layout.token[rows]
            read = source.index_select(0, token)  # [p, D]

            before = pre[rows]  # source D
            for group, local in segments:  # [p, D] @ [D, G * R]
                first = _joined(downs, members[group], dim=1)
                product(read[local], first, out=before[local])

            hidden = _gated(F.gelu(before), gate[rows])  # w gelu(source D)
            outputs = []
            for group, local in segments:  # [p, G * R] @ [G * R, D]
                second = _joined(ups, members[group])
                outputs.append(product(hidden[local], second))
            y.index_add_(0, token, torch.cat(outputs))
        ctx.save_for_backward(source, gate, down, up, pre)
        ctx.layout = layout
        ctx.members = members
        ctx.apart = other is not None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        source, gate, down, up, pre = ctx.saved_tensors
        layout = ctx.layout
        members = ctx.members
        of_h, of_source, _, of_down, of_up, *_ = ctx.needs_input_grad
        of_rows = of_h or of_source

        d_gate = torch.empty_like(gate)  # [P, G]
        d_source = empty(grad.shape, grad)  # [T, D]
        if ctx.apart:
            d_source.zero_()
        else:
            d_source.copy_(grad)  # that of the residual
        d_down = _sums(up) if of_down else None  # [E, R, D], as that of up
        d_up = _sums(up) if of_up else None
        downs = down.unbind()
        ups = up.unbind()
        for rows, segments in layout.parts(PART // max(grad.shape[1], 1)):
            token = layout.token[rows]
            own_gate = gate[rows]
            before = pre[rows]
            read = source.index_select(0, token)  # [p, D]
            d_out = grad.index_select(0, token)  # [p, D]

            # Of gelu(source D), before its gate.
            d_hidden = torch.empty_like(before)  # [p, G * R]
            for group, local in segments:  # [p, D] @ [D, G * R]
                second = _joined(ups, members[group])
                product(d_out[local], second.T, out=d_hidden[local])

            # The gate multiplies gelu(source D): its gradient is their inner product.
            active = F.gelu(before)
            # [p, G, R].
            by_expert = (d_hidden * active).unflatten(1, (gate.shape[1], -1))
            torch.sum(by_expert, 2, out=d_gate[rows])

            weighted = _gated(d_hidden, own_gate)
            d_pre = torch.ops.aten.gelu_backward(weighted, before)  # [p, G * R]
            hidden = _gated(active, own_gate)

            d_rows = []
            for group, local in segments:
                experts = members[group]
                if d_up is not None:  # [G * R, p] @ [p, D]
                    _add(d_up, experts, product(hidden[local].T, d_out[local]))
                if d_down is not None:
                    _add(d_down, experts, product(d_pre[local].T, read[local]))
                if of_rows:  # [p, G * R] @ [G * R, D]
                    first = _joined(downs, experts, dim=1)
                    d_rows.append(product(d_pre[local], first.T))
            if of_rows:
                d_source.index_add_(0, token, torch.cat(d_rows))

        d_inputs = (grad, d_source) if ctx.apart else (d_source, None)
        d_gates = d_gate[layout.place].flatten(1)  # [T, K, G] to [T, K * G]
        if d_down is not None:
            d_down = d_down.to(down.dtype).mT
        if d_up is not None:
            d_up = d_up.to(up.dtype)
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
    if len(experts) == 1:
        return matrices[experts[0]]
    return torch.cat([matrices[expert] for expert in experts], dim)


def _gated(rows: Tensor, gate: Tensor) -> Tensor:
    """Multiply the R columns of each of G experts by its gate ``[p, G]``, in place."""
    rows.unflatten(1, (gate.shape[1], -1)).mul_(gate.unsqueeze(2))
    return rows
