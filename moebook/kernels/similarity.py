"""Rows by their cosines: the C rows of a pool nearest to K shots, and near-duplicates that go."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from moebook.errors import refuse, refuse_unknown
from moebook.kernels.dispatch import implementation, natural, shapes
from moebook.kernels.matmul import empty, product, wide

RULES = ("standing", "any")
WRONG = "NaN, infinity or numbers too large to be squared"

# Rows of a pool on a CPU that are compared at once: they stay in the cache.
ROWS = 4096
# More than a cosine is off with factors and result in bfloat16, whose 8 bits put each
# off by up to 2^-8 of itself: 3 * 2^-8.
SLACK = 2.0**-6
# Fewest shots for which a product in bfloat16 saves more than rounding the rows costs.
SIEVED = 32
# So many times C rows are held before those that fell behind go.
HELD = 3

# Rows compared at once with all later ones for duplicates.
BLOCK = {"cpu": 256, "cuda": 2048}
# Cosines that are held at once at most: a CPU's cache keeps them.
COSINES = {"cpu": 2**18, "cuda": 2**28}
# Of settling pairs side by side; what they leave is settled one after another.
ROUNDS = 4

# From rows and the key that is to be exceeded to places and keys, see `largest`.
Key = Callable[[Tensor, float], tuple[Tensor, Tensor]]
Pairs = tuple[Tensor, Tensor]


class Largest(NamedTuple):
    """Rows drawn from a stream, the largest key first, of equal ones the earlier row."""

    index: Tensor  # [C] int64, their numbers in the stream
    key: Tensor  # [C] what they were drawn by
    vectors: Tensor  # [C, D] the rows
    seen: int  # rows in the stream


def nearest_rows(
    pool: Tensor | Iterable[Tensor], shots: Tensor, count: int, *, impl: str = "auto"
) -> Largest:
    """Return the C rows of a pool with the largest cosine to any of K shots (Rocket Eq. 11 to 13).

    The pool is ``[S, D]``, or a stream of blocks ``[b, D]``, each seen once, the shots ``[K, D]``;
    fewer than C = ``count`` rows come back from a smaller pool. A zero row has cosine 0 with
    everything. Without a gradient. ``impl`` is ``"auto"``, ``"torch"`` (rows are first sieved in
    bfloat16 where a CPU multiplies that) or ``"reference"``.
    """
    shapes("nearest_rows", {"shots": (shots, "K D")}, valued=True)
    targets = unit(shots)
    if not targets.isfinite().all():
        refuse("E-NONFINITE", f"nearest_rows: shots hold {WRONG}")
    score = implementation("nearest_rows", impl, _NEAREST, shots)
    with torch.no_grad():
        blocks = _checked_blocks(pool, shots)
        return largest(blocks, lambda rows, floor: score(rows, targets, floor), count)


def _checked_blocks(pool: Tensor | Iterable[Tensor], shots: Tensor) -> Iterator[Tensor]:
    """Yield the pool's blocks ``[b, D]``, each checked to be as wide as the shots and alike."""
    if not isinstance(pool, Iterable):
        kind = type(pool).__name__
        refuse("E-TYPE", f"nearest_rows: the pool is a {kind}, not tensors")
    for block in [pool] if isinstance(pool, Tensor) else pool:
        if not isinstance(block, Tensor):
            refuse(
                "E-TYPE",
                f"nearest_rows: the pool holds a {type(block).__name__}, not tensors",
            )
        both = {"shots": (shots, "K D"), "pool": (block, "S D")}
        shapes("nearest_rows", both, alike=("shots", "pool"))
        yield block


def largest(blocks: Iterable[Tensor], key: Key, count: int) -> Largest:
    """Keep the C rows of a stream with the largest keys; of equal keys the earlier row is kept.

    Blocks are ``[b, D]``. ``key`` is called with some rows and the key that a row must exceed; it
    returns at least the places of those, ascending, and their keys. Minus infinity is never kept.
    """
    natural("largest", "count", count)
    held: list[Largest] = []
    seen = 0
    floor = -torch.inf  # the key that a row must exceed
    for rows in _cached(blocks):
        places, keys = key(rows, floor)
        wrong = keys.isnan()
        if wrong.any():
            row = seen + int(places[wrong][0])
            refuse("E-NONFINITE", f"row {row} of the pool holds {WRONG}")
        above = keys > floor
        places = places[above]
        keys = keys[above]
        if len(keys) > HELD * count:
            # More than can stay: their rows need not be copied. Places stay ascending.
            first = (
                keys.sort(descending=True, stable=True).indices[:count].sort().values
            )
            places = places[first]
            keys = keys[first]
        if len(places) or not held:
            held.append(Largest(seen + places, keys, rows[places], 0))
            held, floor = _floored(held, count)
        seen += len(rows)
    if not held:
        refuse("E-DATA", "the pool is empty; expected at least one block of rows")
    return _cut(held, count)._replace(seen=seen)


