"""balance_loss: the load-balancing loss of one router over one batch (PESC Eq. 10)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import one_hot

from moebook.errors import refuse, refuse_unknown
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
    """Return ``E * sum_i f_i p_i`` (Eq. 10 without alpha): 1 uniform, E / K collapsed.

    f_i is the share of the ``T * K`` routed slots, ``ids [T, K]``, that go to expert i (it
    sums to 1; "both vectors should ideally have values of 1/n"), and has no gradient. p_i is
    the mean over tokens of the softmax over ALL E of ``logits [T, E]``, taken before the
    top-k. ``mask [T]`` is true (or 1) for tokens that count in both; with no token left the
    loss is 0.

    ``form`` is ``"live"`` as above; ``"kept"``, Eq. 9 and 10 literally: p_i is the mean of
    the gates, the softmax over the K kept logits; or ``"constant"``, the released code's,
    which averages the same gates by token: p is 1/K, so the value is ``E / K`` and the
    gradient zero but for rounding. ``impl`` is ``"auto"``, ``"torch"`` (counts) or
    ``"reference"``.

    >>> logits = torch.zeros(4, 2)
    >>> balance_loss(logits, torch.tensor([[0], [1], [0], [1]])).item()
    1.0
    """
    named = {"logits": (logits, "T E"), "ids": (ids, "T K", "int")}
    if mask is not None:
        named["mask"] = (mask, "T", "real")
    sizes = shapes("balance_loss", named)
    indices("balance_loss", "ids", ids, sizes["E"])
    if mask is not None:
        _check_mask(mask)
    refuse_unknown(form, FORMS, "E-CHOICE", f"balance_loss: unknown form '{form}';")
    # In 16 bits a count ends early.
    wide = torch.promote_types(logits.dtype, torch.float32)
    counted = torch.ones_like(logits[:, 0]) if mask is None else mask
    real = counted.to(wide)
    table = {"torch": _counted, "reference": reference}
    run = implementation("balance_loss", impl, table, logits)
    value: Tensor = run(logits, ids, real, form)
    return value.to(logits.dtype)


def _check_mask(mask: Tensor) -> None:
    """Refuse a mask of others than 0 and 1 (E-RANGE); on a GPU a look would wait for it."""
    if mask.device.type != "cpu" or ((mask == 0) | (mask == 1)).all():
        return
    have = f"mask is {mask.min().item()} to {mask.max().item()}"
    refuse("E-RANGE", f"balance_loss: {have}, expected 1 and 0")


def reference(logits: Tensor, ids: Tensor, real: Tensor, form: str) -> Tensor:
    """Take f from one-hot vectors; ``real [T]`` is 1 for a token that counts, else 0."""
    experts = logits.shape[1]
    tokens = real.sum().clamp(min=1)  # with none left 0, not 0 / 0
    slots = tokens * ids.shape[1]
    hot = one_hot(ids.long(), experts).to(real.dtype)  # [T, K, E]
    load = torch.einsum("tke,t->e", hot, real) / slots  # f, [E]
    gates = logits.gather(1, ids.long()).softmax(-1, real.dtype)  # [T, K], Eq. 9
    if form == "constant":
        # A token's K gates sum to 1, so their mean over K is 1 / K, whatever it chose.
        return experts * load.sum() * (gates.mean(-1) @ real) / tokens
    if form == "kept":
        # Each gate at its expert, 0 at the others.
        share = torch.einsum("tke,tk->te", hot, gates)  # [T, E]
    else:
        share = logits.softmax(-1, real.dtype)  # [T, E]
    # Eq. 10 without alpha, E * sum_i f_i p_i; p is real @ share / tokens.
    return experts * (load * (real @ share)).sum() / tokens


def _counted(logits: Tensor, ids: Tensor, real: Tensor, form: str) -> Tensor:
    """Take f by counting; the forms that few train by, as the reference does."""
    if form != "live":
        return reference(logits, ids, real, form)
    value: Tensor = _Balance.apply(logits, ids, real)
    return value


class _Balance(torch.autograd.Function):
    """No ``[T, K, E]`` tensor is made; the softmax ``[T, E]`` is kept for the backward."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, real: Tensor) -> Tensor:
        experts = logits.shape[1]
        tokens = real.sum().clamp(min=1)
        slots = tokens * ids.shape[1]
        share = empty(logits.shape, real)  # [T, E]
        torch.softmax(logits, -1, real.dtype, out=share)
        counted = real.unsqueeze(1).expand(ids.shape).flatten()  # [T * K]
        load = real.new_zeros(experts).scatter_add_(0, ids.flatten().long(), counted)
        # Eq. 10 is linear in p: E f / tokens, times the sum over tokens of the softmax.
        factor = experts * (load / slots) / tokens  # [E]
        ctx.save_for_backward(share, real, factor)
        ctx.dtype = logits.dtype
        return factor @ (real @ share)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        share, real, factor = ctx.saved_tensors
        # d loss / d share[t, i] = real_t * factor_i.
        d_share = empty(share.shape, share)  # [T, E]
        torch.outer(real, factor * grad, out=d_share)  # [T] x [E]
        # In place: the gradient of the logits takes the memory of that of the softmax.
        torch._softmax_backward_data(
            d_share, share, -1, share.dtype, grad_input=d_share
        )
        return d_share.to(ctx.dtype), None, None
