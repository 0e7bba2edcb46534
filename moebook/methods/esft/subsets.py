"""Groups of alike experts (Appendix C): the literal enumeration, and an exact search instead."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moebook.errors import refuse
from moebook.kernels.dispatch import implementation

UNIT = 2**40
"""Similarities are whole multiples of 1 / UNIT, so that sums are exact and ties are real ties."""

Matrix = NDArray[np.int64]
Group = tuple[int, ...]


def partition(cooccurrence: Tensor, size: int, *, impl: str = "auto") -> tuple[Group, ...]:
    """Split experts into groups, greedily the most alike first (Appendix C).

    Two experts are as alike as the cosine of their rows in the co-occurrence matrix. Of all groups
    of the given size among the experts left, the one with the largest mean pairwise similarity is
    taken, until none is left; among equal ones the first in the order of their numbers.

    Args:
        cooccurrence: ``[E, E]``, from `cooccurrence`. The row of an expert that was never used is
            zero, and its cosine with any other counts as 0.
        size: Experts a group, a divisor of E.
        impl: ``"auto"``, ``"search"`` (branch and bound) or ``"reference"`` (every group is looked
            at, as the paper says: 4.4e9 of them for 8 of 64). Both give the same groups.

    Returns:
        The groups in the order in which they were found, members ascending.

    Raises:
        Refusal: E-SHAPE for a matrix that is not square, E-RANGE for a size that does not divide
            E or negative counts, E-IMPL for an unknown ``impl``.
    """
    if cooccurrence.dim() != 2 or cooccurrence.shape[0] != cooccurrence.shape[1]:
        refuse("E-SHAPE", f"cooccurrence must be [E, E], got {tuple(cooccurrence.shape)}")
    experts = len(cooccurrence)
    if size < 1 or experts % size:
        refuse("E-RANGE", f"the group size is {size}, expected a divisor of {experts} (experts)")
    if cooccurrence.min() < 0:
        refuse("E-RANGE", "cooccurrence holds a negative count")
    best = implementation("partition", impl, {"search": search, "reference": reference})
    alike, left, groups = similarity(cooccurrence), np.arange(experts), []
    while len(left):
        members = left[list(best(alike[np.ix_(left, left)], size))]
        groups.append(tuple(members.tolist()))
        left = np.setdiff1d(left, members)
    return tuple(groups)


def similarity(cooccurrence: Tensor) -> Matrix:
    """Return the cosines of all pairs of rows, in units of 1 / UNIT, ``[E, E]``; diagonal 0."""
    rows = torch.nn.functional.normalize(cooccurrence.double(), dim=1)
    alike = np.rint((rows @ rows.T).numpy() * UNIT).astype(np.int64)
    np.fill_diagonal(alike, 0)
    return np.maximum(alike, alike.T)  # the product may differ across the diagonal by rounding


def reference(alike: Matrix, size: int) -> Group:
    """Look at every group and return the first of the best: the paper's own procedure."""
    best, found = -1, tuple(range(size))
    for group in combinations(range(len(alike)), size):
        value = sum(int(alike[i, j]) for i, j in combinations(group, 2))
        if value > best:
            best, found = value, group
    return found


def search(alike: Matrix, size: int) -> Group:
    """Return what `reference` returns, by branch and bound in the same order.

    A group is grown by ascending numbers; a branch is left when even an upper bound of what can
    still be reached is no more than the best found. The bound gives each candidate its similarity
    to the members and half of its largest ones to other candidates (each pair is shared by two),
    and adds up the best candidates. The last two members are found at once, as the largest entry of
    a matrix.
    """
    if size == 1 or size == len(alike):
        return tuple(range(size))
    return _Search(alike, size).run()


class _Search:
    """State of one search: all values are doubled, so that halves stay whole."""

    def __init__(self, alike: Matrix, size: int) -> None:
        self.alike, self.size = 2 * alike, size
        self.best = self._start() - 1
        self.found: Group = ()

    def run(self) -> Group:
        everyone = np.arange(len(self.alike))
        self._grow((), np.zeros(len(everyone), dtype=np.int64), 0, everyone)
        return self.found

    def _start(self) -> int:
        """Value of a group grown greedily from each expert, the best of them: a lower bound."""
        best = 0
        for first in range(len(self.alike)):
            gain, value = self.alike[first].copy(), 0
            gain[first] = -1
            for _ in range(self.size - 1):
                chosen = int(gain.argmax())
                value += int(gain[chosen])
                gain = np.where(gain < 0, -1, gain + self.alike[chosen])
                gain[chosen] = -1
            best = max(best, value)
        return best

    def _grow(self, members: Group, gain: Matrix, value: int, left: Matrix) -> None:
        """Try all groups that begin with ``members`` and go on within ``left``.

        Args:
            members: Ascending numbers.
            gain: ``[E]``, similarity of each expert to the members.
            value: That of the members among themselves.
            left: Candidates, ascending and above the members.
        """
        missing = self.size - len(members)
        if missing == 2:
            self._finish(members, gain[left], value, left)
            return
        while len(left) >= missing:
            if value + self._bound(gain[left], left, missing) <= self.best:
                return
            chosen, left = int(left[0]), left[1:]
            deeper = gain + self.alike[chosen]
            self._grow((*members, chosen), deeper, value + int(gain[chosen]), left)

    def _bound(self, gain: Matrix, left: Matrix, missing: int) -> int:
        """What ``missing`` more members from ``left`` can add at most."""
        among = self.alike[np.ix_(left, left)]
        largest = np.partition(among, len(left) - missing + 1, axis=1)[:, len(left) - missing + 1 :]
        worth = gain + largest.sum(1) // 2
        return int(np.partition(worth, len(left) - missing)[len(left) - missing :].sum())

    def _finish(self, members: Group, gain: Matrix, value: int, left: Matrix) -> None:
        if len(left) < 2:
            return
        pairs = self.alike[np.ix_(left, left)] + gain[:, None] + gain[None, :]
        pairs[np.tril_indices(len(left))] = -1
        first, second = divmod(int(pairs.argmax()), len(left))
        if value + int(pairs[first, second]) > self.best:
            self.best = value + int(pairs[first, second])
            self.found = (*members, int(left[first]), int(left[second]))
