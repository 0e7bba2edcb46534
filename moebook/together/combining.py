"""Combinations that nobody published: one method's start, choice or experts inside another.

- TRSU's and CRSU's routers in PESC: `route`. Adapters start from zero, so step 0 stays dense.
- A bank of LoRAs as PESC's adapters: `as_adapters`.
- ESFT's choice of experts on adapters: `only`.
- Rocket's choice as the router's start: `by_expert`, whose groups go to `upcycling.trsu`.
- PESC behind a mixture: `beside_experts`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

from moebook import nn as mnn
from moebook.errors import refuse, refuse_unknown
from moebook.kernels.dispatch import natural, shapes
from moebook.methods.esft.choose import Selection
from moebook.methods.rocket.loras import Lora, check_alike
from moebook.methods.upcycling.starts import Start
from moebook.models.anatomy import (
    anatomy,
    beside,
    count,
    dense_layers,
    graft,
    sparse_layers,
)
from moebook.nn import ChosenRows, evaluating, hooked
from moebook.nn.batch import check_batch
from moebook.settings import Each, Size, checked

Batches = Iterable[Mapping[str, Any]]


@torch.no_grad()
def route(model: nn.Module, start: Start) -> nn.Module:
    """Start the model's routers at given weights ``[L, E, D]``, in place."""
    layers = len(anatomy(model).layers)
    if len(start.weights) != layers:
        refuse(
            "E-SHAPE",
            f"the start is of {len(start.weights)} layers, the model has {layers}",
        )
    for router in mnn.routers(model):
        weight = start.weights[router.layer]  # [E, D]
        if weight.shape != router.weight.shape:
            shapes = (
                f"{tuple(weight.shape)} for a router of {tuple(router.weight.shape)}"
            )
            refuse("E-SHAPE", f"the start is {shapes}, [E, D]")
        router.weight.copy_(weight)
    return model


class AsAdapters(NamedTuple):
    """A bank of N LoRAs of rank R on the MLPs' last projections, as adapters of width 2 R."""

    down: Tensor  # [L, N, D, 2 R]
    up: Tensor  # [L, N, 2 R, D]
    # [L, N] share of |A f|^2 that h C explains, over the batches' tokens.
    explained: Tensor


@torch.no_grad()
def as_adapters(
    model: nn.Module, loras: Sequence[Lora], batches: Batches
) -> AsAdapters:
    """Turn LoRAs on a dense model's ``down_proj`` into PESC's adapters, which read its output.

    With ``h = W f`` a LoRA adds ``s B A f``, an adapter ``gelu(h V) U``. Since ``gelu(z) -
    gelu(-z) = z``, ``V = [C, -C]`` and ``U = s [B', -B']`` make it linear: ``s B C' h``. C' is the
    least-squares fit of ``A f`` to h over the batches' tokens: exact where A's rows lie in W's row
    space, else not, as h has D numbers and f has F > D. E-DATA where the batches hold D tokens
    or fewer, through which any fit goes.
    """
    layers = dense_layers(anatomy(model), None, "PESC")
    check_alike(loras, ranks=True)
    paths = {part: path for path, part in model.named_modules()}
    ends = {layer.index: layer.mlp.down_proj for layer in layers}
    for end in ends.values():
        lacking = [lora.name for lora in loras if paths[end] not in lora.down]
        if lacking:
            what = f"'{lacking[0]}' adapts no {paths[end]}"
            refuse("E-KEYS", f"{what}: train the bank on down_proj")
    read = {paths[end] for end in ends.values()}
    for lora in loras:
        others = sorted(lora.down.keys() - read)
        if others:
            what = f"'{lora.name}' adapts {others[0]} too, which no adapter reads"
            refuse("E-KEYS", f"{what}: train the bank on down_proj alone")

    seen = _through(model, ends, batches)
    down: list[Tensor] = []
    up: list[Tensor] = []
    explained: list[Tensor] = []
    for layer, end in ends.items():
        f = seen[layer][0].double()  # [T, F]
        h = seen[layer][1].double()  # [T, D]
        path = paths[end]
        a_f = torch.stack([f @ lora.down[path].to(f).T for lora in loras])  # [N, T, R]

        # C minimises |h C - A f|^2.
        c = torch.linalg.lstsq(h.expand(len(loras), -1, -1), a_f).solution  # [N, D, R]
        missed = (a_f - h @ c).square().sum((1, 2))  # [N]
        explained.append(1 - missed / a_f.square().sum((1, 2)))

        # gelu(h C) s B' - gelu(-h C) s B' = h C s B'.
        s_b = torch.stack([lora.scale * lora.up[path].to(f).T for lora in loras])
        down.append(torch.cat([c, -c], 2).float())  # V = [C, -C], [N, D, 2R]
        up.append(torch.cat([s_b, -s_b], 1).float())  # U = s [B', -B'], [N, 2R, D]
    return AsAdapters(torch.stack(down), torch.stack(up), torch.stack(explained))


