"""mixture of LoRAs: base + sum_n g_n x A_n B_n, all N experts in one concatenated product."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from moebook.errors import refuse
from moebook.kernels.dispatch import implementation, obstacle, shapes
from moebook.kernels.matmul import empty, product

Finish = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]


class Projection(NamedTuple):
    """One linear layer with N LoRAs beside it."""

    base: Tensor  # [..., O], what the layer itself puts out
    gates: Tensor  # [..., N], each expert's weight for each token, 0 where it was not chosen
    down: Tensor  # A of all experts, [N, R, D]
    up: Tensor  # B of all experts, [N, O, R]
    scale: float = 1.0  # on the sum of the experts' outputs, alpha / r


def lora_mixture(
    x: Tensor, projections: Sequence[Projection], *, impl: str = "auto"
) -> list[Tensor]:
    """Add to each projection of ``x [..., D]`` its experts' outputs, weighted by the token's gates.

    ``y = base + scale * sum_n g_n B_n A_n x``, ``[..., O]`` in the dtype of the base; ``x`` is in
    that of the factors. The A of all experts, and of all projections that read the same ``x``, are
    one product; the gate is applied between A and B, on N * R columns; the B of a projection's
    experts are one product more. Nothing is sorted: experts that a token did not choose cost their
    rank in FLOPs, which is less than moving rows would. ``impl`` is ``"auto"``, ``"torch"``
    (concatenated), ``"triton"`` or ``"reference"`` (a loop).
    """
    if not len(projections):
        refuse("E-SHAPE", "lora_mixture: projections is empty, expected one at least")
    for number, projection in enumerate(projections):
        dims = ("... O", "... N", "N R D", "N O R")
        names = [f"projection {number}'s {name}" for name in Projection._fields]
        parts = dict(zip(names, zip(projection, dims, strict=False), strict=False))
        named = {"x": (x, "... D"), **parts}
        shapes("lora_mixture", named, empty="", alike=("x", *names[2:4]))
    unless = next(filter(None, (obstacle(projection.base) for projection in projections)), "")
    run = implementation("lora_mixture", impl, _IMPLEMENTATIONS, x, unless=unless)
    ys: list[Tensor] = run(x, projections)
    return ys


def reference(x: Tensor, projections: Sequence[Projection]) -> list[Tensor]:
    """Add one expert after another."""
    ys = []
    for base, gates, down, up, scale in projections:
        experts = zip(gates.unbind(-1), down, up, strict=True)
        total = sum(gate.unsqueeze(-1) * F.linear(F.linear(x, a), b) for gate, a, b in experts)
        ys.append((base + scale * total).to(base.dtype))
    return ys


def mixture(
    x: Tensor, projections: Sequence[Projection], finish: Finish | None = None
) -> list[Tensor]:
    """Run all projections as one step of autograd, which ends in ``finish``, see `_finished`."""
    scales = [projection.scale for projection in projections]
    parts = [part for projection in projections for part in projection[:4]]
    return list(_Mixture.apply(finish or _finished, scales, x, *parts))


def _finished(base: Tensor, hidden: Tensor, gates: Tensor, up: Tensor, scale: float) -> Tensor:
    """Add all B in one product to ``base [T, O]``: of ``A_n x [T, N * R]``, gates ``[T, N]``."""
    weighted = _weighted(hidden, _wide(gates) * scale)
    delta = _multiply(weighted, _columns(up).T)
    return delta.add_(base) if delta.dtype == base.dtype else (delta + base).to(base.dtype)


_IMPLEMENTATIONS = {"torch": mixture, "reference": reference, "triton": "lora_mixture.run"}


class _Mixture(torch.autograd.Function):
    """All A in one product, and what follows it for each projection.

    Its tensors are base, gates, down and up of each projection, one after another. Kept for the
    backward pass: all but the bases, and ``A_n x`` of all experts ``[T, sum of N * R]``. The
    gradient of a base is the incoming one itself.
    """

    @staticmethod
    def forward(
        ctx: Any, finish: Finish, scales: list[float], x: Tensor, *parts: Tensor
    ) -> tuple[Tensor, ...]:
        bases, gates, downs, ups = (parts[kind::4] for kind in range(4))
        hidden = product(_flat(x), _rows(downs).T)  # [T, D] @ [D, sum of N * R]
        each = hidden.split([down.shape[:2].numel() for down in downs], dim=1)
        ctx.save_for_backward(x, hidden, *gates, *downs, *ups)
        ctx.scales = scales
        return tuple(
            finish(_flat(base), own, _flat(gate), up, scale).view(base.shape)
            for base, own, gate, up, scale in zip(bases, each, gates, ups, scales, strict=True)
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, hidden, *parts = ctx.saved_tensors
        gates, downs, ups = (parts[kind * len(grads) :][: len(grads)] for kind in range(3))
        of_gates, of_downs, of_ups = (ctx.needs_input_grad[kind::4] for kind in (4, 5, 6))
        rows, sizes = _flat(x), [down.shape[:2].numel() for down in downs]
        d_parts: list[Tensor | None] = [None] * 4 * len(grads)
        d_each = []
        for n, (grad, own) in enumerate(zip(grads, hidden.split(sizes, dim=1), strict=True)):
            narrow, gate, scale = _flat(grad).to(x.dtype), gates[n], ctx.scales[n]  # [T, O]
            factors = _wide(_flat(gate)) * scale  # [T, N]
            d_weighted = product(narrow, _columns(ups[n]))  # [T, O] @ [O, N * R]
            d_each.append(_weighted(d_weighted, factors))
            d_parts[4 * n] = grad
            if of_gates[n]:  # [T, N, R] to [T, N]
                by_expert = (_wide(d_weighted) * _wide(own)).unflatten(1, (factors.shape[1], -1))
                d_gate = by_expert.sum(2).mul_(scale)
                d_parts[4 * n + 1] = d_gate.to(gate.dtype).view(gate.shape)
            if of_ups[n]:  # [N * R, T] @ [T, O] to [N, O, R]
                d_up = _multiply(_weighted(own, factors).T, narrow)
                d_parts[4 * n + 3] = d_up.view(ups[n].mT.shape).mT
        d_hidden = torch.cat(d_each, 1) if len(d_each) > 1 else d_each[0]  # [T, sum of N * R]
        if any(of_downs):  # [sum of N * R, T] @ [T, D]
            d_downs = _multiply(d_hidden.T, rows).split(sizes)
            d_parts[2::4] = [d.view(down.shape) for d, down in zip(d_downs, downs, strict=True)]
        d_x = None
        if ctx.needs_input_grad[2]:  # [T, sum of N * R] @ [sum of N * R, D]
            d_x = _multiply(d_hidden, _rows(downs)).view(x.shape)
        return None, None, d_x, *d_parts


def _multiply(left: Tensor, right: Tensor) -> Tensor:
    """Multiply into memory that is kept from step to step."""
    return product(left, right, out=empty((len(left), right.shape[1]), left))


def _flat(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])  # [..., D] to [T, D]


def _rows(downs: Sequence[Tensor]) -> Tensor:
    """Return the A of all experts of all projections, one below the other."""
    rows = [down.flatten(0, 1) for down in downs]
    return torch.cat(rows) if len(rows) > 1 else rows[0]


def _columns(up: Tensor) -> Tensor:
    """Return the B of all experts side by side, ``[O, N * R]``."""
    return up.transpose(0, 1).flatten(1)


def _weighted(columns: Tensor, factors: Tensor) -> Tensor:
    """Multiply the R columns of each expert ``[T, N * R]`` by its factor ``[T, N]``."""
    by_expert = columns.unflatten(1, (factors.shape[1], -1))
    return (by_expert * factors.unsqueeze(2)).to(columns.dtype).flatten(1)


def _wide(tensor: Tensor) -> Tensor:
    """Return a tensor in float32 at least."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
