"""A LoRA beside a frozen linear layer, with dropout, as one step of autograd on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from moebook.nn.dropout import draw_mask


def lora_step(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    down: Tensor,
    up: Tensor,
    *,
    scale: float,
    share: float,
) -> Tensor:
    """Return ``W x + b + scale * B A dropout(x)``, ``[..., O]`` for ``x [..., D]``.

    ``weight [O, D]`` and ``bias [O]`` are frozen; ``down [R, D]`` is A, ``up [O, R]`` is
    B; all have one dtype. ``share`` of the elements of x is dropped before A.

    Op by op (PEFT's layer) the output and its gradient are each passed over three times
    between products. Here B's product is added to the base's by the product itself, and
    what dropout and ``scale`` multiply is multiplied on R columns, not O.
    """
    rows = x.reshape(-1, x.shape[-1])  # [T, D]
    mask, factor = draw_mask(rows, share)
    y: Tensor = _Step.apply(rows, mask, weight, bias, down, up, scale * factor)
    return y.view(*x.shape[:-1], len(weight))


class _Step(torch.autograd.Function):
    """``y = W x + b + scale * B A (mask * x)`` for ``x [T, D]``, gradients by hand.

    Kept for the backward pass: the input as A reads it, the mask, and ``A (mask * x) [T, R]``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,  # [T, D]
        mask: Tensor,  # [T, D], 1 or 0
        weight: Tensor,  # [O, D]
        bias: Tensor | None,  # [O]
        down: Tensor,  # [R, D]
        up: Tensor,  # [O, R]
        scale: float,
    ) -> Tensor:
        y = F.linear(x, weight, bias)  # [T, O]
        # The factor of what dropout lets through is part of ``scale``.
        read = x * mask  # [T, D]
        hidden = read @ down.T  # [T, R]
        torch.addmm(y, hidden, up.T, alpha=scale, out=y)  # y += scale * hidden B^T
        ctx.save_for_backward(read, mask, hidden, weight, down, up)
        ctx.scale = scale
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        read, mask, hidden, weight, down, up = ctx.saved_tensors
        of_x, _, _, _, of_down, of_up, _ = ctx.needs_input_grad
        d_x = None
        d_down = None
        d_up = None
        d_hidden = (grad @ up).mul_(ctx.scale)  # [T, O] @ [O, R]
        if of_up:
            d_up = (grad.T @ hidden).mul_(ctx.scale)  # [O, T] @ [T, R]
        if of_down:
            d_down = d_hidden.T @ read  # [R, T] @ [T, D]
        if of_x:
            d_x = grad @ weight  # [T, O] @ [O, D]
            d_x.addcmul_(d_hidden @ down, mask)  # what dropout let through, by A
        return d_x, None, None, None, d_down, d_up, None
