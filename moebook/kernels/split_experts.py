"""split experts: gated FFNs in two banks, one frozen, one trained, behind a table of slots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from moebook.errors import refuse
from moebook.kernels.dispatch import implementation
from moebook.kernels.route import Routing

Activation = Callable[[Tensor], Tensor]


class Bank(NamedTuple):
    """Gated FFNs in fused weights, as transformers 5 keeps them.

    Attributes:
        gate_up: ``[E, 2F, D]``, the gate's F rows first.
        down: ``[E, D, F]``.
    """

    gate_up: Tensor
    down: Tensor


def split_experts(
    x: Tensor,
    routing: Routing,
    frozen: Bank,
    trained: Bank,
    slots: Tensor,
    act: Activation,
    *,
    impl: str = "auto",
) -> Tensor:
    """Run each token through its K experts, each read from the trained bank where it has a slot.

    ``y = sum_k w_k down_e (act(gate_e x) * up_e x)``, e the k-th expert of the token. Weight
    gradients are computed for the trained bank alone: with p the share of routed slots that hit it,
    the backward pass costs (1 + p) forward passes instead of 2.

    Args:
        x: ``[T, D]``.
        routing: Where the T tokens go, see `grouped` and `moebook.kernels.route`.
        frozen: Bank of all E experts; it never gets a gradient.
        trained: Bank of the N experts that train.
        slots: ``[E]`` int64, where an expert lies in the trained bank, -1 for a frozen one.
        act: Elementwise activation of the gate (SiLU in the models of the paper).
        impl: ``"auto"``, ``"torch"`` (sorted segments, one product per expert and direction) or
            ``"reference"`` (every expert on every token, then masked).

    Returns:
        ``[T, D]`` in the dtype of ``x``; both banks are used in that dtype.

    Raises:
        Refusal: E-SHAPE when the shapes do not fit one another, E-IMPL for an unknown ``impl``.
    """
    _check(x, routing, frozen, trained, slots)
    run = implementation("split_experts", impl, {"torch": _segments, "reference": reference})
    still = Bank(*(weight.detach().to(x.dtype) for weight in frozen))
    return run(x, routing, still, Bank(*(weight.to(x.dtype) for weight in trained)), slots, act)


def grouped(ids: Tensor, weights: Tensor, experts: int) -> Routing:
    """Group the slots of a routing that was decided elsewhere (a router of transformers) by expert.

    Args:
        ids: ``[T, K]`` chosen experts.
        weights: ``[T, K]`` combine weights.
        experts: E.
    """
    flat = ids.flatten()
    counts = flat.new_zeros(experts).scatter_add_(0, flat, torch.ones_like(flat))
    return Routing(ids, weights, flat.argsort(stable=True), counts)


def reference(
    x: Tensor, routing: Routing, frozen: Bank, trained: Bank, slots: Tensor, act: Activation
) -> Tensor:
    """Run every expert on every token and weight it by its gate, 0 where it was not chosen."""
    place = slots.clamp(min=0)
    free = (slots >= 0)[:, None, None]
    gate_up, down = (
        torch.where(free, new[place], old) if len(new) else old
        for new, old in zip(trained, frozen, strict=True)
    )
    gates = x.new_zeros(x.shape[0], len(slots))
    gates = gates.scatter_add(1, routing.ids, routing.weights.to(x.dtype))
    gate, up = torch.einsum("td,efd->tef", x, gate_up).chunk(2, dim=-1)
    outputs = torch.einsum("tef,edf->ted", act(gate) * up, down)
    return torch.einsum("te,ted->td", gates, outputs)


def _check(x: Tensor, routing: Routing, frozen: Bank, trained: Bank, slots: Tensor) -> None:
    experts, double, width = frozen.gate_up.shape
    fits = x.dim() == 2 and x.shape[1] == width and double % 2 == 0
    fits = fits and frozen.down.shape == (experts, width, double // 2)
    fits = fits and slots.shape == routing.counts.shape == (experts,)
    fits = fits and routing.ids.shape[0] == x.shape[0]
    for new, old in zip(trained, frozen, strict=True):
        fits = fits and new.shape == (len(trained.down), *old.shape[1:])
    if not fits:
        got = [tuple(part.shape) for part in (x, routing.ids, *frozen, *trained, slots)]
        refuse(
            "E-SHAPE",
            "split_experts: expected x [T, D], ids [T, K], frozen [E, 2F, D] and [E, D, F],"
            f" trained [N, 2F, D] and [N, D, F], slots [E]; got {', '.join(map(str, got))}",
        )


class _Plan(NamedTuple):
    """The experts that have rows: (expert or slot, whether it trains, its rows in sorted order)."""

    segments: list[tuple[int, bool, slice]]
    act: Activation


def _segments(
    x: Tensor, routing: Routing, frozen: Bank, trained: Bank, slots: Tensor, act: Activation
) -> Tensor:
    segments, start = [], 0
    for expert, (slot, count) in enumerate(torch.stack([slots, routing.counts], 1).tolist()):
        if count:
            place = slot if slot >= 0 else expert
            segments.append((place, slot >= 0, slice(start, start + count)))
        start += count
    gates = routing.weights.to(x.dtype)
    return _Segments.apply(x, gates, *trained, *frozen, routing.order, _Plan(segments, act))


def _combine(rows: Tensor, order: Tensor, shape: torch.Size) -> Tensor:
    """Sum each token's K rows, taken back from sorted order: ``[T * K, D]`` to ``[T, D]``."""
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    return F.embedding_bag(place.view(shape), rows, mode="sum")


