"""Clocks for contenders that take turns: seconds at work, wall-clock seconds, extra memory."""

from __future__ import annotations

import ctypes
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from moebook import runtime
from moebook.errors import Refusal

BUSY = 20_000_000
"""Cycles of a GPU, some 10 ms: longer than it takes to submit a contender's work."""


@dataclass(frozen=True)
class Contender:
    """One way of doing a case's work.

    Attributes:
        name: ``"ours"``, ``"floor"``, or the peer's.
        run: Does the work once.
        leaves: What gets a gradient: freed before every run, outside the clocks.
        forward: The forward pass of ``run`` alone, where it has a backward pass too.
        host: Whether it works on the CPU whatever the device: its own clock is the wall's then.
    """

    name: str
    run: Callable[[], Any]
    leaves: Sequence[torch.Tensor] = ()
    forward: Callable[[], Any] | None = None
    host: bool = False

    def prepare(self) -> None:
        """Free the gradients of the last run."""
        for leaf in self.leaves:
            leaf.grad = None


class Lap(NamedTuple):
    """What one run cost.

    Attributes:
        seconds: Of work: CPU time of the process (all its threads), or the GPU's own time.
        wall: Wall-clock seconds.
        memory: Extra bytes at the peak, over what was held before; None where not measured.
        kept: Bytes that its forward pass holds for its backward pass; None where not measured.
    """

    seconds: float
    wall: float
    memory: int | None = None
    kept: int | None = None


class Cost(NamedTuple):
    """What a contender costs, by the rounds that count: medians, and the memory of its first run.

    The ratio is of its seconds over ours in the same round: above 1 where ours is faster. The
    seconds of different rounds are never compared.
    """

    seconds: float
    wall: float
    ratio: float
    rounds: int
    memory: int | None
    kept: int | None


def interleave(
    contenders: Sequence[Contender], device: torch.device, *, rounds: int, budget: float
) -> tuple[dict[str, Cost], dict[str, str]]:
    """Let all contenders take turns with the first, in rounds whose order rotates.

    The first round warms up and is dropped, except for a contender that is so slow that it is all
    it has; ours has run once before it. A peer that fails drops out; what ours raises is raised.

    Args:
        contenders: Ours first; its ratio is to itself, 1.
        device: Where they run.
        rounds: Counted rounds, at least 1.
        budget: Seconds of work after which a contender takes no further turn.

    Returns:
        By the contenders' names: what each costs, and why others dropped out.
    """
    ours, *others = contenders
    turns: dict[str, list[tuple[Lap, Lap]]] = {contender.name: [] for contender in contenders}
    failed: dict[str, str] = {}
    first = lap(ours, device, watched=True)
    for number in range(rounds + 1):
        mine = lap(ours, device)._replace(memory=first.memory, kept=first.kept)
        turns[ours.name].append((mine, mine))
        start = number % max(len(others), 1)  # who follows a large neighbour finds a cold cache
        for other in others[start:] + others[:start]:
            own = turns[other.name]
            if other.name not in failed and sum(theirs.seconds for _, theirs in own) < budget:
                try:
                    own.append((mine, lap(other, device, watched=number == 0)))
                except Exception as error:  # a peer may fail in any way
                    failed[other.name] = why(error)
    return {name: _cost(own) for name, own in turns.items() if name not in failed}, failed


def why(error: Exception) -> str:
    """Return the first line of what an error says, or its kind where it says nothing."""
    told = error.message if isinstance(error, Refusal) else str(error)
    return told.strip().partition("\n")[0] or type(error).__name__


def _cost(turns: list[tuple[Lap, Lap]]) -> Cost:
    first, pairs = turns[0][1], turns[1:] or turns
    seconds = median(theirs.seconds for _, theirs in pairs)
    wall = median(theirs.wall for _, theirs in pairs)
    ratio = median(theirs.seconds / mine.seconds for mine, theirs in pairs)
    return Cost(seconds, wall, ratio, len(pairs), first.memory, first.kept)


def lap(contender: Contender, device: torch.device, *, watched: bool = False) -> Lap:
    """Run a contender once; ``watched`` measures its memory too."""
    if not watched:
        return _timed(contender, device)
    contender.prepare()
    _give_back()
    before = _held(device)
    with runtime.stopwatch(device) as peak:
        timed = _timed(contender, device)
    extra = None if before is None or peak.memory is None else max(peak.memory - before, 0)
    return timed._replace(memory=extra, kept=_kept(contender, device))


def _kept(contender: Contender, device: torch.device) -> int | None:
    """Bytes that are allocated on a GPU between a contender's forward and backward pass."""
    if contender.forward is None or device.type != "cuda":
        return None
    contender.prepare()
    before = torch.cuda.memory_allocated(device)
    graph = contender.forward()
    held = torch.cuda.memory_allocated(device) - before
    del graph
    return held


def _timed(contender: Contender, device: torch.device) -> Lap:
    """Run once, on a GPU twice: for the wall clock, then for the GPU's own.

    Before its own clock starts, the GPU is kept busy until the work is submitted, as it is in a
    model, where the host runs ahead. A contender that waits for the GPU in between pays for it.
    """
    gpu = device.type == "cuda"
    contender.prepare()
    if gpu:
        torch.cuda.synchronize(device)
    wall, work = time.perf_counter(), time.process_time()
    result = contender.run()
    if gpu:
        torch.cuda.synchronize(device)
    work, wall = time.process_time() - work, time.perf_counter() - wall
    del result  # freed outside the clocks, for each contender alike
    if not gpu or contender.host:
        return Lap(wall if gpu else work, wall)
    contender.prepare()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(BUSY)
    start.record()
    result = contender.run()
    end.record()
    torch.cuda.synchronize(device)
    del result
    return Lap(start.elapsed_time(end) / 1000, wall)


def _give_back() -> None:
    """Return freed memory to the system (glibc), so that using it again counts as new."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def _held(device: torch.device) -> int | None:
    """Bytes held now: allocated by torch on a GPU, resident in the process on a CPU (Linux)."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    status = Path("/proc/self/status")
    held = re.search(r"VmRSS:\s+(\d+) kB", status.read_text()) if status.exists() else None
    return int(held[1]) * 1024 if held else None
