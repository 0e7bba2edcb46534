"""Which open data join the K shots: the nearest, then the duplicates out (Algorithm 2)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from moebook.errors import nearest, refuse
from moebook.methods.rocket import sampling
from moebook.methods.rocket.config import Config
from moebook.methods.rocket.encoders import Encoder
from moebook.methods.rocket.sampling import Array

RULES = ("standing", "any", "index", "repr", "keep")
BLOCK_BYTES = 2**25
"""Most bytes of one block of similarities in `deduplicate`."""
REPR_POOL = 4
"""The Repr filter walks down at most so many times C rows to find C that differ."""


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


def select(
    shots: Sequence[dict[str, str]],
    pool: Iterable[dict[str, str]],
    encoder: Encoder,
    config: Config,
    *,
    seed: int = 0,
) -> Augmentation:
    """Choose from open rows those that resemble the K shots and differ from each other (Alg. 2).

    Args:
        shots: D_K, rows with prompt and answer.
        pool: D_S, of any length; encoded and forgotten block by block.
        encoder: h, see `encoders.load`.
        config: ``sampler``, ``budget``, ``threshold`` and ``duplicates``.
        seed: Of the samplers that draw at random.

    Raises:
        Refusal: E-KSHOT without shots, E-DATA for an empty pool, or when the sampler finds nothing.
    """
    if not shots:
        refuse("E-KSHOT", "have 0 annotated rows, need at least K = 1")
    vectors = encoder.encode([f"{row['prompt']} {row['answer']}" for row in shots])
    return choose(vectors, encoder.blocks(pool), config, seed=seed)


def choose(shots: Array, blocks: Iterable[Array], config: Config, *, seed: int = 0) -> Augmentation:
    """Do the same on embeddings: shots ``[K, D]`` and a stream of blocks ``[b, D]``.

    D_C is put in the order of its similarity to the shots before duplicates go. Memory is C rows,
    one block of the stream and `BLOCK_BYTES`.
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
            down and keep a row that is no near-duplicate of one kept (the Repr filter).
            ``"keep"``: all stay.

    Returns:
        ``[n]`` numbers of the rows that stay, ascending.

    Raises:
        Refusal: E-CHOICE for another rule, E-SHAPE when the lengths differ, E-NONFINITE.
    """
    if rule not in RULES:
        refuse("E-CHOICE", f"unknown rule '{rule}'; {nearest(rule, RULES)}")
    if vectors.ndim != 2 or similarity.shape != vectors.shape[:1]:
        shapes = f"{vectors.shape} and {similarity.shape}"
        refuse("E-SHAPE", f"expected vectors [C, D] and similarity [C], got {shapes}")
    if not (np.isfinite(vectors).all() and np.isfinite(similarity).all()):
        refuse("E-NONFINITE", "the embeddings hold NaN or infinity")
    alive = np.ones(len(vectors), dtype=bool)
    if rule == "keep":
        return np.flatnonzero(alive)
    key = similarity if rule in ("standing", "any") else -np.arange(len(vectors), dtype=np.float64)
    for row, near in _near(sampling.unit(vectors), threshold):
        if rule == "any":
            after = (key[near] > key[row]) | ((key[near] == key[row]) & (near > row))
            alive[row] = not after.any()
        elif alive[row]:
            _settle(row, near[alive[near]], key, alive)
    return np.flatnonzero(alive)


def _settle(row: int, near: Array, key: Array, alive: Array) -> None:
    """Run the inner loop of Alg. 2 for one row: it removes the less near until it goes itself."""
    stronger = np.flatnonzero(key[near] >= key[row])
    end = stronger[0] if len(stronger) else len(near)
    alive[near[:end]] = False
    if len(stronger):
        alive[row] = False


def _near(unit: Array, threshold: float) -> Iterable[tuple[int, Array]]:
    """Yield each row with its near-duplicates, ascending, itself left out; O(C) memory a block."""
    size = max(1, BLOCK_BYTES // max(1, len(unit) * unit.itemsize))
    for at in range(0, len(unit), size):
        close = unit[at : at + size] @ unit.T > threshold
        for line, row in enumerate(range(at, min(at + size, len(unit)))):
            close[line, row] = False
            yield row, np.flatnonzero(close[line])