def _cached(blocks: Iterable[Tensor]) -> Iterator[Tensor]:
    """Split the blocks of a stream on a CPU into what its cache holds."""
    for block in blocks:
        rows = ROWS if block.device.type == "cpu" else max(len(block), 1)
        yield from block.split(rows)


def _floored(held: list[Largest], count: int) -> tuple[list[Largest], float]:
    """Return what is held and the key that a later row must exceed.

    What is held is cut to the C largest where it is more than `HELD` times as many.
    """
    keys = torch.cat([part.key for part in held])
    if len(keys) < count:
        return held, -torch.inf
    if len(keys) > HELD * count:
        held = [_cut(held, count)]
        return held, held[0].key[-1].item()
    # The C-th largest of n is the (n - C + 1)-th smallest.
    return held, keys.kthvalue(len(keys) - count + 1).values.item()


def _cut(held: list[Largest], count: int) -> Largest:
    """Take the largest; rows come in order where keys are equal, and a stable sort keeps it."""
    index = torch.cat([part.index for part in held])
    key = torch.cat([part.key for part in held])
    vectors = torch.cat([part.vectors for part in held])
    order = key.sort(descending=True, stable=True).indices[:count]
    return Largest(index[order], key[order], vectors[order], 0)


def unit(rows: Tensor) -> Tensor:
    """Scale rows to length 1; a zero row stays zero, and one without a finite length is NaN."""
    return (rows / lengths(rows)[:, None]).to(rows.dtype)


def lengths(rows: Tensor) -> Tensor:
    """Return the lengths of rows, in float32 at least: 1 of a zero row, NaN where not finite."""
    kind = torch.promote_types(rows.dtype, torch.float32)
    norms = torch.linalg.vector_norm(rows, dim=1, dtype=kind)
    return norms.masked_fill_(norms == 0, 1).masked_fill_(norms.isinf(), torch.nan)


