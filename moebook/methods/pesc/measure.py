"""What PESC is measured by: its balance loss, its distance from full experts, its size and cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from accelerate.utils import send_to_device
from datasets import Dataset as Rows
from torch import Tensor, nn
from transformers import PreTrainedConfig

from moebook import nn as mnn
from moebook.data import IGNORED
from moebook.errors import refuse, refuse_unknown
from moebook.kernels.bank_scoring import token_nats
from moebook.kernels.dispatch import shapes
from moebook.methods.pesc.apply import Origin, craftable, install
from moebook.methods.pesc.config import Config
from moebook.models import checkpoint
from moebook.models.anatomy import anatomy, count
from moebook.models.skeleton import configuration, skeleton
from moebook.nn import balance, evaluating
from moebook.nn.batch import check_batch
from moebook.training import fit, step_memory

HOSTS = {
    "llama-2-7b": "meta-llama/Llama-2-7b-hf",
    "llama-2-13b": "meta-llama/Llama-2-13b-hf",
    "yi-34b": "01-ai/Yi-34B",
}
# Billions of parameters (Table 2).
PRINTED = {
    "llama-2-7b": 8,
    "llama-2-13b": 15,
    "yi-34b": 38,
}
# Short runs that `cost` times, and their steps; the first is a warm-up.
TURNS = 3
STEPS = 6


def balance_loss(model: nn.Module, attention_mask: Tensor | None = None) -> Tensor:
    """Return ``alpha * E * sum_i f_i p_i``, summed over sparse layers, of the last pass (Eq. 10).

    See `moebook.nn.balance`; 0 for the dense arm and for ``balance="none"``, which take a mask as
    the others do. The mask ``[B, T]`` is 1 for real tokens, by default that which the model was
    called with.
    """
    config = checkpoint.origin(model, Origin).config
    routers = mnn.routers(model)
    if config.balance == "none" or not routers:
        _check_mask(routers, attention_mask)
        return torch.zeros((), device=next(model.parameters()).device)
    # Eq. 10: alpha times n sum_i f_i p_i, which `balance` sums over layers.
    return config.balance_weight * balance(routers, attention_mask, form=config.balance)


def _check_mask(routers: Sequence[mnn.Router], mask: Tensor | None) -> None:
    """Refuse a mask that fits no batch, or not the one that routers saw last."""
    if mask is not None and mask.dim() != 4:  # which is a block mask
        shapes("balance_loss", {"attention_mask": (mask, "B T", "real")}, empty="")
    for router in routers:
        trace = router.trace
        seen = trace.decisions.get(router.layer) if trace else None
        if trace is not None and seen is not None:
            trace.padding(len(seen.ids), mask)


def balance_gradient(model: nn.Module, batch: Mapping[str, Any]) -> tuple[float, float]:
    """Return a batch's balance loss, mean over layers, and its gradient's norm over all routers.

    A frozen router has no part in the norm. No parameter's ``.grad`` is written.
    """
    check_batch("balance_gradient", model, batch)
    config = checkpoint.origin(model, Origin).config
    routers = mnn.routers(model)
    if not routers:
        hint = "the dense arm: prepare it with sparse=True"
        refuse("E-MODEL", f"balance_gradient: the model has no routers, as {hint}")
    if config.balance == "none":
        hint = "expected 'live', 'kept' or 'constant'"
        refuse("E-CHOICE", f"balance_gradient: balance is 'none', {hint}")
    model(**batch)  # leaves its decisions in the routers' trace
    value = balance_loss(model) / len(routers)
    weights = [router.weight for router in routers if router.weight.requires_grad]
    # Where the host trains, frozen routers' loss has a gradient, but none of theirs.
    if not (weights and value.requires_grad):
        why = "the routers are frozen, or the model is in evaluation mode: model.train() first"
        refuse(
            "E-GRADIENT", f"balance_gradient: the balance loss has no gradient: {why}"
        )
    # A weight that the loss does not depend on gives zeros.
    grads = torch.autograd.grad(value, weights, materialize_grads=True)
    norm = torch.stack([grad.norm() for grad in grads]).norm()
    return value.item(), norm.item()


class Approximation(NamedTuple):
    """How near adapters come to full experts; lists go over the labelled rows."""

    # |loss(full) - loss(pesc)|, nats per labelled token: xi of Eq. 6 is the mean.
    gaps: list[float]
    # The mean is the share of the full experts' gain that adapters reach.
    recovered: list[float]
    output_error: float  # |pesc - full| / |full - dense| of the layers' outputs


@torch.no_grad()
def approximation_error(
    pesc: nn.Module,
    full: nn.Module,
    dense: nn.Module,
    batches: Iterable[Mapping[str, Any]],
) -> Approximation:
    """Measure how far trained adapters are from full experts of the same start and data (Eq. 6).

    Both start from ``dense``, ``pesc`` crafted with ``host="frozen"``, ``full`` by `full_experts`.
    Batches hold ``input_ids``, ``attention_mask`` and ``labels [B, T]``; a row without a label
    counts in the output error alone.

    F of Eq. 6 is the training objective, so what counts is the loss: ``recovered`` averages to
    ``(loss(dense) - loss(pesc)) / (loss(dense) - loss(full))``, 1 where adapters learn as much. The
    output error is a mean over layers for real tokens on equal inputs, those of the dense base: 0
    is exact, 1 is what never training the adapters would give.
    """
    models = {"pesc": pesc, "full": full, "dense": dense}
    _check_start(models)
    rows: list[Tensor] = []
    squares = torch.zeros(2, len(anatomy(dense).layers), dtype=torch.float64)
    with evaluating(pesc), evaluating(full), evaluating(dense):
        for given in batches:
            check_batch(
                "approximation_error", dense, given, needs=["labels", "attention_mask"]
            )
            batch = send_to_device(given, pesc.device)
            losses = []
            for name, model in models.items():
                losses.append(_row_losses(model, batch))
                _check_measured(f"the loss of {name}", losses[-1])
            rows.append(torch.stack(losses))  # [3, S]
            squares += _squared_distances(pesc, full, dense, batch)
            _check_measured("the distance of the layers' outputs", squares)
    if not rows:
        refuse(
            "E-DATA", "no batch to measure the approximation error on; give one or more"
        )
    of_pesc, of_full, of_dense = torch.cat(rows, 1)  # [S] each
    # Eq. 6: |F(theta+, omega_o) - F(theta_o, omega+)|, F a row's loss.
    gaps = (of_full - of_pesc).abs()

    # By the mean gain: that of a single row may be near 0, or below.
    gain = (of_dense - of_full).mean()
    recovered = (of_dense - of_pesc) / gain

    # Where full experts stayed the dense MLP there is nothing to approximate.
    pesc_to_full, full_to_dense = squares  # [L] each
    learnt = full_to_dense > 0
    distance = (pesc_to_full[learnt] / full_to_dense[learnt]).sqrt()
    return Approximation(gaps.tolist(), recovered.tolist(), float(distance.mean()))


def _check_start(models: Mapping[str, nn.Module]) -> None:
    """Refuse models of different bases (E-BASE), and full experts that learnt nothing (E-DATA)."""
    dense = models["dense"]
    base = checkpoint.fingerprint(dense)
    for name in ("pesc", "full"):
        made_from = checkpoint.origin(models[name], Origin)
        checkpoint.check_base(f"approximation_error: {name}", made_from.base, base)

    pairs = zip(anatomy(models["full"]).layers, anatomy(dense).layers, strict=True)
    for of_full, of_dense in pairs:
        if isinstance(of_full.mlp, mnn.ExpertMoE):
            start = mnn.Experts(of_dense.mlp, 1).state_dict()
            for part, weight in of_full.mlp.experts.state_dict().items():
                if (weight != start[part]).any():
                    return
    still = "full's experts are the dense MLPs still, so they gain nothing"
    refuse("E-DATA", f"approximation_error: {still}; train them first")


def _check_measured(what: str, values: Tensor) -> None:
    if not values.isfinite().all():
        fix = "look for NaN or infinity in the weights"
        refuse("E-NONFINITE", f"approximation_error: {what} is not finite; {fix}")


def _row_losses(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """Return the mean nats per labelled token of each row that has one, ``[S]``."""
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    # Each place foretells the token after it.
    logits = model(**inputs).logits[:, :-1]  # [B, T - 1, V]
    labels = batch["labels"][:, 1:]  # [B, T - 1]
    nats = token_nats(logits, labels).double().sum(1)  # [B], 0 where nothing is asked
    tokens = (labels != IGNORED).sum(1)
    labelled = tokens > 0
    return nats[labelled] / tokens[labelled]


def _squared_distances(
    pesc: nn.Module, full: nn.Module, dense: nn.Module, batch: Mapping[str, Any]
) -> Tensor:
    """Return squared distances pesc-full and full-dense, ``[2, L]``, on the dense MLPs' inputs."""
    seen: dict[int, tuple[Tensor, Tensor]] = {}  # by layer: input and output, [B, T, D]

    def see(layer: int, arguments: tuple[Any, ...], output: Tensor) -> None:
        seen[layer] = arguments[0], output

    mlps = {number: layer.mlp for number, layer in enumerate(anatomy(dense).layers)}
    with mnn.hooked(mlps, see):
        dense(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])

    real = batch["attention_mask"].bool()
    distances = []
    # All three get the dense model's inputs: no layer answers for those before it.
    pairs = zip(anatomy(pesc).layers, anatomy(full).layers, seen.values(), strict=True)
    for of_pesc, of_full, (x, output) in pairs:
        by_pesc = of_pesc.mlp(x)[real].double()  # [real tokens, D]
        by_full = of_full.mlp(x)[real].double()
        by_dense = output[real].double()
        pesc_full = (by_pesc - by_full).square().sum()
        full_dense = (by_full - by_dense).square().sum()
        distances.append([pesc_full, full_dense])
    return torch.tensor(distances, dtype=torch.float64).T


