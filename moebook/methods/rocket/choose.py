"""Which LoRAs become experts: diversity without forming B A (Eq. 6), and Algorithm 1."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Annotated, Literal

import numpy as np
import pandas as pd
import torch
from pydantic import Field
from scipy.stats import rankdata
from torch import Tensor

from moebook.errors import refuse
from moebook.kernels.dispatch import shapes
from moebook.kernels.groups import groups as best_groups
from moebook.methods.rocket.config import Config
from moebook.methods.rocket.loras import Lora, check_alike
from moebook.settings import checked, columns

__all__ = [
    "Selection",
    "diversity",
    "select",
    "similarity",
]

Ranking = Literal["perplexity", "accuracy", "diversity"]
RANKINGS: dict[Ranking, str] = {
    "perplexity": "R_P",
    "accuracy": "R_A",
    "diversity": "R_D",
}
BEST = 1000  # most groups that a `Selection` holds
ROUNDING = 1e-6  # by which cosines may lie off
Array = np.ndarray


@dataclass(frozen=True)
class Selection:
    """The experts that Alg. 1 chooses, and how it came to them."""

    experts: tuple[str, ...]  #: N names, the least sum of R_P and R_A first
    #: The bank in that order, with scores, ranks (1 is best), whether among M.
    candidates: pd.DataFrame
    #: The best groups of N candidates, with mean cosine, Eq. 6, sums of ranks, R_D, total.
    groups: pd.DataFrame


def similarity(bank: Mapping[str, Lora], config: Config | None = None) -> pd.DataFrame:
    """Compare all pairs of LoRAs: the cosine of each matrix, averaged over the layers (Eq. 6).

    ``[N, N]``, symmetric, float64, indexed by name. ``<B_i A_i, B_j A_j>`` is the sum over the
    R x R entries of ``(B_i' B_j) * (A_i A_j')``: no ``B A`` is formed. A matrix that is zero in one
    of the two has cosine 0. By ``config.compare`` it is also the mean of the absolute cosines of A
    and of B, which depends on a LoRA's basis; ``config.cosine`` acts layer by layer.
    """
    check_alike(list(bank.values()))
    config = config or Config()
    total = np.zeros((len(bank), len(bank)))
    paths = next(iter(bank.values())).down
    for path in paths:
        # A [N, R, D] and B [N, O, R] of all LoRAs; alpha / R cancels in a cosine.
        down = torch.stack([lora.down[path].double() for lora in bank.values()])
        up = torch.stack([lora.up[path].double() for lora in bank.values()])
        if config.compare == "factors":
            # As released: the mean of the absolute cosines of A and of B.
            of_down = _cosines(down.flatten(1) @ down.flatten(1).T).abs()
            of_up = _cosines(up.flatten(1) @ up.flatten(1).T).abs()
            cosines = (of_down + of_up) / 2
        else:
            # Eq. 6: <E_i, E_j> / (|E_i| |E_j|), E the matrix B A of this layer.
            cosines = _cosines(_product(down, up))  # [N, N]
        if config.cosine == "absolute":
            cosines = cosines.abs()
        total += cosines.numpy()
    # Averaged over layers, each matrix by its own norms: a large one weighs no more.
    return pd.DataFrame(total / len(paths), index=list(bank), columns=list(bank))


def _product(down: Tensor, up: Tensor) -> Tensor:
    """Inner products ``[N, N]`` of all ``B_i A_i`` with one another, from R x R products."""
    count, rank, _ = down.shape
    rows = down.flatten(0, 1)  # [N * R, D]
    columns = up.transpose(1, 2).flatten(0, 1)  # [N * R, O]
    # tr(A_i' B_i' B_j A_j) is the sum over the R x R block (i, j) of this.
    small = (rows @ rows.T) * (columns @ columns.T)  # [N * R, N * R]
    return small.view(count, rank, count, rank).sum((1, 3))


def _cosines(gram: Tensor) -> Tensor:
    """Divide inner products ``[N, N]`` by both norms; 0 where a norm is 0."""
    # By rounding, `_product` may give a square a little below 0.
    norms = gram.diagonal().clamp(min=0).sqrt()  # [N]
    scale = norms[:, None] * norms[None, :]
    return torch.where(scale > 0, gram / scale.where(scale > 0, 1), 0.0)


@checked
def diversity(cosines: Array, form: Literal["ordered", "inverse"] = "ordered") -> Array:
    """Return Omega (Eq. 6) of groups, the inverse of their members' mean pairwise cosine ``[G]``.

    Eq. 6 sums over ordered pairs, so that as printed it is half of this; no ranking depends on it.
    As printed (``"inverse"``) it is undefined at a mean of 0, here infinite, and negative, so
    least, for the most different groups; ``"ordered"`` is infinite from 0 downwards.
    """
    shapes("diversity", {"cosines": (cosines, "G", "real")}, empty="G")
    if not np.isfinite(cosines).all():
        refuse("E-NONFINITE", "diversity: cosines hold NaN or infinity")
    # Eq. 6: Omega = 1 / mean cosine; where it is infinite, ``omega`` keeps what it has.
    infinite = cosines <= 0 if form == "ordered" else cosines == 0
    omega = np.full(len(cosines), np.inf)
    return np.divide(1, cosines, out=omega, where=~infinite)


@checked
def select(
    scores: Annotated[
        pd.DataFrame, columns(numbers="log_perplexity", shares="accuracy")
    ],
    similarities: pd.DataFrame,
    config: Config,
    *,
    rankings: Annotated[Sequence[Ranking], Field(min_length=1)] = tuple(RANKINGS),
) -> Selection:
    """Choose N experts out of M candidates out of the bank (Alg. 1), exactly and repeatably.

    R_P ranks the whole bank by perplexity from the smallest, R_A by accuracy from the largest; the
    M least sums are the candidates. R_D ranks all groups of N candidates by diversity from the
    largest; the group with the least total wins. Equal values share a rank (1, 2, 2, 4); equal sums
    are settled by name. Takes `score.scores` and `similarity`; ``rankings`` count (Table 2),
    perplexity or accuracy among them, which rank single LoRAs.

    >>> names = ["a", "b", "c"]
    >>> found = {"log_perplexity": [1.0, 2.0, 9.0], "accuracy": [0.9, 0.8, 0.1]}
    >>> scores = pd.DataFrame(found, index=names)
    >>> cosines = pd.DataFrame(np.eye(3), names, names)
    >>> config = Config(candidates=2, experts=2, top_k=1)
    >>> select(scores, cosines, config).experts
    ('a', 'b')
    """
    if not {"perplexity", "accuracy"} & {*rankings}:
        what = f"rankings is {rankings}, of which none ranks single LoRAs"
        refuse("E-CHOICE", f"{what}: add perplexity or accuracy")
    if len(scores) < config.candidates:
        have = f"the bank has {len(scores)} scored LoRAs, candidates (M) is {config.candidates}"
        refuse("E-BANK", f"{have}: lower M or widen the bank")
    for names in (scores.index, similarities.index, similarities.columns):
        twice = sorted(names[names.duplicated()])
        if twice:
            refuse(
                "E-BANK",
                f"'{twice[0]}' stands twice in the tables: score each LoRA once",
            )
        unknown = sorted(set(scores.index) - set(names))
        if unknown:
            refuse(
                "E-BANK",
                f"no similarity is known for {unknown[:3]}: compare the same bank",
            )
    # By name, which the stable sort below keeps among equal sums.
    table = scores.sort_index()[["log_perplexity", "accuracy"]].copy()
    # Alg. 1, line 3: rank 1 is the smallest perplexity, so its smallest logarithm.
    table["R_P"] = rankdata(table["log_perplexity"], method="min").astype(np.int64)
    # Line 4: rank 1 is the largest accuracy.
    table["R_A"] = rankdata(-table["accuracy"], method="min").astype(np.int64)
    # Line 6: B_M, the M least sums R_P + R_A (in Table 2 only one of them may count).
    used = [RANKINGS[name] for name in rankings if name != "diversity"]
    sums = table[used].sum(axis=1).to_numpy()
    table = table.iloc[np.argsort(sums, kind="stable")]
    table["candidate"] = np.arange(len(table)) < config.candidates
    # Lines 7 to 11; by name again, so that equal totals go by the names of a group.
    members = table[table["candidate"]].sort_index()
    groups = _groups(members, similarities, config, rankings)
    experts = set(groups["members"].iloc[0])
    # Line 12: B_E, in the table's order.
    return Selection(
        tuple(str(name) for name in table.index if name in experts), table, groups
    )


def _groups(
    members: pd.DataFrame,
    similarities: pd.DataFrame,
    config: Config,
    rankings: Sequence[Ranking],
) -> pd.DataFrame:
    """Rank all groups of N members; equal totals come in the order of their names."""
    columns = [RANKINGS[name] for name in RANKINGS if name in rankings]
    # A total that adds R_D as in Alg. 1 is the op's own; another needs all groups.
    few = config.ranking == "sum" and "diversity" in rankings
    cosines = similarities.loc[members.index, members.index].to_numpy()  # [M, M]
    _check_cosines(cosines)
    # [M]: R_P(m) + R_A(m) of each candidate.
    worth = members[[column for column in columns if column != "R_D"]].sum(axis=1)
    ranked = best_groups(
        torch.tensor(cosines),
        torch.tensor(worth.to_numpy()),
        config.experts,
        best=BEST if few else math.comb(config.candidates, config.experts),
        diversity=config.diversity,
    )
    groups = ranked.members.numpy()  # [G, N]
    means = _mean_cosines(cosines, groups)
    table = pd.DataFrame(
        {
            "members": list(map(tuple, members.index.to_numpy()[groups])),
            "similarity": means,
            "diversity": diversity(means, config.diversity),
            "R_P": members["R_P"].to_numpy()[groups].sum(axis=1),
            "R_A": members["R_A"].to_numpy()[groups].sum(axis=1),
            "R_D": ranked.rank.numpy(),  # lines 8 to 10, among all groups
        }
    )
    terms = table[columns].astype(np.float64)
    if config.ranking == "normalised":
        # A term that is alike for all groups becomes 0.
        span = terms.max() - terms.min()
        terms = (terms - terms.min()) / span.replace(0, 1)
    # Line 11: sum over m of (R_P(m) + R_A(m)), plus R_D of the group.
    table["total"] = terms.sum(axis=1)
    # The least total first; of equal ones by first member, then by second. Members are
    # numbered by name, and lexsort takes its last key first.
    best = np.lexsort((*groups.T[::-1], table["total"]))[:BEST]
    return table.iloc[best].reset_index(drop=True)


def _check_cosines(cosines: Array) -> None:
    """Refuse what `similarity` cannot have given, of LoRAs ``[M, M]``."""
    shapes("select", {"similarities": (cosines, "M M", "real")}, empty="")
    if not (np.abs(cosines) <= 1 + ROUNDING).all():
        refuse("E-RANGE", "select: similarities hold NaN or numbers outside [-1, 1]")
    if not np.allclose(cosines, cosines.T, atol=ROUNDING):
        refuse(
            "E-DATA",
            "select: similarities differ from their transpose; compare one bank",
        )


def _mean_cosines(cosines: Array, groups: Array) -> Array:
    """Return the mean over the pairs of each group ``[G, N]``; 0 for groups of one."""
    # Each pair once, since cosines are symmetric; a pair of columns is [G] and [G].
    pairs = combinations(groups.T, 2)
    total = np.zeros(len(groups))
    for one, other in pairs:
        total = total + cosines[one, other]
    # Of N (N - 1) / 2 pairs; a group of one has none, and its sum is 0.
    return total / max(math.comb(groups.shape[1], 2), 1)
