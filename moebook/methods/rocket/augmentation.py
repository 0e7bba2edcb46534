"""Which open data join the K shots: the nearest, then the duplicates out (Algorithm 2)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from moebook import kernels
from moebook.errors import refuse
from moebook.methods.rocket import sampling
from moebook.methods.rocket.config import CHOICES, Config
from moebook.methods.rocket.sampling import Array
from moebook.methods.settings import chosen

REPR_POOL = 4
"""The Repr filter walks down at most so many times C rows to find C that differ.

Sec. 4.6.1 says that it, too, ends with fewer than C. But walking down D_C itself it keeps what
Alg. 2 keeps, row for row, and the comparison would be of one rule with itself; so it fills up to C,
as the filter does where it comes from.
"""


@dataclass(frozen=True)
class Augmentation:
    """D_A: what Alg. 2 takes from the open data.

    Attributes:
        index: Numbers of the rows in the pool, nearest to the shots first.
        similarity: Their largest cosine over the shots.
        candidates: Numbers of D_C, the rows before duplicates went, in the same order.
        vectors: Embeddings of the rows of ``index`` ``[n, D]``.
    """

    index: Array
    similarity: Array
    candidates: Array
    vectors: Array


def choose(shots: Array, blocks: Iterable[Array], config: Config, *, seed: int = 0) -> Augmentation:
    """Choose from open rows those that resemble the K shots and differ from each other (Alg. 2).

    D_C is put in the order of its similarity to the shots before duplicates go. Memory is a few
    times C rows and one block of the stream.

    Args:
        shots: Embeddings of D_K ``[K, D]``, see `encoders.load`.
        blocks: Embeddings of D_S, of any length, block by block ``[b, D]`` (`Encoder.blocks`).
        config: ``sampler``, ``budget``, ``threshold`` and ``duplicates``.
        seed: Of the samplers that draw at random.

    Raises:
        Refusal: E-DATA for an empty pool, or when the sampler finds nothing.
    """
    budget = config.budget * (REPR_POOL if config.duplicates == "repr" else 1)
    drawn = sampling.draw(shots, blocks, config, budget, seed=seed)
    if not len(drawn.index):
        refuse(
            "E-DATA",
            f"none of {drawn.seen} open rows lies in the hull of the {len(shots)} shots: lower"
            f" components ({config.components}) or give more shots",
        )
    index, vectors = drawn.index.numpy(), drawn.vectors.numpy()
    near = sampling.nearness(shots, vectors)
    order = np.lexsort((index, -near))
    index, near, vectors = index[order], near[order], vectors[order]
    if config.duplicates == "index":  # the released code's list has no order but the data's own
        order = np.argsort(index)
        index, near, vectors = index[order], near[order], vectors[order]
    kept = deduplicate(vectors, near, config.threshold, rule=config.duplicates)
    if config.duplicates == "repr":
        kept = kept[: config.budget]
    kept = kept[np.lexsort((index[kept], -near[kept]))]
    return Augmentation(index[kept], near[kept], index, vectors[kept])


def deduplicate(
    vectors: Array, similarity: Array, threshold: float, *, rule: str = "standing"
) -> Array:
    """Return the rows that stay when of two near-duplicates one goes (Alg. 2, lines 5 to 13).

    Two rows are near-duplicates when their cosine is above the threshold.

    Args:
        vectors: ``[C, D]`` embeddings of D_C.
        similarity: ``[C]`` nearness to the shots.
        threshold: tau, in [-1, 1].
        rule: ``"standing"``: Alg. 2 line by line: pairs (i, j) in order, both still in D_C; j goes
            if i is nearer to the shots, else i. Of two equally near rows the earlier goes, since
            the test is a strict one. ``"any"``: a row goes if any nearer one (of equally near
            ones, any later one) is its near-duplicate, whether that one stays or not, as in
            SemDeDup: the text's "any two instructions", and independent of the order.
            ``"index"``: of two the later goes, whatever its nearness (released). ``"repr"``: walk
            down and keep a row that is no near-duplicate of one kept (the Repr filter), which
            is ``"standing"`` where no two rows are equally near; `choose` gives it more rows.
            ``"keep"``: all stay.

    Returns:
        ``[n]`` numbers of the rows that stay, ascending.

    Raises:
        Refusal: E-CHOICE for another rule; those of `kernels.duplicates`.
    """
    chosen("rule", rule, CHOICES["duplicates"])
    if rule == "keep":
        return np.arange(len(vectors))
    key = similarity if rule in ("standing", "any") else -np.arange(len(vectors))
    kept = kernels.duplicates(
        torch.from_numpy(vectors), torch.from_numpy(key), threshold,
        rule="any" if rule == "any" else "standing",
    )  # fmt: skip
    return np.asarray(kept)
