"""Sparse upcycling with full experts (Eq. 3), and how far PESC is from it (Eq. 6)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moebook import nn as mnn
from moebook.data import IGNORED
from moebook.errors import refuse
from moebook.methods.pesc.config import Config
from moebook.methods.pesc.crafting import Origin, checked, graft
from moebook.models.anatomy import anatomy
from moebook.models.fingerprint import fingerprint
from moebook.nn.modes import evaluating


def full_experts(model: nn.Module, config: Config) -> nn.Module:
    """Craft in place with E full copies of each MLP as experts: what PESC approximates (Eq. 3).

    Renormalised gates make it the dense function at first, as PESC is. The experts and routers are
    all of it that trains (theta_i of Eq. 3), the rest of the host is frozen; `balance_loss` works
    on it.

    Raises:
        Refusal: Those of `craft`; E-CHOICE unless ``config.host`` is ``"frozen"``, since in Eq. 6
            the experts alone differ.
    """
    if config.host != "frozen":
        refuse(
            "E-CHOICE", f"host is '{config.host}': Eq. 6 compares experts alone, use host='frozen'"
        )
    chosen = checked(model, config)
    made = Origin(config, True, fingerprint(model))
    graft(
        chosen,
        config,
        lambda layer, router: mnn.ExpertMoE(router, mnn.Experts(layer.mlp, config.experts)),
    )
    model.requires_grad_(False)
    for layer in anatomy(model).layers:
        if isinstance(layer.mlp, mnn.ExpertMoE):
            layer.mlp.requires_grad_(True)
    model.pesc = made
    return model


@dataclass(frozen=True)
class Approximation:
    """Eq. 6, measured on a set of batches.

    Attributes:
        loss_gap: Mean over rows of ``|loss(full) - loss(pesc)|``, nats per labelled token: xi of
            Eq. 6 with F the training objective.
        gaps: The same row by row.
        output_error: Mean over layers of ``|pesc - full| / |full - dense|``, norms over all real
            tokens: the layers' outputs on equal inputs, those of the dense base. 0 is exact, 1 is
            what never training the adapters would give.
    """

    loss_gap: float
    gaps: list[float]
    output_error: float


@torch.no_grad()
def approximation_error(
    pesc: nn.Module, full: nn.Module, dense: nn.Module, batches: Iterable[Mapping[str, Any]]
) -> Approximation:
    """Measure how far trained adapters are from full experts of the same start and data.

    Args:
        pesc: Crafted and trained with ``host="frozen"``.
        full: From `full_experts`, trained on the same steps.
        dense: The base both started from.
        batches: Each with ``input_ids``, ``attention_mask`` and ``labels`` ``[B, T]``, as the model
            takes them (also with ``logits_to_keep`` and the labels' last columns alone).

    All three are measured without dropout and get the mode back in which they came.

    Raises:
        Refusal: E-DATA without a batch.
    """
    gaps: list[float] = []
    distance = torch.zeros(2, len(anatomy(dense).layers), dtype=torch.float64)
    models = [pesc, full, dense]
    with evaluating(pesc), evaluating(full), evaluating(dense):
        for given in batches:
            batch = {
                key: value.to(models[0].device) if isinstance(value, Tensor) else value
                for key, value in given.items()
            }
            losses = [_row_losses(model, batch) for model in models[:2]]
            gaps += (losses[0] - losses[1]).abs().tolist()
            distance += _distances(models, batch)
    if not gaps:
        refuse("E-DATA", "no batch to measure the approximation error on; give one or more")
    moved = distance[1] > 0
    ratio = (distance[0][moved] / distance[1][moved]).sqrt()
    return Approximation(sum(gaps) / len(gaps), gaps, float(ratio.mean()))


def _row_losses(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """Return the mean nats per labelled token of each row ``[B]``."""
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    logits, labels = model(**inputs).logits[:, :-1].float(), batch["labels"][:, 1:]
    nats = nn.functional.cross_entropy(logits.mT, labels, ignore_index=IGNORED, reduction="none")
    return nats.sum(1) / (labels != IGNORED).sum(1).clamp(min=1)


def _distances(models: list[nn.Module], batch: Mapping[str, Any]) -> Tensor:
    """Return squared distances pesc-full and full-dense, ``[2, L]``, on the dense MLPs' inputs."""
    mlps = [[layer.mlp for layer in anatomy(model).layers] for model in models]
    seen: list[tuple[Tensor, Tensor]] = []
    with ExitStack() as hooks:
        for mlp in mlps[2]:
            see = mlp.register_forward_hook(lambda _, args, out: seen.append((args[0], out)))
            hooks.enter_context(see)
        models[2](input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    real = batch["attention_mask"].bool()
    rows = []
    for pesc, full, (x, dense) in zip(mlps[0], mlps[1], seen, strict=True):
        outputs = pesc(x)[real].double(), full(x)[real].double(), dense[real].double()
        rows.append(
            [(outputs[0] - outputs[1]).square().sum(), (outputs[1] - outputs[2]).square().sum()]
        )
    return torch.tensor(rows, dtype=torch.float64).T
