"""groups: of all groups of N out of M candidates, those that are worth most and differ most."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from moebook.errors import nearest, refuse
from moebook.kernels.dispatch import implementation

DIVERSITY = ("ordered", "inverse")
MOST = 10**9
"""Most groups that are searched; a hundred million take about a tenth of a second."""
BITS = 60
"""Bits of a sum of similarities in whole steps."""
FAR = 2 ** (BITS + 1)
"""What puts negative sums behind all others."""
TILE = (256, 1024)
"""Left and right halves that are joined at once: their sums stay in the cache."""
Array = np.ndarray[Any, Any]


class Groups(NamedTuple):
    """The G best groups, the least total first; of equal totals, in the order of their members.

    Attributes:
        members: ``[G, N]`` int64, ascending.
        rank: ``[G]`` int64, by diversity among all groups, 1 is best; equal ones share the least.
        total: ``[G]`` float64, rank plus the members' worth.
    """

    members: Tensor
    rank: Tensor
    total: Tensor


def groups(
    similarity: Tensor,
    worth: Tensor,
    size: int,
    *,
    best: int = 1000,
    diversity: str = "ordered",
    impl: str = "auto",
) -> Groups:
    """Rank all groups by diversity, add the members' worth, and return those of the least total.

    This is the last step of Rocket's Alg. 1, exactly: no group is left out of the ranks. Each
    similarity is rounded to a multiple of 2^-55 or so of the largest, finer than float64 adds them,
    so that sums are whole numbers and equal ones are equal in whatever order they were added.

    Args:
        similarity: ``[M, M]``; what stands above the diagonal is read.
        worth: ``[M]``, less is better (in Rocket R_P + R_A).
        size: N, 1 to M.
        best: G, how many groups are returned where there are more.
        diversity: ``"ordered"``: the least mean similarity is best. ``"inverse"``: its inverse, the
            largest best: zero first, then upwards, then the negative ones upwards.
        impl: ``"auto"``, ``"numpy"`` (each group is half and half: one product of float32 matrices
            sieves, the few groups that can be among the best are added in whole numbers) or
            ``"reference"``. Both work on the CPU.

    Raises:
        Refusal: E-SHAPE, E-DTYPE, E-RANGE, E-CHOICE, E-NONFINITE or E-IMPL for an argument that
            cannot be used; E-RANGE also for more than `MOST` groups, and for more than ten million
            that ``best`` and the range of worth would have listed one by one.
    """
    count = len(similarity)
    if similarity.dim() != 2 or similarity.shape[1] != count or worth.shape != (count,):
        shapes = f"{tuple(similarity.shape)} and {tuple(worth.shape)}"
        refuse("E-SHAPE", f"groups: expected similarity [M, M] and worth [M], got {shapes}")
    if similarity.is_complex():
        refuse("E-DTYPE", f"groups: similarity is {similarity.dtype}, expected real numbers")
    if worth.is_complex():
        refuse("E-DTYPE", f"groups: worth is {worth.dtype}, expected real numbers")
    if not 1 <= size <= count:
        refuse("E-RANGE", f"groups: size is {size}, expected 1 to {count} (the candidates)")
    if best < 1:
        refuse("E-RANGE", f"groups: best is {best}, expected at least 1")
    if diversity not in DIVERSITY:
        refuse(
            "E-CHOICE", f"groups: unknown diversity '{diversity}'; {nearest(diversity, DIVERSITY)}"
        )
    if (number := math.comb(count, size)) > MOST:
        refuse(
            "E-RANGE",
            f"groups: {count} candidates have {number:,} groups of {size}, at most {MOST:,} are"
            " searched: fewer candidates",
        )
    for name, values in (("similarity", similarity), ("worth", worth)):
        if not values.isfinite().all():
            refuse("E-NONFINITE", f"groups: {name} holds NaN or infinity")
    if number > 10**7 and number <= 2 * best + float(
        (worth.double().sort(descending=True).values - worth.double().sort().values)[:size].sum()
    ):
        span = f"{float(worth.min()):g} to {float(worth.max()):g}"
        refuse(
            "E-RANGE",
            f"groups: best is {best:,} and worth runs from {span}: all {number:,} groups would be"
            " listed one by one, at most 10,000,000 are: fewer candidates, or ranks for worth",
        )
    run = implementation("groups", impl, _IMPLEMENTATIONS)
    steps = _steps(similarity.detach().cpu().double().numpy(), size)
    found = run(steps, worth.detach().cpu().double().numpy(), size, best, diversity == "inverse")
    return Groups(*(torch.from_numpy(part).to(similarity.device) for part in found))


def _steps(similarity: Array, size: int) -> Array:
    """Write similarities as whole numbers, symmetric, so small that no sum overflows."""
    upper = np.triu(similarity, 1)
    largest = max(float(np.abs(upper).max()), np.finfo(np.float64).tiny)
    room = BITS - math.comb(size, 2).bit_length()
    steps = np.ldexp(upper, room - math.frexp(largest)[1]).round().astype(np.int64)
    return np.asarray(steps + steps.T)


def reference(
    steps: Array, worth: Array, size: int, best: int, inverse: bool
) -> tuple[Array, Array, Array]:
    """Enumerate all groups."""
    members = np.array(list(combinations(range(len(steps)), size)))
    return _ranked(members, _keys(steps, members, inverse), worth, best)


def _by_halves(
    steps: Array, worth: Array, size: int, best: int, inverse: bool
) -> tuple[Array, Array, Array]:
    """Search among the groups of least similarity alone: the others have too large a rank.

    With s the range of worth over the groups, the first ``2 G + s`` by (similarity, worth, members)
    hold the G best. Let k groups be less similar than one that is left out. If k >= G + s, the
    first G are better by their ranks. Else more than G of those before it are as similar as it is,
    of its rank and not of more worth.
    """
    least = np.sort(worth)
    keep = 2 * best + math.ceil(least[-size:].sum() - least[:size].sum())
    if size == 1 or math.comb(len(steps), size) <= keep:
        return reference(steps, worth, size, best, inverse)
    members, keys = _least(steps, worth, size, keep, inverse)
    order = np.lexsort(members.T[::-1])
    return _ranked(members[order], keys[order], worth, best)


def _ranked(members: Array, keys: Array, worth: Array, best: int) -> tuple[Array, Array, Array]:
    """Order groups that come in the order of their members by rank plus worth."""
    ranks = np.searchsorted(np.sort(keys), keys) + 1
    totals = ranks + worth[members].sum(axis=1)
    order = np.argsort(totals, kind="stable")[:best]
    return members[order].astype(np.int64), ranks[order], totals[order]


def _keys(steps: Array, members: Array, inverse: bool) -> Array:
    """Add up the similarities of each group's pairs ``[G]``, exactly; less is more diverse."""
    total = np.zeros(len(members), dtype=np.int64)
    for i, j in combinations(range(members.shape[1]), 2):
        total += steps[members[:, i], members[:, j]]
    return np.where(total < 0, total + FAR, total) if inverse else total