class _Segments(torch.autograd.Function):
    """Slots sorted by expert, so that each expert is dense products over its own rows.

    Kept for the backward pass: ``x`` and the pre-activation ``[T * K, 2F]``. The gate is applied
    between the two products, on F columns instead of D. What ``x`` and the frozen bank do not need
    is not computed.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gates: Tensor, gate_up: Tensor, down: Tensor, still_gate_up: Tensor,
        still_down: Tensor, order: Tensor, plan: _Plan,
    ) -> Tensor:  # fmt: skip
        token = order // gates.shape[1]
        pre = x.new_empty(len(order), still_gate_up.shape[1])
        for place, trains, rows in plan.segments:
            weight = (gate_up if trains else still_gate_up)[place]
            torch.mm(x[token[rows]], weight.T, out=pre[rows])
        hidden = _gated(pre, plan.act).mul_(gates.flatten()[order].unsqueeze(1))
        out = x.new_empty(len(order), x.shape[1])
        for place, trains, rows in plan.segments:
            weight = (down if trains else still_down)[place]
            torch.mm(hidden[rows], weight.T, out=out[rows])
        ctx.save_for_backward(x, gates, gate_up, down, still_gate_up, still_down, order, pre)
        ctx.plan = plan
        return _combine(out, order, gates.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, gates, gate_up, down, still_gate_up, still_down, order, pre = ctx.saved_tensors
        token = order // gates.shape[1]
        gate = gates.flatten()[order].unsqueeze(1)
        with torch.enable_grad():
            leaf = pre.detach().requires_grad_()
            active = _gated(leaf, ctx.plan.act)
        weighted = active.detach() * gate
        d_weighted, d_down = torch.empty_like(weighted), torch.zeros_like(down)
        for place, trains, rows in ctx.plan.segments:
            d_out = grad[token[rows]]
            torch.mm(d_out, (down if trains else still_down)[place], out=d_weighted[rows])
            if trains:
                torch.mm(d_out.T, weighted[rows], out=d_down[place])
        d_gates = torch.empty_like(gates).flatten()
        d_gates[order] = (d_weighted * active.detach()).sum(1)
        (d_pre,) = torch.autograd.grad(active, leaf, d_weighted.mul_(gate))
        d_gate_up = torch.zeros_like(gate_up)
        d_rows = x.new_empty(len(order), x.shape[1]) if ctx.needs_input_grad[0] else None
        for place, trains, rows in ctx.plan.segments:
            if trains:
                torch.mm(d_pre[rows].T, x[token[rows]], out=d_gate_up[place])
            if d_rows is not None:
                weight = (gate_up if trains else still_gate_up)[place]
                torch.mm(d_pre[rows], weight, out=d_rows[rows])
        d_x = None if d_rows is None else _combine(d_rows, order, gates.shape)
        return d_x, d_gates.view_as(gates), d_gate_up, d_down, None, None, None, None


def _gated(pre: Tensor, act: Activation) -> Tensor:
    gate, up = pre.chunk(2, dim=-1)
    return act(gate) * up
