"""Sparse upcycling: each FFN of a dense decoder becomes E copies of it behind a router."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moebook import nn as mnn
from moebook.errors import refuse
from moebook.methods.upcycling.config import Config
from moebook.methods.upcycling.starts import Start, random
from moebook.models.anatomy import Anatomy, Layer, anatomy, dense_layers
from moebook.models.fingerprint import fingerprint
from moebook.nn import balance


@dataclass(frozen=True)
class Origin:
    """What a model was made from, kept on the model as ``model.upcycling``.

    Attributes:
        config: The settings.
        base: Fingerprint of the dense host before anything was changed.
    """

    config: Config
    base: str


def upcycle(model: nn.Module, config: Config, start: Start | None = None) -> nn.Module:
    """Turn a dense decoder into a sparse one with full experts in place (Sec. 2.1, 4.4).

    In each chosen layer the FFN gives way to E copies of itself in fused 3-D weights and a linear
    router that reads the FFN's (normed) input. At step 0 the model is the dense one for
    ``combine="renormalised"`` and not for ``"probability"``: see `Config`. Routers are float32
    (float64 in a float64 host). Everything new requires a gradient; the rest is left as it was
    (the paper trains it all). The model is checked first and left untouched when it is refused.

    Args:
        model: A causal language model with gated MLPs without biases (Llama, Mistral, Qwen ...).
        config: The settings.
        start: The routers' first weights, from one of the initialisations; None for SU, normal with
            standard deviation 0.02 drawn from ``config.seed``.

    Returns:
        The same model, of the same class.

    Raises:
        Refusal: E-MODEL for a host that is sparse already or has no such MLPs; E-RANGE for a layer
            that it does not have; E-SHAPE when ``start`` does not fit; E-BASE when it was collected
            from another model; E-NONFINITE when it holds NaN or infinity.
    """
    host = anatomy(model)
    layers = dense_layers(host, config.layers, "upcycling")
    base = fingerprint(model)
    start = random(model, config.experts, seed=config.seed) if start is None else start
    weights = _weights(start, host, layers, config, base)
    blocks = _build(host, layers, weights, config)
    for layer, block in zip(layers, blocks, strict=True):
        layer.replace(block)
    model.upcycling = Origin(config, base)
    return model


def balance_loss(model: nn.Module, attention_mask: Tensor | None = None) -> Tensor:
    """Return ``alpha * N * sum_i f_i P_i``, summed over sparse layers, of the last pass (Eq. 3, 4).

    f_i counts each token's first choice (the argmax of Eq. 4, also with K = 2). Correction: Eq. 4
    divides by L where it sums over all B x L tokens of the batch, so that f and P would sum to B;
    here both are shares of the batch's real tokens, padding left out. Fits
    ``training.fit(..., penalty=upcycling.balance_loss)``.

    Args:
        model: An upcycled model that has run forward.
        attention_mask: ``[B, T]``, 1 for real tokens; by default the one the model was called with.

    Raises:
        Refusal: E-MODEL for a model that is not upcycled or has not run yet; E-GRADIENT when the
            routers should train but the pass left no graph.
    """
    weight = origin(model).config.balance_weight
    return weight * balance(mnn.routers(model), attention_mask, first=True)


def origin(model: nn.Module) -> Origin:
    """Return the `Origin` of a model, also inside a wrapper (DDP, PEFT).

    Raises:
        Refusal: E-MODEL when the model has none.
    """
    found = (module.__dict__.get("upcycling") for module in model.modules())
    made = next((each for each in found if isinstance(each, Origin)), None)
    if made is None:
        refuse("E-MODEL", "the model has not been through upcycling.upcycle")
    return made


def _weights(
    start: Start, host: Anatomy, layers: list[Layer], config: Config, base: str
) -> list[Tensor]:
    """Return the router weights ``[E, D]`` of each chosen layer, or refuse a start."""
    if start.base is not None and start.base != base:
        refuse(
            "E-BASE",
            f"the router start was collected from base {start.base[:12]}..., this model is"
            f" {base[:12]}...: collect again from this model",
        )
    want = (config.experts, host.hidden)
    if start.weights.dim() != 3 or tuple(start.weights.shape[1:]) != want:
        shape = tuple(start.weights.shape)
        refuse("E-SHAPE", f"the router start is {shape}, expected [L, {want[0]}, {want[1]}]")
    if not start.weights.isfinite().all():
        refuse("E-NONFINITE", "the router start holds NaN or infinity")
    places = {layer: place for place, layer in enumerate(start.layers)}
    missing = [layer.index for layer in layers if layer.index not in places]
    if missing:
        refuse("E-SHAPE", f"the router start has no weights for layer {missing[0]}")
    return [start.weights[places[layer.index]] for layer in layers]


def _build(
    host: Anatomy, layers: list[Layer], weights: list[Tensor], config: Config
) -> list[mnn.ExpertMoE]:
    """Make all blocks, before any of them is put in."""
    trace, blocks = mnn.Trace(), []
    for layer, weight in zip(layers, weights, strict=True):
        experts = mnn.Experts(layer.mlp, config.experts)
        if config.noise:
            _disturb(experts, config.noise, config.seed + layer.index)
        dense = experts.down_proj
        router = mnn.Router(
            host.hidden,
            config.experts,
            config.top_k,
            layer=layer.index,
            trace=trace,
            combine=config.combine,
            dtype=torch.promote_types(torch.float32, dense.dtype),
            device=dense.device,
        )
        with torch.no_grad():
            router.weight.copy_(weight)
        blocks.append(mnn.ExpertMoE(router, experts).train(layer.block.training))
    trace.follow(host.decoder)
    return blocks


@torch.no_grad()
def _disturb(experts: mnn.Experts, noise: float, seed: int) -> None:
    """Add Gaussian noise to every expert, of ``noise`` times each fused tensor's own deviation.

    The standard deviation is that of the dense tensor (all experts are still copies of it), gate
    and up projection taken together. Drawn on the CPU, so equal on every device.
    """
    generator = torch.Generator().manual_seed(seed)
    for weight in (experts.gate_up_proj, experts.down_proj):
        drawn = torch.randn(weight.shape, generator=generator, dtype=torch.float32)
        weight.add_((drawn * (noise * weight[0].float().std().item())).to(weight))