def _through(
    model: nn.Module, linears: Mapping[int, nn.Linear], batches: Batches
) -> dict[int, tuple[Tensor, Tensor]]:
    """Return what goes into linear layers and comes out, ``[T, F]`` and ``[T, D]``.

    T are the real tokens of all batches.
    """
    entering: dict[int, list[Tensor]] = {layer: [] for layer in linears}
    leaving: dict[int, list[Tensor]] = {layer: [] for layer in linears}
    masks: list[Tensor] = []

    def see(layer: int, arguments: tuple[Any, ...], output: Tensor) -> None:
        # The running batch's real tokens: [B, T, F] to [t, F], [B, T, D] to [t, D].
        entering[layer].append(arguments[0][masks[-1]])
        leaving[layer].append(output[masks[-1]])

    device = next(model.parameters()).device
    with evaluating(model), hooked(linears, see):
        for batch in batches:
            check_batch("as_adapters", model, batch, needs=["attention_mask"])
            ids = batch["input_ids"].to(device)
            mask = batch["attention_mask"].to(device)
            masks.append(mask.bool())
            model(input_ids=ids, attention_mask=mask, use_cache=False)
    if not masks:
        refuse("E-DATA", "as_adapters: no batch is given, expected one at least")
    tokens = sum(int(mask.sum()) for mask in masks)
    width = next(iter(linears.values())).out_features
    # Through D points and fewer a fit goes exactly, and would explain all of whatever it is given.
    if tokens <= width:
        refuse(
            "E-DATA",
            f"as_adapters: the batches hold {tokens} real tokens, expected more than the "
            f"host's width, {width}, to fit to",
        )
    return {
        layer: (torch.cat(entering[layer]), torch.cat(leaving[layer]))
        for layer in linears
    }


@torch.no_grad()
def start_adapters(model: nn.Module, start: AsAdapters) -> nn.Module:
    """Give a crafted model's adapters a start, in place; their numbers and width must fit."""
    for layer in anatomy(model).layers:
        part = layer.experts
        shape = tuple(start.down[layer.index].shape)
        if not isinstance(part, mnn.Adapters) or tuple(part.down.shape) != shape:
            refuse(
                "E-SHAPE",
                f"layer {layer.index} holds no adapters of {shape}, [E, D, R]",
            )
        part.down.copy_(start.down[layer.index])
        part.up.copy_(start.up[layer.index])
    return model


def only(model: nn.Module, selection: Selection) -> nn.Module:
    """Let a crafted model's selected adapters train and nothing else, in place.

    All adapters of a layer are two tensors, of which no part can be frozen: the others are read
    without a gradient, so that AdamW leaves them as they are. Weight decay would not, and `fit`
    refuses it.
    """
    model.requires_grad_(False)
    for layer in sparse_layers(model):
        part = layer.experts
        chosen = list(selection.experts[layer.index])
        if not isinstance(part, mnn.Adapters):
            refuse(
                "E-MODEL",
                f"layer {layer.index} holds no adapters: esft.specialise takes it",
            )
        for name in ("down", "up"):
            weight = getattr(part, name).requires_grad_(True)
            register_parametrization(part, name, ChosenRows(chosen, weight))
    return model


def trained(model: nn.Module) -> int:
    """Count the parameters that train."""
    chosen = [part for part in model.modules() if isinstance(part, ChosenRows)]
    # Adapters require a gradient as one tensor, also for the rows that stay.
    return count(model, trained=True) - sum(part.idle for part in chosen)


@checked
def by_expert(
    nats: pd.DataFrame, experts: Annotated[Each[str], Field(min_length=1)]
) -> dict[str, list[int]]:
    """Deal shots out to the LoRAs that model them best, by the nats ``[N, K]`` of their answers.

    A LoRA that is best on none gets the shot on which it lags least.
    """
    experts = tuple(experts)
    if len({*experts}) < len(experts):
        refuse("E-NAME", f"a LoRA is named twice: {', '.join(experts)}")
    twice = sorted(nats.index[nats.index.duplicated()])
    if twice:
        refuse("E-BANK", f"'{twice[0]}' stands twice in the nats: score each LoRA once")
    for name in experts:
        refuse_unknown(
            name, nats.index, "E-NAME", f"no nats are given for LoRA '{name}';"
        )
    chosen = nats.loc[list(experts)]
    shapes("by_expert", {"nats": (chosen.to_numpy(), "N K", "real")}, empty="")
    if not np.isfinite(chosen.to_numpy()).all():
        refuse("E-NONFINITE", "by_expert: nats hold NaN or infinity")
    lag = (chosen - chosen.min()).to_numpy()  # [N, K] nats behind the best
    best = lag.argmin(0)  # [K]
    dealt: dict[str, list[int]] = {}
    for place, name in enumerate(experts):
        own = np.flatnonzero(best == place).tolist()
        # No group stays empty: its centroid is where the router's row starts.
        dealt[name] = own or [int(lag[place].argmin())]
    return dealt


@checked
def beside_experts(
    model: nn.Module, *, experts: Size, top_k: Size, width: Size
) -> nn.Module:
    """Put PESC's routed adapters behind the MoE blocks of a sparse host, in place; they train.

    They read what the block puts out. ``up`` starts at zero, so the model is the host at first.
    """
    natural("beside_experts", "top_k", top_k, experts, "experts")
    host = anatomy(model)
    layers = sparse_layers(model)
    model.requires_grad_(False)

    def build(layer: Any, router: mnn.Router) -> nn.Module:
        made = mnn.Adapters(
            host.hidden, experts, width, dropout=0.1, **beside(router.weight)
        )
        # The whole MoE block in the place of PESC's shared FFN.
        return mnn.AdapterMoE(layer.mlp, router, made)

    graft(host, layers, build, experts=experts, top_k=top_k)
    return model
