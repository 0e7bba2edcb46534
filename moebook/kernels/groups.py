"""groups: of all groups of N out of M candidates, those that are worth most and differ most."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from moebook.errors import nearest, refuse
from moebook.kernels.arguments import natural, real, together, valued
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


class Search(NamedTuple):
    """What is searched for: the first groups by (key, worth, members).

    A group's key is the sum of its pairs' similarities; less is more diverse.

    Attributes:
        steps: ``[M, M]`` int64, similarities as whole numbers, symmetric.
        worth: ``[M]`` float64.
        size: N.
        keep: How many groups are wanted.
        inverse: Whether negative sums come last.
    """

    steps: Tensor
    worth: Tensor
    size: int
    keep: int
    inverse: bool

    def slack(self) -> float:
        """Return more than a sum is off that is added in float32, in any order."""
        pairs = math.comb(self.size, 2)
        largest = float(self.steps.abs().max())
        return (pairs + len(self.steps) + 8) * pairs * largest * 2.0**-22

    def keys(self, members: Tensor) -> Tensor:
        """Add up the similarities of each group's pairs ``[G]``, exactly."""
        total = torch.zeros(len(members), dtype=torch.int64, device=members.device)
        for i, j in combinations(range(self.size), 2):
            total += self.steps[members[:, i], members[:, j]]
        return torch.where(total < 0, total + FAR, total) if self.inverse else total

    def values(self, members: Tensor) -> Tensor:
        """Add up each group's worth ``[G]``, on every device in the same order."""
        total = torch.zeros(len(members), dtype=torch.float64, device=members.device)
        for column in members.T:
            total += self.worth[column]
        return total

    def order(self, members: Tensor) -> Tensor:
        """Return the places of groups in the order of their members: of their numbers, downwards.

        Behind a group come, for each of its members, those that share what is before it and have a
        later one there.
        """
        count, behind = len(self.steps), torch.zeros_like(members[:, 0])
        for i in range(self.size):
            left = [math.comb(count - 1 - m, self.size - i) if m >= i else 0 for m in range(count)]
            behind += torch.tensor(left, device=members.device)[members[:, i]]
        return behind.argsort(descending=True)

    def first(self, members: Tensor) -> tuple[Tensor, Tensor]:
        """Return those of some groups ``[G, N]`` that are wanted, in any order, and their keys."""
        keys = self.keys(members)
        if len(keys) > self.keep:
            near = keys <= keys.kthvalue(self.keep).values
            members, keys = members[near], keys[near]
        if len(keys) > self.keep:  # equal ones
            order = self.order(members)
            for by in (self.values(members), keys):
                order = order[by[order].argsort(stable=True)]
            members, keys = members[order[: self.keep]], keys[order[: self.keep]]
        return members, keys


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
    Without a gradient.

    Args:
        similarity: ``[M, M]``; what stands above the diagonal is read.
        worth: ``[M]``, less is better (in Rocket R_P + R_A).
        size: N, 1 to M.
        best: G, how many groups are returned where there are more.
        diversity: ``"ordered"``: the least mean similarity is best. ``"inverse"``: its inverse, the
            largest best: zero first, then upwards, then the negative ones upwards.
        impl: ``"auto"``, ``"torch"`` (each group is half and half: one product of float32 matrices
            sieves, the few groups that can be among the best are added in whole numbers; on the
            CPU, wherever the tensors lie), ``"triton"`` (the same product, no sum of which is
            written) or ``"reference"``.

    Raises:
        Refusal: E-SHAPE, E-DTYPE, E-DEVICE, E-TYPE, E-RANGE, E-CHOICE, E-NONFINITE or E-IMPL for an
            argument that cannot be used; E-RANGE also for more than `MOST` groups, and for more
            than ten million that ``best`` and the range of worth would have listed one by one.
    """
    if similarity.dim() != 2:
        shape = tuple(similarity.shape)
        refuse("E-SHAPE", f"groups: expected similarity [M, M], got {shape}")
    count = len(similarity)
    if similarity.shape[1] != count or worth.shape != (count,):
        shapes = f"{tuple(similarity.shape)} and {tuple(worth.shape)}"
        refuse("E-SHAPE", f"groups: expected similarity [M, M] and worth [M], got {shapes}")
    named = {"similarity": similarity, "worth": worth}
    real("groups", named)
    together("groups", named)
    valued("groups", named)
    natural("groups", "size", size, count, "the candidates")
    natural("groups", "best", best)
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
    value = worth.detach().double()
    if not math.isfinite(apart := _range(value, size)):
        refuse("E-NONFINITE", f"groups: worth adds up beyond float64 over {size}: ranks for worth")
    keep = 2 * best + math.ceil(apart)
    if number > 10**7 and number <= keep:
        span = f"{float(worth.min()):g} to {float(worth.max()):g}"
        refuse(
            "E-RANGE",
            f"groups: best is {best:,} and worth runs from {span}: all {number:,} groups would be"
            " listed one by one, at most 10,000,000 are: fewer candidates, or ranks for worth",
        )
    # Whatever the similarities come in, float32 sieves them.
    find = implementation("groups", impl, _IMPLEMENTATIONS, similarity.detach().float())
    search = Search(_steps(similarity.detach(), size), value, size, keep, diversity == "inverse")
    members, keys = find(search)
    return _ranked(search, members, keys, best)


def _steps(similarity: Tensor, size: int) -> Tensor:
    """Write similarities as whole numbers, symmetric, so small that no sum overflows."""
    upper = np.triu(similarity.cpu().double().numpy(), 1)
    largest = max(float(np.abs(upper).max()), np.finfo(np.float64).tiny)
    room = BITS - math.comb(size, 2).bit_length()
    steps = np.ldexp(upper, room - math.frexp(largest)[1]).round().astype(np.int64)
    return torch.from_numpy(steps + steps.T).to(similarity.device)


def _range(worth: Tensor, size: int) -> float:
    """Return the greatest worth of a group less the least."""
    ascending = worth.sort().values
    return float(ascending[-size:].sum() - ascending[:size].sum())


def _ranked(search: Search, members: Tensor, keys: Tensor, best: int) -> Groups:
    """Return the groups of the least rank plus worth, of those that can be among them.

    Those are all groups, or the first ``keep = 2 G + s``, s being the range of worth over the
    groups: let k groups be less similar than one that is left out. If k >= G + s, the first G are
    better by their ranks. Else more than G of those before it are as similar as it is, of its rank
    and not of more worth.
    """
    order = search.order(members)
    members, keys = members[order], keys[order]
    ranks = torch.searchsorted(keys.sort().values, keys) + 1
    totals = ranks + search.values(members)
    order = totals.argsort(stable=True)[:best]
    return Groups(members[order], ranks[order], totals[order])


def reference(search: Search) -> tuple[Tensor, Tensor]:
    """Enumerate all groups ``[G, N]``, with their keys ``[G]``."""
    listed = np.array(list(combinations(range(len(search.steps)), search.size)))
    members = torch.from_numpy(listed).to(search.steps.device)
    return members, search.keys(members)


def _by_halves(search: Search) -> tuple[Tensor, Tensor]:
    """Return the wanted groups and their keys; memory is that of halves."""
    device = search.steps.device
    search = search._replace(steps=search.steps.cpu(), worth=search.worth.cpu())
    if search.size == 1 or math.comb(len(search.steps), search.size) <= search.keep:
        members, keys = reference(search)
    else:
        members, keys = _least(search)
    return members.to(device), keys.to(device)


def _least(search: Search) -> tuple[Tensor, Tensor]:
    """Sieve the groups tile by tile; what the float32 sums let through is added up exactly."""
    slack, keep = search.slack(), search.keep
    waiting, limit = 0, math.inf
    found = torch.zeros(0, search.size, dtype=torch.int64)
    keys = torch.zeros(0, dtype=torch.int64)
    for sums, left, right in _tiles(search.steps.float(), search.size):
        if search.inverse:
            sums += np.float32(FAR) * (sums < -slack)
        close = np.flatnonzero(sums.min(axis=1) <= limit)
        if not len(close):
            continue
        near = sums[close]
        if np.count_nonzero(near <= limit) > keep:
            limit = min(limit, np.partition(near, keep - 1, axis=None)[keep - 1] + 2 * slack)
        row, column = np.nonzero(near <= limit)
        joined = np.hstack([left[close[row]], right[column]])
        found = torch.cat([found, torch.from_numpy(joined)])
        if len(found) > waiting + keep:
            found, keys = search.first(found)
            waiting = len(found)
            limit = min(limit, float(keys.max()) + slack) if waiting == keep else limit
    return search.first(found)


def _tiles(steps: Tensor, size: int) -> Iterator[tuple[Array, Array, Array]]:
    """Yield the sums of all groups ``[a, b]`` with the members of a left and b right halves."""
    count, low = len(steps), size // 2
    left, within_left, right, within_right = (half.numpy() for half in halves(steps, size))
    across = toward(torch.from_numpy(left), steps).numpy()
    joined = np.zeros((count + 2, len(right)), dtype=np.float32)
    np.put_along_axis(joined, right.T, 1, axis=0)
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
                # OpenBLAS may raise a flag on numbers of no product. PyTorch's own product would
                # round to bfloat16 for whoever allows that (`slack` is that of float32).
                with np.errstate(all="ignore"):
                    sums = rows[top : top + TILE[0]] @ columns
                yield sums, left[part], right[at : at + columns.shape[1]]


def halves(steps: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """List the halves of groups ``[n, N // 2]`` and ``[n, N - N // 2]``, each with its sum ``[n]``.

    A group is its first N // 2 members, the last of which is m, and N - N // 2 members above m. Its
    sum is that within the left half, that within the right one, and the product of the left half's
    similarities to everyone with the right half's indicator. Left halves come in the order of m,
    and those right halves that are above m before the others.
    """
    count, low = len(steps), size // 2
    left, within_left = _listed(steps, low, count - size + low)
    mirrored, within_right = _listed(steps.flip(0, 1), size - low, count - low)
    return left, within_left, count - 1 - mirrored.flip(1), within_right


def _listed(steps: Tensor, size: int, among: int) -> tuple[Tensor, Tensor]:
    """List groups among the first candidates, in the order of last members, then of those before.

    So those of the first m candidates come first, ``comb(m, size)`` of them.
    """
    members, within = torch.zeros_like(steps[:1, :0], dtype=torch.int64), steps.new_zeros(1)
    for length in range(1, size + 1):
        ends = range(among - size + length)
        before = torch.tensor([math.comb(end, length - 1) for end in ends], device=steps.device)
        last = torch.arange(len(ends), device=steps.device).repeat_interleave(before)
        prefix = torch.arange(len(last), device=steps.device) - (before.cumsum(0) - before)[last]
        within = within[prefix] + toward(members, steps)[prefix, last]
        members = torch.column_stack([members.index_select(0, prefix), last])
    return members, within


def toward(members: Tensor, steps: Tensor) -> Tensor:
    """Add up each group's similarities to each candidate ``[n, M]``."""
    starts = torch.arange(len(members), device=members.device) * members.shape[1]
    return embedding_bag(members.flatten(), steps, starts, mode="sum")


_IMPLEMENTATIONS = {"torch": _by_halves, "reference": reference}
