"""Every op by name, its contenders in turns, one row a contender."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd
import torch

from moebook import runtime
from moebook.bench import floors, profiling
from moebook.bench.case import SCALES, Letters, Op, number_format
from moebook.bench.goals import STATED
from moebook.bench.timing import Contender, interleave
from moebook.errors import Refusal, nearest, refuse

OPS: Mapping[str, str] = {
    "route": "routers.ROUTE",
    "experts": "full_experts.EXPERTS",
    "split_experts": "full_experts.SPLIT",
    "adapters": "low_rank.ADAPTERS",
    "lora_mixture": "low_rank.LORAS",
    "balance_loss": "routers.BALANCE",
    "bank": "bank.BANK",
    "nearest": "rows.NEAREST",
    "duplicates": "rows.DUPLICATES",
    "groups": "rows.GROUPS",
    "clusters": "rows.CLUSTERS",
}
"""Where each op's `Op` is: imported when it is asked for, since some need more packages."""
COLUMNS = (
    "op", "case", "contender", "key", "seconds", "wall", "ratio", "rounds", "memory", "kept",
    "flops", "traffic", "note", "profile",
)  # fmt: skip


def find(name: str) -> Op:
    """Return an op by its name.

    Raises:
        Refusal: E-NAME for an unknown one, with the nearest; E-PEER where a package is missing.
    """
    if name not in OPS:
        refuse("E-NAME", f"unknown op '{name}'; {nearest(name, OPS)}")
    module, attribute = OPS[name].split(".")
    try:
        op: Op = getattr(importlib.import_module(f"moebook.bench.{module}"), attribute)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("moebook"):
            raise
        refuse("E-PEER", f"{name} needs {error.name}, which is not installed")
    return op


def present(names: Iterable[str] | None = None) -> tuple[dict[str, Op], dict[str, str]]:
    """Return the ops of these names, all by default, and why others cannot run here.

    Raises:
        Refusal: E-NAME for an unknown one.
    """
    ops, absent = {}, {}
    for name in names if names is not None else OPS:
        try:
            ops[name] = find(name)
        except Refusal as refusal:
            if refusal.code != "E-PEER":
                raise
            absent[name] = refusal.message
    return ops, absent


def measure(
    names: Iterable[str] | None = None,
    *,
    scale: str | None = None,
    device: str = "auto",
    rounds: int = 5,
    budget: float = 3.0,
) -> pd.DataFrame:
    """Time every case of some ops against its floor and its peers.

    Args:
        names: Ops; all by default.
        scale: One of `case.SCALES`; by default the one that the device's goals are stated for.
        device: As `runtime.resolve_device` takes it. What works on NumPy arrays runs on the CPU.
        rounds: Counted rounds; a ratio is the median of theirs.
        budget: Seconds of work after which a slow contender takes no further turn; it has one.

    Returns:
        One row a contender: ``op``, ``case``, ``contender``, ``key`` (the three as the name of a
        recorded value), ``seconds`` at work and ``wall`` (medians), ``ratio`` (median of theirs
        over ours), ``rounds``, ``memory`` (extra bytes at the peak of the first run), ``kept``
        (those between forward and backward pass, on a GPU), ``flops`` and ``traffic`` of the case,
        ``note``: why a contender took no part, and ``profile``: of ours, where its time goes.
        ``attrs`` has the kind of ``device`` and ``scale``.

    Raises:
        Refusal: E-NAME, E-CHOICE, E-RANGE or E-DEVICE for an argument that cannot be used.
    """
    place = runtime.resolve_device(device)
    scale = scale or STATED[place.type]
    if scale not in SCALES:
        refuse("E-CHOICE", f"unknown scale '{scale}'; {nearest(scale, SCALES)}")
    if rounds < 1:
        refuse("E-RANGE", f"rounds is {rounds}, expected at least 1")
    ops, absent = present(names)
    todo = [(n, c, letters) for n, op in ops.items() for c, letters in op.sizes[scale].items()]
    ours = {"case": "", "contender": "ours"}
    lines: list[dict[str, Any]] = [{"op": n, **ours, "note": why} for n, why in absent.items()]
    for name, label, letters in runtime.progress(todo, "bench", len(todo)):
        lines += measured(name, label, letters, place, rounds, budget, profiled=True)
    frame = pd.DataFrame(lines, columns=list(COLUMNS))
    frame.attrs.update(device=place.type, scale=scale)
    return frame


def measured(
    name: str, label: str, letters: Letters, place: torch.device, rounds: int, budget: float,
    *, profiled: bool = False,
) -> list[dict[str, Any]]:  # fmt: skip
    """Time one case; its inputs are freed at the end."""
    head = {"op": name, "case": label}
    try:
        case = find(name).build(place, **letters)
        found = interleave(case.contenders, place, rounds=rounds, budget=budget)
    except Refusal as refusal:  # of our own op: a case that it cannot do is a result too
        return [{**head, "contender": "ours", "note": refusal.message}]
    of_case = {"flops": case.flops, "traffic": case.traffic, "note": ""}
    lines = [
        {
            **head,
            "contender": who,
            "key": f"{name}/{label}/{slug(who)}",
            **cost._asdict(),
            **of_case,
        }
        for who, cost in found.items()
    ]
    if profiled:
        lines[0]["profile"] = profiling.shares(case.contenders[0], place, lines[0]["seconds"])
    return lines + [{**head, "contender": who, "note": why} for who, why in case.absent.items()]


def slug(name: str) -> str:
    """Write a name as part of a recorded value's name."""
    return re.sub(r"[^A-Za-z0-9]+", "_", name).strip("_")


def ceilings(device: str = "auto", *, side: int = 0, rounds: int = 5) -> dict[str, float]:
    """Measure the roof: FLOPs a second of a square product, bytes a second of a large copy.

    Args:
        device: As in `measure`.
        side: Of the square matrices; by default 1,024, and 8,192 on a GPU. The copy is of 64 times
            as many numbers, on a GPU of 8 times as many.
        rounds: Of which the median is taken.
    """
    place = runtime.resolve_device(device)
    dtype, gpu = number_format(place), place.type == "cuda"
    side = side or (8192 if gpu else 1024)
    product = floors.Product(side, side, side)
    source = torch.zeros((8 if gpu else 64) * side * side, device=place, dtype=dtype)
    target = torch.empty_like(source)
    copy = Contender("copy", lambda: target.copy_(source))
    parties = [floors.dense([product], place, dtype), copy]
    found = interleave(parties, place, rounds=rounds, budget=60.0)
    return {
        "flops": product.flops / found["floor"].seconds,
        "bytes": 2 * source.nbytes / found["copy"].seconds,
    }
