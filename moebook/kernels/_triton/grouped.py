"""Grouped products: rows sorted by expert, each tile of rows with its own expert's matrix.

Nothing here waits for the GPU: the device alone knows how many tiles the experts need, and a fixed
number of programs share them out. No addition is atomic: two runs are equal bit for bit. On Hopper
and later, tiles of 16-bit numbers are fetched by the tensor memory accelerator where the widths are
multiples of 16 bytes; else by pointers.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from moebook.kernels._triton.route import tile_table
from moebook.kernels.route import Routing


class Sorted(NamedTuple):
    """S = T * K rows in the order of their experts; all numbers are int64."""

    token: Tensor  # [S], the token of a row
    place: Tensor  # [T, K], the row of a slot
    counts: Tensor  # [E], rows of each expert
    ends: Tensor  # [E], where they end
    shares: list[tuple[Tensor, Tensor]]  # the tiles of each bank, see `tile_table`
    blocks: dict[str, Any]  # sizes of a program's work, warps and stages


def roomy(device: torch.device, kilobytes: int = 160) -> bool:
    """Whether a program can have large tiles' shared memory: 163 KB on an A100, not on a T4."""
    if device.type == "cpu":
        return True
    has = torch.cuda.get_device_properties(device)
    return getattr(has, "shared_memory_per_block_optin", 0) >= kilobytes * 1024


def precision() -> str:
    """Return how PyTorch multiplies float32 on a GPU: exactly, unless TF32 is allowed.

    Of the setting's two names the older, ``allow_tf32``, cannot be read where this one was set.
    """
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def blocks(dtype: torch.dtype, large: bool) -> dict[str, Any]:
    """Choose a program's work: BM rows, BN columns, BK deep; large tiles need a `roomy` device."""
    small = {"BM": 32, "BN": 64, "num_warps": 4}
    if dtype == torch.float32:
        return {**small, "BK": 32, "PRECISION": precision(), "num_stages": 2}
    if not large:
        return {**small, "BK": 64, "PRECISION": "ieee", "num_stages": 4}
    wide = {"BM": 128, "BN": 256, "num_warps": 8}
    return {**wide, "BK": 64, "PRECISION": "ieee", "num_stages": 3}


def gradient_blocks(
    dtype: torch.dtype, chosen: dict[str, Any], tma: bool
) -> dict[str, Any]:
    """Choose the work of a program of `weight_gradient`, from what `blocks` chose."""
    side = 64 if dtype == torch.float32 else 128
    warps = 4 if tma else 8
    stages = 4 if tma else chosen["num_stages"]
    return {
        "BI": side,
        "BJ": side,
        "BK": 32,
        "PRECISION": chosen["PRECISION"],
        "num_warps": warps,
        "num_stages": stages,
    }


def sort_rows(
    routing: Routing, dtype: torch.dtype, slots: Tensor | None = None
) -> Sorted:
    """Make the kernels' tables on the device; ``slots [E]`` are places in the first bank, or -1."""
    order = routing.order
    counts = routing.counts.contiguous()
    many = len(order) >= 64 * len(counts)  # rows that an expert can expect
    chosen = blocks(dtype, large=many and roomy(order.device))
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    shares = []
    for bank in range(1 if slots is None else 2):
        share = tile_table(counts, len(order), chosen["BM"], slots=slots, bank=bank)
        shares.append(share)
    token = order // routing.ids.shape[1]
    place = place.view(routing.ids.shape)
    return Sorted(token, place, counts, counts.cumsum(0), shares, chosen)


def fetched(dtype: torch.dtype, device: torch.device, *widths: int) -> bool:
    """Whether the tensor memory accelerator, which the interpreter plays, fetches such rows."""
    if dtype == torch.float32 or any(2 * width % 16 for width in widths):
        return False
    return device.type == "cpu" or torch.cuda.get_device_capability(device)[0] >= 9


def aligned(tensor: Tensor) -> Tensor:
    """Return the tensor contiguous, from where the accelerator fetches: a multiple of 16 bytes."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % 16 else tensor


def view(tensor: Tensor, block: Sequence[int], tma: bool) -> Any:
    """Return what a kernel reads blocks of a tensor from; a bank's matrices lie in a row."""
    if not tma or not tensor.numel():
        return tensor
    shape = (-1, *tensor.shape[1 - len(block) :])
    return TensorDescriptor.from_tensor(tensor.view(shape), list(block))


def programs(device: torch.device) -> int:
    """Return how many programs share the work, one a multiprocessor: a kernel's constant."""
    if device.type == "cpu":
        return 2
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@triton.jit
def block_of(
    source,
    row,
    column,
    end,
    wide,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TMA: tl.constexpr,
):
    """Return a block of a matrix ``[.., wide]``; by pointers it is 0 outside of ``end`` rows."""
    if TMA:
        block = source.load([row.to(tl.int32), column])
    else:
        i = row + tl.arange(0, ROWS)
        j = column + tl.arange(0, COLUMNS)
        inside = (i < end)[:, None] & (j < wide)[None, :]
        block = tl.load(source + i[:, None] * wide + j[None, :], mask=inside, other=0.0)
    return block


