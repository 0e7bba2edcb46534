"""groups: of all groups of N out of M candidates, those that are worth most and differ most."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from moebook.errors import refuse, refuse_unknown
from moebook.kernels.dispatch import implementation, natural, shapes

MASKS = {"ordered": -1, "inverse": 2**62 - 1}  # of sums: the second puts negative ones last
MOST, LISTED = 10**9, 10**7  # groups searched (10**8 take a fifth of a second), and kept
FEW = 10_000  # groups that are listed in less time than it takes to compile a loop (7 s)
BITS = 60  # bits of a sum of similarities in whole steps
Array = np.ndarray[Any, Any]
Search = Callable[[Array, Array, int, int, int], tuple[Array, Array, Array]]


class Groups(NamedTuple):
    """The G best groups, the least total first; of equal totals, in the order of their members."""

    members: Tensor  # [G, N] int64, ascending
    rank: Tensor  # [G] int64, by diversity among all groups, 1 is best; equal ones share the least
    total: Tensor  # [G] float64, rank plus the members' worth


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

    The last step of Rocket's Alg. 1, exactly: no group is left out of the ranks. Each similarity is
    rounded to a multiple of 2^-55 or so of the largest, finer than float64 adds them, so that sums
    are whole numbers, equal in any order. On the CPU, without a gradient.

    Args:
        similarity: ``[M, M]``; what stands above the diagonal is read.
        worth: ``[M]``, less is better (in Rocket R_P + R_A).
        size: N, 1 to M; more than `MOST` groups are refused.
        best: G, how many groups are returned; at most `LISTED` are listed for it.
        diversity: ``"ordered"``: the least mean similarity is best. ``"inverse"``: its inverse, the
            largest best: zero first, then upwards, then the negative ones upwards.
        impl: ``"numba"`` (a compiled loop over all groups), ``"reference"``, or ``"auto"``: the
            reference for up to `FEW` groups.
    """
    tensors = {"similarity": (similarity, "M M", "real"), "worth": (worth, "M", "real")}
    count = shapes("groups", tensors, valued=True)["M"]
    natural("groups", "size", size, count, "the candidates")
    natural("groups", "best", best)
    refuse_unknown(diversity, MASKS, "E-CHOICE", f"groups: unknown diversity '{diversity}';")
    if (number := math.comb(count, size)) > MOST:
        have = f"{count} candidates have {number:,} groups of {size}"
        refuse("E-RANGE", f"groups: {have}, at most {MOST:,} are searched: fewer candidates")
    if impl == "auto" and number <= FEW:
        impl = "reference"
    search: Search = implementation("groups", impl, _IMPLEMENTATIONS)
    alike, value = (part.detach().double().cpu().numpy() for part in (similarity, worth))
    for name, values in (("similarity", alike), ("worth", value)):
        if not np.isfinite(values).all():
            refuse("E-NONFINITE", f"groups: {name} holds NaN or infinity")
    keep = min(number, _needed(value, size, best))
    members, keys, sums = search(_steps(alike, size), value, size, keep, MASKS[diversity])
    ranks = np.searchsorted(np.sort(keys), keys) + 1
    totals = ranks + sums
    order = np.argsort(totals, kind="stable")[:best]
    found = (torch.from_numpy(part[order]) for part in (members, ranks, totals))
    return Groups(*(part.to(similarity.device) for part in found))


def _needed(worth: Array, size: int, best: int) -> int:
    """Return how many of the most diverse groups hold the G best: 2 G + s, s being worth's range.

    Let k groups be less similar than one left out. If k >= G + s, the first G are better by rank.
    Else more than G before it are as similar as it is, of its rank and not of more worth.
    """
    ascending = np.sort(worth)
    with np.errstate(all="ignore"):
        spread = float(ascending[-size:].sum() - ascending[:size].sum())
    if not math.isfinite(spread):
        refuse("E-NONFINITE", f"groups: worth adds up beyond float64 over {size}: ranks for worth")
    if (needed := 2 * best + math.ceil(spread)) > LISTED < math.comb(len(worth), size):
        told = f"best is {best:,} and worth runs from {ascending[0]:g} to {ascending[-1]:g}"
        most = f"{needed:,} groups would be listed, at most {LISTED:,} are"
        refuse("E-RANGE", f"groups: {told}: {most}: fewer candidates, or ranks for worth")
    return needed


