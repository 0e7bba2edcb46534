"""nearest: the C rows of a pool most similar to K shots, in the memory of C rows and one block."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from moebook import errors
from moebook.errors import refuse
from moebook.kernels.arguments import alike, floating, natural, together, valued
from moebook.kernels.dispatch import implementation
from moebook.kernels.memory import empty
from moebook.kernels.products import product

FORMS = ("maximum", "mean")
ROWS = 4096
"""Rows of a pool on a CPU that are compared at once: they stay in the cache."""
SLACK = 2.0**-7
"""More than a cosine is off whose factors and result are rounded to bfloat16 (3 * 2^-9)."""
HELD = 3
"""Times C rows are held before those that fell behind go."""
SIEVED = 32
"""Fewest shots for which a product in bfloat16 saves more than rounding the rows costs."""
WRONG = "NaN, infinity or numbers too large to be squared"
Key = Callable[[Tensor, float], tuple[Tensor, Tensor]]


class Largest(NamedTuple):
    """Rows drawn from a stream, the largest key first, of equal ones the earlier row.

    Attributes:
        index: ``[C]`` int64, their numbers in the stream.
        key: ``[C]``, what they were drawn by.
        vectors: ``[C, D]``, the rows.
        seen: Rows in the stream.
    """

    index: Tensor
    key: Tensor
    vectors: Tensor
    seen: int


def nearest(
    pool: Tensor | Iterable[Tensor],
    shots: Tensor,
    count: int,
    *,
    form: str = "maximum",
    impl: str = "auto",
) -> Largest:
    """Return the C rows of a pool with the largest cosine to K shots (Rocket Eq. 11 to 13).

    A zero row has cosine 0 with everything. Fewer than C rows come back from a smaller pool.
    Without a gradient.

    Args:
        pool: ``[S, D]``, or a stream of blocks ``[b, D]``; each is seen once and forgotten.
        shots: ``[K, D]``.
        count: C, at least 1.
        form: ``"maximum"`` over the shots (Eq. 13), or their ``"mean"``, which commutes with the
            product: one vector is compared.
        impl: ``"auto"``, ``"torch"`` (where a CPU multiplies bfloat16, such a product sieves and
            the rows that can be among the C are compared in their own dtype), ``"triton"``
            (compares a block without writing its ``[b, K]`` cosines) or ``"reference"``.

    Raises:
        Refusal: E-SHAPE, E-TYPE, E-RANGE, E-CHOICE, E-DTYPE, E-DEVICE, E-DATA, E-NONFINITE or
            E-IMPL for an argument that cannot be used.
    """
    if shots.dim() != 2 or not len(shots):
        refuse("E-SHAPE", f"nearest: shots must be [K, D] with K >= 1, got {tuple(shots.shape)}")
    if isinstance(pool, Tensor) and pool.dim() != 2:
        got = f"{tuple(pool.shape)} and {tuple(shots.shape)}"
        refuse("E-SHAPE", f"nearest: expected pool [S, D] and shots [K, D], got {got}")
    valued("nearest", {"shots": shots})
    if form not in FORMS:
        refuse("E-CHOICE", f"nearest: unknown form '{form}'; {errors.nearest(form, FORMS)}")
    floating("nearest", {"shots": shots})
    targets = unit(shots)
    if not targets.isfinite().all():
        refuse("E-NONFINITE", f"nearest: shots hold {WRONG}")
    score = implementation("nearest", impl, _IMPLEMENTATIONS, shots)
    if form == "mean":
        targets = targets.mean(0, keepdim=True)

    def key(rows: Tensor, floor: float) -> tuple[Tensor, Tensor]:
        if rows.shape[1] != shots.shape[1]:
            got = f"{tuple(rows.shape)} and {tuple(shots.shape)}"
            refuse("E-SHAPE", f"nearest: expected pool [S, D] and shots [K, D], got {got}")
        alike("nearest", {"shots": shots, "pool": rows})
        together("nearest", {"shots": shots, "pool": rows})
        found: tuple[Tensor, Tensor] = score(rows, targets, floor)
        return found

    with torch.no_grad():
        return largest([pool] if isinstance(pool, Tensor) else pool, key, count)


def largest(blocks: Iterable[Tensor], key: Key, count: int) -> Largest:
    """Keep the C rows of a stream with the largest keys; of equal keys the earlier row is kept.

    Rows with the key minus infinity are never kept, so fewer than C can come back.

    Args:
        blocks: ``[b, D]``, block after block.
        key: Called with some rows and the key that a row must exceed; returns the places of the
            rows that do, ascending, and their keys. It may return more.
        count: C.

    Raises:
        Refusal: E-TYPE or E-RANGE for a count that is no whole number from 1, E-SHAPE for a block
            that is no matrix, E-DATA without a block, E-NONFINITE for a key NaN.
    """
    natural("nearest", "count", count)
    held: list[Largest] = []
    seen, floor = 0, -torch.inf
    for block in blocks:
        if not isinstance(block, Tensor) or block.dim() != 2:
            got = tuple(block.shape) if isinstance(block, Tensor) else type(block).__name__
            refuse("E-SHAPE", f"nearest: expected blocks of the pool [b, D], got {got}")
        for rows in block.split(ROWS if block.device.type == "cpu" else max(len(block), 1)):
            places, keys = key(rows, floor)
            if keys.isnan().any():
                row = seen + int(places[keys.isnan()][0])
                refuse("E-NONFINITE", f"nearest: row {row} of the pool holds {WRONG}")
            above = keys > floor
            places, keys = places[above], keys[above]
            if len(keys) > HELD * count:  # so that no more rows are copied
                first = keys.sort(descending=True, stable=True).indices[:count].sort().values
                places, keys = places[first], keys[first]
            if len(places) or not held:
                held.append(Largest(seen + places, keys, rows[places], 0))
                held, floor = _floored(held, count)
            seen += len(rows)
    if not held:
        refuse("E-DATA", "nearest: the pool is empty; expected at least one block of rows")
    return _cut(held, count)._replace(seen=seen)


def _floored(held: list[Largest], count: int) -> tuple[list[Largest], float]:
    """Return what is held, cut where it is much, and the key that a later row must exceed."""
    keys = torch.cat([part.key for part in held])
    if len(keys) < count:
        return held, -torch.inf
    if len(keys) > HELD * count:
        held = [_cut(held, count)]
        return held, held[0].key[-1].item()
    return held, keys.kthvalue(len(keys) - count + 1).values.item()


def _cut(held: list[Largest], count: int) -> Largest:
    """Take the largest; rows come in order where keys are equal, and a stable sort keeps it."""
    index, key, vectors = (torch.cat(parts) for parts in list(zip(*held, strict=True))[:3])
    order = key.sort(descending=True, stable=True).indices[:count]
    return Largest(index[order], key[order], vectors[order], 0)


def unit(rows: Tensor) -> Tensor:
    """Scale rows to length 1; a zero row stays zero, and one without a finite length is NaN."""
    return (rows / lengths(rows)[:, None]).to(rows.dtype)


def wide(rows: Tensor) -> Tensor:
    """Return rows in float32 at least: a cosine rounded to fewer bits is another."""
    return rows if rows.element_size() >= 4 else rows.float()


def lengths(rows: Tensor) -> Tensor:
    """Return the lengths of rows, in float32 at least: 1 of a zero row, NaN where not finite."""
    kind = torch.promote_types(rows.dtype, torch.float32)
    norms = torch.linalg.vector_norm(rows, dim=1, dtype=kind)
    return norms.masked_fill_(norms == 0, 1).masked_fill_(norms.isinf(), torch.nan)


def reference(rows: Tensor, targets: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    """Compare unit rows with each target and take the largest cosine."""
    return _all(rows), (unit(wide(rows)) @ wide(targets).T).amax(1)


def _blocked(rows: Tensor, targets: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    """Divide the largest product by the row's length; where it pays, only for rows in question."""
    rows, targets = wide(rows), wide(targets)
    long = lengths(rows)
    if not (floor > -torch.inf and len(targets) >= SIEVED and _sieves(rows)):
        return _all(rows), product(targets, rows.T).amax(0) / long
    half = targets.bfloat16()
    rough = (half @ empty(rows.shape, half).copy_(rows).T).amax(0) / long
    places = (~(rough <= floor - SLACK)).nonzero().squeeze(1)  # NaN stays
    return places, (targets @ rows[places].T).amax(0) / long[places]


def _all(rows: Tensor) -> Tensor:
    return torch.arange(len(rows), device=rows.device)


def _sieves(rows: Tensor) -> bool:
    """Whether this is a CPU with instructions for bfloat16."""
    on_cpu = rows.device.type == "cpu" and rows.dtype == torch.float32
    return on_cpu and torch.cpu._is_avx512_bf16_supported()


_IMPLEMENTATIONS = {"torch": _blocked, "reference": reference}
