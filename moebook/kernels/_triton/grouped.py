"""Grouped products: rows sorted by expert, each tile of rows with its own expert's matrix.

Nothing here waits for the GPU. How many tiles the experts need is known on the device alone, so as
many programs are started as there can be at most, and those without rows end at once. No sum is
made by atomic additions: two runs are equal bit for bit.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moebook.kernels.route import Routing


class Sorted(NamedTuple):
    """S = T * K rows in the order of their experts.

    Attributes:
        token: ``[S]`` int64, the token of a row.
        place: ``[T, K]`` int64, the row of a slot.
        counts, ends: ``[E]`` int64, rows of each expert, and where they end.
        tiles: ``[tiles, 3]`` int64: expert, first row, end of the expert's rows; all 0 for a tile
            without rows.
        blocks: Sizes of a program's work, warps and stages.
    """

    token: Tensor
    place: Tensor
    counts: Tensor
    ends: Tensor
    tiles: Tensor
    blocks: dict[str, Any]


def blocks(dtype: torch.dtype, rows: int, experts: int) -> dict[str, Any]:
    """Choose a program's work: BM rows, BN columns, BK deep, by the rows that an expert can expect.

    float32 is multiplied as PyTorch multiplies it on this device: exactly, unless TF32 is allowed.
    """
    if dtype == torch.float32:
        precision = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
        return {"BM": 32, "BN": 64, "BK": 32, "PRECISION": precision, "num_warps": 4,
                "num_stages": 2}  # fmt: skip
    if rows < 64 * experts:
        return {"BM": 32, "BN": 64, "BK": 64, "PRECISION": "ieee", "num_warps": 4,
                "num_stages": 4}  # fmt: skip
    return {"BM": 128, "BN": 128, "BK": 64, "PRECISION": "ieee", "num_warps": 8,
            "num_stages": 3}  # fmt: skip


def gradient_blocks(dtype: torch.dtype, chosen: dict[str, Any]) -> dict[str, Any]:
    """Choose the work of a program of `weight_gradient`, from what `blocks` chose."""
    side = 64 if dtype == torch.float32 else 128
    return {"BI": side, "BJ": side, "BK": 32, "PRECISION": chosen["PRECISION"], "num_warps": 8,
            "num_stages": chosen["num_stages"]}  # fmt: skip


def sort_rows(routing: Routing, dtype: torch.dtype) -> Sorted:
    """Make the tables that the kernels read, on the device."""
    order, counts = routing.order, routing.counts
    chosen = blocks(dtype, len(order), len(counts))
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    ends = counts.cumsum(0)
    tiles = tile_table(counts, ends, len(order), chosen["BM"])
    top_k = routing.ids.shape[1]
    return Sorted(order // top_k, place.view(-1, top_k), counts, ends, tiles, chosen)


def tile_table(counts: Tensor, ends: Tensor, total: int, rows: int) -> Tensor:
    """Cut groups of rows into tiles: ``[tiles, 3]`` of group, first row, end of the group.

    Args:
        counts: ``[groups]`` int64, rows of each group.
        ends: ``[groups]`` int64, where they end.
        total: The sum of the counts, which the host knows without asking the device.
        rows: Rows of a tile.
    """
    per_group = (counts + rows - 1) // rows
    last = per_group.cumsum(0)
    tile = torch.arange(total // rows + len(counts), device=counts.device)
    group = torch.searchsorted(last, tile, right=True)
    known = group.clamp(max=len(counts) - 1)
    first = (ends - counts)[known] + (tile - (last - per_group)[known]) * rows
    return torch.stack([known, first, ends[known]], 1) * (group < len(counts)).unsqueeze(1)


@triton.jit
def matrix_of(trained, frozen, slots, expert, size: tl.constexpr):
    """Return where an expert's matrix begins: in the trained bank if it has a slot there."""
    slot = tl.load(slots + expert)
    return trained + slot * size if slot >= 0 else frozen + expert * size


