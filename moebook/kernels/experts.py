"""experts: sum_k w_k down_e (act(gate_e x) * up_e x), gated FFNs in one fused bank, or in two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moebook.errors import refuse
from moebook.kernels.dispatch import implementation, lowered, shapes
from moebook.kernels.matmul import empty, product
from moebook.kernels.route import Layout, Part, Routing, lay_out

Activation = Callable[[Tensor], Tensor]
# Modules that draw in training mode.
RANDOM = (torch.nn.RReLU, torch.nn.Dropout, torch.nn.AlphaDropout)
# Numbers of the pre-activation up to which experts are computed side by side.
PART = 2**18


class Bank(NamedTuple):
    """Gated FFNs in fused weights, as transformers 5 keeps them."""

    gate_up: Tensor  #: [E, 2F, D], the gate's F rows first
    down: Tensor  #: [E, D, F], their last product

    def to(self, dtype: torch.dtype) -> Bank:
        """Return the bank in another dtype."""
        return Bank(self.gate_up.to(dtype), self.down.to(dtype))


def experts(
    x: Tensor, routing: Routing, bank: Bank, act: Activation, *, impl: str = "auto"
) -> Tensor:
    """Run each token through its K experts and sum their outputs by the routing's weights.

    ``y = sum_k w_k down_e (act(gate_e x) * up_e x)``, ``[T, D]`` like ``x``, e the k-th expert of
    the token; the bank is used in the dtype of ``x``, under autocast in autocast's. Kept for the
    backward pass are ``x`` and the pre-activation ``[T * K, 2F]``. An expert that a token chose
    twice counts twice.

    ``act`` is elementwise (SiLU in Mixtral, OLMoE, DeepSeek, Qwen3-MoE). ``impl`` is ``"auto"``,
    ``"torch"`` (a product per expert and direction), ``"triton"`` (for SiLU) or ``"reference"``
    (every expert on every token, masked).

    >>> from moebook.kernels import route
    >>> x, logits = torch.ones(3, 2), torch.zeros(3, 4)
    >>> bank = Bank(gate_up=torch.ones(4, 2 * 5, 2), down=torch.ones(4, 2, 5))
    >>> experts(x, route(logits, top_k=2), bank, torch.relu)[0].tolist()
    [20.0, 20.0]
    """
    weights = {"gate_up": (bank.gate_up, "E 2F D"), "down": (bank.down, "E D F")}
    shapes("experts", {"x": (x, "T D"), **weights, **routing.named()})
    x = lowered(x)
    table = {"torch": gated_ffn, "reference": reference, "triton": "experts.run"}
    unless = _check_act("experts", act)
    run = implementation("experts", impl, table, x, unless=unless)
    y: Tensor = run(x, routing, bank.to(x.dtype), act)
    return y


def reference(x: Tensor, routing: Routing, bank: Bank, act: Activation) -> Tensor:
    """Run every expert on every token and weight it by its gate, 0 where it was not chosen."""
    gates = x.new_zeros(x.shape[0], len(bank.down))  # [T, E]
    gates = gates.scatter_add(1, routing.ids, routing.weights.to(x.dtype))
    pre = torch.einsum("td,efd->tef", x, bank.gate_up)  # [T, E, 2F]
    gate, up = pre.chunk(2, dim=-1)
    hidden = activated(gate, act) * up  # [T, E, F]
    outputs = torch.einsum("tef,edf->ted", hidden, bank.down)  # [T, E, D]
    return torch.einsum("te,ted->td", gates, outputs)


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

    What `experts` computes, but weight gradients are computed for the trained bank alone: with p
    the share of routed slots that hit it, the backward pass costs (1 + p) forward passes, not 2.

    ``frozen`` holds all E experts and never gets a gradient, ``trained`` the N that train; ``slots
    [E]`` int64 say where an expert lies in the latter, -1 for a frozen one.
    """
    named = {
        "x": (x, "T D"),
        "frozen gate_up": (frozen.gate_up, "E 2F D"),
        "frozen down": (frozen.down, "E D F"),
        "trained gate_up": (trained.gate_up, "N 2F D"),
        "trained down": (trained.down, "N D F"),
        "slots": (slots, "E", "int"),
        **routing.named(),
    }
    number = shapes("split_experts", named, empty="T N")["N"]
    if slots.device.type == "cpu":
        places = [slot for slot in slots.tolist() if slot != -1]
        distinct = set(places)
        if len(distinct) < len(places) or not distinct <= set(range(number)):
            expected = f"-1 or a place in [0, {number}) each, none twice"
            refuse(
                "E-RANGE",
                f"split_experts: slots are {slots.tolist()}, expected {expected}",
            )
    x = lowered(x)
    table = {"torch": gated_ffn, "reference": _split_reference, "triton": "experts.run"}
    unless = _check_act("split_experts", act)
    run = implementation("split_experts", impl, table, x, unless=unless)
    still = Bank(frozen.gate_up.detach(), frozen.down.detach()).to(x.dtype)
    y: Tensor = run(x, routing, trained.to(x.dtype), act, still, slots)
    return y


