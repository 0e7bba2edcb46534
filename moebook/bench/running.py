"""Run cases: every op by name, its contenders in turns, one row a contender."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd
import torch

from moebook import runtime
from moebook.bench import bank, floors, full_experts, low_rank, routers, rows
from moebook.bench.case import SCALES, Case, Letters, Op, number_format
from moebook.bench.timing import Contender, Laps, interleave
from moebook.errors import Refusal, nearest, refuse

OPS: Mapping[str, Op] = {
    "route": routers.ROUTE,
    "experts": full_experts.EXPERTS,
    "split_experts": full_experts.SPLIT,
    "adapters": low_rank.ADAPTERS,
    "lora_mixture": low_rank.LORAS,
    "balance_loss": routers.BALANCE,
    "bank": bank.BANK,
    "nearest": rows.NEAREST,
    "duplicates": rows.DUPLICATES,
    "groups": rows.GROUPS,
    "clusters": rows.CLUSTERS,
}
COLUMNS = (
    "op", "case", "contender", "key", "seconds", "wall", "ratio", "rounds", "memory", "flops",
    "traffic", "note",
)  # fmt: skip


def find(name: str) -> Op:
    """Return an op by its name.

    Raises:
        Refusal: E-NAME for an unknown one, with the nearest.
    """
    if name not in OPS:
        refuse("E-NAME", f"unknown op '{name}'; {nearest(name, OPS)}")
    return OPS[name]


def measure(
    names: Iterable[str] | None = None,
    *,
    scale: str = "full",
    device: str = "auto",
    rounds: int = 5,
    budget: float = 8.0,
) -> pd.DataFrame:
    """Time every case of some ops against its floor and its peers.

    Args:
        names: Ops; all by default.
        scale: One of `case.SCALES`.
        device: As `runtime.resolve_device` takes it. What works on NumPy arrays runs on the CPU.
        rounds: Counted rounds; a ratio is the median of theirs.
        budget: Seconds of work after which a slow contender takes no further turn; it has one.

    Returns:
        One row a contender: ``op``, ``case``, ``contender``, ``key`` (the three as the name of a
        recorded value), ``seconds`` at work and ``wall`` (medians), ``ratio`` (median of theirs
        over ours), ``rounds``, ``memory`` (extra bytes at the peak of the first run), ``flops``
        and ``traffic`` of the case, and ``note``: why a contender took no part.
        ``attrs["device"]`` is the kind of device.

    Raises:
        Refusal: E-NAME, E-CHOICE, E-RANGE or E-DEVICE for an argument that cannot be used.
    """
    if scale not in SCALES:
        refuse("E-CHOICE", f"unknown scale '{scale}'; {nearest(scale, SCALES)}")
    if rounds < 1:
        refuse("E-RANGE", f"rounds is {rounds}, expected at least 1")
    place = runtime.resolve_device(device)
    chosen = {name: find(name) for name in (names if names is not None else OPS)}
    todo = [(n, c, letters) for n, op in chosen.items() for c, letters in op.sizes[scale].items()]
    lines: list[dict[str, Any]] = []
    for name, label, letters in runtime.progress(todo, "bench", len(todo)):
        lines += measured(name, label, letters, place, rounds, budget)
    frame = pd.DataFrame(lines, columns=list(COLUMNS))
    frame.attrs["device"] = place.type
    return frame


def measured(
    name: str, label: str, letters: Letters, place: torch.device, rounds: int, budget: float
) -> list[dict[str, Any]]:
    """Time one case; its inputs are freed at the end."""
    head = {"op": name, "case": label}
    try:
        case = find(name).build(place, **letters)
        found = interleave(case.contenders, place, rounds=rounds, budget=budget)
    except Refusal as refusal:  # of our own op: a case that it cannot do is a result too
        return [{**head, "contender": "ours", "note": refusal.message}]
    lines = [
        {**head, "key": f"{name}/{label}/{slug(who)}", **_line(case, who, laps)}
        for who, laps in found.items()
    ]
    return lines + [{**head, "contender": who, "note": why} for who, why in case.absent.items()]


def slug(name: str) -> str:
    """Write a name as part of a recorded value's name."""
    return re.sub(r"[^A-Za-z0-9]+", "_", name).strip("_")


def _line(case: Case, who: str, laps: Laps) -> dict[str, Any]:
    return {
        "contender": who,
        "seconds": laps.seconds,
        "wall": laps.wall,
        "ratio": laps.ratio,
        "rounds": len(laps.theirs),
        "memory": laps.memory,
        "flops": case.flops,
        "traffic": case.traffic,
        "note": "",
    }


def ceilings(device: str = "auto", *, side: int = 1024, rounds: int = 5) -> dict[str, float]:
    """Measure the roof: FLOPs a second of a square product, bytes a second of a large copy.

    Args:
        device: As in `measure`.
        side: Of the square matrices; the copy is of 64 times as many numbers.
        rounds: Of which the median is taken.
    """
    place = runtime.resolve_device(device)
    dtype = number_format(place)
    products = [floors.Product(side, side, side)]
    source = torch.zeros(64 * side * side, device=place, dtype=dtype)
    target = torch.empty_like(source)
    copy = Contender("copy", lambda: target.copy_(source))
    parties = [floors.dense(products, place, dtype), copy]
    found = interleave(parties, place, rounds=rounds, budget=60.0)
    moved = 2 * source.numel() * source.element_size()
    return {
        "flops": floors.flops(products) / found["floor"].seconds,
        "bytes": moved / found["copy"].seconds,
    }
