"""groups: of all groups of N out of M candidates, those that are worth most and differ most."""

from __future__ import annotations

import math
from itertools import chain, combinations
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from moebook.errors import refuse, refuse_unknown
from moebook.kernels.dispatch import natural, shapes

# What a sum of similarities is masked by before sums are compared. The lower 62 bits
# make a negative sum a huge one, so that negative ones come last.
MASKS = {"ordered": -1, "inverse": 2**62 - 1}
MOST = 10**6  # groups that are listed
BITS = 60  # of a sum of similarities in whole steps: int64 cannot overflow
Array = np.ndarray[Any, Any]


class Groups(NamedTuple):
    """The G best groups, the least total first; of equal totals, in their members' order."""

    members: Tensor  # [G, N] int64, ascending
    # [G] int64, by diversity among all groups, 1 is best; equal ones share.
    rank: Tensor
    total: Tensor  # [G] float64, rank plus the members' worth


def groups(
    similarity: Tensor,
    worth: Tensor,
    size: int,
    *,
    best: int = 1000,
    diversity: str = "ordered",
) -> Groups:
    """Rank all groups by diversity, add the members' worth, and return the least totals.

    The last step of Rocket's Alg. 1, exactly: no group is left out of the ranks. Each
    similarity is rounded to a multiple of 2^-55 or so of the largest, finer than float64
    adds them, so that sums are whole numbers, equal in any order. On the CPU, without a
    gradient.

    Args:
        similarity: ``[M, M]``; what stands above the diagonal is read.
        worth: ``[M]``, less is better (in Rocket R_P + R_A).
        size: N, 1 to M; more than `MOST` groups are refused.
        best: G, how many groups are returned.
        diversity: ``"ordered"``: the least mean similarity is best. ``"inverse"``: its
            inverse, the largest best: zero first, then upwards, then the negative ones
            upwards.
    """
    tensors = {"similarity": (similarity, "M M", "real"), "worth": (worth, "M", "real")}
    count = shapes("groups", tensors, valued=True)["M"]
    natural("groups", "size", size, count, "the candidates")
    natural("groups", "best", best)
    refuse_unknown(
        diversity, MASKS, "E-CHOICE", f"groups: unknown diversity '{diversity}';"
    )
    number = math.comb(count, size)
    if number > MOST:
        have = f"{count} candidates have {number:,} groups of {size}"
        refuse(
            "E-RANGE", f"groups: {have}, at most {MOST:,} are listed: fewer candidates"
        )
    alike = _finite("similarity", similarity)
    value = _finite("worth", worth)

    # Alg. 1, line 7: all N-tuples of the candidates, [groups, N].
    listed = chain.from_iterable(combinations(range(count), size))
    members = np.fromiter(listed, np.int64, number * size).reshape(number, size)

    # Of each group: its sum of similarities, in whole steps, and of worth. Eq. 6 goes
    # on to divide the first by the number of pairs, on which no rank depends.
    steps = _steps(alike, size)
    sums = np.zeros(number, np.int64)
    for i, j in combinations(range(size), 2):  # ascending members: above the diagonal
        sums += steps[members[:, i], members[:, j]]
    worths = np.zeros(number)
    with np.errstate(over="ignore"):  # refused below
        for column in members.T:
            worths += value[column]
    if not np.isfinite(worths).all():
        have = f"worth adds up beyond float64 over {size}"
        refuse("E-NONFINITE", f"groups: {have}: ranks for worth")

    # Line 9, R_D: 1 and the number of more diverse groups; equal ones share it.
    keys = sums & MASKS[diversity]
    ranks = np.searchsorted(np.sort(keys), keys) + 1
    # Line 11: the least R_P + R_A + R_D.
    totals = ranks + worths
    order = np.argsort(totals, kind="stable")[:best]
    device = similarity.device
    return Groups(
        members=torch.from_numpy(members[order]).to(device),
        rank=torch.from_numpy(ranks[order]).to(device),
        total=torch.from_numpy(totals[order]).to(device),
    )


def _finite(name: str, tensor: Tensor) -> Array:
    """Return a tensor's numbers in float64, none of them NaN or infinite."""
    values: Array = tensor.detach().double().cpu().numpy()
    if not np.isfinite(values).all():
        refuse("E-NONFINITE", f"groups: {name} holds NaN or infinity")
    return values


def _steps(similarity: Array, size: int) -> Array:
    """Write similarities ``[M, M]`` as whole numbers, so small that no sum overflows."""
    upper = np.triu(similarity, 1)
    # Not 0, of which there is no exponent to go by.
    largest = max(float(np.abs(upper).max()), np.finfo(np.float64).tiny)
    pairs = math.comb(size, 2)  # that a group's sum is of
    room = BITS - pairs.bit_length()
    _, exponent = math.frexp(largest)
    # Each step count is at most 2^room, and fewer than 2^(BITS - room) are added.
    steps: Array = np.ldexp(upper, room - exponent).round().astype(np.int64)
    return steps
