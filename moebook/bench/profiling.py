"""Where a contender's time goes, by PyTorch's profiler: what a missed goal is explained by."""

from __future__ import annotations

import os
import time

import torch
from torch.profiler import ProfilerActivity, profile

from moebook.bench.timing import Contender

LARGEST = 5
"""Entries that are kept."""


def shares(contender: Contender, device: torch.device) -> dict[str, float]:
    """Run a contender once more and say where the time went.

    Returns:
        The share of the run's wall-clock time by torch's op, on a GPU by kernel, in falling order;
        at last that of all else: smaller entries, Python, NumPy, and on a GPU waiting.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it logs its own start and end otherwise
    gpu = device.type == "cuda"
    contender.prepare()
    with profile(activities=[ProfilerActivity.CUDA if gpu else ProfilerActivity.CPU]) as watched:
        start = time.perf_counter()
        result = contender.run()
        if gpu:
            torch.cuda.synchronize(device)
        spent = 1e6 * (time.perf_counter() - start)
    del result
    clock = "self_device_time_total" if gpu else "self_cpu_time_total"
    found = {event.key: getattr(event, clock) / spent for event in watched.key_averages()}
    top = sorted(found.items(), key=lambda item: -item[1])[:LARGEST]
    return {**dict(top), "all else": max(0.0, 1 - sum(share for _, share in top))}


def told(found: dict[str, float], times: float) -> str:
    """Say in a line how much each entry is of ``times``."""
    parts = ((name, share * times) for name, share in found.items())
    return ", ".join(f"{name} {part:.2f}" for name, part in parts if part >= 0.005)
