"""The state of any model's routers: gradient, scale and entropy of the logits, load."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from moebook.errors import refuse
from moebook.models.anatomy import Layer, anatomy
from moebook.nn import Decision, evaluating, observe


def logit_scale(logits: Tensor) -> float:
    """Return the standard deviation of a token's logits over the experts, as a root mean square.

    A token's mean is taken out first, since adding a constant to all its logits changes nothing.

    Args:
        logits: ``[T, E]``.
    """
    centred = logits.double() - logits.double().mean(-1, keepdim=True)
    return float(centred.square().mean().sqrt())


def statistics(model: nn.Module, batches: Iterable[Mapping[str, Tensor]]) -> pd.DataFrame:
    """Measure every router over some text, padding left out.

    Works on models with routers of `moebook.nn` and on transformers' own (Mixtral, OLMoE, Qwen
    MoE). The model runs in evaluation mode and is given back in the mode it came in.

    Args:
        model: A routed causal language model.
        batches: Each with ``input_ids`` and, where padded, ``attention_mask`` ``[B, T]``.

    Returns:
        One row a layer: ``scale`` (see `logit_scale`), ``entropy`` of a token's probabilities over
        ln E, averaged over tokens (1: undecided, 0: certain), ``load_entropy``, that of the
        experts' shares of the routed slots over ln E, and ``largest``, the largest share.

    Raises:
        Refusal: E-MODEL when the model has no routers; E-DATA when there are no tokens.
    """
    layers = routed(model)
    totals = torch.zeros(len(layers), 3, dtype=torch.float64)
    slots: list[Any] = [0] * len(layers)
    for batch in batches:
        for place, decision in enumerate(decisions(model, batch)):
            logs = decision.logits.double().log_softmax(-1)
            nats = -(logs.exp() * logs).sum(-1).sum()
            squares = logit_scale(decision.logits) ** 2 * len(logs)
            totals[place] += torch.stack([torch.tensor(squares), nats, torch.tensor(len(logs))])
            counted = torch.bincount(decision.ids.flatten(), minlength=logs.shape[1])
            slots[place] = slots[place] + counted
    if not totals[:, 2].all():
        refuse("E-DATA", "no tokens to measure the routers on: give at least one batch")
    rows = []
    for layer, (squares, nats, tokens), counted in zip(layers, totals, slots, strict=True):
        share = counted / counted.sum()
        limit = math.log(max(len(share), 2))
        load = float(-torch.special.xlogy(share, share).sum()) / limit
        scale = math.sqrt(float(squares / tokens))
        rows.append((layer.index, scale, float(nats / tokens) / limit, load, float(share.max())))
    return pd.DataFrame(rows, columns=["layer", "scale", "entropy", "load_entropy", "largest"])


def gradients(model: nn.Module, batch: Mapping[str, Any]) -> pd.DataFrame:
    """Measure the gradient of the language-model loss at every router's weights.

    The balance loss is no part of it. Nothing is changed: no ``.grad`` is written, and the model
    is given back in the mode it came in (it runs in evaluation mode, without dropout).

    Args:
        model: A routed causal language model.
        batch: ``input_ids``, ``attention_mask`` and ``labels`` ``[B, T]``.

    Returns:
        One row a layer: ``gradient``, the Euclidean norm over the router's ``[E, D]`` weights.

    Raises:
        Refusal: E-MODEL when the model has no routers or they do not require a gradient.
    """
    layers, device = routed(model), next(model.parameters()).device
    weights = [layer.router.weight for layer in layers]  # type: ignore[union-attr]
    if not all(weight.requires_grad for weight in weights):
        refuse("E-MODEL", "a router does not require a gradient: model.requires_grad_(True) first")
    read = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in batch.items()}
    with evaluating(model), torch.enable_grad():
        found = torch.autograd.grad(model(**read).loss, weights, allow_unused=True)
    norms = [0.0 if grad is None else float(grad.norm()) for grad in found]
    return pd.DataFrame({"layer": [layer.index for layer in layers], "gradient": norms})


def summary(
    model: nn.Module, batches: Iterable[Mapping[str, Tensor]], batch: Mapping[str, Any]
) -> dict[str, float]:
    """Summarise all routers of a model together.

    Args:
        model: A routed causal language model whose routers require a gradient.
        batches: For `statistics`, whose ``scale``, ``entropy`` and ``load_entropy`` are averaged
            over layers.
        batch: For `gradients`: ``gradient`` is the norm over all routers' weights.
    """
    means = statistics(model, batches)[["scale", "entropy", "load_entropy"]].mean()
    norm = np.linalg.norm(gradients(model, batch).gradient)
    return {"gradient": float(norm), **means.to_dict()}


def decisions(model: nn.Module, batch: Mapping[str, Tensor]) -> list[Decision]:
    """Return what each router decided for a batch's real tokens, ``[T, E]`` and ``[T, K]``, on CPU.

    Raises:
        Refusal: E-MODEL when the model has no routers, or one whose output is not understood.
    """
    layers = routed(model)
    seen = observe(model, {layer.index: layer.router for layer in layers}, batch)
    real = [seen[layer.index].real() for layer in layers]
    return [Decision(each.logits.cpu(), each.ids.cpu(), each.gates.cpu()) for each in real]


def routed(model: nn.Module) -> list[Layer]:
    """Return the sparse layers of a model, or refuse one without."""
    layers = [layer for layer in anatomy(model).layers if layer.router is not None]
    if not layers:
        refuse("E-MODEL", "the model has no routers: it is dense")
    return layers
