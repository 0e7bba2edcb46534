"""mixture of LoRAs: base + sum_n g_n x A_n B_n, all N experts in one concatenated product."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from moebook.errors import refuse
from moebook.kernels.dispatch import implementation


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


def _concatenated(x: Tensor, projections: Sequence[Projection]) -> list[Tensor]:
    factors = [projection.down.flatten(0, 1) for projection in projections]
    columns = [len(factor) for factor in factors]
    joined = F.linear(x, torch.cat(factors) if len(factors) > 1 else factors[0])
    pairs = zip(joined.split(columns, dim=-1), projections, strict=True)
    return [_mixed(hidden.unflatten(-1, p.down.shape[:2]), p) for hidden, p in pairs]


def _mixed(hidden: Tensor, projection: Projection) -> Tensor:
    """Finish a mixture from what its A gave: gates, then all B in one product.

    Args:
        hidden: ``A_n x`` of each expert, ``[..., N, R]``.
        projection: What is to be finished.
    """
    base, gates, _, up, scale = projection
    weighted = (hidden * gates.unsqueeze(-1)).flatten(-2)
    delta = F.linear(weighted, up.transpose(0, 1).flatten(1))  # [O, N * R]
    return (base + delta * scale).to(base.dtype)


def _check(number: int, x: Tensor, projection: Projection) -> None:
    base, gates, down, up, _ = projection
    fits = down.dim() == up.dim() == 3 and x.shape[-1:] == down.shape[2:]
    fits = fits and base.shape[:-1] == gates.shape[:-1] == x.shape[:-1]
    fits = fits and up.shape == (len(down), base.shape[-1], down.shape[1])
    if not fits or gates.shape[-1:] != down.shape[:1] or not len(down):
        got = ", ".join(str(tuple(part.shape)) for part in (x, base, gates, down, up))
        refuse(
            "E-SHAPE",
            f"lora_mixture: projection {number}: expected x [..., D], base [..., O], gates"
            f" [..., N], down [N, R, D], up [N, O, R]; got {got}",
        )
    if not x.is_floating_point():
        refuse("E-DTYPE", f"lora_mixture: x is {x.dtype}, expected floating point")
    if down.dtype != x.dtype or up.dtype != x.dtype:
        got = f"{x.dtype}, down is {down.dtype}, up is {up.dtype}"
        refuse("E-DTYPE", f"lora_mixture: projection {number}: x is {got}: cast x or them")
    if not base.is_floating_point():
        got = f"{base.dtype}, expected floating point"
        refuse("E-DTYPE", f"lora_mixture: projection {number}: base is {got}")
    if gates.is_complex():
        got = f"{gates.dtype}, expected floating point"
        refuse("E-DTYPE", f"lora_mixture: projection {number}: gates is {got}")
    if (devices := {part.device for part in (base, gates, down, up)}) != {x.device}:
        names = ", ".join(sorted(map(str, devices)))
        refuse("E-DEVICE", f"lora_mixture: projection {number} lies on {names}, x on {x.device}")