@triton.jit
def _product(
    rows, token, trained, frozen, slots, gate, out, tiles,
    K: tl.constexpr, N: tl.constexpr, TRANSPOSED: tl.constexpr, GATHER: tl.constexpr,
    WEIGH: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """out[r] = gate[r] * rows[r or token[r]] @ matrix [K, N] of r's expert, or transposed."""
    tile = tiles + 3 * tl.program_id(1)
    expert, start, end = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    if start >= end:
        return
    row = tl.arange(0, BM)
    live = row < end - start
    if GATHER:
        source = tl.load(token + start + row, mask=live, other=0)
    else:
        source = row
        rows += start * K
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    matrix = matrix_of(trained, frozen, slots, expert, K * N)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for first in range(0, K, BK):
        deep = first + tl.arange(0, BK)
        left = rows + source[:, None] * K + deep[None, :]
        a = tl.load(left, mask=live[:, None] & (deep < K)[None, :], other=0.0)
        if TRANSPOSED:
            right = matrix + column[None, :] * K + deep[:, None]
        else:
            right = matrix + deep[:, None] * N + column[None, :]
        b = tl.load(right, mask=(deep < K)[:, None] & (column < N)[None, :], other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    if WEIGH:
        total *= tl.load(gate + start + row, mask=live, other=0.0)[:, None]
    to = out + start * N + row[:, None] * N + column[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=live[:, None] & (column < N)[None, :])


@triton.jit
def _weight_gradient(
    left, right, token, owner, counts, ends, out,
    HIGH: tl.constexpr, WIDE: tl.constexpr, GATHER_LEFT: tl.constexpr, PRECISION: tl.constexpr,
    BI: tl.constexpr, BJ: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out[n] = sum over the rows of expert owner[n] of left[r] x right[r], one of them by token."""
    expert = tl.load(owner + tl.program_id(1))
    end = tl.load(ends + expert)
    start = end - tl.load(counts + expert)
    tile = tl.program_id(0)
    i = tile // tl.cdiv(WIDE, BJ) * BI + tl.arange(0, BI)
    j = tile % tl.cdiv(WIDE, BJ) * BJ + tl.arange(0, BJ)
    total = tl.zeros((BI, BJ), dtype=tl.float32)
    for first in range(start, end, BK):
        row = first + tl.arange(0, BK)
        live = (row < end)[:, None]
        by_token = tl.load(token + row, mask=row < end, other=0)
        if GATHER_LEFT:
            at_left = left + by_token[:, None] * HIGH + i[None, :]
            at_right = right + row[:, None] * WIDE + j[None, :]
        else:
            at_left = left + row[:, None] * HIGH + i[None, :]
            at_right = right + by_token[:, None] * WIDE + j[None, :]
        a = tl.load(at_left, mask=live & (i < HIGH)[None, :], other=0.0)
        b = tl.load(at_right, mask=live & (j < WIDE)[None, :], other=0.0)
        total = tl.dot(tl.trans(a), b, total, input_precision=PRECISION)
    to = out + tl.program_id(1).to(tl.int64) * HIGH * WIDE + i[:, None] * WIDE + j[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=(i < HIGH)[:, None] & (j < WIDE)[None, :])


@triton.jit
def _combine(
    rows, place, base, out, D: tl.constexpr, K: tl.constexpr,
    ADD: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """out[t] = base[t] + the sum of the rows of t's K slots."""
    token = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    total = tl.zeros((BD,), dtype=tl.float32)
    if ADD:
        total += tl.load(base + token * D + d, mask=d < D, other=0.0).to(tl.float32)
    for k in range(K):
        row = tl.load(place + token * K + k)
        total += tl.load(rows + row * D + d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(out + token * D + d, total.to(out.dtype.element_ty), mask=d < D)


class Banks(NamedTuple):
    """One kind of matrix of all experts: two tensors, and the table that says which to read."""

    trained: Tensor
    frozen: Tensor
    slots: Tensor


def product(
    rows: Tensor, banks: Banks, by: Sorted, *, transposed: bool, gather: bool, gate: Tensor | None
) -> Tensor:
    """Multiply sorted rows by their experts' matrices, ``[K, N]`` or transposed ``[N, K]``.

    Args:
        rows: ``[S, K]``, or ``[T, K]`` with ``gather``.
        banks: The matrices.
        by: The order.
        transposed: Whether the matrices lie as ``[N, K]``.
        gather: Whether a row is read from its token.
        gate: ``[S]`` float32 factor on each row of the result, or None.

    Returns:
        ``[S, N]``.
    """
    first, second = banks.frozen.shape[1:]
    width, columns = (second, first) if transposed else (first, second)
    out = rows.new_empty(len(by.token), columns)
    grid = (triton.cdiv(columns, by.blocks["BN"]), len(by.tiles))
    _product[grid](
        rows, by.token, *banks, out if gate is None else gate, out, by.tiles, K=width, N=columns,
        TRANSPOSED=transposed, GATHER=gather, WEIGH=gate is not None, **by.blocks,
    )  # fmt: skip
    return out


def weight_gradient(
    left: Tensor, right: Tensor, by: Sorted, slots: Tensor, weight: Tensor, *, gather_left: bool
) -> Tensor:
    """Return the gradient of a trained bank ``[N, I, J]``: sums of outer products of its rows.

    Args:
        left: ``[S, I]``, or ``[T, I]`` with ``gather_left``.
        right: ``[S, J]``; ``[T, J]`` without ``gather_left``.
        by: The order.
        slots: ``[E]``, where an expert lies in the bank, -1 where it does not.
        weight: The bank.
        gather_left: Which of the two is read by token.
    """
    number, high, wide = weight.shape
    out = torch.empty_like(weight)
    if not number:
        return out
    # The inverse of the table; experts without a slot write behind its end.
    owner = slots.new_zeros(number + 1)
    places = torch.where(slots >= 0, slots, number)
    owner[places] = torch.arange(len(slots), device=slots.device)
    chosen = gradient_blocks(left.dtype, by.blocks)
    grid = (triton.cdiv(high, chosen["BI"]) * triton.cdiv(wide, chosen["BJ"]), number)
    _weight_gradient[grid](
        left, right, by.token, owner, by.counts, by.ends, out, HIGH=high, WIDE=wide,
        GATHER_LEFT=gather_left, **chosen,
    )  # fmt: skip
    return out


def combine(rows: Tensor, by: Sorted, base: Tensor | None = None) -> Tensor:
    """Sum the rows of each token, ``[S, D]`` to ``[T, D]``, onto ``base`` if there is one."""
    tokens, top_k = by.place.shape
    out = rows.new_empty(tokens, rows.shape[1])
    if tokens:
        wide = min(1024, triton.next_power_of_2(rows.shape[1]))
        _combine[(tokens, triton.cdiv(rows.shape[1], wide))](
            rows, by.place, out if base is None else base, out, D=rows.shape[1], K=top_k,
            ADD=base is not None, BD=wide,
        )  # fmt: skip
    return out
