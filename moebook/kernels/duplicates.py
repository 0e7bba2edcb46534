"""duplicates: which rows stay when of two near-duplicates one goes, in the memory of S rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moebook.errors import nearest, refuse
from moebook.kernels.arguments import floating, real, together, valued
from moebook.kernels.dispatch import implementation
from moebook.kernels.nearest import WRONG, lengths, unit, wide
from moebook.kernels.products import product

RULES = ("standing", "any")
ROWS = {"cpu": 256, "cuda": 2048}
"""Rows that are compared with all later ones at once: what goes among them saves its products."""
COSINES = {"cpu": 2**18, "cuda": 2**28}
"""Most that are held at once: a CPU's cache keeps them until the near pairs are found."""
ROUNDS = 4
"""Of settling pairs side by side; what they leave is settled one after another."""
Pairs = tuple[Tensor, Tensor]


def duplicates(
    vectors: Tensor, key: Tensor, threshold: float, *, rule: str = "standing", impl: str = "auto"
) -> Tensor:
    """Return the rows that stay when of two whose cosine is above a threshold one goes.

    Rocket's Alg. 2, lines 5 to 13, runs over all ordered pairs (i, j). The second visit of a pair
    changes nothing, since after the first no more than one of the two is there: pairs i < j do.
    Without a gradient.

    Args:
        vectors: ``[S, D]``.
        key: ``[S]``; of two near-duplicates the one of the larger key stays, of equal ones the
            later, since Alg. 2's test is a strict one.
        threshold: tau, in [-1, 1].
        rule: ``"standing"``: Alg. 2's own: pairs in order, both still there. ``"any"``: a row goes
            if it loses to any near-duplicate, whether that one stays or not, as in SemDeDup: the
            order of the pairs does not matter.
        impl: ``"auto"``, ``"torch"`` (rows that are still there, block by block, against the later
            ones; then the loop over near pairs alone), ``"triton"`` (the same, without writing
            cosines to memory) or ``"reference"`` (the two loops).

    Returns:
        ``[n]`` int64 numbers of the rows that stay, ascending.

    Raises:
        Refusal: E-SHAPE, E-DTYPE, E-DEVICE, E-RANGE, E-CHOICE, E-NONFINITE or E-IMPL for an
            argument that cannot be used.
    """
    if vectors.dim() != 2 or key.shape != vectors.shape[:1]:
        shapes = f"{tuple(vectors.shape)} and {tuple(key.shape)}"
        refuse("E-SHAPE", f"duplicates: expected vectors [S, D] and key [S], got {shapes}")
    floating("duplicates", {"vectors": vectors})
    real("duplicates", {"key": key})
    together("duplicates", {"vectors": vectors, "key": key})
    valued("duplicates", {"vectors": vectors})
    if not -1 <= threshold <= 1:
        refuse("E-RANGE", f"duplicates: threshold is {threshold}, expected -1 to 1")
    if rule not in RULES:
        refuse("E-CHOICE", f"duplicates: unknown rule '{rule}'; {nearest(rule, RULES)}")
    if not lengths(vectors).isfinite().all():
        refuse("E-NONFINITE", f"duplicates: vectors hold {WRONG}")
    if not key.isfinite().all():
        refuse("E-NONFINITE", "duplicates: key holds NaN or infinity")
    run = implementation("duplicates", impl, _IMPLEMENTATIONS, vectors)
    with torch.no_grad():
        alive: Tensor = run(vectors, key, threshold, rule == "standing")
        return alive.nonzero().squeeze(1)


def reference(vectors: Tensor, key: Tensor, threshold: float, standing: bool) -> Tensor:
    """Run the two loops of Alg. 2 as they are printed; without ``standing``, each pair once."""
    rows = unit(wide(vectors))
    alive = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
    for i in range(len(rows)):
        for j in range(0 if standing else i + 1, len(rows)):
            if i == j or (standing and not (alive[i] and alive[j])):
                continue
            if rows[i] @ rows[j] > threshold:
                alive[j if key[i] > key[j] else i] = False
    return alive


def _blocked(vectors: Tensor, key: Tensor, threshold: float, standing: bool) -> Tensor:
    rows = unit(wide(vectors))
    return through(rows, key, threshold, standing, ROWS[rows.device.type], near)


def near(rows: Tensor, size: int, threshold: float) -> Pairs:
    """Return the pairs i < j, i among the first ``size`` rows, above the threshold, in order."""
    upper, found = rows[:size], []
    columns = max(1, COSINES[rows.device.type] // size)
    for start in range(0, len(rows), columns):
        close = product(upper, rows[start : start + columns].T) > threshold
        if start < size:
            close.triu_(1 - start)
        found.append(close.nonzero() + torch.tensor([0, start], device=rows.device))
    first, second = torch.cat(found).T
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
    """Go through the rows in blocks of ``size``: near pairs are found, then settled in order.

    By Alg. 2's rule rows that went leave before the next block is compared.

    Args:
        rows: ``[S, D]``, as ``pairs`` wants them.
        key: ``[S]``.
        threshold: Of the cosine.
        standing: Whether both of a pair must still be there.
        size: Rows of a block.
        pairs: Finds near pairs, as `near` does.

    Returns:
        ``[S]``, whether a row stays.
    """
    alive = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
    left = torch.arange(len(rows), device=rows.device)
    while len(left):
        i, j = (left[place] for place in pairs(rows, size, threshold))
        lose = torch.where(key[i] > key[j], j, i)
        left, rows = left[size:], rows[size:]
        alive[_losers(i, j, lose) if standing else lose] = False
        if standing and len(lose):
            stay = alive[left].nonzero().squeeze(1)
            left, rows = left[stay], rows[stay]
    return alive


def _losers(first: Tensor, second: Tensor, lose: Tensor) -> Tensor:
    """Settle pairs in order: of two that are still there the one goes that loses.

    A pair that is the first open one of both its rows can be settled whatever becomes of the
    others, so all such pairs are settled at once. What a few rounds of that leave open, in large
    clusters of near rows, is settled one after another.
    """
    rows, pairs = torch.unique(torch.stack([first, second]), return_inverse=True)
    losers = torch.where(lose == first, *pairs)
    turn = torch.arange(len(first), device=first.device)
    gone = torch.zeros_like(rows, dtype=torch.bool)
    for _ in range(ROUNDS):
        earliest = torch.full_like(rows, len(first))
        earliest.scatter_reduce_(0, pairs.flatten(), turn.repeat(2), "amin")
        now = (earliest[pairs] == turn).all(0)
        gone[losers[now]] = True
        still = ~(now | gone[pairs].any(0))
        pairs, losers, turn = pairs[:, still], losers[still], turn[still]
    left = gone.tolist()
    for i, j, loser in zip(*pairs.tolist(), losers.tolist(), strict=True):
        left[loser] |= not (left[i] or left[j])
    return rows[torch.tensor(left, dtype=torch.bool, device=rows.device)]


_IMPLEMENTATIONS = {"torch": _blocked, "reference": reference}