def _least(steps: Array, worth: Array, size: int, keep: int, inverse: bool) -> tuple[Array, Array]:
    """Return the first groups by (key, worth, members), and their keys; memory is that of halves.

    A sum in float32 is off by less than ``slack``; what it lets through is added up exactly.
    """
    pairs = math.comb(size, 2)
    slack = (pairs + len(steps) + 8) * pairs * float(np.abs(steps).max()) * 2.0**-22
    found, waiting, limit = np.zeros((0, size), np.uint16), 0, np.inf
    keys = np.zeros(0, np.int64)
    for sums, left, right in _tiles(steps.astype(np.float32), size):
        if inverse:
            sums += np.float32(FAR) * (sums < -slack)
        close = np.flatnonzero(sums.min(axis=1) <= limit)
        if not len(close):
            continue
        near = sums[close]
        if np.count_nonzero(near <= limit) > keep:
            limit = min(limit, np.partition(near, keep - 1, axis=None)[keep - 1] + 2 * slack)
        row, column = np.nonzero(near <= limit)
        found = np.concatenate([found, np.hstack([left[close[row]], right[column]])])
        if len(found) > waiting + keep:
            found, keys = _first(steps, worth, found, keep, inverse)
            waiting = len(found)
            limit = min(limit, float(keys[-1]) + slack) if waiting == keep else limit
    return _first(steps, worth, found, keep, inverse)


def _first(
    steps: Array, worth: Array, members: Array, keep: int, inverse: bool
) -> tuple[Array, Array]:
    keys = _keys(steps, members, inverse)
    order = np.lexsort((*members.T[::-1], worth[members].sum(axis=1), keys))[:keep]
    return members[order], keys[order]


def _tiles(steps: Array, size: int) -> Iterator[tuple[Array, Array, Array]]:
    """Yield the sums of all groups ``[a, b]`` with the members of a left and b right halves.

    A group is its first N // 2 members, the last of which is m, and N - N // 2 members above m. Its
    sum is that within the left half, that within the right one, and the product of the left half's
    similarities to everyone with the right half's indicator.
    """
    count, low = len(steps), size // 2
    left, within_left, across = _halves(steps, low)
    mirrored, within_right, _ = _halves(np.ascontiguousarray(steps[::-1, ::-1]), size - low)
    right = count - 1 - mirrored[:, ::-1]
    joined = np.zeros((count + 2, len(right)), dtype=np.float32)
    np.put_along_axis(joined, right.T.astype(np.int64), 1, axis=0)
    joined[-2], joined[-1] = 1, within_right
    for last in range(low - 1, count - size + low):
        first, end = math.comb(last, low), math.comb(last + 1, low)
        above = math.comb(count - 1 - last, size - low)
        rows = np.ones((end - first, count - last + 1), dtype=np.float32)
        rows[:, :-2], rows[:, -2] = across[first:end, last + 1 :], within_left[first:end]
        for at in range(0, above, TILE[1]):
            columns = np.ascontiguousarray(joined[last + 1 :, at : min(at + TILE[1], above)])
            for top in range(0, end - first, TILE[0]):
                part = slice(first + top, min(first + top + TILE[0], end))
                sums = rows[top : top + TILE[0]] @ columns
                yield sums, left[part], right[at : at + columns.shape[1]]


def _halves(steps: Array, size: int) -> tuple[Array, Array, Array]:
    """List the groups of ``size``, in the order of their last members, then of those before it.

    So those of the first m candidates come first, ``comb(m, size)`` of them.

    Returns:
        Members ``[n, size]`` uint16, ascending; the sum of each group's pairs ``[n]``; the sum of
        its similarities to each candidate ``[n, M]``.
    """
    count = len(steps)
    members, within = np.zeros((1, 0), np.uint16), np.zeros(1, np.float32)
    across = np.zeros((1, count), np.float32)
    for length in range(1, size + 1):
        before = [math.comb(last, length - 1) for last in range(count)]
        prefix = np.concatenate([np.arange(number) for number in before])
        last = np.repeat(np.arange(count), before)
        within = within[prefix] + across[prefix, last]
        members = np.column_stack([members[prefix], last.astype(np.uint16)])
        across = across[prefix] + steps[last]
    return members, within, across


_IMPLEMENTATIONS = {"numpy": _by_halves, "reference": reference}
