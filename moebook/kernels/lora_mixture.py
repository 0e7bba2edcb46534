"""mixture of LoRAs: base + sum_n g_n x A_n B_n, all N experts in one concatenated product."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from moebook.errors import refuse
from moebook.kernels.dispatch import implementation, shapes
from moebook.kernels.matmul import empty, product

Finish = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]


class Projection(NamedTuple):
    """One linear layer with N LoRAs beside it.

    Attributes:
        base: ``[..., O]``, what the layer itself puts out.
        gates: ``[..., N]``, each expert's weight for each token, 0 where it was not chosen.
        down: A of all experts, ``[N, R, D]``.
        up: B of all experts, ``[N, O, R]``.
        scale: Factor on the sum of the experts' outputs, alpha / r.
    """

    base: Tensor
    gates: Tensor
    down: Tensor
    up: Tensor
    scale: float = 1.0


def lora_mixture(
    x: Tensor, projections: Sequence[Projection], *, impl: str = "auto"
) -> list[Tensor]:
    """Add to each projection of ``x`` its experts' outputs, weighted by the token's gates.

    ``y = base + scale * sum_n g_n B_n A_n x``. The A of all experts, and of all projections that
    read the same ``x``, are one product; the gate is applied between A and B, on N * R columns; the
    B of a projection's experts are one product more. Nothing is sorted: experts that a token did
    not choose cost their rank in FLOPs, which is less than moving rows would.

    Args:
        x: ``[..., D]``, in the dtype of the factors.
        projections: Each with factors and gates of its own.
        impl: ``"auto"``, ``"torch"`` (concatenated), ``"triton"`` or ``"reference"`` (one expert
            after another).

    Returns:
        For each projection ``[..., O]`` in the dtype of its base.
    """
    if not len(projections):
        refuse("E-SHAPE", "lora_mixture: projections is empty, expected one at least")
    for number, projection in enumerate(projections):
        dims = ("... O", "... N", "N R D", "N O R")
        names = [f"projection {number}'s {name}" for name in Projection._fields]
        parts = dict(zip(names, zip(projection[:4], dims, strict=True), strict=False))
        alike = ("x", *names[2:4])
        shapes("lora_mixture", {"x": (x, "... D"), **parts}, empty="", alike=alike)
    run = implementation("lora_mixture", impl, _IMPLEMENTATIONS, x)
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
    """Run all projections as one step of autograd.

    ``finish`` makes of a base ``[T, O]``, the ``A_n x`` of its experts ``[T, N * R]``, gates
    ``[T, N]``, up and scale the output ``[T, O]``.
    """
    scales = [projection.scale for projection in projections]
    parts = [part for projection in projections for part in projection[:4]]
    return list(_Mixture.apply(finish or _finished, scales, x, *parts))


def _finished(base: Tensor, hidden: Tensor, gates: Tensor, up: Tensor, scale: float) -> Tensor:
    """Apply the gates to the experts' R columns each, and all B in one product."""
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
                d_gate = _by_expert(_wide(d_weighted) * _wide(own), factors).sum(2).mul_(scale)
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
    """Return ``[..., D]`` as ``[T, D]``."""
    return tensor.reshape(-1, tensor.shape[-1])


def _rows(downs: Sequence[Tensor]) -> Tensor:
    """Return the A of all experts of all projections, one below the other."""
    rows = [down.flatten(0, 1) for down in downs]
    return torch.cat(rows) if len(rows) > 1 else rows[0]


def _columns(up: Tensor) -> Tensor:
    """Return the B of all experts side by side, ``[O, N * R]``."""
    return up.transpose(0, 1).flatten(1)


def _by_expert(columns: Tensor, gates: Tensor) -> Tensor:
    """View ``[T, N * R]`` as ``[T, N, R]``."""
    return columns.unflatten(1, (gates.shape[1], columns.shape[1] // gates.shape[1]))


def _weighted(columns: Tensor, factors: Tensor) -> Tensor:
    """Multiply the R columns of each expert by its factor."""
    return (_by_expert(columns, factors) * factors.unsqueeze(2)).to(columns.dtype).flatten(1)


def _wide(tensor: Tensor) -> Tensor:
    """Return a tensor in float32 at least."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
