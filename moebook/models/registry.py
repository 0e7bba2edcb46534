"""Our experts in anyone's mixture: `moebook.kernels.experts` as an implementation of transformers.

For Mixtral, OLMoE, DeepSeek-V2 and V3, Qwen3-MoE and whatever keeps fused experts like them: after
`register_experts`, ``model.set_experts_implementation("moebook")``; ``"grouped_mm"`` goes back.
"""

from __future__ import annotations

from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from moebook.errors import refuse
from moebook.kernels import Bank, experts, grouped
from moebook.nn import Experts

NAME = "moebook"


def register_experts() -> None:
    """Enter `run_experts` into the registry of transformers as ``"moebook"``; again is harmless."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, run_experts)


def run_experts(host: nn.Module, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Return ``sum_k w_k E_k(x)``, in training and in generation, as the registry asks for it.

    The host has ``gate_up_proj [E, 2F, D]``, ``down_proj [E, D, F]`` and ``act_fn``; x is
    ``[T, D]``, ids and weights are ``[T, K]``.
    """
    if problem := incompatibility(host):
        refuse("E-MODEL", f"{type(host).__name__}: experts implementation '{NAME}' cannot run it: "
               f"{problem}; use model.set_experts_implementation('grouped_mm')")  # fmt: skip
    routing = grouped(ids, weights, len(host.down_proj))
    return experts(x, routing, Bank(host.gate_up_proj, host.down_proj), host.act_fn)


def incompatibility(host: nn.Module) -> str | None:
    """Say in what a host's experts differ from gated FFNs in fused weights; None if they do not."""
    gate = None if isinstance(host, Experts) else getattr(type(host), "_apply_gate", None)
    differences = {
        "no gate": not getattr(host, "has_gate", True),
        "gate and up interleaved": not getattr(host, "is_concatenated", True),
        "biases": getattr(host, "has_bias", False),
        "transposed weights": getattr(host, "is_transposed", False),
        "a norm behind the experts": getattr(host, "has_post_expert_norm", False),
        "experts spread over devices": getattr(host, "_is_expert_parallel", False),
        "a gate of its own": gate is not None and gate.__name__ != "_default_apply_gate",
        "no act_fn": not callable(getattr(host, "act_fn", None)),
    }
    return next((name for name, present in differences.items() if present), None)
