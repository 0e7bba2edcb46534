"""Which LoRAs become experts: diversity without forming B A (Eq. 6), and Algorithm 1."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy.stats import rankdata
from torch import Tensor

from moebook import kernels
from moebook.errors import nearest, refuse
from moebook.methods.rocket import bank as banks
from moebook.methods.rocket.config import Config
from moebook.methods.rocket.loras import Lora

RANKINGS = ("perplexity", "accuracy", "diversity")
MOST_GROUPS = 1_000_000
"""Most groups that are all listed, where their totals are not those of Alg. 1."""
COLUMNS = (("R_P", "perplexity"), ("R_A", "accuracy"), ("R_D", "diversity"))
BEST = 1000
"""Most groups that a `Selection` holds."""
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Selection:
    """The experts that Alg. 1 chooses, and how it came to them.

    Attributes:
        experts: N names, the least sum of R_P and R_A first.
        candidates: One row a LoRA of the bank, in that order: ``perplexity``, ``accuracy``, their
            ranks ``R_P`` and ``R_A`` (1 is best) and ``candidate``, whether it is among the M.
        groups: One row a group of N candidates, the `BEST` of them, best first: ``members``,
            ``similarity`` (mean cosine), ``diversity`` (Eq. 6), ``R_P`` and ``R_A`` (sums over the
            members), ``R_D`` (rank among all groups) and ``total``.
    """

    experts: tuple[str, ...]
    candidates: pd.DataFrame
    groups: pd.DataFrame


def similarity(bank: Mapping[str, Lora], config: Config | None = None) -> pd.DataFrame:
    """Compare all pairs of LoRAs: the cosine of each matrix, averaged over the layers (Eq. 6).

    With the product, ``<B_i A_i, B_j A_j>`` is the sum over the R x R entries of
    ``(B_i' B_j) * (A_i A_j')``: no ``B A`` is formed. alpha / r cancels. A matrix that is zero in
    one of the two has cosine 0.

    Args:
        bank: LoRAs by name.
        config: ``compare`` and ``cosine``; `Config`'s own by default. ``"factors"`` gives the mean
            of the absolute cosines of A and of B, which depends on the basis in which a LoRA
            happens to be written; ``"absolute"`` works layer by layer.

    Returns:
        ``[N, N]``, symmetric, float64, indexed by name.

    Raises:
        Refusal: E-BANK as in `bank.check`.
    """
    banks.check(bank)
    config = config or Config()
    total = np.zeros((len(bank), len(bank)))
    paths = next(iter(bank.values())).down
    for path in paths:
        down = torch.stack([lora.down[path].double() for lora in bank.values()])  # [N, R, D]
        up = torch.stack([lora.up[path].double() for lora in bank.values()])  # [N, O, R]
        if config.compare == "factors":
            inner = (_cosines(_gram(down)).abs() + _cosines(_gram(up)).abs()) / 2
        else:
            inner = _cosines(_product(down, up))
        total += (inner.abs() if config.cosine == "absolute" else inner).numpy()
    return pd.DataFrame(total / len(paths), index=list(bank), columns=list(bank))


def diversity(similarities: pd.DataFrame, group: Sequence[str], *, form: str = "ordered") -> float:
    """Return Omega of a group (Eq. 6): the inverse of its members' mean pairwise cosine.

    Eq. 6 multiplies the sum over ordered pairs by ``2 / (N (N - 1))``, so that as printed it is
    half of this; no ranking depends on that. It is undefined at a mean of 0, and negative, so
    least, for the most different groups.

    Args:
        similarities: From `similarity`.
        group: Names.
        form: ``"ordered"``: infinite from a mean of 0 downwards; ``"inverse"``: as printed,
            infinite at 0 only.

    Returns:
        Above 0; infinite for a group of one.
    """
    mean = float(_means(similarities, [tuple(group)])[0])
    if mean == 0 or (mean < 0 and form == "ordered"):
        return math.inf
    return 1 / mean


def select(
    scores: pd.DataFrame,
    similarities: pd.DataFrame,
    config: Config,
    *,
    rankings: Sequence[str] = RANKINGS,
) -> Selection:
    """Choose N experts out of M candidates out of the bank (Alg. 1), exactly and repeatably.

    R_P ranks the whole bank by perplexity from the smallest, R_A by accuracy from the largest; the
    M least sums are the candidates; R_D ranks all groups of N candidates by diversity from the
    largest; the group with the least total wins. Equal values share a rank (1, 2, 2, 4), so that
    LoRAs of equal accuracy, frequent with few shots, are told apart by perplexity and not by the
    alphabet; equal sums are settled by name.

    Args:
        scores: From `scoring.scores`.
        similarities: From `similarity`, of these LoRAs at least.
        config: M, N, ``diversity`` and ``ranking``.
        rankings: Which of perplexity, accuracy and diversity count (Table 2's ablations).

    Raises:
        Refusal: E-BANK for fewer LoRAs than M, E-CHOICE for another ranking, E-NONFINITE for
            scores that are not finite, E-RANGE for more than `kernels.groups.MOST` groups, or
            `MOST_GROUPS` without diversity or with normalised ranks: those are listed one by one.
    """
    _check(scores, similarities, config, rankings)
    table = scores.sort_index()[["perplexity", "accuracy"]].copy()
    table["R_P"] = _ranks(table["perplexity"].to_numpy())
    table["R_A"] = _ranks(-table["accuracy"].to_numpy())
    worth = table["R_P"] * ("perplexity" in rankings) + table["R_A"] * ("accuracy" in rankings)
    table = table.iloc[np.argsort(worth.to_numpy(), kind="stable")]
    table["candidate"] = np.arange(len(table)) < config.candidates
    members = sorted(table.index[table["candidate"]])
    groups = _groups(table.loc[members], similarities, config, rankings)
    chosen = set(groups["members"].iloc[0])
    return Selection(tuple(str(n) for n in table.index if n in chosen), table, groups)


def _groups(
    members: pd.DataFrame, similarities: pd.DataFrame, config: Config, rankings: Sequence[str]
) -> pd.DataFrame:
    """Rank all groups of N members; groups come in the order of their names, so ties keep it."""
    names, given = list(members.index), similarities.loc[members.index, members.index].to_numpy()
    worth = members[[key for key, name in COLUMNS[:2] if name in rankings]].sum(axis=1)
    found = kernels.groups(
        torch.tensor(given), torch.tensor(worth.to_numpy()), config.experts,
        best=BEST if _as_printed(config, rankings) else MOST_GROUPS, diversity=config.diversity,
    )  # fmt: skip
    places, ranks = found.members.numpy(), found.rank.numpy()
    order = np.lexsort(places.T[::-1])
    places, ranks = places[order], ranks[order]
    means = _pair_means(given, places)
    omega = np.divide(1, means, out=np.full(len(means), np.inf), where=means != 0)
    if config.diversity == "ordered":
        omega[means < 0] = np.inf
    table = pd.DataFrame(
        {
            "members": [tuple(names[place] for place in group) for group in places],
            "similarity": means,
            "diversity": omega,
            "R_P": members["R_P"].to_numpy()[places].sum(axis=1),
            "R_A": members["R_A"].to_numpy()[places].sum(axis=1),
            "R_D": ranks,
        }
    )
    terms = table[[key for key, name in COLUMNS if name in rankings]].astype(np.float64)
    if config.ranking == "normalised":
        spread = (terms.max() - terms.min()).replace(0, 1)
        terms = (terms - terms.min()) / spread
    table["total"] = terms.sum(axis=1)
    return table.sort_values("total", kind="stable", ignore_index=True).head(BEST)


def _check(
    scores: pd.DataFrame, similarities: pd.DataFrame, config: Config, rankings: Sequence[str]
) -> None:
    for name in rankings:
        if name not in RANKINGS:
            refuse("E-CHOICE", f"unknown ranking '{name}'; {nearest(name, RANKINGS)}")
    if not rankings:
        refuse("E-CHOICE", f"no ranking is given; {nearest('', RANKINGS)}")
    if len(scores) < config.candidates:
        refuse(
            "E-BANK",
            f"the bank has {len(scores)} scored LoRAs, candidates (M) is {config.candidates}:"
            " lower M or widen the bank",
        )
    if not np.isfinite(scores[["perplexity", "accuracy"]].to_numpy(dtype=np.float64)).all():
        refuse("E-NONFINITE", "the scores hold NaN or infinity: see scoring.scores")
    unknown = sorted(set(scores.index) - set(similarities.index))
    if unknown:
        refuse("E-BANK", f"no similarity is known for {unknown[:3]}: compare the same bank")
    number = math.comb(config.candidates, config.experts)
    if number > MOST_GROUPS and not _as_printed(config, rankings):
        refuse(
            "E-RANGE",
            f"{config.candidates} candidates have {number:,} groups of {config.experts}, at most"
            f" {MOST_GROUPS:,} are listed where ranking is '{config.ranking}' by"
            f" {', '.join(rankings)}: lower M",
        )


def _as_printed(config: Config, rankings: Sequence[str]) -> bool:
    """Whether a group's total is worth plus R_D as in Alg. 1, so that few groups can be best."""
    return config.ranking == "sum" and "diversity" in rankings


def _ranks(values: Array) -> Array:
    """Rank from the smallest, 1 to n; equal values share the least of their ranks."""
    return np.asarray(rankdata(values, method="min"), dtype=np.int64)


def _means(similarities: pd.DataFrame, groups: list[tuple[str, ...]]) -> Array:
    places = similarities.index.get_indexer([name for group in groups for name in group])
    return _pair_means(similarities.to_numpy(), places.reshape(len(groups), -1))


def _pair_means(matrix: Array, groups: Array) -> Array:
    """Return the mean over the pairs of each group ``[G, N]``; 0 for groups of one."""
    size = groups.shape[1]
    total = np.zeros(len(groups))
    for i, j in combinations(range(size), 2):
        total += matrix[groups[:, i], groups[:, j]]
    return total / max(size * (size - 1) / 2, 1)


def _product(down: Tensor, up: Tensor) -> Tensor:
    """Inner products ``[N, N]`` of all ``B_i A_i`` with one another, from R x R products."""
    count, rank, _ = down.shape
    rows = down.flatten(0, 1)  # [N * R, D]
    columns = up.transpose(1, 2).flatten(0, 1)  # [N * R, O]
    small = (rows @ rows.T) * (columns @ columns.T)
    return small.view(count, rank, count, rank).sum((1, 3))


def _gram(stack: Tensor) -> Tensor:
    flat = stack.flatten(1)
    return flat @ flat.T


def _cosines(gram: Tensor) -> Tensor:
    """Divide inner products by both norms; 0 where a norm is 0."""
    norms = gram.diagonal().clamp(min=0).sqrt()
    scale = norms[:, None] * norms[None, :]
    return torch.where(scale > 0, gram / scale.where(scale > 0, 1), 0.0)
