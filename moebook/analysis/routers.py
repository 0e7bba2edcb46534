"""The state of any routers: gradient, scale and entropy of logits, load, constancy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
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

__all__ = [
    "activated",
    "consistency",
    "decisions",
    "gradients",
    "logit_scale",
    "overall",
    "reach",
    "real_decisions",
    "statistics",
    "summary",
]


def logit_scale(logits: Tensor) -> float:
    """Standard deviation of a token's logits ``[T, E]`` over experts, RMS over T.

    A number without unit: the larger, the surer the router.
    """
    shapes("logit_scale", {"logits": (logits, "... T E")}, empty="")
    # sqrt(mean over tokens of the variance over experts).
    centred = logits.double() - logits.double().mean(-1, keepdim=True)
    return float(centred.square().mean().sqrt())


@dataclass
class _Totals:
    """Sums over the tokens that a router has seen."""

    tokens: int = 0
    squares: float = 0.0  # of the logits' scale
    nats: float = 0.0  # entropy of the logits' softmax
    slots: Any = 0  # routed slots of each expert, [E]

    def add(self, decision: Decision) -> None:
        """Add the tokens of a batch."""
        logs = decision.logits.double().log_softmax(-1)  # [T, E]
        self.tokens += len(logs)
        # A scale is a root mean square: its square times the tokens adds up.
        squares = logit_scale(decision.logits) ** 2 * len(logs)
        self.squares += float(np.float32(squares))  # as in all recorded runs
        entropies = -(logs.exp() * logs).sum(-1)  # [T], sum -p ln p
        self.nats += float(entropies.sum())
        ids = decision.ids.flatten()  # [T * K]
        self.slots = self.slots + torch.bincount(ids, minlength=logs.shape[1])

    def row(self) -> dict[str, float]:
        """Means over tokens, entropies as shares of that of an even choice."""
        share = self.slots / self.slots.sum()  # [E]
        even = math.log(max(len(share), 2))  # ln E; that of one expert would be 0
        return {
            "scale": math.sqrt(self.squares / self.tokens),
            "entropy": self.nats / self.tokens / even,
            # Sum -s ln s over ln E; xlogy gives 0, not NaN, for an unused expert.
            "load_entropy": float(-torch.special.xlogy(share, share).sum()) / even,
            "largest": float(share.max()),
        }


def statistics(
    model: nn.Module, batches: Iterable[Mapping[str, Tensor]]
) -> pd.DataFrame:
    """Measure every router, ours or of transformers, over some text, padding left out.

    Batches hold ``input_ids`` and ``attention_mask`` ``[B, T]``.

    Returns:
        One row a layer, with ``scale`` (see `logit_scale`), ``entropy`` of the softmax
        of a token's logits over ln E, averaged over tokens (1: undecided, 0: certain;
        the same where the gates themselves are sigmoids, so that families compare),
        ``load_entropy``, that of the experts' shares of the routed slots over ln E, and
        ``largest``, the largest share.
    """
    layers = sparse_layers(model)
    totals = [_Totals() for _ in layers]
    for batch in batches:
        for total, decision in zip(totals, real_decisions(model, batch), strict=True):
            if len(decision.logits):  # else a batch of padding
                total.add(decision)
    if not all(total.tokens for total in totals):
        missing = "no tokens to measure the routers on"
        refuse("E-DATA", f"{missing}: give at least one batch")
    frame = pd.DataFrame([total.row() for total in totals])
    frame.insert(0, "layer", [layer.index for layer in layers])
    return frame


def gradients(model: nn.Module, batch: Mapping[str, Any]) -> pd.DataFrame:
    """Measure the gradient of the model's loss, without balance loss, at its routers.

    One row a layer: ``gradient``, the Euclidean norm over all that trains of the
    router, in most families its weights ``[E, D]``. No ``.grad`` is written; the model
    runs in evaluation mode, without dropout.
    """
    layers = sparse_layers(model)
    weights = [_trained(layer.router) for layer in layers]
    every = list(chain.from_iterable(weights))
    # One backward pass for all layers; its norms come in the order of `every`.
    norms = iter(_gradients(model, batch, every))
    rows = []
    for layer, of_router in zip(layers, weights, strict=True):
        own = islice(norms, len(of_router))  # a norm a weight of the router
        rows.append((layer.index, math.hypot(*own)))
    return pd.DataFrame(rows, columns=["layer", "gradient"])


def reach(model: nn.Module, batch: Mapping[str, Any]) -> float:
    """Norm of the gradient at all routers over that at all experts (see `gradients`).

    Routers that learn have 0.001 or more. Equal experts give 0 until a first step parts
    them.
    """
    routers: list[Tensor] = []
    experts: list[Tensor] = []
    for layer in sparse_layers(model):
        routers += _trained(layer.router)
        experts += (p for p in layer.experts.parameters() if p.requires_grad)
    of_routers = math.hypot(*_gradients(model, batch, routers))
    return of_routers / math.hypot(*_gradients(model, batch, experts))


def _trained(router: nn.Module) -> list[Tensor]:
    """What trains of a router, be it called ``weight`` or lie in a layer of its own."""
    weights = [weight for weight in router.parameters() if weight.requires_grad]
    if not weights:
        hint = "model.requires_grad_(True) first"
        refuse("E-MODEL", f"a router does not require a gradient: {hint}")
    return weights


def _gradients(
    model: nn.Module, batch: Mapping[str, Any], weights: list[Tensor]
) -> list[float]:
    """Return the norm of the loss's gradient at each of the weights."""
    check_batch("gradients", model, batch, needs=["labels"])
    inputs = send_to_device(batch, next(model.parameters()).device)
    with evaluating(model), torch.enable_grad():
        loss = model(**inputs).loss
        # Writes no .grad; a weight that the loss does not depend on gives None.
        grads = torch.autograd.grad(loss, weights, allow_unused=True)
    return [0.0 if grad is None else float(grad.norm()) for grad in grads]