def _steps(similarity: Array, size: int) -> Array:
    """Write similarities as whole numbers, so small that no sum overflows."""
    upper = np.triu(similarity, 1)
    largest = max(float(np.abs(upper).max()), np.finfo(np.float64).tiny)
    room = BITS - math.comb(size, 2).bit_length()
    return np.ldexp(upper, room - math.frexp(largest)[1]).round().astype(np.int64)


def reference(
    steps: Array, worth: Array, size: int, keep: int, mask: int
) -> tuple[Array, Array, Array]:
    """List all groups ``[G, N]`` in order, with their sums of similarities and of worth ``[G]``."""
    members = np.array(list(combinations(range(len(steps)), size)))
    keys, sums = np.zeros(len(members), np.int64), np.zeros(len(members))
    for i, j in combinations(range(size), 2):
        keys += steps[members[:, i], members[:, j]]
    for column in members.T:
        sums += worth[column]
    return members, keys & mask, sums


def _enumerated(
    steps: Array, worth: Array, size: int, keep: int, mask: int
) -> tuple[Array, Array, Array]:
    """List the first ``keep`` groups by (sum of similarities, worth, members), in order."""
    if size == 1:
        return reference(steps, worth, size, keep, mask)
    room = 2 * keep + len(steps) ** 2
    members, keys = np.empty((room, size), np.int64), np.empty(room, np.int64)
    sums, prefix = np.empty(room), np.arange(size - 2)
    listed, finished, limit, worst = 0, False, np.iinfo(np.int64).max, np.inf
    while not finished:
        limits = limit, worst
        listed, finished = _fill()(steps, worth, mask, prefix, members, keys, sums, listed, *limits)
        if listed > keep:
            first = np.lexsort((sums[:listed], keys[:listed]))[:keep]
            limit, worst, listed = keys[first[-1]], sums[first[-1]], keep
            first.sort()
            for part in (members, keys, sums):
                part[:keep] = part[first]
    return members[:listed], keys[:listed], sums[:listed]


@cache
def _fill() -> Any:
    """Compile `_filled`, once a machine; to import numba takes half a second."""
    from numba import njit

    return njit(cache=True)(_filled)


def _filled(
    steps: Array, worth: Array, mask: int, prefix: Array,
    members: Array, keys: Array, sums: Array, listed: int, limit: int, worst: float,
) -> tuple[int, bool]:  # fmt: skip
    """List groups that come before (limit, worst), while there is room for those of one prefix.

    A prefix is the first N - 2 members, ``toward[i, m]`` that of its first i to candidate m.
    """
    count, last = len(steps), len(prefix)
    toward = np.zeros((last + 1, count), np.int64)
    within, worths = np.zeros(last + 1, np.int64), np.zeros(last + 1)
    place = 0
    while place >= 0 and listed + count * count // 2 <= len(keys):
        for i in range(place, last):
            m = prefix[i]
            within[i + 1] = within[i] + toward[i, m]
            worths[i + 1] = worths[i] + worth[m]
            for j in range(m + 1, count):
                toward[i + 1, j] = toward[i, j] + steps[m, j]
        near = toward[last]
        for i in range(prefix[last - 1] + 1 if last else 0, count - 1):
            total = within[last] + near[i]
            for j in range(i + 1, count):
                key = (total + near[j] + steps[i, j]) & mask
                if key <= limit:
                    value = worths[last] + worth[i] + worth[j]
                    if key < limit or value < worst:
                        members[listed, :last] = prefix
                        members[listed, last], members[listed, last + 1] = i, j
                        keys[listed], sums[listed] = key, value
                        listed += 1
        place = last - 1
        while place >= 0 and prefix[place] == count - 2 - last + place:
            place -= 1
        if place >= 0:
            prefix[place] += 1
            for i in range(place + 1, last):
                prefix[i] = prefix[i - 1] + 1
    return listed, place < 0


_IMPLEMENTATIONS = {"numba": _enumerated, "reference": reference}
