"""adapters on a GPU: by pairs of experts where K is 2, else grouped products and a sum onto h."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from moebook.kernels._triton import pairs
from moebook.kernels._triton.grouped import (
    aligned,
    combine,
    gather,
    product,
    sort_rows,
    weight_gradient,
)
from moebook.kernels._triton.placing import placed
from moebook.kernels.route import Routing


@placed
def run(
    h: Tensor, source: Tensor, routing: Routing, down: Tensor, up: Tensor, scale: float
) -> Tensor:
    """Run `moebook.kernels.adapters`."""
    other = None if source is h else source.contiguous()
    gates = routing.weights.float() * scale
    factors = (aligned(down), aligned(up))
    function = pairs.Pairs if pairs.fit(routing, down) else _Adapters
    y: Tensor = function.apply(h.contiguous(), other, gates, *factors, routing)
    return y


class _Adapters(torch.autograd.Function):
    """Kept for the backward pass: the inputs and the pre-activation ``[T * K, R]``."""

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, other: Tensor | None, gates: Tensor, down: Tensor, up: Tensor,
        routing: Routing,
    ) -> Tensor:  # fmt: skip
        source, by = h if other is None else other, sort_rows(routing, h.dtype)
        gate = gates.flatten()[routing.order].unsqueeze(1)
        pre = product(gather(source, by), [down], by, transposed=False, gate=None)
        hidden = (F.gelu(pre.float()) * gate).to(h.dtype)
        out = product(hidden, [up], by, transposed=False, gate=None)
        ctx.save_for_backward(source, gate, down, up, pre)
        ctx.by, ctx.apart = by, other is not None
        return combine(out, by, base=h)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        source, gate, down, up, pre = ctx.saved_tensors
        by, grad, wide = ctx.by, grad.contiguous(), pre.float()
        d_out = gather(grad, by)
        d_hidden = product(d_out, [up], by, transposed=True, gate=None).float()
        active = F.gelu(wide)
        d_gates = (d_hidden * active).sum(1)[by.place]
        d_pre = torch.ops.aten.gelu_backward(d_hidden * gate, wide).to(pre.dtype)
        d_down = d_up = None
        if ctx.needs_input_grad[3]:
            d_down = weight_gradient(gather(source, by), d_pre, by, down)
        if ctx.needs_input_grad[4]:
            d_up = weight_gradient((active * gate).to(pre.dtype), d_out, by, up)
        d_rows = product(d_pre, [down], by, transposed=True, gate=None)
        d_source = combine(d_rows, by, base=None if ctx.apart else grad)
        d_inputs = (grad, d_source) if ctx.apart else (d_source, None)
        return *d_inputs, d_gates, d_down, d_up, None
