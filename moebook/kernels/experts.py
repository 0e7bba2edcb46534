"""experts: sum_k w_k down_e (act(gate_e x) * up_e x), gated FFNs in fused 3-D weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moebook.errors import refuse
from moebook.kernels.arguments import floating, together
from moebook.kernels.dispatch import implementation
from moebook.kernels.memory import empty
from moebook.kernels.products import product
from moebook.kernels.route import Routing, check_routing
from moebook.kernels.segments import Layout, lay_out

Activation = Callable[[Tensor], Tensor]
PART = 2**18
"""Numbers of the pre-activation up to which neighbouring experts are computed side by side."""


class Bank(NamedTuple):
    """Gated FFNs in fused weights, as transformers 5 keeps them.

    Attributes:
        gate_up: ``[E, 2F, D]``, the gate's F rows first.
        down: ``[E, D, F]``.
    """

    gate_up: Tensor
    down: Tensor

    def to(self, dtype: torch.dtype) -> Bank:
        """Return the bank in another dtype."""
        return Bank(self.gate_up.to(dtype), self.down.to(dtype))


def experts(
    x: Tensor, routing: Routing, bank: Bank, act: Activation, *, impl: str = "auto"
) -> Tensor:
    """Run each token through its K experts and sum their outputs by the routing's weights.

    ``y = sum_k w_k down_e (act(gate_e x) * up_e x)``, e the k-th expert of the token. Kept for the
    backward pass are ``x`` and the pre-activation ``[T * K, 2F]``; the gradient of a weight is
    written once, and not computed where it is not asked for. An expert that a token chose twice
    counts twice.

    Args:
        x: ``[T, D]``.
        routing: Where the T tokens go, from `route` or `grouped`.
        bank: The E experts.
        act: Elementwise activation of the gate (SiLU in Mixtral, OLMoE, DeepSeek, Qwen3-MoE).
        impl: ``"auto"``, ``"torch"`` (one product per expert and direction over its own rows),
            ``"triton"`` or ``"reference"`` (every expert on every token, then masked).

    Returns:
        ``[T, D]`` in the dtype of ``x``; the bank is used in that dtype.

    Raises:
        Refusal: E-SHAPE, E-DTYPE or E-DEVICE when the arguments do not fit one another, E-TYPE for
            an activation with parameters or in place, E-IMPL for an ``impl`` that is unknown or
            cannot run.
    """
    check_bank("experts", x, bank)
    check_act("experts", act)
    check_routing("experts", routing, x, len(bank.down))
    run = implementation("experts", impl, {"torch": _segments, "reference": reference}, x)
    y: Tensor = run(x, routing, bank.to(x.dtype), act)
    return y


def reference(x: Tensor, routing: Routing, bank: Bank, act: Activation) -> Tensor:
    """Run every expert on every token and weight it by its gate, 0 where it was not chosen."""
    gates = x.new_zeros(x.shape[0], len(bank.down))
    gates = gates.scatter_add(1, routing.ids, routing.weights.to(x.dtype))
    gate, up = torch.einsum("td,efd->tef", x, bank.gate_up).chunk(2, dim=-1)
    outputs = torch.einsum("tef,edf->ted", act(gate) * up, bank.down)
    return torch.einsum("te,ted->td", gates, outputs)


def check_bank(op: str, x: Tensor, bank: Bank, label: str = "") -> None:
    """Refuse a bank that cannot serve rows ``[T, D]``.

    Args:
        op: Name of the op.
        x: ``[T, D]``.
        bank: The bank.
        label: What tells it from another one, before the names of its parts.

    Raises:
        Refusal: E-SHAPE for shapes, E-DTYPE for what is not floating point, E-DEVICE for another
            device than that of the rows.
    """
    fits = x.dim() == 2 and bank.gate_up.dim() == 3 and bank.gate_up.shape[1] % 2 == 0
    if fits:
        number, double, width = bank.gate_up.shape
        fits = x.shape[1] == width and bank.down.shape == (number, width, double // 2)
        fits = fits and width > 0 and double > 0
    named = {"x": x, f"{label}gate_up": bank.gate_up, f"{label}down": bank.down}
    if not fits:
        x_name, gate_up, down = named
        got = ", ".join(str(tuple(part.shape)) for part in named.values())
        refuse(
            "E-SHAPE",
            f"{op}: expected {x_name} [T, D >= 1], {gate_up} [E, 2F, D] with F >= 1, {down}"
            f" [E, D, F]; got {got}",
        )
    floating(op, named)
    together(op, named)


def check_act(op: str, act: Activation) -> None:
    """Refuse, with E-TYPE, an activation that an op's own backward pass cannot go through."""
    if not callable(act):
        refuse("E-TYPE", f"{op}: act is {act!r}, expected a function such as torch.nn.SiLU()")
    name = type(act).__name__
    module = act if isinstance(act, torch.nn.Module) else torch.nn.Module()
    if torch.is_grad_enabled() and any(part.requires_grad for part in module.parameters()):
        refuse(
            "E-TYPE", f"{op}: act is {name}, whose parameters would get no gradient: freeze them"
        )
    if any(getattr(part, "inplace", False) for part in module.modules()):
        refuse("E-TYPE", f"{op}: act is {name}, expected one that is not in place")


def _segments(x: Tensor, routing: Routing, bank: Bank, act: Activation) -> Tensor:
    return gated_ffn(x, routing, [bank], [(0, expert) for expert in range(len(bank.down))], act)


