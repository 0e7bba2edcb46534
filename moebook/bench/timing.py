"""Clocks for contenders that take turns: seconds at work, wall-clock seconds, extra memory."""

from __future__ import annotations

import ctypes
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from moebook import runtime
from moebook.errors import Refusal

BUSY, ENTRIES = 20_000_000, 5
"""Cycles of a GPU, some 10 ms, longer than it takes to submit work; entries kept of a profile."""


@dataclass(frozen=True)
class Contender:
    """One way of doing a case's work: ``"ours"``, the ``"floor"`` or a peer's."""

    name: str
    run: Callable[[], Any]  # does the work once, after the gradients of leaves are freed
    leaves: Sequence[torch.Tensor] = ()
    forward: Callable[[], Any] | None = None  # alone, where a backward pass follows
    host: bool = False  # works on the CPU whatever the device: its own clock is the wall's

    def prepare(self) -> None:
        """Free the gradients of the last run."""
        for leaf in self.leaves:
            leaf.grad = None


class Timing(NamedTuple):
    """What one run cost; None where not measured."""

    seconds: float  # of work: CPU time of the process, all its threads, or the GPU's own time
    wall: float
    memory: int | None = None  # extra bytes at the peak, over what was held before
    kept: int | None = None  # bytes that the forward pass holds for the backward pass


class Cost(NamedTuple):
    """What a contender costs: medians of the rounds that count, the memory of its first run."""

    seconds: float
    wall: float
    ratio: float  # of its seconds over ours in the same round: above 1 where ours is faster
    rounds: int
    memory: int | None
    kept: int | None


def interleave(
    contenders: Sequence[Contender], device: torch.device, *, rounds: int, budget: float
) -> tuple[dict[str, Cost], dict[str, str]]:
    """Let all contenders take turns with the first; return what each costs, or why it dropped out.

    The first round warms up and is dropped, except for a contender that has no other, since after
    ``budget`` seconds of work it takes no further turn; ours has run once before it.
    """
    ours, *others = contenders
    turns: dict[str, list[tuple[Timing, Timing]]] = {each.name: [] for each in contenders}
    failed: dict[str, str] = {}
    first = timed(ours, device, watched=True)
    for number in range(rounds + 1):
        mine = timed(ours, device)._replace(memory=first.memory, kept=first.kept)
        turns[ours.name].append((mine, mine))
        start = number % max(len(others), 1)  # who follows a large neighbour finds a cold cache
        for other in others[start:] + others[:start]:
            past = turns[other.name]
            if other.name not in failed and sum(theirs.seconds for _, theirs in past) < budget:
                try:
                    past.append((mine, timed(other, device, watched=number == 0)))
                except Exception as error:  # a peer may fail in any way
                    failed[other.name] = why(error)
    return {name: _cost(past) for name, past in turns.items() if name not in failed}, failed


def why(error: Exception) -> str:
    """Return the first line of what an error says, or its kind where it says nothing."""
    text = error.message if isinstance(error, Refusal) else str(error)
    return text.strip().partition("\n")[0] or type(error).__name__


def _cost(turns: list[tuple[Timing, Timing]]) -> Cost:
    first, pairs = turns[0][1], turns[1:] or turns
    seconds = median(theirs.seconds for _, theirs in pairs)
    wall = median(theirs.wall for _, theirs in pairs)
    ratio = median(theirs.seconds / mine.seconds for mine, theirs in pairs)
    return Cost(seconds, wall, ratio, len(pairs), first.memory, first.kept)


def timed(contender: Contender, device: torch.device, *, watched: bool = False) -> Timing:
    """Run a contender once; ``watched`` measures its memory too."""
    if not watched:
        return _clocked(contender, device)
    contender.prepare()
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)  # what was freed goes to the system, so that its use counts as new
    gpu = device.type == "cuda"
    before = torch.cuda.memory_allocated(device) if gpu else runtime.peak_memory(mark="VmRSS")
    with runtime.stopwatch(device) as peak:
        timing = _clocked(contender, device)
    extra = None if before is None or peak.memory is None else max(peak.memory - before, 0)
    return timing._replace(memory=extra, kept=_kept(contender, device))


def _kept(contender: Contender, device: torch.device) -> int | None:
    """Bytes allocated on a GPU between a contender's forward and backward pass."""
    if contender.forward is None or device.type != "cuda":
        return None
    contender.prepare()
    before = torch.cuda.memory_allocated(device)
    graph = contender.forward()  # noqa: F841
    return torch.cuda.memory_allocated(device) - before


def _clocked(contender: Contender, device: torch.device) -> Timing:
    """Run once, on a GPU twice: for the wall clock, then for the GPU's own.

    Until the work is submitted the GPU is kept busy, as in a model, where the host runs ahead.
    """
    gpu = device.type == "cuda"
    wait = partial(torch.cuda.synchronize, device) if gpu else lambda: None
    contender.prepare()
    wait()
    wall, work = time.perf_counter(), time.process_time()
    result = contender.run()
    wait()
    work, wall = time.process_time() - work, time.perf_counter() - wall
    del result  # freed outside the clocks, for each contender alike
    if not gpu or contender.host:
        return Timing(wall if gpu else work, wall)
    contender.prepare()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(BUSY)
    start.record()
    result = contender.run()
    end.record()
    torch.cuda.synchronize(device)
    del result
    return Timing(start.elapsed_time(end) / 1000, wall)


def shares(contender: Contender, device: torch.device, seconds: float) -> dict[str, float]:
    """Return shares of a contender's ``seconds`` by torch's op or GPU kernel, and ``all else``."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it logs its own start and end otherwise
    gpu = device.type == "cuda"
    contender.prepare()
    with profile(activities=[ProfilerActivity.CUDA if gpu else ProfilerActivity.CPU]) as watched:
        start = time.perf_counter()
        result = contender.run()
        if gpu:
            torch.cuda.synchronize(device)
        else:  # on a GPU a watched run is slower than that
            seconds = time.perf_counter() - start
    del result
    clock = "self_device_time_total" if gpu else "self_cpu_time_total"
    parts: Counter[str] = Counter()
    for event in watched.key_averages():
        # Of a kernel's C++ name neither where its template is defined, nor what it was made for.
        template = event.key.startswith("void ")
        name = re.split(r"[<(]", event.key)[0].split("::")[-1] if template else event.key
        parts[name] += getattr(event, clock) / (1e6 * seconds)
    top = parts.most_common(ENTRIES)
    return {**dict(top), "all else": max(0.0, 1 - sum(share for _, share in top))}
