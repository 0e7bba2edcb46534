"""Clocks for contenders that take turns: seconds at work, wall-clock seconds, extra memory."""

from __future__ import annotations

import ctypes
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from moebook import runtime

BUSY = 20_000_000
"""Cycles of a GPU, some 10 ms: longer than it takes to submit a contender's work."""


def _nothing() -> None:
    """Prepare nothing."""


@dataclass(frozen=True)
class Contender:
    """One way of doing a case's work.

    Attributes:
        name: ``"ours"``, ``"floor"``, or the peer's.
        run: Does the work once.
        prepare: Called before every run and not timed (frees the gradients of the last one).
        forward: The forward pass of ``run`` alone, where it has a backward pass too.
        host: Whether it works on the CPU whatever the device: its own clock is the wall's then.
    """

    name: str
    run: Callable[[], Any]
    prepare: Callable[[], None] = _nothing
    forward: Callable[[], Any] | None = None
    host: bool = False


@dataclass(frozen=True)
class Lap:
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


@dataclass
class Laps:
    """The rounds in which one contender took its turn with ours.

    Attributes:
        mine: Ours, in the same rounds.
        theirs: The contender's.
        first: The contender's first run, whose memory was measured.
    """

    mine: list[Lap] = field(default_factory=list)
    theirs: list[Lap] = field(default_factory=list)
    first: Lap | None = None

    @property
    def ratios(self) -> list[float]:
        """Their seconds over ours, one a round: above 1 where ours is faster."""
        return [b.seconds / a.seconds for a, b in zip(self.mine, self.theirs, strict=True)]

    @property
    def ratio(self) -> float:
        """Median of the ratios; the seconds of different rounds are never compared."""
        return statistics.median(self.ratios)

    @property
    def seconds(self) -> float:
        """Median of their seconds at work."""
        return statistics.median(lap.seconds for lap in self.theirs)

    @property
    def wall(self) -> float:
        """Median of their wall-clock seconds."""
        return statistics.median(lap.wall for lap in self.theirs)


def interleave(
    contenders: Sequence[Contender],
    device: torch.device,
    *,
    rounds: int,
    budget: float,
    clock: Callable[[Contender, torch.device, bool], Lap] | None = None,
) -> dict[str, Laps]:
    """Let all contenders take turns with the first, in rounds whose order rotates.

    The first round warms up and is dropped, except for a contender that is so slow that it is all
    it has; ours has run once before it.

    Args:
        contenders: Ours first; its ratio is to itself, 1.
        device: Where they run.
        rounds: Counted rounds, at least 1.
        budget: Seconds of work after which a contender takes no further turn.
        clock: `lap`, unless a test brings its own.

    Returns:
        By the contenders' names.
    """
    clock = clock or lap
    ours, *others = contenders
    found = {contender.name: Laps() for contender in contenders}
    spent = dict.fromkeys(found, 0.0)
    found[ours.name].first = clock(ours, device, True)
    for number in range(rounds + 1):
        mine = clock(ours, device, False)
        found[ours.name].mine.append(mine)
        found[ours.name].theirs.append(mine)
        for other in _rotated(others, number):
            if spent[other.name] < budget:
                turn = clock(other, device, number == 0)
                spent[other.name] += turn.seconds
                found[other.name].mine.append(mine)
                found[other.name].theirs.append(turn)
                if number == 0:
                    found[other.name].first = turn
    for laps in found.values():
        laps.mine, laps.theirs = laps.mine[1:] or laps.mine, laps.theirs[1:] or laps.theirs
    return found


def _rotated(others: Sequence[Contender], number: int) -> Sequence[Contender]:
    """Begin with another one each round: who follows a large neighbour finds a cold cache."""
    start = number % max(len(others), 1)
    return [*others[start:], *others[:start]]


def lap(contender: Contender, device: torch.device, watched: bool) -> Lap:
    """Run a contender once; ``watched`` measures its memory too."""
    contender.prepare()
    if not watched:
        return _timed(contender, device)
    _give_back()
    before = _held(device)
    with runtime.stopwatch(device) as peak:
        timed = _timed(contender, device)
    extra = None if before is None or peak.memory is None else max(peak.memory - before, 0)
    return Lap(timed.seconds, timed.wall, extra, _kept(contender, device))


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
    if device.type == "cuda":
        return (_timed_by_wall if contender.host else _timed_on_gpu)(contender, device)
    wall, work = time.perf_counter(), time.process_time()
    result = contender.run()
    spent = Lap(time.process_time() - work, time.perf_counter() - wall)
    del result  # freed outside the clocks, for each contender alike
    return spent


def _timed_by_wall(contender: Contender, device: torch.device) -> Lap:
    torch.cuda.synchronize(device)
    wall = time.perf_counter()
    result = contender.run()
    torch.cuda.synchronize(device)
    wall = time.perf_counter() - wall
    del result
    return Lap(wall, wall)


def _timed_on_gpu(contender: Contender, device: torch.device) -> Lap:
    """Run twice: for the wall clock, then for the GPU's own.

    Before its own clock starts, the GPU is kept busy until the work is submitted, as it is in a
    model, where the host runs ahead. A contender that waits for the GPU in between pays for it.
    """
    wall = _timed_by_wall(contender, device).wall
    contender.prepare()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(BUSY)
    start.record()
    result = contender.run()
    end.record()
    torch.cuda.synchronize(device)
    spent = Lap(start.elapsed_time(end) / 1000, wall)
    del result
    return spent


def _give_back() -> None:
    """Return freed memory to the system (glibc), so that using it again counts as new."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def _held(device: torch.device) -> int | None:
    """Bytes held now: allocated by torch on a GPU, resident in the process on a CPU (Linux)."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    sizes = [line for line in status.splitlines() if line.startswith("VmRSS:")]
    return int(sizes[0].split()[1]) * 1024 if sizes else None
