"""Which expert serves which domain: shares of tokens by layer, summarised."""

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

__all__ = [
    "contrast",
    "load",
    "panels",
    "shares",
    "specialisation",
    "stacks",
    "summary",
]

KEYS = ["layer", "router"]  # what a router is known by: a layer may have several
TOLERANCE = 1e-6  # by which the shares of a domain and router may miss 1


def _whole(frame: pd.DataFrame) -> pd.DataFrame:
    """Refuse shares of which some are missing, twice there or no shares of a whole."""
    of_router = frame.groupby(KEYS)
    expected = frame.domain.nunique() * of_router.expert.nunique()
    # A line that stands twice would hide one that is missing.
    twice = frame.duplicated([*KEYS, "domain", "expert"])
    if (of_router.size() != expected).any() or twice.any():
        once = "expected each expert of a router once for each domain"
        refuse("E-DATA", f"shares: {once}")
    if (frame[["layer", "expert", "slots", "share"]] < 0).any(axis=None):
        refuse("E-RANGE", "shares: a layer, expert, count or share is below 0")
    sums = frame.groupby([*KEYS, "domain"]).share.sum()
    off = (sums - 1).abs()
    if off.max() > TOLERANCE:
        farthest = sums[off.idxmax()]
        wrong = f"those of a domain and router sum to {farthest:g}, expected 1"
        refuse("E-RANGE", f"shares: {wrong}")
    return frame


Shares = Annotated[
    pd.DataFrame,
    columns("router domain", numbers="layer expert slots share"),
    AfterValidator(_whole),
]
"""What `shares` returns."""


Batches = Iterable[Mapping[str, Tensor]]


@checked
def shares(
    model: nn.Module,
    batches: Annotated[Mapping[str, SkipValidation[Batches]], Field(min_length=1)],
) -> pd.DataFrame:
    """Measure each expert's share of the slots of each router, by domain (PESC Fig. 4).

    For routers of `moebook.nn`, padding left out. Columns layer, router (its path in
    the model), domain, expert, slots (count), share (sums to 1 within a domain and
    router).
    """
    modules = routers(model)
    if not modules:
        missing = "the model has no routers of moebook"
        refuse("E-MODEL", f"{missing}: craft or upcycle it first")
    paths = {module: path for path, module in model.named_modules()}
    watched = {router: router for router in modules}
    rows = []
    for domain, of_domain in batches.items():
        slots = {router: torch.zeros(len(router.weight)).double() for router in modules}
        for batch in of_domain:
            for router, decision in observe(model, watched, batch).items():
                ids = decision.real().ids.flatten().cpu()  # [T * K]
                slots[router] += torch.bincount(ids, minlength=len(router.weight))
        for router, counts in slots.items():
            total = counts.sum()
            if total == 0:
                refuse("E-DATA", f"domain '{domain}' has no tokens to count")
            for expert, count in enumerate(counts):
                key = (router.layer, paths[router], domain, expert)
                rows.append((*key, int(count), float(count / total)))
    return pd.DataFrame(rows, columns=[*KEYS, "domain", "expert", "slots", "share"])


@checked
def load(frame: Shares) -> pd.DataFrame:
    """Summarise the load of each router over all domains of `shares` together.

    One row a router, with its layer: ``entropy``, that of the experts' shares over ln E
    (1 uniform; at least ln K over ln E), and ``largest``, the largest share of one
    expert (1/E to 1/K).
    """
    share = _over_domains(frame, KEYS)  # routers by experts
    # Sum -s ln s over ln E, where 0 ln 0 counts as 0.
    logs = np.log(share.where(share > 0, 1.0))
    experts = share.notna().sum(axis=1)  # routers may have different numbers of them
    uniform = np.log(experts).clip(lower=1e-12)  # of a single expert it would be 0
    entropy = -(share * logs).sum(axis=1) / uniform
    entropy = entropy.clip(0, 1)  # rounding can pass 1 by a hair
    largest = share.max(axis=1)
    return pd.DataFrame({"entropy": entropy, "largest": largest}).reset_index()


def _over_domains(frame: pd.DataFrame, index: str | list[str]) -> pd.DataFrame:
    """Each expert's share of the slots of all domains, one column an expert."""
    slots = frame.pivot_table(
        index=index, columns="expert", values="slots", aggfunc="sum"
    )
    return slots.div(slots.sum(axis=1), axis=0)


@checked
def specialisation(frame: Shares) -> pd.DataFrame:
    """Measure how differently each domain of `shares` is routed from the average one.

    Columns layer, router, domain, distance: half the summed absolute difference (total
    variation, in [0, 1]) between the domain's shares and the mean of all domains'
    shares.
    """
    wide = frame.pivot(index=[*KEYS, "domain"], columns="expert", values="share")
    # Each domain counts alike in the mean, however much text it has.
    average = wide.groupby(level=KEYS).transform("mean")
    # Total variation: 1/2 sum_e |s_e - mean s_e|.
    distance = (wide - average).abs().sum(axis=1) / 2
    return distance.rename("distance").reset_index()


@checked
def contrast(shares: Shares, one: str, other: str) -> tuple[float, float]:
    """Measure how differently two domains are routed: the paper's way, and by layer.

    Returns two total variations in [0, 1]. The first is that of shares averaged over the
    routers (router initialisation, Table 7), in which preferences cancel where an
    expert's number has no common meaning through the layers. The second is the mean of
    each router's own.
    """
    for name in (one, other):
        message = f"no domain '{name}' in the shares;"
        refuse_unknown(name, set(shares.domain), "E-NAME", message)
    wide = shares.pivot(index=KEYS, columns=["domain", "expert"], values="share")
    # Routers by experts; one that a router lacks serves nothing there.
    gap = (wide[one] - wide[other]).fillna(0.0)
    # Table 7 averages over layers first: 1/2 sum_e |mean_l (s_le - s'_le)|.
    averaged = gap.mean().abs().sum() / 2
    # By router: 1/2 sum_e |s_le - s'_le|.
    by_router = gap.abs().sum(axis=1) / 2
    return float(averaged), float(by_router.mean())


@checked
def panels(shares: Shares, most: Count = 4) -> dict[str, pd.DataFrame]:
    """Arrange `shares` for heat maps, domains by experts, of ``most`` layers."""
    present = sorted(shares.layer.unique())  # not every layer has a router
    # Evenly spaced among these, from the first on.
    count = min(most, len(present))
    places = np.linspace(0, len(present) - 1, count).astype(int)
    layers = {present[place] for place in places}
    tables = {}
    for layer, of_layer in shares.groupby("layer"):
        if layer in layers:
            # Where a layer has several routers, the mean of their shares.
            table = of_layer.pivot_table(
                index="domain", columns="expert", values="share"
            )
            tables[f"layer {layer}"] = table
    return tables


@checked
def stacks(shares: Shares, most: Count = 4) -> dict[str, pd.Series]:
    """Arrange `shares` of all domains for stacked bars, of the layers of `panels`."""
    share = _over_domains(shares, "layer").rename(index="layer {}".format)
    return {name: share.loc[name] for name in panels(shares, most)}


@checked
def summary(shares: Shares) -> dict[str, float]:
    """Sum `shares` up in three means over routers and domains, each in [0, 1]."""
    loads = load(shares)
    return {
        "load_entropy": loads.entropy.mean(),
        "largest_share": loads.largest.mean(),
        "specialisation": specialisation(shares).distance.mean(),
    }