def gated_ffn(
    x: Tensor,
    routing: Routing,
    banks: list[Bank],
    addresses: list[tuple[int, int]],
    act: Activation,
) -> Tensor:
    """Run sorted segments through experts that may lie in several banks.

    Args:
        x: ``[T, D]``.
        routing: Where the T tokens go.
        banks: In the dtype of ``x``.
        addresses: (number of the bank, row in it) of each expert.
        act: Elementwise activation of the gate.
    """
    layout = lay_out(routing, x.dtype, banks[0].gate_up.shape[1:].numel())
    segments = [(*addresses[expert], rows) for expert, rows in layout.segments]
    parts = _parts(segments, PART // max(banks[0].gate_up.shape[1], 1))
    weights = [weight for bank in banks for weight in bank]
    gates = routing.weights.to(x.dtype)
    y: Tensor = _GatedFFN.apply(x, gates, _Plan(layout, parts, act), *weights)
    return y


class _Segment(NamedTuple):
    """Rows of one expert: the number of its bank, its row in it, and where they lie in a part."""

    bank: int
    place: int
    rows: slice


class _Part(NamedTuple):
    """Rows of the layout, and the segments that they are."""

    rows: slice
    segments: list[_Segment]


class _Plan(NamedTuple):
    """What is to be done."""

    layout: Layout
    parts: list[_Part]
    act: Activation


def _parts(segments: list[tuple[int, int, slice]], most: int) -> list[_Part]:
    """Join neighbouring segments up to so many rows: then calls cost less than what they do."""
    parts: list[_Part] = []
    for bank, place, rows in segments:
        if not parts or rows.stop - parts[-1].rows.start > most:
            parts.append(_Part(rows, []))
        start, joined = parts[-1].rows.start, parts[-1].segments
        joined.append(_Segment(bank, place, slice(rows.start - start, rows.stop - start)))
        parts[-1] = _Part(slice(start, rows.stop), joined)
    return parts


class _GatedFFN(torch.autograd.Function):
    """Slots sorted by expert; all that a part needs is done while its rows are in the cache.

    The gate is applied between the two products, on F columns instead of D.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gates: Tensor, plan: _Plan, *weights: Tensor) -> Tensor:
        token, gate = plan.layout.token, plan.layout.spread(gates)
        pre = empty((len(token), weights[0].shape[1]), x)
        out = empty((len(token), x.shape[1]), x)
        for rows, segments in plan.parts:
            read, before, after = x.index_select(0, token[rows]), pre[rows], out[rows]
            for bank, place, own in segments:
                product(read[own], weights[2 * bank][place].T, out=before[own])
            first, second = before.chunk(2, dim=1)
            hidden = (plan.act(first) * second).mul_(gate[rows])
            for bank, place, own in segments:
                product(hidden[own], weights[2 * bank + 1][place].T, out=after[own])
        ctx.save_for_backward(x, gate, pre, *weights)
        ctx.plan = plan
        return plan.layout.combine(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, pre, *weights = ctx.saved_tensors
        layout, parts, act = ctx.plan
        d_weights = [
            _unwritten(weight, number // 2, parts) if ctx.needs_input_grad[3 + number] else None
            for number, weight in enumerate(weights)
        ]
        d_gate = torch.empty_like(gate)
        d_rows = empty((len(pre), x.shape[1]), x) if ctx.needs_input_grad[0] else None
        for rows, segments in parts:
            first, second = pre[rows].chunk(2, dim=1)
            active, derivative = _activated(first, act)
            read, d_out = (part.index_select(0, layout.token[rows]) for part in (x, grad))
            d_hidden = torch.empty_like(active)
            for bank, place, own in segments:
                product(d_out[own], weights[2 * bank + 1][place], out=d_hidden[own])
            hidden = active * second
            torch.sum(d_hidden * hidden, 1, keepdim=True, out=d_gate[rows])
            hidden.mul_(gate[rows])
            d_pre = torch.empty_like(pre[rows])
            d_first, d_second = d_pre.chunk(2, dim=1)
            torch.mul(d_hidden.mul_(gate[rows]), active, out=d_second)
            d_first.copy_(derivative(d_hidden.mul_(second)))
            for bank, place, own in segments:
                d_gate_up, d_down = d_weights[2 * bank : 2 * bank + 2]
                if d_down is not None:
                    product(d_out[own].T, hidden[own], out=d_down[place])
                if d_gate_up is not None:
                    product(d_pre[own].T, read[own], out=d_gate_up[place])
                if d_rows is not None:
                    product(d_pre[own], weights[2 * bank][place], out=d_rows[rows][own])
        d_x = None if d_rows is None else layout.combine(d_rows)
        return d_x, d_gate[layout.place].squeeze(-1), None, *d_weights


def _activated(rows: Tensor, act: Activation) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return ``act(rows)``, and what pulls a gradient of it back to the rows."""
    leaf = rows.detach().requires_grad_()
    with torch.enable_grad():
        active = act(leaf)
    return active.detach(), lambda grad: torch.autograd.grad(active, leaf, grad)[0]


def _unwritten(weight: Tensor, bank: int, parts: list[_Part]) -> Tensor:
    """Make a weight's gradient: zero for the experts without rows, the others are yet to come.

    To fill it all with zeros first would touch every byte twice.
    """
    grad = empty(weight.shape, weight)
    used = {segment.place for part in parts for segment in part.segments if segment.bank == bank}
    for place in set(range(len(weight))) - used:
        grad[place].zero_()
    return grad
