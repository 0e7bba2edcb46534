"""route on a GPU: the K largest logits of each row in one kernel, then a sort by counting.

Nothing here waits for the GPU, and nothing is atomic: two runs give the same order.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moebook.kernels.route import Routing, weights_of

ROWS = 32  # tokens of one program that chooses
# The largest and the smallest number of 32 bits: no logit has their bits.
FIRST = tl.constexpr(2**31 - 1)
LAST = tl.constexpr(-(2**31))
ITEMS = 128  # items of one program that sorts
# Of a program that compares all its items with one another; fewer spill registers.
WARPS = 8


def run(logits: Tensor, top_k: int, combine: str) -> Routing:
    """Run `moebook.kernels.route`."""
    ids = torch.empty(len(logits), top_k, dtype=torch.int64, device=logits.device)
    if len(logits):
        experts = logits.shape[1]
        _choose[(triton.cdiv(len(logits), ROWS),)](
            logits.detach().contiguous(),
            ids,
            len(logits),
            E=experts,
            K=top_k,
            BT=ROWS,
            BE=triton.next_power_of_2(experts),
        )
    order, counts = sort(ids.view(-1), logits.shape[1])
    return Routing.of_ids(ids, weights_of(logits, ids, combine), order, counts)


@triton.jit
def _choose(
    logits, ids, T, E: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BE: tl.constexpr
):
    """ids[t] = the experts of the K largest logits of t, of equal ones the lower number first."""
    row = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64)
    expert = tl.arange(0, BE)[None, :]
    inside = (row < T)[:, None] & (expert < E)
    logit = tl.load(logits + row[:, None] * E + expert, mask=inside, other=0).to(
        tl.float32
    )
    # Whole numbers in the order of the logits, NaN first as in a sort; what was taken
    # comes last.
    bits = tl.where(logit == 0, 0.0, logit).to(tl.int32, bitcast=True)
    rank = tl.where(logit != logit, FIRST, bits ^ ((bits >> 31) & FIRST))
    rank = tl.where(inside, rank, LAST)
    for k in tl.static_range(K):
        best = tl.argmax(rank, axis=1)
        tl.store(ids + row * K + k, best.to(tl.int64), mask=row < T)
        rank = tl.where(expert == best[:, None], LAST, rank)


def sort(ids: Tensor, bins: int, *, pairs: int = 0) -> tuple[Tensor, Tensor]:
    """Sort n items stably by key, by two kernels and one running sum: order and counts ``[bins]``.

    Keys are ids ``[n]``, or with ``pairs`` = E ``min * E + max`` of ids ``[n, 2]``; all is int64.
    """
    n = len(ids)
    blocks = triton.cdiv(len(ids), ITEMS)
    order = torch.empty(n, dtype=torch.int64, device=ids.device)
    if not n:
        return order, order.new_zeros(bins)
    counts = order.new_zeros(bins, blocks)
    within = torch.empty(n, dtype=torch.int32, device=ids.device)
    _count[(blocks,)](
        ids, within, counts, n, blocks, E=pairs, BT=ITEMS, num_warps=WARPS
    )
    # Key by key, and within a key block by block: so places are stable.
    ends = counts.view(-1).cumsum(0)  # [bins * blocks]
    _place[(blocks,)](ids, within, counts, ends, order, n, blocks, E=pairs, BT=ITEMS)
    return order, counts.sum(1)


@triton.jit
def _key(ids, item, n, E: tl.constexpr):
    """Keys of some items, -1 behind the last."""
    live = item < n
    if E:
        one = tl.load(ids + 2 * item, mask=live, other=0)
        two = tl.load(ids + 2 * item + 1, mask=live, other=0)
        return tl.where(live, tl.minimum(one, two) * E + tl.maximum(one, two), -1)
    return tl.load(ids + item, mask=live, other=-1)


@triton.jit
def _count(ids, within, counts, n, blocks, E: tl.constexpr, BT: tl.constexpr):
    """Of one block: each item's place among those of its key, and how many a key has."""
    lane = tl.arange(0, BT)
    item = tl.program_id(0) * BT + lane
    key = _key(ids, item, n, E)
    # For each item (a row) every item of the block (a column): of its key? earlier?
    same = key[:, None] == key[None, :]
    earlier = lane[None, :] < lane[:, None]
    before = tl.sum((same & earlier).to(tl.int32), axis=1)
    total = tl.sum(same.to(tl.int32), axis=1)
    tl.store(within + item, before, mask=item < n)
    # One lane writes a key's number: that of its last item.
    last = (item < n) & (before == total - 1)
    tl.store(counts + key * blocks + tl.program_id(0), total.to(tl.int64), mask=last)


@triton.jit
def _place(
    ids, within, counts, ends, order, n, blocks, E: tl.constexpr, BT: tl.constexpr
):
    """order[place of an item] = the item."""
    item = tl.program_id(0) * BT + tl.arange(0, BT)
    live = item < n
    at = _key(ids, item, n, E) * blocks + tl.program_id(0)
    start = tl.load(ends + at, mask=live, other=0) - tl.load(
        counts + at, mask=live, other=0
    )
    place = start + tl.load(within + item, mask=live, other=0)
    tl.store(order + place, item.to(tl.int64), mask=live)


def tile_table(
    counts: Tensor, total: int, rows: int, *, slots: Tensor | None = None, bank: int = 0
) -> tuple[Tensor, Tensor]:
    """Cut groups of sorted rows into tiles of so many rows.

    ``counts [groups]`` sum to ``total``, known on the host. With ``slots [groups]``, a group's
    place in the first of two banks or -1 for the second, those of one ``bank``, 0 or 1, are cut.
    Returns ``[tiles, 3]`` int64, place in the bank, first row and end, and how many count ``[1]``.
    """
    groups = len(counts)
    tiles = torch.empty(
        total // rows + groups, 3, dtype=torch.int64, device=counts.device
    )
    number = torch.empty(1, dtype=torch.int64, device=counts.device)
    _cut[(groups,)](
        counts,
        counts if slots is None else slots,
        tiles,
        number,
        G=groups,
        ROWS=rows,
        BANK=-1 if slots is None else bank,
        BG=triton.next_power_of_2(groups),
    )
    return tiles, number


@triton.jit
def _cut(
    counts,  # [G]
    slots,  # [G], or whatever where BANK is -1
    tiles,  # [tiles, 3]: place, first row, end
    number,  # [1]
    G: tl.constexpr,
    ROWS: tl.constexpr,
    BANK: tl.constexpr,
    BG: tl.constexpr,
):
    """Write the tiles of one group."""
    mine = tl.program_id(0)
    group = tl.arange(0, BG)
    count = tl.load(counts + group, mask=group < G, other=0)
    needed = (count + ROWS - 1) // ROWS
    place = mine.to(tl.int64)
    if BANK >= 0:
        slot = tl.load(slots + group, mask=group < G, other=-1)
        needed = tl.where((slot >= 0) == (BANK == 0), needed, 0)
        if BANK == 0:
            place = tl.load(slots + mine)
    first = tl.sum(tl.where(group < mine, needed, 0))
    start = tl.sum(tl.where(group < mine, count, 0))
    end = start + tl.load(counts + mine)
    if mine == 0:
        tl.store(number, tl.sum(needed))
    for tile in range(0, tl.sum(tl.where(group == mine, needed, 0))):
        to = tiles + 3 * (first + tile)
        tl.store(to, place)
        tl.store(to + 1, start + tile * ROWS)
        tl.store(to + 2, end)
