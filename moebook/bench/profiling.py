"""Where a contender's time goes, by PyTorch's profiler: what a missed goal is explained by."""

from __future__ import annotations

import os
import re
import time
from collections import Counter

import torch
from torch.profiler import ProfilerActivity, profile

from moebook.bench.timing import Contender

LARGEST = 5
"""Entries that are kept."""


def shares(contender: Contender, device: torch.device, seconds: float) -> dict[str, float]:
    """Run a contender once more and say where the time went.

    Args:
        contender: Whom to watch.
        device: Where it runs.
        seconds: What it takes on a GPU when nobody watches: a watched run is slower there.

    Returns:
        The share of the time by torch's op, on a GPU by kernel, in falling order; at last that of
        all else: smaller entries, Python, NumPy, and on a GPU waiting.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it logs its own start and end otherwise
    gpu = device.type == "cuda"
    contender.prepare()
    with profile(activities=[ProfilerActivity.CUDA if gpu else ProfilerActivity.CPU]) as watched:
        start = time.perf_counter()
        result = contender.run()
        if gpu:
            torch.cuda.synchronize(device)
        else:
            seconds = time.perf_counter() - start
    del result
    clock = "self_device_time_total" if gpu else "self_cpu_time_total"
    found: Counter[str] = Counter()
    for event in watched.key_averages():
        found[_short(event.key)] += getattr(event, clock) / (1e6 * seconds)
    top = found.most_common(LARGEST)
    return {**dict(top), "all else": max(0.0, 1 - sum(share for _, share in top))}


def _short(name: str) -> str:
    """Leave out where a C++ template is defined, and what it was made for."""
    return re.split(r"[<(]", name)[0].split("::")[-1] if name.startswith("void ") else name