class Counts(NamedTuple):
    """Numbers of parameters, LoRA merged."""

    dense: int  # of the host
    adapters: int
    routers: int
    total: int  # of the crafted model
    # That one token uses: the host, the routers, and K of E adapters a layer.
    activated: int


def counts(config: Config, host: str | PreTrainedConfig) -> Counts:
    """Count a crafted model's parameters on meta, for one of `HOSTS` or a configuration."""
    if isinstance(host, str):
        refuse_unknown(host, HOSTS, "E-MODEL", f"unknown host '{host}';")
        host = configuration(HOSTS[host])
    model = skeleton(host)
    dense = count(model)
    install(craftable(model, config), config)
    adapters = sum(
        count(part) for part in model.modules() if isinstance(part, mnn.Adapters)
    )
    routers = sum(count(part) for part in mnn.routers(model))
    # A token passes over E - K of the E adapters of a layer.
    idle = adapters * (config.experts - config.top_k) // config.experts
    total = count(model)
    return Counts(dense, adapters, routers, total, total - idle)


def matched(dense: nn.Module, config: Config) -> Config:
    """Widen LoRA, at its scale, until the dense arm trains as many parameters as the sparse one.

    Counted is the host that ``dense.config`` describes, whole, even where some layers are cut off.
    """
    host = skeleton(dense.config)
    linears = (
        m for name, m in host.named_modules() if name.endswith(config.lora_targets)
    )
    # LoRA of rank r adds A [r, in] and B [out, r] to a linear layer.
    per_rank = sum(linear.in_features + linear.out_features for linear in linears)
    sparse = counts(config, dense.config)
    rank = config.lora_rank + round((sparse.adapters + sparse.routers) / per_rank)
    return replace(
        config, lora_rank=rank, lora_alpha=config.lora_alpha * rank / config.lora_rank
    )


