"""mixture of LoRAs: base + sum_n g_n x A_n B_n, all N experts in one concatenated product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from moebook.kernels.dispatch import factor, implementation, lowered, obstacle, shapes
from moebook.kernels.matmul import empty, product, wide

Finish = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]


def lora_mixture(
    x: Tensor,
    base: Tensor,
    gates: Tensor,
    down: Tensor,
    up: Tensor,
    scale: float | Tensor = 1.0,
    *,
    impl: str = "auto",
) -> Tensor:
    """Add to a linear layer's output the outputs of N LoRAs, weighted by the token's gates.

    ``y = base + scale * sum_n g_n B_n A_n x``, ``[..., O]`` in the dtype of ``base [..., O]``, what
    the layer makes of ``x [..., D]``. ``gates [..., N]`` are 0 where an expert was not chosen;
    ``down [N, R, D]`` and ``up [N, O, R]`` are A and B of all experts, in the dtype of ``x``;
    under autocast all three are used in autocast's. ``scale`` is a number, or a tensor of one,
    which then has a gradient.

    The A of all experts are one product and their B another, with the gate between them, on N * R
    columns: what was not chosen costs fewer FLOPs than moving rows would. ``impl`` is ``"auto"``,
    ``"torch"`` (concatenated), ``"triton"`` or ``"reference"`` (a loop).
    """
    named = {
        "x": (x, "... D"),
        "base": (base, "... O"),
        "gates": (gates, "... N"),
        "down": (down, "N R D"),
        "up": (up, "N O R"),
    }
    shapes("lora_mixture", named, empty="", alike=("x", "down", "up"))
    factor("lora_mixture", "scale", scale)
    x, down, up = map(lowered, (x, down, up))
    if isinstance(scale, Tensor):
        # It may want a gradient, and autograd knows that of the gates.
        gates = wide(gates) * scale
        scale = 1.0
    table = {"torch": mixture, "reference": reference, "triton": "lora_mixture.run"}
    unless = ""
    if base.dtype != x.dtype:
        unless = obstacle(base) or ""
    run = implementation("lora_mixture", impl, table, x, unless=unless)
    y: Tensor = run(x, base, gates, down, up, scale)
    return y


def reference(
    x: Tensor, base: Tensor, gates: Tensor, down: Tensor, up: Tensor, scale: float
) -> Tensor:
    """Add one expert after another."""
    # Rocket Eq. 8 beside W x, which is ``base``: the gates sum to 1.
    total: Tensor | int = 0
    for gate, a, b in zip(gates.unbind(-1), down, up, strict=True):
        output = F.linear(F.linear(x, a), b)  # B_n A_n x
        total = total + gate.unsqueeze(-1) * output
    return (base + scale * total).to(base.dtype)


def mixture(
    x: Tensor,
    base: Tensor,
    gates: Tensor,
    down: Tensor,
    up: Tensor,
    scale: float,
    finish: Finish | None = None,
) -> Tensor:
    """Run the mixture as one step of autograd, which ends in ``finish``, see `_finished`."""
    y: Tensor = _Mixture.apply(finish or _finished, scale, x, base, gates, down, up)
    return y


def _finished(
    base: Tensor, hidden: Tensor, gates: Tensor, up: Tensor, scale: float
) -> Tensor:
    """Add all B in one product to ``base [T, O]``.

    ``hidden [T, N * R]`` is A_n x of all experts, ``gates`` are ``[T, N]``.
    """
    weighted = _weighted(hidden, wide(gates) * scale)
    delta = _multiply(weighted, _columns(up).T)  # [T, N * R] @ [N * R, O]
    if delta.dtype == base.dtype:
        return delta.add_(base)
    return (delta + base).to(base.dtype)


class _Mixture(torch.autograd.Function):
    """``y = base + scale * sum_n g_n B_n A_n x``, with all A and all B in one product each.

    Kept for the backward pass: all but the base, and ``A_n x`` of all experts.
    """

    @staticmethod
    def forward(
        ctx: Any,
        finish: Finish,
        scale: float,
        x: Tensor,  # [..., D]
        base: Tensor,  # [..., O]
        gates: Tensor,  # [..., N]
        down: Tensor,  # [N, R, D]
        up: Tensor,  # [N, O, R]
    ) -> Tensor:
        hidden = product(_flat(x), down.flatten(0, 1).T)  # [T, D] @ [D, N * R]
        ctx.save_for_backward(x, hidden, gates, down, up)
        ctx.scale = scale
        return finish(_flat(base), hidden, _flat(gates), up, scale).view(base.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, hidden, gates, down, up = ctx.saved_tensors
        of_x, _, of_gates, of_down, of_up = ctx.needs_input_grad[2:]
        d_y = _flat(grad).to(x.dtype)  # [T, O]
        factors = wide(_flat(gates)) * ctx.scale  # [T, N], scale * g_n
        d_weighted = product(d_y, _columns(up))  # [T, O] @ [O, N * R]
        d_hidden = _weighted(d_weighted, factors)  # [T, N * R]
        d_x = None
        d_gates = None
        d_down = None
        d_up = None
        if of_gates:
            # A gate multiplies A_n x: its gradient is the inner product with B_n' d_y.
            terms = wide(d_weighted) * wide(hidden)
            by_expert = terms.unflatten(1, (len(down), -1))  # [T, N, R]
            d_gates = by_expert.sum(2).mul_(ctx.scale).to(gates.dtype).view(gates.shape)
        if of_up:
            weighted = _weighted(hidden, factors)
            stacked = _multiply(weighted.T, d_y)  # [N * R, T] @ [T, O]
            d_up = stacked.view(up.mT.shape).mT  # [N, R, O] to [N, O, R]
        if of_down:  # [N * R, T] @ [T, D]
            d_down = _multiply(d_hidden.T, _flat(x)).view(down.shape)
        if of_x:  # [T, N * R] @ [N * R, D]
            d_x = _multiply(d_hidden, down.flatten(0, 1)).view(x.shape)
        return None, None, d_x, grad, d_gates, d_down, d_up


def _multiply(left: Tensor, right: Tensor) -> Tensor:
    """Multiply into memory that is kept from step to step."""
    return product(left, right, out=empty((len(left), right.shape[1]), left))


def _flat(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])  # [..., D] to [T, D]


def _columns(up: Tensor) -> Tensor:
    """Return the B of all experts side by side, ``[O, N * R]``."""
    return up.transpose(0, 1).flatten(1)


def _weighted(columns: Tensor, factors: Tensor) -> Tensor:
    """Multiply the R columns of each expert ``[T, N * R]`` by its factor ``[T, N]``."""
    by_expert = columns.unflatten(1, (factors.shape[1], -1))
    return (by_expert * factors.unsqueeze(2)).to(columns.dtype).flatten(1)
