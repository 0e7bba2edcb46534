"""Every op by name, its contenders in turns, one row a contender."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd
import torch

from moebook import runtime
from moebook.bench import floors, peers, profiling
from moebook.bench.case import ROLES, SCALES, Cases, Letters, Op, number_format
from moebook.bench.goals import ROUNDS, STATED
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
    op: Op = getattr(peers.module(f"moebook.bench.{module}"), attribute)
    return op


def roles(names: Iterable[str] | None = None) -> pd.DataFrame:
    """List which letter of each op varies in which of the `ROLES`, and what it counts there."""
    rows = {
        name: [f"{axis.letter}: {axis.meaning}" for axis in find(name).axes]
        for name in (OPS if names is None else names)
    }
    return pd.DataFrame.from_dict(rows, orient="index", columns=list(ROLES))


def measure(
    names: Iterable[str] | None = None,
    *,
    scale: str | None = None,
    device: str = "auto",
    rounds: int = ROUNDS,
) -> pd.DataFrame:
    """Time every case of some ops against its floor and its peers.

    Args:
        names: Ops; all by default.
        scale: One of `case.SCALES`; by default the one that the device's goals are stated for.
        device: As `runtime.resolve_device` takes it. What works on NumPy arrays runs on the CPU.
        rounds: Counted rounds; a ratio is the median of theirs. A contender that has worked for
            three seconds takes no further turn.

    Returns:
        One row a contender: ``op``, ``case``, ``contender``, ``key`` (the three as the name of a
        recorded value), ``seconds`` at work and ``wall`` (medians), ``ratio`` (median of theirs
        over ours), ``rounds``, ``memory`` (extra bytes at the peak of the first run), ``kept``
        (those between forward and backward pass, on a GPU), ``flops`` and ``traffic`` of the case,
        ``note``: why a contender took no part, and ``profile``: of ours, where its time goes.
        ``attrs`` has the kind of ``device``, ``scale``, ``rounds`` and the CPU's ``threads``.

    Raises:
        Refusal: E-NAME, E-CHOICE, E-RANGE or E-DEVICE for an argument that cannot be used.
    """
    place = runtime.resolve_device(device)
    chosen = STATED[place.type] if scale is None else scale
    if chosen not in SCALES:
        refuse("E-CHOICE", f"unknown scale '{chosen}'; {nearest(chosen, SCALES)}")
    if rounds < 1:
        refuse("E-RANGE", f"rounds is {rounds}, expected at least 1")
    frame = _run("bench", names, lambda op: op.cases(chosen), place, rounds, budget=3.0)
    threads = torch.get_num_threads()
    frame.attrs.update(device=place.type, scale=chosen, rounds=rounds, threads=threads)
    return frame


def growth(
    names: Iterable[str] | None = None,
    *,
    device: str = "auto",
    rounds: int = 1,
    points: int | None = None,
) -> pd.DataFrame:
    """Measure each op at several sizes: one letter varies, all others are as in the small case.

    Args:
        names: Ops; all by default.
        device: As `measure` takes it.
        rounds: Counted rounds a point; a contender may spend half a second on one.
        points: Most points a letter, the smallest first; all by default.

    Returns:
        What `measure` returns, with ``letter``, ``value`` and ``exponent``: of the power law
        through the first and the last point of the contender's seconds (1 is linear).
    """
    place = runtime.resolve_device(device)
    frame = _run("sweep", names, lambda op: op.swept(points), place, rounds, budget=0.5)
    frame = frame[frame["seconds"].notna()].reset_index(drop=True)
    frame[["letter", "value"]] = frame["case"].str.extract(r"(\w+)=(\d+)")
    frame = frame.astype({"value": int})
    curves = frame.sort_values("value").groupby(["op", "letter", "contender"])
    over, span = (
        np.log(curves[name].transform("last") / curves[name].transform("first"))
        for name in ("value", "seconds")
    )
    return frame.assign(exponent=span / over)


def _run(
    task: str,
    names: Iterable[str] | None,
    cases: Callable[[Op], Cases],
    place: torch.device,
    rounds: int,
    budget: float,
) -> pd.DataFrame:
    """Time some cases of each op; one whose packages are missing has a line that says so."""
    todo: list[tuple[str, str, Letters]] = []
    lines: list[dict[str, Any]] = []
    for name in OPS if names is None else names:
        try:
            todo += [(name, label, letters) for label, letters in cases(find(name)).items()]
        except Refusal as refusal:
            if refusal.code != "E-PEER":
                raise
            lines.append({"op": name, "case": "", "contender": "ours", "note": refusal.message})
    for name, label, letters in runtime.progress(todo, task, len(todo)):
        lines += measured(name, label, letters, place, rounds, budget, profiled=task == "bench")
    return pd.DataFrame(lines, columns=list(COLUMNS))


def measured(
    name: str, label: str, letters: Letters, place: torch.device, rounds: int, budget: float,
    *, profiled: bool = False,
) -> list[dict[str, Any]]:  # fmt: skip
    """Time one case; its inputs are freed at the end."""
    head: dict[str, Any] = {"op": name, "case": label}
    try:
        case = find(name).build(place, **letters)
        found, failed = interleave(case.contenders, place, rounds=rounds, budget=budget)
    except Refusal as refusal:  # of our own op: a case that it cannot do is a result too
        return [{**head, "contender": "ours", "note": refusal.message}]
    head |= {"flops": case.flops, "traffic": case.traffic, "note": ""}
    lines = [
        {**head, "contender": who, "key": f"{name}/{label}/{slug(who)}", **cost._asdict()}
        for who, cost in found.items()
    ]
    if profiled:
        lines[0]["profile"] = profiling.shares(case.contenders[0], place, lines[0]["seconds"])
    absent = {**failed, **case.absent}
    return lines + [{**head, "contender": who, "note": why} for who, why in absent.items()]


def slug(name: str) -> str:
    """Write a name as part of a recorded value's name."""
    return re.sub(r"[^A-Za-z0-9]+", "_", name).strip("_")


def ceilings(device: str = "auto") -> dict[str, float]:
    """Measure the roof: FLOPs a second of a square product, bytes a second of a large copy."""
    place = runtime.resolve_device(device)
    dtype, gpu = number_format(place), place.type == "cuda"
    side = 8192 if gpu else 1024
    product = floors.Product(side, side, side)
    source = torch.zeros((8 if gpu else 64) * side * side, device=place, dtype=dtype)
    target = torch.empty_like(source)
    copy = Contender("copy", lambda: target.copy_(source))
    parties = [floors.dense([product], place, dtype), copy]
    found, _ = interleave(parties, place, rounds=5, budget=60.0)
    return {
        "flops": product.flops / found["floor"].seconds,
        "bytes": 2 * source.nbytes / found["copy"].seconds,
    }
