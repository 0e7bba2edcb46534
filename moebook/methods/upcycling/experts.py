"""Full experts that transformers' registry of implementations can run, and noise on them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from moebook import nn as mnn
from moebook.errors import nearest, refuse
from moebook.kernels import Routing


class FusedExperts(mnn.Experts):
    """E copies of a dense MLP, run by the implementation that the host's configuration names.

    ``"eager"`` is our own (one dense product per expert over its sorted rows); ``"grouped_mm"``,
    ``"batched_mm"`` and whatever else is registered take this module as one of transformers' own:
    the class attributes are what they ask about its layout.

    Args:
        config: The host's configuration, kept to look the name up.
        mlp: The dense MLP to copy.
        experts: E.

    Raises:
        Refusal: E-MODEL when the MLP's projections have biases.
    """

    has_gate = is_concatenated = True
    has_bias = has_post_expert_norm = is_transposed = _is_expert_parallel = False

    def __init__(self, config: PreTrainedConfig, mlp: nn.Module, experts: int) -> None:
        super().__init__(mlp, experts)
        self.config, self.num_experts = config, experts

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        """Return ``sum_k w_k E_k(x)`` (Eq. 2) for ``x [T, D]``."""
        run = ALL_EXPERTS_FUNCTIONS.get_interface(self.config._experts_implementation, None)
        if run is None:
            return super().forward(x, routing)
        return run(self, x, routing.ids, routing.weights)

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate) * up


def use_experts(model: PreTrainedModel, implementation: str) -> None:
    """Choose what runs the experts: ``"eager"`` (ours) or a name of transformers' registry.

    transformers' own ``set_experts_implementation`` passes dense model classes by without a word,
    and an upcycled model keeps the class of its dense host.

    Raises:
        Refusal: E-IMPL for a name that is not registered.
    """
    names = ["eager", *ALL_EXPERTS_FUNCTIONS.keys()]
    if implementation not in names:
        refuse(
            "E-IMPL",
            f"experts: no implementation '{implementation}'; {nearest(implementation, names)}",
        )
    model.config._experts_implementation = implementation


@torch.no_grad()
def disturb(experts: FusedExperts, noise: float, seed: int) -> None:
    """Add Gaussian noise to every expert, of ``noise`` times each fused tensor's own deviation.

    The standard deviation is that of the dense tensor (all experts are still copies of it), gate
    and up projection taken together. Drawn on the CPU, so equal on every device.
    """
    generator = torch.Generator().manual_seed(seed)
    for weight in (experts.gate_up_proj, experts.down_proj):
        drawn = torch.randn(weight.shape, generator=generator, dtype=torch.float32)
        weight.add_((drawn * (noise * weight[0].float().std().item())).to(weight))