def printed_sizes() -> pd.DataFrame:
    """Set the paper's three crafted hosts beside the sizes that Table 2 prints.

    Numbers of parameters at width 512, ``total_64`` at 64, which the released code trains; between
    ``implied_width_low`` and ``implied_width_high`` the total rounds to what is printed.
    """
    wide = Config.preset("fixed")
    released = Config.preset("released")
    lines: dict[str, dict[str, float]] = {}
    for host, printed in PRINTED.items():
        size = counts(wide, host)
        rest = size.dense + size.routers
        # At width R the total is rest + R per_width, here solved for R at the edges of
        # what rounds to the printed number.
        per_width = size.adapters / wide.adapter_width
        lines[host] = {
            "dense": size.dense,
            "total": size.total,
            "activated": size.activated,
            "total_64": counts(released, host).total,
            "implied_width_low": ((printed - 0.5) * 1e9 - rest) / per_width,
            "implied_width_high": ((printed + 0.5) * 1e9 - rest) / per_width,
        }
    return pd.DataFrame(lines).T


def cost(
    dense: nn.Module,
    sparse: nn.Module,
    train: Rows,
    inputs: Mapping[str, Tensor],
    **recipe: Any,
) -> tuple[list[float], float]:
    """Return what a step of the crafted model costs over one of the dense arm: times and bytes.

    Both train in turns by the recipe of `training.fit`, so that a busy machine slows both. Times
    are the median ratios of a step's seconds by turn; bytes are counted for ``inputs``,
    ``input_ids`` and ``attention_mask`` ``[B, T]``, in which each token is its label.
    """
    check_batch("cost", dense, inputs)
    pair = dense.train(), sparse.train()
    labelled = {**inputs, "labels": inputs["input_ids"]}
    memory = [step_memory(model, labelled).total for model in pair]
    ratios = []
    for turn in range(TURNS):
        settings = {**recipe, "steps": STEPS, "seed": turn, "penalty": balance_loss}
        # Seconds count from the start, so the differences leave out the first step.
        times = [np.diff(fit(model, train, **settings).seconds) for model in pair]
        ratios.append(float(np.median(times[1] / times[0])))
    return ratios, memory[1] / memory[0]
