"""Which expert serves which domain: shares of tokens by layer and expert, summarised."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated

import numpy as np
import pandas as pd
import torch
from pydantic import AfterValidator, Field, SkipValidation
from torch import Tensor, nn

from moebook.errors import refuse, refuse_unknown
from moebook.nn import observe, routers
from moebook.settings import Count, checked, columns

KEYS = ["layer", "router"]  # what tells one router from another: a layer may have several
SUM = 1e-6  # by which the shares of a domain and router may miss 1


def _whole(frame: pd.DataFrame) -> pd.DataFrame:
    """Refuse shares of which some are missing, twice there or no shares of a whole."""
    of_router = frame.groupby(KEYS)
    lines = of_router.size()
    wanted = of_router.domain.nunique() * of_router.expert.nunique()
    if (lines != wanted).any() or frame.duplicated([*KEYS, "domain", "expert"]).any():
        refuse("E-DATA", "shares: expected each expert of a router once for each domain")
    if (frame[["layer", "expert", "slots", "share"]] < 0).any(axis=None):
        refuse("E-RANGE", "shares: a layer, expert, count or share is below 0")
    sums = frame.groupby([*KEYS, "domain"]).share.sum()
    if not np.allclose(sums, 1, atol=SUM):
        refuse("E-RANGE", f"shares: those of a domain and router sum to {sums.min():g}, expected 1")
    return frame


Shares = Annotated[
    pd.DataFrame,
    columns("router domain", numbers="layer expert slots share"),
    AfterValidator(_whole),
]
"""What `shares` returns."""


@checked
def shares(
    model: nn.Module,
    batches: Annotated[
        Mapping[str, SkipValidation[Iterable[Mapping[str, Tensor]]]], Field(min_length=1)
    ],
) -> pd.DataFrame:
    """Measure each expert's share of the slots of each router, by domain (PESC Fig. 4).

    For routers of `moebook.nn`, padding left out. Columns layer, router (its path in the model),
    domain, expert, slots (count), share (sums to 1 within a domain and router).
    """
    modules = routers(model)
    if not modules:
        refuse("E-MODEL", "the model has no routers of moebook: craft or upcycle it first")
    names, rows = {module: name for name, module in model.named_modules()}, []
    for domain, several in batches.items():
        slots = {router: torch.zeros(len(router.weight)).double() for router in modules}
        for batch in several:
            for router, decision in observe(model, {each: each for each in modules}, batch).items():
                ids = decision.real().ids.flatten().cpu()
                slots[router] += torch.bincount(ids, minlength=len(router.weight))
        for router, counted in slots.items():
            if not (total := counted.sum()):
                refuse("E-DATA", f"domain '{domain}' has no tokens to count")
            rows += [
                (router.layer, names[router], domain, expert, int(count), float(count / total))
                for expert, count in enumerate(counted)
            ]
    return pd.DataFrame(rows, columns=[*KEYS, "domain", "expert", "slots", "share"])


@checked
def load(frame: Shares) -> pd.DataFrame:
    """Summarise the load of each router over all domains of `shares` together.

    One row a router, with its layer: ``entropy``, that of the experts' shares over ln E (1 uniform;
    at least ln K over ln E), and ``largest``, the largest share of one expert (1/E to 1/K).
    """
    slots = frame.pivot_table(index=KEYS, columns="expert", values="slots", aggfunc="sum")
    share = slots.div(slots.sum(axis=1), axis=0)
    logs = np.log(share.where(share > 0, 1.0))
    entropy = -(share * logs).sum(axis=1) / max(np.log(share.shape[1]), 1e-12)
    entropy = entropy.clip(0, 1)  # rounding can pass 1 by a hair
    return pd.DataFrame({"entropy": entropy, "largest": share.max(axis=1)}).reset_index()


@checked
def specialisation(frame: Shares) -> pd.DataFrame:
    """Measure how differently each domain of `shares` is routed from the average domain.

    Columns layer, router, domain, distance: half the summed absolute difference (total variation,
    in [0, 1]) between the domain's shares and the mean of all domains' shares.
    """
    wide = frame.pivot(index=[*KEYS, "domain"], columns="expert", values="share")
    average = wide.groupby(level=KEYS).transform("mean")
    distance = (wide - average).abs().sum(axis=1) / 2
    return distance.rename("distance").reset_index()


@checked
def contrast(shares: Shares, one: str, other: str) -> tuple[float, float]:
    """Measure how differently two domains are routed, in the paper's way and layer by layer.

    Returns two total variations in [0, 1]: that of shares averaged over the routers (router
    initialisation, Table 7), in which preferences cancel where an expert's number has no common
    meaning through the layers; and the mean of each router's own.
    """
    for name in (one, other):
        refuse_unknown(name, set(shares.domain), "E-NAME", f"no domain '{name}' in the shares;")
    wide = shares.pivot(index=KEYS, columns=["domain", "expert"], values="share")
    gap = wide[one] - wide[other]
    return float(gap.mean().abs().sum() / 2), float(gap.abs().sum(axis=1).mean() / 2)


@checked
def panels(shares: Shares, most: Count = 4) -> dict[str, pd.DataFrame]:
    """Arrange `shares` for heat maps, domains by experts, of ``most`` layers from first to last."""
    last = int(shares.layer.max())
    layers = set(np.linspace(0, last, min(most, last + 1)).astype(int))
    return {
        f"layer {layer}": part.pivot_table(index="domain", columns="expert", values="share")
        for layer, part in shares.groupby("layer")
        if layer in layers
    }


@checked
def stacks(shares: Shares, most: Count = 4) -> dict[str, pd.Series]:
    """Arrange `shares` over all domains for stacked bars, of the layers that `panels` shows."""
    slots = shares.pivot_table(index="layer", columns="expert", values="slots", aggfunc="sum")
    spread = slots.div(slots.sum(axis=1), axis=0).rename(index="layer {}".format)
    return {name: spread.loc[name] for name in panels(shares, most)}


@checked
def summary(shares: Shares) -> dict[str, float]:
    """Sum `shares` up in three means over routers and domains, each in [0, 1]."""
    loads, distances = load(shares), specialisation(shares).distance
    means = loads.entropy.mean(), loads.largest.mean(), distances.mean()
    return dict(zip(("load_entropy", "largest_share", "specialisation"), means, strict=True))
