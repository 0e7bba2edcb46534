"""Which expert serves which domain: shares of tokens by layer and expert, summarised."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from moebook.errors import refuse
from moebook.nn import observe, routers

KEYS = ["layer", "router"]
"""What tells one router from another: a layer may have several."""


def shares(model: nn.Module, batches: Mapping[str, Iterable[Mapping[str, Tensor]]]) -> pd.DataFrame:
    """Measure each expert's share of the slots of each router, by domain (PESC Fig. 4).

    Works on any model with routers of `moebook.nn`. Padding is left out. The model runs in
    evaluation mode and is given back in the mode it came in.

    Args:
        model: A crafted or upcycled model.
        batches: For each domain its batches, each with ``input_ids`` and, where padded,
            ``attention_mask`` ``[B, T]``.

    Returns:
        Columns layer, router (its path in the model: a layer may have several), domain, expert,
        slots (count), share (sums to 1 within a domain and router).

    Raises:
        Refusal: E-MODEL when the model has no routers, E-DATA when a domain has no tokens.
    """
    found = routers(model)
    if not found:
        refuse("E-MODEL", "the model has no routers of moebook: craft or upcycle it first")
    names, rows = {module: name for name, module in model.named_modules()}, []
    for domain, several in batches.items():
        slots = torch.zeros(len(found), len(found[0].weight), dtype=torch.float64)
        for batch in several:
            seen = observe(model, dict(enumerate(found)), batch)
            slots += torch.stack(
                [
                    torch.bincount(seen[place].real().ids.flatten().cpu(), minlength=slots.shape[1])
                    for place in range(len(found))
                ]
            )
        if not slots.sum():
            refuse("E-DATA", f"domain '{domain}' has no tokens to count")
        for router, counted in zip(found, slots, strict=True):
            total = counted.sum()
            rows += [
                (router.layer, names[router], domain, expert, int(count), float(count / total))
                for expert, count in enumerate(counted)
            ]
    return pd.DataFrame(rows, columns=[*KEYS, "domain", "expert", "slots", "share"])


def load(frame: pd.DataFrame) -> pd.DataFrame:
    """Summarise the load of each router over all domains together.

    Args:
        frame: From `shares`.

    Returns:
        One row a router, with its layer: ``entropy``, that of the experts' shares over ln E (1
        uniform; at least ln K over ln E, since a token takes K different experts), and
        ``largest``, the largest share of one expert (1/E when uniform, at most 1/K).
    """
    slots = frame.pivot_table(index=KEYS, columns="expert", values="slots", aggfunc="sum")
    share = slots.div(slots.sum(axis=1), axis=0)
    logs = np.log(share.where(share > 0, 1.0))
    entropy = -(share * logs).sum(axis=1) / max(np.log(share.shape[1]), 1e-12)
    entropy = entropy.clip(0, 1)  # rounding can pass 1 by a hair
    return pd.DataFrame({"entropy": entropy, "largest": share.max(axis=1)}).reset_index()


def specialisation(frame: pd.DataFrame) -> pd.DataFrame:
    """Measure how differently each domain is routed from the average domain.

    Args:
        frame: From `shares`.

    Returns:
        Columns layer, router, domain, distance: half the summed absolute difference (total
        variation, in [0, 1]) between the domain's shares and the mean of all domains' shares; 0
        when alike.
    """
    wide = frame.pivot(index=[*KEYS, "domain"], columns="expert", values="share")
    average = wide.groupby(level=KEYS).transform("mean")
    distance = (wide - average).abs().sum(axis=1) / 2
    return distance.rename("distance").reset_index()


def contrast(shares: pd.DataFrame, one: str, other: str) -> tuple[float, float]:
    """Measure how differently two domains are routed, in the paper's way and layer by layer.

    Args:
        shares: From `shares`.
        one: A domain.
        other: Another one.

    Returns:
        Two total variations in [0, 1]: that of shares averaged over the routers (router
        initialisation, Table 7), in which preferences cancel where an expert's number has no common
        meaning through the layers; and the mean of each router's own.
    """
    wide = shares.pivot(index=KEYS, columns=["domain", "expert"], values="share")
    gap = wide[one] - wide[other]
    return float(gap.mean().abs().sum() / 2), float(gap.abs().sum(axis=1).mean() / 2)


def panels(shares: pd.DataFrame, most: int = 4) -> dict[str, pd.DataFrame]:
    """Arrange `shares` for a heat map: a table of domains by experts for each of a few layers.

    Args:
        shares: From `shares`.
        most: At most so many layers, spread from the first to the last.
    """
    layers = set(np.linspace(0, shares.layer.max(), most).astype(int))
    return {
        f"layer {layer}": part.pivot_table(index="domain", columns="expert", values="share")
        for layer, part in shares.groupby("layer")
        if layer in layers
    }


def stacks(shares: pd.DataFrame, most: int = 4) -> dict[str, pd.Series]:
    """Arrange `shares` for stacked bars: each expert's share over all domains, for a few layers.

    Args:
        shares: From `shares`.
        most: At most so many layers, the same as those of `panels`.

    Returns:
        Layer's name to shares by expert ``[E]``, which sum to 1.
    """
    slots = shares.pivot_table(index="layer", columns="expert", values="slots", aggfunc="sum")
    spread = slots.div(slots.sum(axis=1), axis=0).rename(index="layer {}".format)
    return {name: spread.loc[name] for name in panels(shares, most)}


def summary(shares: pd.DataFrame) -> dict[str, float]:
    """Sum `shares` up in three numbers in [0, 1], means over routers and domains.

    Args:
        shares: From `shares`.

    Returns:
        ``load_entropy`` and ``largest_share`` from `load`, ``specialisation`` from
        `specialisation`.
    """
    loads, distances = load(shares), specialisation(shares).distance
    means = loads.entropy.mean(), loads.largest.mean(), distances.mean()
    return dict(zip(("load_entropy", "largest_share", "specialisation"), means, strict=True))