def summary(
    model: nn.Module, batches: Iterable[Mapping[str, Tensor]], batch: Mapping[str, Any]
) -> dict[str, float]:
    """Summarise all routers: means of `statistics` over layers, norm of `gradients`.

    Batches hold ``input_ids [B, T]``; the norm is of the loss in nats a token.
    """
    means = statistics(model, batches)[["scale", "entropy", "load_entropy"]].mean()
    norm = np.linalg.norm(gradients(model, batch).gradient)
    return {"gradient": float(norm), **means.to_dict()}


def activated(model: nn.Module, batches: Iterable[Mapping[str, Tensor]]) -> Tensor:
    """Return which experts each real token activates, ``[L, T, E]``, on the CPU."""
    sets = []
    for batch in batches:
        decisions = real_decisions(model, batch)
        if len({decision.logits.shape[1] for decision in decisions}) > 1:
            differ = "layers differ in their number of experts"
            refuse("E-SHAPE", f"{differ}: compare them one by one")
        layers = []
        for decision in decisions:
            none = torch.zeros_like(decision.logits)  # [T, E]
            layers.append(none.scatter(1, decision.ids, 1).bool())  # true at the chosen
        sets.append(torch.stack(layers))  # [L, T, E]
    if not any(tokens.shape[1] for tokens in sets):
        missing = "no tokens to see experts activated by"
        refuse("E-DATA", f"{missing}: give at least one batch")
    return torch.cat(sets, dim=1)


@checked
def consistency(checkpoints: Each[Tensor]) -> pd.DataFrame:
    """Compare the experts that tokens activate at checkpoints by the Jaccard index.

    Checkpoints are of `activated`, ``[L, T, E]`` over the same tokens.

    For a token and layer, ``|A and B| / |A or B|`` of the sets of activated experts,
    averaged over tokens and over all pairs of checkpoints (router initialisation, Sec.
    5.3.3, which leaves open which are compared). With K = 1 the mean is the share of
    tokens that kept their expert; two unrelated uniform routings give 1/E. Columns
    ``layer`` (place among sparse ones) and ``consistency`` in [0, 1].
    """
    checkpoints = tuple(checkpoints)
    if len(checkpoints) < 2:
        compares = "consistency compares at least two"
        refuse("E-DATA", f"{len(checkpoints)} checkpoints: {compares}")
    tensors = {}
    for number, sets in enumerate(checkpoints):
        tensors[f"checkpoint {number}"] = (sets, "L T E", "bool")
    shapes("consistency", tensors, empty="")
    for name, (sets, *_) in tensors.items():
        if not sets.any(-1).all():
            none = f"{name} has a token that activates no expert in a layer"
            refuse("E-RANGE", f"{none}, expected at least one")
    scores = []
    for before, after in combinations(checkpoints, 2):
        # Sec. 5.3.3, Jaccard's index of a token's experts before and after: those in
        # both over those in either.
        both = (before & after).sum(-1).double()  # [L, T]
        either = (before | after).sum(-1)
        scores.append((both / either).mean(-1))  # [L]
    means = torch.stack(scores).mean(0)  # [L]
    return pd.DataFrame({"layer": range(len(means)), "consistency": means.tolist()})


def overall(watched: Mapping[int, Tensor], steps: Iterable[int]) -> float:
    """Average `consistency` over layers, a share of what was `activated` (Table 6).

    ``watched`` is by step, ``[L, T, E]`` each.
    """
    checkpoints = []
    for step in steps:
        if step not in watched:
            there = list(watched)
            refuse("E-DATA", f"nothing was recorded after step {step}; after {there}")
        checkpoints.append(watched[step])
    return float(consistency(checkpoints).consistency.mean())


def real_decisions(model: nn.Module, batch: Mapping[str, Tensor]) -> list[Decision]:
    """What each layer's router decides for the real tokens, ``[T, ...]`` on the CPU."""
    on_cpu = []
    for decision in decisions(model, batch).values():
        real = decision.real()
        on_cpu.append(Decision(real.logits.cpu(), real.ids.cpu(), real.weights.cpu()))
    return on_cpu


def decisions(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[int, Decision]:
    """Each router's decisions by layer number; the decoder runs, without the head.

    The batch holds ``input_ids [B, T]``; a decision has ``logits [T, E]`` and ``ids [T, K]``.
    """
    routers = {layer.index: layer.router for layer in sparse_layers(model)}
    return observe(anatomy(model).decoder, routers, batch)
