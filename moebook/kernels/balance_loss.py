"""balance_loss: the load-balancing loss of one router over one batch (PESC Eq. 10)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moebook.errors import refuse_unknown
from moebook.kernels.dispatch import implementation, indices, shapes
from moebook.kernels.matmul import empty

FORMS = ("live", "kept", "constant")


def balance_loss(
    logits: Tensor,
    ids: Tensor,
    *,
    mask: Tensor | None = None,
    form: str = "live",
    impl: str = "auto",
) -> Tensor:
    """Return ``E * sum_i f_i p_i`` (Eq. 10 without alpha): 1 for uniform routing, E / K collapsed.

    f_i is the share of the ``T * K`` routed slots, ``ids [T, K]``, that go to expert i (it sums to
    1; "both vectors should ideally have values of 1/n"), and has no gradient. p_i is the mean over
    tokens of the softmax over ALL E of ``logits [T, E]``, taken before the top-k. ``mask [T]`` is
    true (or 1) for tokens that count in both; with no token left the loss is 0.

    ``form`` is ``"live"`` as above; ``"kept"``, Eq. 9 and 10 literally: p_i is the mean of the
    gates, the softmax over the K kept logits; or ``"constant"``, the released code's, which
    averages the same gates by token: p is 1/K, so the value is ``E / K`` and the gradient zero but
    for rounding. ``impl`` is ``"auto"``, ``"torch"`` (counts) or ``"reference"``.
    """
    named = {"logits": (logits, "T E"), "ids": (ids, "T K", "int")}
    sizes = shapes("balance_loss", named if mask is None else named | {"mask": (mask, "T", "real")})
    indices("balance_loss", "ids", ids, sizes["E"])
    refuse_unknown(form, FORMS, "E-CHOICE", f"balance_loss: unknown form '{form}';")
    wide = torch.promote_types(logits.dtype, torch.float32)  # in 16 bits a count ends early
    keep = torch.ones_like(logits[:, 0], dtype=wide) if mask is None else mask.to(wide)
    table = {"torch": _counted, "reference": reference}
    run = implementation("balance_loss", impl, table, logits)
    value: Tensor = run(logits, ids, keep, form)
    return value.to(logits.dtype)


def reference(logits: Tensor, ids: Tensor, keep: Tensor, form: str) -> Tensor:
    """Take f from one-hot vectors."""
    tokens = keep.sum().clamp(min=1)
    hot = torch.nn.functional.one_hot(ids.long(), logits.shape[1]).to(keep.dtype)
    load = torch.einsum("tke,t->e", hot, keep) / (tokens * ids.shape[1])
    gates = logits.gather(1, ids.long()).softmax(-1, keep.dtype)
    if form == "constant":
        return logits.shape[1] * load.sum() * (gates.mean(-1) @ keep) / tokens
    kept = torch.einsum("tke,tk->te", hot, gates)
    share = kept if form == "kept" else logits.softmax(-1, keep.dtype)
    return logits.shape[1] * (load * (keep @ share)).sum() / tokens


def _counted(logits: Tensor, ids: Tensor, keep: Tensor, form: str) -> Tensor:
    """Take f by counting; the forms that few train by, as the reference does."""
    if form != "live":
        return reference(logits, ids, keep, form)
    value: Tensor = _Balance.apply(logits, ids, keep)
    return value


class _Balance(torch.autograd.Function):
    """No ``[T, K, E]`` tensor is made; the softmax ``[T, E]`` is kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
        share = torch.softmax(logits, -1, keep.dtype, out=empty(logits.shape, keep))  # [T, E]
        weights = keep.unsqueeze(1).expand(ids.shape).flatten()
        load = keep.new_zeros(logits.shape[1]).scatter_add_(0, ids.flatten().long(), weights)  # [E]
        tokens = keep.sum().clamp(min=1)
        factor = logits.shape[1] * (load / (tokens * ids.shape[1])) / tokens
        ctx.save_for_backward(share, keep, factor)
        ctx.dtype = logits.dtype
        return factor @ (keep @ share)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        share, keep, factor = ctx.saved_tensors
        d = torch.outer(keep, factor * grad, out=empty(share.shape, share))  # [T] x [E]
        torch._softmax_backward_data(d, share, -1, share.dtype, grad_input=d)
        return d.to(ctx.dtype), None, None
