"""balance_loss: the load-balancing loss of one router over one batch (PESC Eq. 10)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moebook.errors import nearest, refuse
from moebook.kernels.arguments import floating, real, together, whole
from moebook.kernels.dispatch import implementation
from moebook.kernels.memory import empty

FORMS = ("live", "constant")


def balance_loss(
    logits: Tensor,
    ids: Tensor,
    *,
    mask: Tensor | None = None,
    form: str = "live",
    impl: str = "auto",
) -> Tensor:
    """Return ``E * sum_i f_i p_i``: 1 for uniform routing, up to ``E / K`` for collapsed.

    Eq. 10 without its factor alpha.

    f_i is the share of the ``T * K`` routed slots that go to expert i (it sums to 1; "both vectors
    should ideally have values of 1/n"), and has no gradient. p_i is the mean over tokens of the
    softmax over ALL E logits, taken before the top-k. Averaged over the kept slots instead, as
    released, it is 1/K whatever the router does, and its gradient vanishes.

    Args:
        logits: ``[T, E]`` router logits.
        ids: ``[T, K]`` chosen experts.
        mask: ``[T]``, true (or 1) for tokens that count; all of them by default. Padding is left
            out of both f and p. With no token left the loss is 0.
        form: ``"live"`` as above. ``"constant"`` is the released code's form: the mean of the
            softmax over the K kept logits stands for p, which is 1/K for every token, so the value
            is ``E / K`` whatever the routing, and the gradient is zero but for rounding.
        impl: ``"auto"``, ``"torch"`` (counts), ``"triton"`` or ``"reference"`` (one-hot vectors).

    Raises:
        Refusal: E-SHAPE, E-DTYPE, E-DEVICE, E-RANGE, E-CHOICE or E-IMPL for an argument that cannot
            be used.
    """
    fits = logits.dim() == ids.dim() == 2 and len(ids) == len(logits)
    if not fits or not logits.shape[1] or not ids.shape[1]:
        got = f"{tuple(logits.shape)} and {tuple(ids.shape)}"
        refuse(
            "E-SHAPE", f"balance_loss: expected logits [T, E >= 1] and ids [T, K >= 1], got {got}"
        )
    if mask is not None and mask.shape != logits.shape[:1]:
        shapes = f"{tuple(mask.shape)} for {len(logits)} tokens"
        refuse("E-SHAPE", f"balance_loss: expected mask [T], got {shapes}")
    masked = {} if mask is None else {"mask": mask}
    floating("balance_loss", {"logits": logits})
    whole("balance_loss", {"ids": ids})
    real("balance_loss", masked)
    together("balance_loss", {"logits": logits, "ids": ids, **masked})
    if ids.device.type == "cpu" and ids.numel() and not 0 <= ids.min() <= ids.max() < len(logits.T):
        got = f"{int(ids.min())} to {int(ids.max())}, expected 0 to {logits.shape[1] - 1}"
        refuse("E-RANGE", f"balance_loss: ids are {got} (the experts)")
    if form not in FORMS:
        refuse("E-CHOICE", f"balance_loss: unknown form '{form}'; {nearest(form, FORMS)}")
    wide = torch.promote_types(logits.dtype, torch.float32)  # in 16 bits a count ends early
    keep = torch.ones_like(logits[:, 0], dtype=wide) if mask is None else mask.to(wide)
    run = implementation("balance_loss", impl, _IMPLEMENTATIONS, logits)
    value: Tensor = run(logits, ids, keep, form)
    return value.to(logits.dtype)


def reference(logits: Tensor, ids: Tensor, keep: Tensor, form: str) -> Tensor:
    """Take f from one-hot vectors."""
    tokens = keep.sum().clamp(min=1)
    hot = torch.nn.functional.one_hot(ids.long(), logits.shape[1]).to(keep.dtype)
    load = torch.einsum("tke,t->e", hot, keep) / (tokens * ids.shape[1])
    if form == "constant":
        kept = logits.gather(1, ids.long()).softmax(-1, keep.dtype).mean(-1)
        return logits.shape[1] * load.sum() * (kept @ keep) / tokens
    return logits.shape[1] * (load * (keep @ logits.softmax(-1, keep.dtype))).sum() / tokens


def _counted(logits: Tensor, ids: Tensor, keep: Tensor, form: str) -> Tensor:
    """Take f by counting; the constant form, which nothing is trained by, as the reference does."""
    if form == "constant":
        return reference(logits, ids, keep, form)
    value: Tensor = _Balance.apply(logits, ids, keep)
    return value


class _Balance(torch.autograd.Function):
    """No ``[T, K, E]`` tensor is made; the softmax ``[T, E]`` is kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
        share = torch.softmax(logits, -1, keep.dtype, out=empty(logits.shape, keep))
        weights = keep.unsqueeze(1).expand(ids.shape).flatten()
        load = keep.new_zeros(logits.shape[1]).scatter_add_(0, ids.flatten().long(), weights)
        tokens = keep.sum().clamp(min=1)
        factor = logits.shape[1] * (load / (tokens * ids.shape[1])) / tokens
        ctx.save_for_backward(share, keep, factor)
        ctx.dtype = logits.dtype
        return factor @ (keep @ share)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        share, keep, factor = ctx.saved_tensors
        d = torch.outer(keep, factor * grad, out=empty(share.shape, share))
        torch._softmax_backward_data(d, share, -1, share.dtype, grad_input=d)
        return d.to(ctx.dtype), None, None


_IMPLEMENTATIONS = {"torch": _counted, "reference": reference}
