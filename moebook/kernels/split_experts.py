"""split experts: gated FFNs in two banks, one frozen, one trained, behind a table of slots."""

from __future__ import annotations

import torch
from torch import Tensor

from moebook.errors import refuse
from moebook.kernels.arguments import together, whole
from moebook.kernels.dispatch import implementation
from moebook.kernels.experts import Activation, Bank, check_act, check_bank, gated_ffn
from moebook.kernels.experts import reference as one_bank
from moebook.kernels.route import Routing, check_routing


def split_experts(
    x: Tensor,
    routing: Routing,
    frozen: Bank,
    trained: Bank,
    slots: Tensor,
    act: Activation,
    *,
    impl: str = "auto",
) -> Tensor:
    """Run each token through its K experts, each read from the trained bank where it has a slot.

    What `experts` computes, but weight gradients are computed for the trained bank alone: with p
    the share of routed slots that hit it, the backward pass costs (1 + p) forward passes, not 2.

    Args:
        x: ``[T, D]``.
        routing: Where the T tokens go, from `route` or `grouped`.
        frozen: Bank of all E experts; it never gets a gradient.
        trained: Bank of the N experts that train.
        slots: ``[E]`` int64, where an expert lies in the trained bank, -1 for a frozen one.
        act: Elementwise activation of the gate (SiLU in the models of the paper).
        impl: ``"auto"``, ``"torch"`` (one product per expert and direction over its own rows),
            ``"triton"`` or ``"reference"`` (every expert on every token, then masked).

    Returns:
        ``[T, D]`` in the dtype of ``x``; both banks are used in that dtype.

    Raises:
        Refusal: E-SHAPE, E-DTYPE, E-DEVICE or E-RANGE when the arguments do not fit one another,
            E-TYPE for an activation with parameters or in place, E-IMPL for an ``impl`` that is
            unknown or cannot run.
    """
    check_bank("split_experts", x, frozen, "frozen ")
    check_bank("split_experts", x, trained, "trained ")
    if trained.down.shape[1:] != frozen.down.shape[1:] or slots.shape != frozen.down.shape[:1]:
        got = f"{tuple(frozen.down.shape)}, {tuple(trained.down.shape)} and {tuple(slots.shape)}"
        refuse(
            "E-SHAPE",
            "split_experts: expected down of frozen [E, D, F], of trained [N, D, F] and slots [E];"
            f" got {got}",
        )
    whole("split_experts", {"slots": slots})
    together("split_experts", {"x": x, "slots": slots})
    if slots.device.type == "cpu" and len(slots) and int(slots.max()) >= len(trained.down):
        got = f"{int(slots.max())}, the trained bank holds {len(trained.down)} experts"
        refuse("E-RANGE", f"split_experts: slots go up to {got}")
    if slots.device.type == "cpu" and len(slots) and slots.min() < -1:
        refuse("E-RANGE", f"split_experts: slots hold {int(slots.min())}, expected -1 or a place")
    if slots.device.type == "cpu" and (uses := slots[slots >= 0].bincount()).gt(1).any():
        refuse("E-RANGE", f"split_experts: slots hold {int(uses.argmax())} twice, expected it once")
    check_act("split_experts", act)
    check_routing("split_experts", routing, x, len(frozen.down))
    table = {"torch": _segments, "reference": reference}
    still = Bank(frozen.gate_up.detach(), frozen.down.detach()).to(x.dtype)
    run = implementation("split_experts", impl, table, x)
    y: Tensor = run(x, routing, still, trained.to(x.dtype), slots, act)
    return y


def reference(
    x: Tensor, routing: Routing, frozen: Bank, trained: Bank, slots: Tensor, act: Activation
) -> Tensor:
    """Put the trained rows into their places in one bank, and run that."""
    place = slots.clamp(min=0)
    free = (slots >= 0)[:, None, None]
    merged = [
        torch.where(free, new[place], old) if len(new) else old
        for new, old in zip(trained, frozen, strict=True)
    ]
    return one_bank(x, routing, Bank(*merged), act)


def _segments(
    x: Tensor, routing: Routing, frozen: Bank, trained: Bank, slots: Tensor, act: Activation
) -> Tensor:
    if slots.is_meta:
        refuse("E-DEVICE", "split_experts: slots on meta hold no numbers: impl='reference'")
    addresses = [
        (0, slot) if slot >= 0 else (1, expert) for expert, slot in enumerate(slots.tolist())
    ]
    return gated_ffn(x, routing, [trained, frozen], addresses, act)
