"""mixture of LoRAs: base + sum_n g_n x A_n B_n, all N experts in one concatenated product."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

    Raises:
        Refusal: E-SHAPE, E-DTYPE or E-DEVICE when the arguments do not fit one another, E-IMPL for
            an ``impl`` that is unknown or cannot run.
    """
    if not len(projections):
        refuse("E-SHAPE", "lora_mixture: projections is empty, expected one at least")
    for number, projection in enumerate(projections):
        _check(number, x, projection)
    table = {"torch": _concatenated, "reference": reference}
    ys: list[Tensor] = implementation("lora_mixture", impl, table, x)(x, projections)
    return ys


def reference(x: Tensor, projections: Sequence[Projection]) -> list[Tensor]:
    """Add one expert after another."""
    ys = []
    for base, gates, down, up, scale in projections:
        experts = zip(gates.unbind(-1), down, up, strict=True)
        total = sum(gate.unsqueeze(-1) * F.linear(F.linear(x, a), b) for gate, a, b in experts)
        ys.append((base + scale * total).to(base.dtype))
    return ys


def mixture(x: Tensor, projections: Sequence[Projection], finish: Finish) -> list[Tensor]:
    """Run all projections as one step of autograd.

    Args:
        x: ``[..., D]``.
        projections: As of `lora_mixture`.
        finish: From a base ``[T, O]``, the ``A_n x`` of its experts ``[T, N * R]``, gates
            ``[T, N]``, up and scale to the output ``[T, O]``.
    """
    scales = [projection.scale for projection in projections]
    parts = [part for projection in projections for part in projection[:4]]
    return list(_Mixture.apply(finish, scales, x, *parts))


def _concatenated(x: Tensor, projections: Sequence[Projection]) -> list[Tensor]:
    return mixture(x, projections, _finished)


def _finished(base: Tensor, hidden: Tensor, gates: Tensor, up: Tensor, scale: float) -> Tensor:
    weighted = _weighted(hidden, _wide(gates) * scale)
    delta = _kept(weighted, _columns(up).T)
    return delta.add_(base) if delta.dtype == base.dtype else (delta + base).to(base.dtype)


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
        hidden = product(_flat(x), _rows(downs).T)
        owns = hidden.split([down.shape[:2].numel() for down in downs], dim=1)
        ctx.save_for_backward(x, hidden, *gates, *downs, *ups)
        ctx.scales = scales
        return tuple(
            finish(_flat(base), own, _flat(gate), up, scale).view(base.shape)
            for base, own, gate, up, scale in zip(bases, owns, gates, ups, scales, strict=True)
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, hidden, *parts = ctx.saved_tensors
        gates, downs, ups = (parts[kind * len(grads) :][: len(grads)] for kind in range(3))
        of_gates, of_downs, of_ups = (ctx.needs_input_grad[kind::4] for kind in (4, 5, 6))
        rows, sizes = _flat(x), [down.shape[:2].numel() for down in downs]
        d_parts: list[Tensor | None] = [None] * 4 * len(grads)
        d_owns = []
        for n, (grad, own) in enumerate(zip(grads, hidden.split(sizes, dim=1), strict=True)):
            narrow, gate, scale = _flat(grad).to(x.dtype), gates[n], ctx.scales[n]
            factors, d_weighted = _wide(_flat(gate)) * scale, product(narrow, _columns(ups[n]))
            d_owns.append(_weighted(d_weighted, factors))
            d_parts[4 * n] = grad
            if of_gates[n]:
                d_gate = _by_expert(_wide(d_weighted) * _wide(own), factors).sum(2).mul_(scale)
                d_parts[4 * n + 1] = d_gate.to(gate.dtype).view(gate.shape)
            if of_ups[n]:
                d_up = _kept(_weighted(own, factors).T, narrow)
                d_parts[4 * n + 3] = d_up.view(ups[n].mT.shape).mT
        d_hidden = torch.cat(d_owns, 1) if len(d_owns) > 1 else d_owns[0]
        if any(of_downs):
            d_downs = _kept(d_hidden.T, rows).split(sizes)
            d_parts[2::4] = [d.view(down.shape) for d, down in zip(d_downs, downs, strict=True)]
        d_x = None
        if ctx.needs_input_grad[2]:
            d_x = _kept(d_hidden, _rows(downs)).view(x.shape)
        return None, None, d_x, *d_parts


def _kept(left: Tensor, right: Tensor) -> Tensor:
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


def _check(number: int, x: Tensor, projection: Projection) -> None:
    base, gates, down, up, _ = projection
    fits = down.dim() == up.dim() == 3 and x.shape[-1:] == down.shape[2:]
    fits = fits and base.shape[:-1] == gates.shape[:-1] == x.shape[:-1]
    fits = fits and up.shape == (len(down), base.shape[-1], down.shape[1])
    fits = fits and gates.shape[-1:] == down.shape[:1]
    if not fits or 0 in down.shape or 0 in up.shape:
        got = ", ".join(str(tuple(part.shape)) for part in (x, base, gates, down, up))
        refuse(
            "E-SHAPE",
            f"lora_mixture: projection {number}: expected x [..., D], base [..., O], gates"
            f" [..., N], down [N, R, D], up [N, O, R], none of D, O, N and R zero; got {got}",
        )
    own = {f"projection {number}'s {name}": part for name, part in projection._asdict().items()}
    own.pop(f"projection {number}'s scale")
    _, _, a, b = own
    floating("lora_mixture", {"x": x, **own})
    alike("lora_mixture", {"x": x, a: down, b: up})
    together("lora_mixture", {"x": x, **own})