@triton.jit
def _product(
    rows,  # [S, K], sorted by expert
    matrices,  # [E, N, K]; backward [E, K, N]
    gate,  # [S], forward alone
    out,  # [S, N]
    tiles,  # see `tile_table`
    number,
    K: tl.constexpr,
    N: tl.constexpr,
    FORWARD: tl.constexpr,
    TMA: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """out[r] = gate[r] * matrix [N, K] of r's expert @ rows[r]; backward, matrix [K, N].T."""
    columns = tl.cdiv(N, BN)
    for work in tl.range(
        tl.program_id(0), tl.load(number) * columns, PROGRAMS, flatten=True
    ):
        tile = tiles + 3 * (work // columns)
        place = tl.load(tile)
        start = tl.load(tile + 1)
        end = tl.load(tile + 2)
        column = (work % columns * BN).to(tl.int32)
        total = tl.zeros((BM, BN), dtype=tl.float32)
        for first in range(0, K, BK):
            a = block_of(rows, start, first, end, K, BM, BK, TMA)
            if FORWARD:
                top = place * N
                b = block_of(matrices, top + column, first, top + N, K, BN, BK, TMA).T
            elif TMA:
                # Beyond a matrix it is 0: of the next one a row's 0 would not cancel infinity.
                b = matrices.load([place.to(tl.int32), first, column])
                b = tl.reshape(b, (BK, BN))
            else:
                top = place * K
                b = block_of(matrices, top + first, column, top + K, N, BK, BN, TMA)
            total = tl.dot(a, b, total, input_precision=PRECISION)
        row = start + tl.arange(0, BM)
        if FORWARD:
            total *= tl.load(gate + row, mask=row < end, other=0.0)[:, None]
        n = column + tl.arange(0, BN)
        to = out + row[:, None] * N + n[None, :]
        inside = (row < end)[:, None] & (n < N)[None, :]
        tl.store(to, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _weight_gradient(
    left,  # [S, HIGH], or [T, HIGH] by token
    right,  # [S, WIDE], or [T, WIDE] by token
    left_blocks,  # the same for TMA
    right_blocks,  # the same for TMA
    token,  # [S], of each sorted row
    owner,  # [N], the expert of a place in the bank, or -1
    counts,  # [E], rows of each expert
    ends,  # [E], where they end
    out,  # [N, HIGH, WIDE]
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    BI: tl.constexpr,
    BJ: tl.constexpr,
    BK: tl.constexpr,
):
    """out[n] = the sum of left[r] right[r].T, an outer product, over the rows r of expert owner[n].

    Rows are sorted, but those of the side ``BY_TOKEN``. Without an owner (-1) the sum is 0.
    """
    expert = tl.load(owner + tl.program_id(1))
    end = tl.load(ends + expert, mask=expert >= 0, other=0).to(tl.int32)
    start = end - tl.load(counts + expert, mask=expert >= 0, other=0).to(tl.int32)
    left_column = tl.program_id(0) // tl.cdiv(WIDE, BJ) * BI
    right_column = tl.program_id(0) % tl.cdiv(WIDE, BJ) * BJ
    total = tl.zeros((BI, BJ), dtype=tl.float32)
    whole = start
    if TMA:
        # It does not stop at the expert's last row, so the rest is for the loop below.
        whole = start + (end - start) // BK * BK
        for first in range(start, whole, BK):
            a = left_blocks.load([first, left_column])
            b = right_blocks.load([first, right_column])
            total = tl.dot(a.T, b, total, input_precision=PRECISION)
    i = left_column + tl.arange(0, BI)
    j = right_column + tl.arange(0, BJ)
    for first in range(whole, end, BK):
        row = (first + tl.arange(0, BK)).to(tl.int64)
        live = (row < end)[:, None]
        at_left = row
        at_right = row
        if BY_TOKEN == "left":
            at_left = tl.load(token + row, mask=row < end, other=0)
        if BY_TOKEN == "right":
            at_right = tl.load(token + row, mask=row < end, other=0)
        a = tl.load(
            left + at_left[:, None] * HIGH + i[None, :],
            mask=live & (i < HIGH)[None, :],
            other=0.0,
        )
        b = tl.load(
            right + at_right[:, None] * WIDE + j[None, :],
            mask=live & (j < WIDE)[None, :],
            other=0.0,
        )
        total = tl.dot(tl.trans(a), b, total, input_precision=PRECISION)
    to = (
        out
        + tl.program_id(1).to(tl.int64) * HIGH * WIDE
        + i[:, None] * WIDE
        + j[None, :]
    )
    tl.store(
        to,
        total.to(out.dtype.element_ty),
        mask=(i < HIGH)[:, None] & (j < WIDE)[None, :],
    )


@triton.jit
def _combine(rows, place, out, D: tl.constexpr, K: tl.constexpr, BD: tl.constexpr):
    """Add each token's K rows of ``rows [S, D]``, which ``place [T, K]`` names; ``out [T, D]``.

    A program writes BD numbers of one token, summed in float32 in the order of its choices.
    """
    token = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    inside = d < D
    total = tl.zeros((BD,), dtype=tl.float32)
    for k in range(K):
        row = tl.load(place + token * K + k)
        part = tl.load(rows + row * D + d, mask=inside, other=0.0)
        total += part.to(tl.float32)
    tl.store(out + token * D + d, total.to(out.dtype.element_ty), mask=inside)


def product(
    rows: Tensor, banks: Sequence[Tensor], by: Sorted, gate: Tensor | None = None
) -> Tensor:
    """Multiply sorted rows by their experts' matrices, forward with a gate or backward without.

    Forward ``gate [S] * rows [S, K] @ matrix [N, K].T``, backward ``rows [S, K] @ matrix [K, N]``;
    the result is ``[S, N]``. ``banks`` are the matrices of each share; the gate is float32.
    """
    forward = gate is not None
    columns, width = banks[0].shape[1:]
    if not forward:
        width, columns = columns, width
    out = rows.new_empty(len(rows), columns)
    chosen = by.blocks
    tma = fetched(rows.dtype, rows.device, width, columns)
    deep = chosen["BK"]
    wide = chosen["BN"]
    block = (wide, deep) if forward else (1, deep, wide)
    most = programs(rows.device)
    for bank, share in zip(banks, by.shares, strict=True):
        if len(rows) and len(bank):
            work = len(share[0]) * triton.cdiv(columns, wide)
            _product[(min(most, work),)](
                view(rows, (chosen["BM"], deep), tma),
                view(bank, block, tma),
                # Without a gate no pointer to it is read: any will do.
                out if gate is None else gate,
                out,
                *share,
                K=width,
                N=columns,
                FORWARD=forward,
                TMA=tma,
                PROGRAMS=most,
                **chosen,
            )
    return out


def weight_gradient(
    left: Tensor,
    right: Tensor,
    by: Sorted,
    weight: Tensor,
    *,
    slots: Tensor | None = None,
    by_token: str = "",
) -> Tensor:
    """Return the gradient of a bank ``[N, I, J]``: ``left [S, I].T @ right [S, J]`` by expert.

    ``slots [E]`` are where an expert lies in the bank, -1 where it does not; None if all do.
    ``by_token`` names the side, ``"left"`` or ``"right"``, that is ``[T, ...]`` and read by token.
    """
    number, high, wide = weight.shape
    out = torch.empty_like(weight)
    if not number:
        return out
    owner = torch.arange(len(by.counts), device=weight.device)
    if slots is not None:
        # The inverse of the table; experts without a slot write behind its end.
        places = torch.where(slots >= 0, slots, number)
        owner = owner.new_full((number + 1,), -1).scatter_(0, places, owner)
    tma = (
        not by_token and len(left) > 0 and fetched(left.dtype, left.device, high, wide)
    )
    chosen = gradient_blocks(left.dtype, by.blocks, tma)
    grid = (triton.cdiv(high, chosen["BI"]) * triton.cdiv(wide, chosen["BJ"]), number)
    _weight_gradient[grid](
        left,
        right,
        view(left, (chosen["BK"], chosen["BI"]), tma),
        view(right, (chosen["BK"], chosen["BJ"]), tma),
        by.token,
        owner,
        by.counts,
        by.ends,
        out,
        HIGH=high,
        WIDE=wide,
        BY_TOKEN=by_token,
        TMA=tma,
        **chosen,
    )
    return out


def gather(rows: Tensor, by: Sorted) -> Tensor:
    """Read the row of each slot's token, ``[T, D]`` to ``[S, D]``."""
    return combine(rows, by._replace(place=by.token.view(-1, 1)))


def combine(rows: Tensor, by: Sorted) -> Tensor:
    """Sum the rows of each token, ``[S, D]`` to ``[T, D]``."""
    tokens, top_k = by.place.shape
    out = rows.new_empty(tokens, rows.shape[1])
    if tokens:
        wide = min(1024, triton.next_power_of_2(rows.shape[1]))
        grid = (tokens, triton.cdiv(rows.shape[1], wide))
        _combine[grid](rows, by.place, out, D=rows.shape[1], K=top_k, BD=wide)
    return out
