"""Sparse upcycling: each FFN of a dense decoder becomes E copies of it behind a router."""

from __future__ import annotations

import os
import warnings
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from moebook import nn as mnn
from moebook.errors import refuse
from moebook.methods.upcycling.config import Config
from moebook.methods.upcycling.starts import Start, su
from moebook.models import checkpoint
from moebook.models.anatomy import Anatomy, Layer, anatomy, dense_layers, graft, normed
from moebook.nn import balance
from moebook.settings import settings

NOISE = 2**32  # in the noise's seed: no seed, no layer and no process has this number


@settings
class Origin(checkpoint.Origin):
    """The settings of a model and its dense base's fingerprint, kept as ``model.upcycling``."""

    method: ClassVar[str] = "upcycling"
    config: Config


def upcycle(model: nn.Module, config: Config, start: Start | None = None) -> nn.Module:
    """Turn a dense decoder into one with full experts, in place (Sec. 2.1, 4.4).

    In each chosen layer E copies of the FFN, a gated MLP without biases, in fused
    3-D weights replace it, behind a linear router that reads its (normed) input in
    float32 or wider. Without a ``start`` the router is SU's, N(0, 0.02^2). What is
    new requires a gradient; the rest stays (the paper trains it all). W-ROUTER warns
    where, with K = 1, a norm stops them learning.

    >>> from moebook import models
    >>> model = upcycle(models.load("nano")[0], Config(experts=2, top_k=2))
    >>> anatomy(model).layers[0].count
    2
    """
    host = anatomy(model)
    layers = dense_layers(host, config.layers, "upcycling")
    # Of the dense weights, so before a layer is replaced.
    base = checkpoint.fingerprint(model)
    start = su(model, config.experts, seed=config.seed) if start is None else start
    checkpoint.check_base("the start", start.base or base, base)  # SU's fits any
    shape = tuple(start.weights.shape)
    # A start has rows for all L layers, also for those that stay dense.
    expected = (len(host.layers), config.experts, host.hidden)
    if shape != expected:
        refuse(
            "E-SHAPE", f"the router start is {shape}, expected [L, E, D] = {expected}"
        )
    _check_factors(config, start)
    # A norm divides what it reads by its size, and so cancels a weight that is the
    # only one.
    cancelling = normed(host, layers) if config.top_k == 1 < config.experts else []
    if cancelling:
        why = (
            f"norms follow the FFNs of layers {cancelling}, "
            "so that a token's only weight cancels"
        )
        hint = "take top_k=2, and noise for a gradient from the first step on"
        text = f"W-ROUTER: {why}: only the balance loss reaches their routers; {hint}"
        warnings.warn(text, stacklevel=2)
    _install(host, layers, start.weights, config, start.factors)
    model.upcycling = Origin(config=config, base=base)
    return model


def _check_factors(config: Config, start: Start) -> None:
    """Refuse the rule "scaled" without a start's factors, and factors under another rule."""
    if config.combine == "scaled" and start.factors is None:
        have = "combine is 'scaled', and the start has no factors"
        refuse("E-DATA", f"{have}; make it by levelled(start, inputs, top_k)")
    if config.combine != "scaled" and start.factors is not None:
        have = f"combine is '{config.combine}', and the start has factors"
        refuse("E-DATA", f"{have}; take combine='scaled', or a start without")


def save(model: nn.Module, folder: str | os.PathLike[str]) -> Path:
    """Write all parameters (all of them train) and the `Origin` to a new folder, of any host."""
    tensors = dict(model.named_parameters())
    return checkpoint.save(folder, checkpoint.origin(model, Origin), tensors)


def load(model: nn.Module, folder: str | os.PathLike[str]) -> nn.Module:
    """Restore a saved model onto its dense base, in place and bit for bit, after all checks."""

    def restore(model: nn.Module, made_from: Origin) -> dict[str, nn.Parameter]:
        # The file holds noise, factors and routers, so none is drawn or set here.
        config = replace(made_from.config, noise=0.0)
        host = anatomy(model)
        layers = dense_layers(host, config.layers, "upcycling")
        _install(
            host,
            layers,
            torch.zeros(len(host.layers), config.experts, host.hidden),
            config,
        )
        model.upcycling = made_from
        return dict(model.named_parameters())

    return checkpoint.load(model, folder, Origin, restore)


def balance_loss(model: nn.Module, attention_mask: Tensor | None = None) -> Tensor:
    """Return ``alpha * N * sum_i f_i P_i``, summed over sparse layers, of the last pass (Eq. 3, 4).

    f_i counts each token's first choice (the argmax of Eq. 4, also with K = 2). Correction: in
    Eq. 4 f and P sum to B; here both are shares of the batch's real tokens, those where
    ``attention_mask [B, T]`` is 1. A scalar with a gradient; a layer adds alpha where its loads are
    even, and alpha * N where one expert takes all.
    """
    weight = checkpoint.origin(model, Origin).config.balance_weight
    # Eq. 3, a term a layer: alpha * N * sum_i f_i P_i, with N = E. Eq. 4: in f a token
    # counts once, for its argmax, which is the first of its K choices.
    return weight * balance(mnn.routers(model), attention_mask, first=True)


def _install(
    host: Anatomy,
    layers: list[Layer],
    weights: Tensor,
    config: Config,
    factors: Tensor | None = None,
) -> None:
    """Put experts in the layers, behind routers that start at ``weights [L, E, D]``.

    A layer's factor ``[L]`` goes into its experts' last weights, so that a model of the rule
    "scaled" is one of Eq. 2 with other weights: its steps change what Eq. 2's change.
    """

    def build(layer: Layer, router: mnn.Router) -> nn.Module:
        experts = mnn.Experts(layer.mlp, config.experts)
        if config.noise:
            _disturb(experts, config.noise, config.seed, layer.index)
        with torch.no_grad():
            if factors is not None:
                # Eq. 2 times the layer's factor: the last product is linear, so it can
                # go into its weights, [E, D, F].
                experts.down_proj.mul_(factors[layer.index].to(experts.down_proj))
            router.weight.copy_(weights[layer.index])  # [E, D], W_r of Eq. 1
        return mnn.ExpertMoE(router, experts)

    # What "scaled" adds to Eq. 2 is in the experts: the router combines by Eq. 2.
    rule = "probability" if config.combine == "scaled" else config.combine
    how = {"experts": config.experts, "top_k": config.top_k, "combine": rule}
    graft(host, layers, build, **how)


@torch.no_grad()
def _disturb(experts: mnn.Experts, noise: float, seed: int, layer: int) -> None:
    """Add Gaussian noise, drawn on the CPU, of ``noise`` times each dense tensor's deviation.

    On meta, where nothing has a deviation, none is added.
    """
    if experts.down_proj.is_meta:
        return
    # Mixed: by seed + layer, layer 1 of seed 0 would get what layer 0 of seed 1 gets;
    # and by the seed alone layer 0 would get what its router starts from (`su`).
    mixed = np.random.SeedSequence([seed, layer, NOISE]).generate_state(1)[0]
    generator = torch.Generator().manual_seed(int(mixed))
    gate, up = experts.gate_up_proj.chunk(2, dim=1)  # [E, F, D]
    # Each expert gets a draw of its own.
    for weight in (gate, up, experts.down_proj):
        drawn = torch.randn(weight.shape, generator=generator, dtype=torch.float32)
        deviation = weight[0].float().std().item()  # all experts are still copies
        weight.add_((drawn * (noise * deviation)).to(weight))