def _compared(rows: Tensor, targets: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    """Compare unit rows with each target and take the largest cosine: the reference."""
    # Eq. 11 and 12: A, transposed.
    cosines = unit(wide(rows)) @ wide(targets).T  # [b, K]
    # Eq. 13: max_i A_ij, the cosine to the nearest shot.
    return _all(rows), cosines.amax(1)


def _sieved(rows: Tensor, targets: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    """Divide the largest product by the row's length; where it pays, only for rows in question."""
    rows = wide(rows)
    targets = wide(targets)
    norms = lengths(rows)
    worthwhile = floor > -torch.inf and len(targets) >= SIEVED
    able = rows.device.type == "cpu" and torch.cpu._is_avx512_bf16_supported()
    if not (worthwhile and able and rows.dtype == torch.float32):
        # Eq. 13: shots have length 1, and a row's own divides its maximum alone.
        return _all(rows), product(targets, rows.T).amax(0) / norms

    rough_targets = targets.bfloat16()  # [K, D]
    rough_rows = empty(rows.shape, rough_targets).copy_(rows)  # [b, D]
    rough = (rough_targets @ rough_rows.T).amax(0) / norms
    behind = rough <= floor - SLACK  # false for NaN, which is to be refused
    places = (~behind).nonzero().squeeze(1)
    exact = (targets @ rows[places].T).amax(0)
    return places, exact / norms[places]


def _all(rows: Tensor) -> Tensor:
    return torch.arange(len(rows), device=rows.device)


def duplicates(
    vectors: Tensor,
    key: Tensor,
    threshold: float,
    *,
    rule: str = "standing",
    impl: str = "auto",
) -> Tensor:
    """Return the rows that stay when of two whose cosine is above a threshold one goes.

    Rocket's Alg. 2, lines 5 to 13, runs over all ordered pairs (i, j). Pairs i < j do: a second
    visit changes nothing. Returns ``[n]`` int64, ascending, without a gradient.

    Args:
        vectors: ``[S, D]``.
        key: ``[S]``; of two near-duplicates the one of the larger key stays, of equal ones the
            later, since Alg. 2's test is a strict one.
        threshold: tau, in [-1, 1].
        rule: ``"standing"``: Alg. 2's own: pairs in order, both still there. ``"any"``: a row goes
            if it loses to any near-duplicate, whether that one stays or not, as in SemDeDup.
        impl: ``"auto"``, ``"torch"`` (near pairs block by block, then the loop over them alone),
            ``"triton"`` (no cosine in memory) or ``"reference"`` (the two loops).
    """
    shapes(
        "duplicates",
        {"vectors": (vectors, "S D"), "key": (key, "S", "real")},
        valued=True,
    )
    if not -1 <= threshold <= 1:
        refuse("E-RANGE", f"duplicates: threshold is {threshold}, expected -1 to 1")
    refuse_unknown(rule, RULES, "E-CHOICE", f"duplicates: unknown rule '{rule}';")
    if not lengths(vectors).isfinite().all():
        refuse("E-NONFINITE", f"duplicates: vectors hold {WRONG}")
    if not key.isfinite().all():
        refuse("E-NONFINITE", "duplicates: key holds NaN or infinity")
    run = implementation("duplicates", impl, _DUPLICATES, vectors)
    with torch.no_grad():
        alive: Tensor = run(vectors, key, threshold, rule == "standing")
        return alive.nonzero().squeeze(1)


def _looped(vectors: Tensor, key: Tensor, threshold: float, standing: bool) -> Tensor:
    """Run the two loops of Alg. 2 as they are printed; without ``standing``, each pair once."""
    rows = unit(wide(vectors))
    alive = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
    # Line 5. What went is in D_C no more, so that no later pair has it.
    for i in range(len(rows)):
        for j in range(0 if standing else i + 1, len(rows)):
            if i == j:
                continue
            if standing and not (alive[i] and alive[j]):
                continue
            # Line 6 with Eq. 14; lines 7 to 11: the row nearer to the shots stays.
            if rows[i] @ rows[j] > threshold:
                loser = j if key[i] > key[j] else i
                alive[loser] = False
    return alive


def _blocked(vectors: Tensor, key: Tensor, threshold: float, standing: bool) -> Tensor:
    rows = unit(wide(vectors))
    size = BLOCK[rows.device.type]
    return through(rows, key, threshold, standing, size, near)


def near(rows: Tensor, size: int, threshold: float) -> Pairs:
    """Return the pairs i < j above the threshold, i among the first ``size`` rows, in order."""
    first_rows = rows[:size]
    columns = max(1, COSINES[rows.device.type] // size)
    blocks = []
    for start in range(0, len(rows), columns):
        # [size, columns].
        cosines = product(first_rows, rows[start : start + columns].T)
        close = cosines > threshold  # Alg. 2, line 6
        if start < size:
            close.triu_(1 - start)  # i < j alone
        pairs = close.nonzero()
        blocks.append(pairs + torch.tensor([0, start], device=rows.device))
    first, second = torch.cat(blocks).T
    order = first.sort(stable=True).indices
    return first[order], second[order]


def through(
    rows: Tensor,
    key: Tensor,
    threshold: float,
    standing: bool,
    size: int,
    pairs: Callable[[Tensor, int, float], Pairs],
) -> Tensor:
    """Find the near pairs of a block of ``size`` rows, settle them in order, and go on.

    By Alg. 2's rule (``standing``) rows that went leave before the next block is compared. ``rows``
    are ``[S, D]`` as ``pairs`` (such as `near`) wants them; returns ``[S]``, whether a row stays.
    """
    alive = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
    left = torch.arange(len(rows), device=rows.device)  # what is to be compared yet
    while len(left):
        first, second = pairs(rows, size, threshold)
        i = left[first]
        j = left[second]
        # Lines 7 to 11, of each pair.
        lose = torch.where(key[i] > key[j], j, i)
        gone = _losers(i, j, lose) if standing else lose
        alive[gone] = False
        left = left[size:]
        rows = rows[size:]
        if standing and len(lose):
            stay = alive[left].nonzero().squeeze(1)
            left = left[stay]
            rows = rows[stay]
    return alive


def _losers(first: Tensor, second: Tensor, lose: Tensor) -> Tensor:
    """Settle pairs in order: of two that are still there the one goes that loses.

    All pairs that are the first open one of both their rows are settled at once, whatever becomes
    of the others. What a few rounds of that leave open is settled one after another.
    """
    # Rows by their place among those that are in any pair; pairs [2, P], losers [P].
    rows, pairs = torch.unique(torch.stack([first, second]), return_inverse=True)
    losers = torch.where(lose == first, pairs[0], pairs[1])
    turn = torch.arange(len(first), device=first.device)  # when a pair is settled
    is_gone = torch.zeros_like(rows, dtype=torch.bool)
    for _ in range(ROUNDS):
        settled = _undisputed(pairs, turn, len(rows))
        is_gone[losers[settled]] = True
        # A pair that has lost a row will never be settled.
        open_yet = ~(settled | is_gone[pairs].any(0))
        pairs = pairs[:, open_yet]
        losers = losers[open_yet]
        turn = turn[open_yet]

    # What is open yet, pair by pair.
    gone = is_gone.tolist()
    for i, j, loser in zip(*pairs.tolist(), losers.tolist(), strict=True):
        if not (gone[i] or gone[j]):
            gone[loser] = True
    return rows[torch.tensor(gone, dtype=torch.bool, device=rows.device)]


def _undisputed(pairs: Tensor, turn: Tensor, rows: int) -> Tensor:
    """Say which pairs ``[2, P]`` are the first of both their rows: none before takes one away."""
    never = torch.iinfo(turn.dtype).max
    earliest = turn.new_full((rows,), never)  # of each row, the turn of its first pair
    earliest.scatter_reduce_(0, pairs.flatten(), turn.repeat(2), "amin")
    return (earliest[pairs] == turn).all(0)


_NEAREST = {"torch": _sieved, "reference": _compared}
_DUPLICATES = {"torch": _blocked, "reference": _looped, "triton": "duplicates.run"}