def _split_reference(
    x: Tensor,
    routing: Routing,
    trained: Bank,
    act: Activation,
    frozen: Bank,
    slots: Tensor,
) -> Tensor:
    """Put the trained rows into their places in one bank, and run that."""
    merged = frozen
    if len(trained.down):
        place = slots.clamp(min=0)  # [E]; what a frozen expert reads there is not taken
        trains = (slots >= 0)[:, None, None]
        merged = Bank(
            gate_up=torch.where(trains, trained.gate_up[place], frozen.gate_up),
            down=torch.where(trains, trained.down[place], frozen.down),
        )
    return reference(x, routing, merged, act)


def _check_act(op: str, act: Activation) -> str:
    """Refuse an activation that our backward pass cannot go through; return why Triton cannot."""
    if not callable(act):
        refuse(
            "E-TYPE",
            f"{op}: act is {act!r}, expected a function such as torch.nn.SiLU()",
        )
    name = f"{op}: act is {type(act).__name__}"
    module = act if isinstance(act, torch.nn.Module) else torch.nn.Module()
    if torch.is_grad_enabled() and any(
        part.requires_grad for part in module.parameters()
    ):
        refuse("E-TYPE", f"{name}, whose parameters would get no gradient: freeze them")
    if torch.is_grad_enabled() and any(
        isinstance(part, RANDOM) and part.training for part in module.modules()
    ):
        again = "which the backward pass would draw anew: call its eval()"
        refuse("E-TYPE", f"{name}, {again}")
    if any(getattr(part, "inplace", False) for part in module.modules()):
        refuse("E-TYPE", f"{name}, expected one that is not in place")
    return "" if _is_silu(act) else "its activation is SiLU alone"


def _is_silu(act: Activation) -> bool:
    """Whether it is PyTorch's function or module, or the module that transformers' models have."""
    if act is torch.nn.functional.silu or type(act) is torch.nn.SiLU:
        return True
    kind = type(act)
    place = (kind.__module__, kind.__name__)
    return place == ("transformers.activations", "SiLUActivation")


def activated(rows: Tensor, act: Activation) -> Tensor:
    """Return ``act(rows)``, or refuse a function that is not elementwise, as far as that shows."""
    version = None if rows.is_inference() else rows._version
    active = act(rows)
    wanted = f"{tuple(rows.shape)} of {rows.dtype}, as it was given"
    if not isinstance(active, Tensor):
        refuse(
            "E-TYPE",
            f"experts: act returns a {type(active).__name__}, expected {wanted}",
        )
    if active.shape != rows.shape or active.dtype != rows.dtype:
        got = f"{tuple(active.shape)} of {active.dtype}"
        refuse("E-SHAPE", f"experts: act returns {got}, expected {wanted}")
    if version is not None and rows._version != version:
        refuse(
            "E-TYPE",
            "experts: act changes what it is given, expected one that is not in place",
        )
    return active


def gated_ffn(
    x: Tensor,
    routing: Routing,
    bank: Bank,
    act: Activation,
    frozen: Bank | None = None,
    slots: Tensor | None = None,
) -> Tensor:
    """Run sorted segments through experts of one bank, or of a trained and a frozen one."""
    layout = lay_out(routing, x.dtype, bank.gate_up.shape[1:].numel())
    if slots is None:
        where = [(0, expert) for expert in range(len(bank.down))]
    else:
        places = enumerate(_places(slots, len(bank.down)))
        where = [(0, slot) if slot >= 0 else (1, expert) for expert, slot in places]
    weights = [*bank] if frozen is None else [*bank, *frozen]
    gates = routing.weights.to(x.dtype)
    y: Tensor = _GatedFFN.apply(x, gates, layout, where, act, *weights)
    return y


def _places(slots: Tensor, trained: int) -> list[int]:
    """Return what the slots hold; on meta, where they hold nothing, the first experts train."""
    if not slots.is_meta:
        return list(slots.tolist())
    return [*range(trained), *[-1] * (len(slots) - trained)]


