"""Clocks for contenders that take turns: seconds at work, on the wall, memory."""

from __future__ import annotations

import ctypes
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from moebook import runtime
from moebook.errors import Refusal

BUSY_CYCLES = 20_000_000  # of a GPU, some 10 ms: longer than it takes to submit work
PROFILE_ENTRIES = 5  # the largest of a profile; the rest is told in one


@dataclass(frozen=True)
class Contender:
    """One way of doing a case's work: ``"ours"``, the ``"floor"`` or a peer's."""

    name: str
    # Does the work once, after the gradients of leaves are freed.
    run: Callable[[], Any]
    leaves: Sequence[torch.Tensor] = ()
    forward: Callable[[], Any] | None = None  # alone, where a backward pass follows
    # Works on the CPU whatever the device: its own clock is the wall's.
    host: bool = False

    def prepare(self) -> None:
        """Free the gradients of the last run."""
        for leaf in self.leaves:
            leaf.grad = None


class Timing(NamedTuple):
    """What one run cost; None where not measured."""

    # Of work: CPU time of the process, all its threads, or the GPU's own time.
    seconds: float
    wall: float
    memory: int | None = None  # extra bytes at the peak, over what was held before
    kept: int | None = None  # bytes that the forward pass holds for the backward pass


class Cost(NamedTuple):
    """What a contender costs: medians of the rounds that count; memory at first."""

    seconds: float
    wall: float
    ratio: float  # of its seconds over ours in the same round: above 1, ours is faster
    rounds: int
    memory: int | None
    kept: int | None


Turn = tuple[Timing, Timing]  # of ours and of a contender, in the same round


def interleave(
    contenders: Sequence[Contender], device: torch.device, *, rounds: int, budget: float
) -> tuple[dict[str, Cost], dict[str, str]]:
    """Let all take turns with the first; return what each costs, or why it failed.

    The first round warms up and is dropped, except for a contender that has no other,
    since after ``budget`` seconds of work it takes no further turn; ours has run once
    before it.
    """
    ours, *others = contenders
    turns: dict[str, list[Turn]] = {contender.name: [] for contender in contenders}
    failed: dict[str, str] = {}
    first = timed(ours, device, watched=True)
    for number in range(rounds + 1):
        mine = timed(ours, device)._replace(memory=first.memory, kept=first.kept)
        turns[ours.name].append((mine, mine))
        # Who follows a large neighbour finds a cold cache: each round starts elsewhere.
        start = number % max(len(others), 1)
        for other in others[start:] + others[:start]:
            past = turns[other.name]
            spent = sum(theirs.seconds for _, theirs in past)
            if other.name in failed or spent >= budget:
                continue
            try:
                past.append((mine, timed(other, device, watched=number == 0)))
            except Exception as error:  # a peer may fail in any way
                failed[other.name] = why(error)
    costs = {name: _cost(past) for name, past in turns.items() if name not in failed}
    return costs, failed


def why(error: Exception) -> str:
    """Return the first line of what an error says, or its kind if it says nothing."""
    text = error.message if isinstance(error, Refusal) else str(error)
    return text.strip().partition("\n")[0] or type(error).__name__


def _cost(turns: list[Turn]) -> Cost:
    _, first = turns[0]
    counted = turns[1:] or turns
    return Cost(
        seconds=median(theirs.seconds for _, theirs in counted),
        wall=median(theirs.wall for _, theirs in counted),
        ratio=median(theirs.seconds / mine.seconds for mine, theirs in counted),
        rounds=len(counted),
        memory=first.memory,
        kept=first.kept,
    )


def timed(
    contender: Contender, device: torch.device, *, watched: bool = False
) -> Timing:
    """Run a contender once; ``watched`` measures its memory too."""
    if not watched:
        return _clocked(contender, device)
    contender.prepare()
    _trim()
    if device.type == "cuda":
        before: int | None = torch.cuda.memory_allocated(device)
    else:
        before = runtime.peak_memory(mark="VmRSS")
    with runtime.stopwatch(device) as watch:
        timing = _clocked(contender, device)
    extra = None
    if before is not None and watch.memory is not None:
        extra = max(watch.memory - before, 0)
    return timing._replace(memory=extra, kept=_kept(contender, device))


def _trim() -> None:
    """Give what was freed back to the system, so that its next use counts as new."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "malloc_trim"):
            libc.malloc_trim(0)


def _kept(contender: Contender, device: torch.device) -> int | None:
    """Bytes allocated on a GPU between a contender's forward and backward pass."""
    if contender.forward is None or device.type != "cuda":
        return None
    contender.prepare()
    before = torch.cuda.memory_allocated(device)
    graph = contender.forward()  # noqa: F841
    return torch.cuda.memory_allocated(device) - before


def _clocked(contender: Contender, device: torch.device) -> Timing:
    """Run once, on a GPU twice: for the wall clock, then for the GPU's own."""
    gpu = device.type == "cuda"
    contender.prepare()
    if gpu:
        torch.cuda.synchronize(device)
    wall = time.perf_counter()
    work = time.process_time()
    result = contender.run()
    if gpu:
        torch.cuda.synchronize(device)
    work = time.process_time() - work
    wall = time.perf_counter() - wall
    del result  # freed outside the clocks, for each contender alike
    if contender.host:
        return Timing(wall if gpu else work, wall)
    return Timing(_gpu_seconds(contender, device) if gpu else work, wall)


def _gpu_seconds(contender: Contender, device: torch.device) -> float:
    """Run once; return the seconds between two events on the GPU.

    Until the work is submitted the GPU is kept busy, as in a model, where the host runs
    ahead.
    """
    contender.prepare()
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(BUSY_CYCLES)
    start.record()
    result = contender.run()
    end.record()
    torch.cuda.synchronize(device)
    del result
    return start.elapsed_time(end) / 1000


def shares(
    contender: Contender, device: torch.device, seconds: float
) -> dict[str, float]:
    """Return shares of ``seconds`` by torch's op or GPU kernel, and ``all else``."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it logs its start and end
    gpu = device.type == "cuda"
    activity = ProfilerActivity.CUDA if gpu else ProfilerActivity.CPU
    clock = "self_device_time_total" if gpu else "self_cpu_time_total"
    contender.prepare()
    with profile(activities=[activity]) as watched:
        start = time.perf_counter()
        result = contender.run()
        if gpu:
            torch.cuda.synchronize(device)
        else:  # on a GPU a watched run is slower than that
            seconds = time.perf_counter() - start
    del result
    parts: Counter[str] = Counter()
    for event in watched.key_averages():
        parts[_plain(event.key)] += getattr(event, clock) / (1e6 * seconds)
    largest = dict(parts.most_common(PROFILE_ENTRIES))
    return {**largest, "all else": max(0.0, 1 - sum(largest.values()))}


def _plain(name: str) -> str:
    """Take from a C++ template's name where it is defined and what it was made for."""
    if not name.startswith("void "):
        return name
    return re.split(r"[<(]", name)[0].split("::")[-1]
