"""groups on a GPU: the sums of all groups tile by tile, of which the least of each row are written.

A row of a tile is a left half with some consecutive right halves. The rows in which the wanted
groups can lie are few, and PyTorch adds those up exactly, the most promising first. What is held is
the halves, and some bytes a row to sort them. Two runs are equal.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from moebook.kernels._triton.placing import placed
from moebook.kernels.groups import FAR, Search, halves, toward

ROWS = 2**14
"""Rows of tiles that are added up exactly at once: a million groups."""
BLOCKS = {"BL": 64, "BR": 64, "BK": 16, "num_warps": 8, "num_stages": 2}
"""A program's work: BL left halves with BR right ones, BK candidates at a time."""


def run(search: Search) -> tuple[Tensor, Tensor]:
    """Return the wanted groups and their keys, as `moebook.kernels.groups` does."""
    return _searched(search.steps, search)


@placed
def _searched(steps: Tensor, search: Search) -> tuple[Tensor, Tensor]:
    """Add up rows in the order of their least sums until no later one can matter."""
    slack = search.slack()
    left, within_left, right, within_right = halves(steps.float(), search.size)
    tiles = _tiles(left, len(right), search)
    least = torch.empty(len(tiles), BLOCKS["BL"], device=steps.device)
    _least[(len(tiles),)](
        left, within_left, toward(left, steps.float()), right, within_right, tiles, least, slack,
        len(left), len(right), len(steps),
        LOW=left.shape[1], HIGH=right.shape[1], FAR=float(FAR * search.inverse), **BLOCKS,
    )  # fmt: skip
    least = least.flatten()
    members, limit = left.new_zeros(0, search.size), torch.finfo(least.dtype).max
    for rows in least.argsort(stable=True).split(ROWS):
        rows = rows[least[rows] <= limit]
        if not len(rows):
            break
        members, keys = search.first(torch.cat([members, _joined(rows, tiles, left, right)]))
        if len(members) == search.keep:
            limit = float(keys.max()) + slack
    return members, keys


def _tiles(left: Tensor, many: int, search: Search) -> Tensor:
    """Return the first left and the first right half of each tile ``[tiles, 2]``.

    A block of left halves meets the right ones that are above the first of their last members.
    """
    count, high = len(search.steps), search.size - left.shape[1]
    above = [min(many, math.comb(count - 1 - last, high)) for last in range(-1, count)]
    tops = torch.arange(0, len(left), BLOCKS["BL"], device=left.device)
    lasts = left[tops, -1] if left.shape[1] else tops - 1
    wide = torch.tensor(above, device=left.device)[lasts + 1]
    wide = (wide + BLOCKS["BR"] - 1) // BLOCKS["BR"]
    block = torch.arange(len(tops), device=left.device).repeat_interleave(wide)
    place = torch.arange(len(block), device=left.device) - (wide.cumsum(0) - wide)[block]
    return torch.stack([tops[block], place * BLOCKS["BR"]], 1)


def _joined(rows: Tensor, tiles: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """List the groups of some rows of tiles ``[G, N]``."""
    top, first = tiles[rows // BLOCKS["BL"]].T
    other = first[:, None] + torch.arange(BLOCKS["BR"], device=rows.device)
    one, there = (top + rows % BLOCKS["BL"])[:, None].expand_as(other), other < len(right)
    found = torch.cat([left[one[there]], right[other[there]]], 1)
    low = left.shape[1]
    return found[found[:, low - 1] < found[:, low]] if low else found


@triton.jit
def _least(
    lower, within_lower, across, upper, within_upper, tiles, least, slack, lefts, rights, count,
    LOW: tl.constexpr, HIGH: tl.constexpr, FAR: tl.constexpr, BL: tl.constexpr, BR: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """least[tile, l] = the least sum of left half l with a right half of the tile above it."""
    tile = tl.program_id(0).to(tl.int64)
    one = (tl.load(tiles + 2 * tile) + tl.arange(0, BL)).to(tl.int32)
    other = (tl.load(tiles + 2 * tile + 1) + tl.arange(0, BR)).to(tl.int32)
    last = tl.where(one < lefts, tl.full((BL,), -1, dtype=tl.int32), count)
    if LOW > 0:
        last = tl.load(lower + one * LOW + LOW - 1, mask=one < lefts, other=count).to(tl.int32)
    total = tl.zeros((BL, BR), dtype=tl.float32)
    for start in range(tl.min(last) + 1, count, BK):
        candidate = start + tl.arange(0, BK)
        inside = (one < lefts)[:, None] & (candidate < count)[None, :]
        of = across + one.to(tl.int64)[:, None] * count
        a = tl.load(of + candidate[None, :], mask=inside, other=0.0)
        b = tl.zeros((BK, BR), dtype=tl.float32)
        for i in tl.static_range(HIGH):
            member = tl.load(upper + other * HIGH + i, mask=other < rights, other=-1).to(tl.int32)
            b += tl.where(member[None, :] == candidate[:, None], 1.0, 0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    first = tl.load(upper + other * HIGH, mask=other < rights, other=-1)
    total += tl.load(within_lower + one, mask=one < lefts, other=0.0)[:, None]
    total += tl.load(within_upper + other, mask=other < rights, other=0.0)[None, :]
    if FAR > 0:
        total = tl.where(total < -slack, total + FAR, total)
    total = tl.where(last[:, None] < first[None, :], total, float("inf"))
    tl.store(least + tile * BL + tl.arange(0, BL), tl.min(total, 1))
