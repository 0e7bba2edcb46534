"""The state of any model's routers: gradient, scale and entropy of the logits, load, constancy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import chain, combinations, islice
from typing import Any

import numpy as np
import pandas as pd
import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn

from moebook.errors import refuse
from moebook.kernels.dispatch import shapes
from moebook.models.anatomy import anatomy, sparse_layers
from moebook.nn import evaluating, observe
from moebook.nn.batch import check_batch
from moebook.nn.routing import Decision
from moebook.settings import Each, checked


def logit_scale(logits: Tensor) -> float:
    """Return the standard deviation of a token's logits ``[T, E]`` over experts, RMS over T."""
    shapes("logit_scale", {"logits": (logits, "... T E")}, empty="")
    centred = logits.double() - logits.double().mean(-1, keepdim=True)
    return float(centred.square().mean().sqrt())


def statistics(model: nn.Module, batches: Iterable[Mapping[str, Tensor]]) -> pd.DataFrame:
    """Measure every router, ours or of transformers, over some text, padding left out.

    Returns:
        One row a layer: ``scale`` (see `logit_scale`), ``entropy`` of a token's probabilities over
        ln E, averaged over tokens (1: undecided, 0: certain), ``load_entropy``, that of the
        experts' shares of the routed slots over ln E, and ``largest``, the largest share.
    """
    layers = sparse_layers(model)
    totals = torch.zeros(len(layers), 3, dtype=torch.float64)
    slots: list[Any] = [0] * len(layers)
    for batch in batches:
        for place, decision in enumerate(real_decisions(model, batch)):
            if not len(decision.logits):
                continue  # a batch of padding
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
    """Measure the gradient of the language-model loss, without balance loss, at every router.

    One row a layer: ``gradient``, the Euclidean norm over all that trains of the router, in most
    families its weights ``[E, D]``. No ``.grad`` is written; the model runs in evaluation mode,
    without dropout.
    """
    layers = sparse_layers(model)
    parts = [_trained(layer.router) for layer in layers]
    norms = iter(_gradients(model, batch, list(chain.from_iterable(parts))))
    gradient = [math.hypot(*islice(norms, len(part))) for part in parts]
    return pd.DataFrame({"layer": [layer.index for layer in layers], "gradient": gradient})


def reach(model: nn.Module, batch: Mapping[str, Any]) -> float:
    """Return the norm of all routers' gradient over that of all experts' (see `gradients`).

    Routers that learn have 0.001 or more. Equal experts give 0 until a first step parts them.
    """
    layers = sparse_layers(model)
    routers = chain.from_iterable(_trained(layer.router) for layer in layers)
    experts = [p for layer in layers for p in layer.experts.parameters() if p.requires_grad]
    norm_of_routers = math.hypot(*_gradients(model, batch, list(routers)))
    return norm_of_routers / math.hypot(*_gradients(model, batch, experts))


def _trained(router: nn.Module) -> list[Tensor]:
    """Return what trains of a router, be it called ``weight`` or lie in a layer of its own."""
    parameters = [part for part in router.parameters() if part.requires_grad]
    if not parameters:
        refuse("E-MODEL", "a router does not require a gradient: model.requires_grad_(True) first")
    return parameters


def _gradients(model: nn.Module, batch: Mapping[str, Any], weights: list[Tensor]) -> list[float]:
    """Return the norms of the loss's gradient at some parameters, which ask for one."""
    check_batch("gradients", model, batch, needs=["labels"])
    inputs = send_to_device(batch, next(model.parameters()).device)
    with evaluating(model), torch.enable_grad():
        grads = torch.autograd.grad(model(**inputs).loss, weights, allow_unused=True)
    return [0.0 if grad is None else float(grad.norm()) for grad in grads]


def summary(
    model: nn.Module, batches: Iterable[Mapping[str, Tensor]], batch: Mapping[str, Any]
) -> dict[str, float]:
    """Summarise all routers: means of `statistics` over layers, norm of `gradients` over all."""
    means = statistics(model, batches)[["scale", "entropy", "load_entropy"]].mean()
    norm = np.linalg.norm(gradients(model, batch).gradient)
    return {"gradient": float(norm), **means.to_dict()}


def activated(model: nn.Module, batches: Iterable[Mapping[str, Tensor]]) -> Tensor:
    """Return which experts each real token activates, ``[L, T, E]`` boolean on the CPU."""
    parts = []
    for batch in batches:
        layers = real_decisions(model, batch)
        if len({each.logits.shape[1] for each in layers}) > 1:
            refuse("E-SHAPE", "layers differ in their number of experts: compare them one by one")
        sets = [torch.zeros_like(each.logits).scatter(1, each.ids, 1) for each in layers]
        parts.append(torch.stack(sets).bool())
    if not sum(part.shape[1] for part in parts):
        refuse("E-DATA", "no tokens to see experts activated by: give at least one batch")
    return torch.cat(parts, dim=1)


@checked
def consistency(checkpoints: Each[Tensor]) -> pd.DataFrame:
    """Compare the experts that tokens activate at several checkpoints by the Jaccard index.

    For a token and layer, ``|A and B| / |A or B|`` of the sets of activated experts, averaged over
    tokens and over all pairs of checkpoints (router initialisation, Sec. 5.3.3, which leaves open
    which are compared). With K = 1 the mean is the share of tokens that kept their expert; two
    unrelated uniform routings give 1/E. Columns ``layer`` (place among sparse ones) and
    ``consistency`` in [0, 1].
    """
    checkpoints = tuple(checkpoints)
    if len(checkpoints) < 2:
        refuse("E-DATA", f"{len(checkpoints)} checkpoints: consistency compares at least two")
    named = {f"checkpoint {n}": (each, "L T E", "bool") for n, each in enumerate(checkpoints)}
    shapes("consistency", named, empty="")
    scores = [
        ((one & other).sum(-1).double() / (one | other).sum(-1)).mean(-1)
        for one, other in combinations(checkpoints, 2)
    ]
    means = torch.stack(scores).mean(0)
    return pd.DataFrame({"layer": range(len(means)), "consistency": means.tolist()})


def overall(watched: Mapping[int, Tensor], steps: Iterable[int]) -> float:
    """Average `consistency` over layers, of what was `activated` after some steps (Table 6)."""
    wanted = list(steps)
    if missing := [step for step in wanted if step not in watched]:
        refuse("E-DATA", f"nothing was recorded after step {missing[0]}; after {[*watched]}")
    return float(consistency([watched[step] for step in wanted]).consistency.mean())


def real_decisions(model: nn.Module, batch: Mapping[str, Tensor]) -> list[Decision]:
    """Return what each layer's router decides for the real tokens, ``[T, ...]`` on the CPU."""
    real = [seen.real() for seen in decisions(model, batch).values()]
    return [Decision(each.logits.cpu(), each.ids.cpu(), each.weights.cpu()) for each in real]


def decisions(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[int, Decision]:
    """Return each router's decisions by layer number; the decoder runs, without the head."""
    routers = {layer.index: layer.router for layer in sparse_layers(model)}
    return observe(anatomy(model).decoder, routers, batch)