class _GatedFFN(torch.autograd.Function):
    """Slots sorted by expert; all that a part needs is done while its rows are in the cache.

    ``where`` is the number of the bank of each expert, and its place in it; ``weights`` are
    gate_up and down of one bank, then of the other. The weight of a slot is applied between
    the two products, on F columns instead of D.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,  # [T, D]
        gates: Tensor,  # [T, K]
        layout: Layout,
        where: list[tuple[int, int]],
        act: Activation,
        *weights: Tensor,
    ) -> Tensor:
        gate_ups = weights[0::2]  # one a bank
        downs = weights[1::2]
        gate = layout.spread(gates)  # [P, 1], the weight w of a row
        pre = empty((len(gate), gate_ups[0].shape[1]), x)  # [P, 2F]
        out = empty((len(gate), x.shape[1]), x)  # [P, D]
        parts = layout.parts(PART // max(pre.shape[1], 1))
        for rows, segments in parts:
            read = x.index_select(0, layout.token[rows])  # [p, D]
            before = pre[rows]
            for expert, local in segments:  # [p, D] @ [D, 2F]
                bank, place = where[expert]
                product(read[local], gate_ups[bank][place].T, out=before[local])

            gated, up = before.chunk(2, dim=1)  # [p, F] both
            hidden = (activated(gated, act) * up).mul_(gate[rows])

            after = out[rows]
            for expert, local in segments:  # [p, F] @ [F, D]
                bank, place = where[expert]
                product(hidden[local], downs[bank][place].T, out=after[local])
        ctx.save_for_backward(x, gate, pre, *weights)
        ctx.layout = layout
        ctx.parts = parts
        ctx.where = where
        ctx.act = act
        return layout.combine(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, pre, *weights = ctx.saved_tensors
        layout = ctx.layout
        where = ctx.where
        gate_ups = weights[0::2]
        downs = weights[1::2]

        of_x, _, _, _, _, *of_weights = ctx.needs_input_grad
        d_weights: list[Tensor | None] = []
        for number, weight in enumerate(weights):
            wanted = of_weights[number]
            empty_grad = (
                _unwritten(weight, number // 2, ctx.parts, where) if wanted else None
            )
            d_weights.append(empty_grad)
        d_gate_ups = d_weights[0::2]
        d_downs = d_weights[1::2]
        d_gate = torch.empty_like(gate)  # [P, 1]
        d_rows = empty((len(pre), x.shape[1]), x) if of_x else None  # [P, D]

        for rows, segments in ctx.parts:
            token = layout.token[rows]
            read = x.index_select(0, token)  # [p, D]
            d_out = grad.index_select(0, token)  # [p, D]
            gated, up = pre[rows].chunk(2, dim=1)  # [p, F] both
            active, derivative = _activated(gated, ctx.act)

            d_hidden = torch.empty_like(active)  # of the weighted hidden
            for expert, local in segments:  # [p, D] @ [D, F]
                bank, place = where[expert]
                product(d_out[local], downs[bank][place], out=d_hidden[local])

            # hidden = w * act(gated) * up, so each factor's gradient is by the others.
            hidden = active * up
            torch.sum(d_hidden * hidden, 1, keepdim=True, out=d_gate[rows])
            hidden.mul_(gate[rows])
            d_hidden.mul_(gate[rows])
            d_pre = torch.empty_like(pre[rows])  # [p, 2F]
            d_gated, d_up = d_pre.chunk(2, dim=1)
            torch.mul(d_hidden, active, out=d_up)
            d_gated.copy_(derivative(d_hidden.mul_(up)))

            for expert, local in segments:
                bank, place = where[expert]
                d_gate_up = d_gate_ups[bank]
                d_down = d_downs[bank]
                if d_down is not None:  # [D, p] @ [p, F]
                    product(d_out[local].T, hidden[local], out=d_down[place])
                if d_gate_up is not None:  # [2F, p] @ [p, D]
                    product(d_pre[local].T, read[local], out=d_gate_up[place])
                if d_rows is not None:  # [p, 2F] @ [2F, D]
                    product(
                        d_pre[local], gate_ups[bank][place], out=d_rows[rows][local]
                    )

        d_x = None if d_rows is None else layout.combine(d_rows)
        d_gates = d_gate[layout.place].squeeze(-1)  # [T, K]
        return d_x, d_gates, None, None, None, *d_weights


def _activated(
    rows: Tensor, act: Activation
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return ``act(rows)``, and what pulls a gradient of it back to the rows."""
    leaf = rows.detach().requires_grad_()
    with torch.enable_grad():
        active = activated(leaf, act)
    if not active.requires_grad:
        have = "experts: act returns what has no gradient"
        refuse("E-GRADIENT", f"{have}, expected a function of PyTorch")
    if any(source is not leaf for source in _sources(active)):
        have = "experts: act reads parameters, which would get no gradient"
        refuse("E-GRADIENT", f"{have}: freeze them, or take impl='reference'")
    return active.detach(), lambda grad: torch.autograd.grad(active, leaf, grad)[0]


def _sources(active: Tensor) -> list[Tensor]:
    """List the tensors at which the gradient of this one would end."""
    if active.grad_fn is None:
        return [active]
    sources = []
    seen = set()
    nodes: list[Any] = [active.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):  # it accumulates the gradient of a tensor
            sources.append(node.variable)
        nodes += [before for before, _ in node.next_functions]
    return sources


def _unwritten(
    weight: Tensor, bank: int, parts: list[Part], where: list[tuple[int, int]]
) -> Tensor:
    """Make a weight's gradient, zero only for experts without rows.

    The others are written by their products: no byte is written twice.
    """
    grad = empty(weight.shape, weight)
    used = set()
    for part in parts:
        for expert, _ in part.segments:
            used.add(where[expert])
    for place in range(len(weight)):
        if (bank, place) not in used:
            grad[place].zero_()
    return grad
