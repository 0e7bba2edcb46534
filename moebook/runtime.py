"""The machine a run sees; torch is imported where it is needed, so ``moebook list`` is quick."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import random
import re
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import numpy as np
from pydantic import Field
from tqdm import tqdm

from moebook.errors import refuse, refuse_unknown
from moebook.settings import checked

if TYPE_CHECKING:
    import torch

Item = TypeVar("Item")

QUIET = "MOEBOOK_QUIET"  # set to 1 where notebooks are executed for the book
RESUME = "MOEBOOK_RESUME"  # set there too: the folder of the run's checkpoints
FOUND = "found.json"  # in a training's folder there: its seconds when the run was taken up again
PLACE = ("LOCAL_RANK", "RANK", "WORLD_SIZE")  # what a launcher sets of a process
PACKAGES = (
    "torch",
    "transformers",
    "peft",
    "accelerate",
    "bitsandbytes",
    "safetensors",
    "datasets",
    "lm-eval",
    "numpy",
    "scipy",
    "pandas",
    "scikit-learn",
    "triton",
    "papermill",
    "ipykernel",
)


@checked
def seed_everything(seed: Annotated[int, Field(ge=0, lt=2**32)]) -> None:
    """Seed Python's, NumPy's and torch's generators on all devices; NumPy takes 32 bits."""
    import torch

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def random_states_kept() -> AbstractContextManager[None]:
    """Put torch's random states back after a block: all that ``torch.manual_seed`` seeds."""
    import torch

    # Of several GPUs that it was not told of it would warn.
    gpus = range(torch.cuda.device_count())
    kept: AbstractContextManager[None] = torch.random.fork_rng(gpus)
    return kept


def now() -> str:
    """Return the time to the second (UTC), as records have it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def processes() -> tuple[int, int]:
    """Return this process's number and how many ``accelerate launch`` started, else (0, 1)."""
    given = [name for name in PLACE if name in os.environ]
    if "LOCAL_RANK" not in given:
        # accelerate sets an address for several processes, and with --cpu starts one of them
        if {"MASTER_PORT", "ACCELERATE_MIXED_PRECISION"} <= os.environ.keys():
            refuse(
                "E-USAGE",
                "accelerate launch started one process of several; start them with "
                "torchrun --nproc-per-node N, or leave --num_processes away",
            )
        return 0, 1
    with suppress(KeyError, ValueError):
        local, rank, world = (int(os.environ[name]) for name in PLACE)
        if local >= 0 and 0 <= rank < world:
            return rank, world
    found = ", ".join(f"{name}={os.environ[name]}" for name in given)
    refuse(
        "E-USAGE",
        f"{found} is no place among processes; set LOCAL_RANK, RANK and WORLD_SIZE to "
        "numbers from 0 on, RANK below WORLD_SIZE, or none of them",
    )


def resolve_device(name: str) -> torch.device:
    """Turn ``auto``, ``cpu``, ``cuda`` (each process has its own) or ``cuda:1`` into a device."""
    import torch

    present = torch.cuda.device_count()
    if name == "auto":
        name = "cuda" if present else "cpu"
    if name == "cuda" and "LOCAL_RANK" in os.environ:
        name = f"cuda:{os.environ['LOCAL_RANK']}"
    names = ["cpu", "cuda", *(f"cuda:{index}" for index in range(present))]
    kind, _, index = name.partition(":")
    if kind == "cuda" and int(index if index.isdecimal() else 0) >= present:
        refuse(
            "E-DEVICE",
            f"device '{name}' is not on this machine ({present} GPUs); use cpu",
        )
    refuse_unknown(name, ["auto", *names], "E-DEVICE", f"unknown device '{name}':")
    return torch.device(name)


def resolve_dtype(name: str, device: str | torch.device) -> torch.dtype:
    """Turn a name into a dtype the device can train in; ``auto``: bfloat16 on a GPU that has it."""
    import torch

    gpu = torch.device(device).type == "cuda"
    able = {
        "float32": True,
        "float16": gpu,
        "bfloat16": not gpu or torch.cuda.is_bf16_supported(),
    }
    if name == "auto":
        name = "bfloat16" if gpu and able["bfloat16"] else "float32"
    refuse_unknown(name, ["auto", *able], "E-DTYPE", f"unknown dtype '{name}':")
    if not able[name]:
        refuse(
            "E-DTYPE",
            f"dtype {name} needs a GPU that has it, not {device}; use float32",
        )
    dtype: torch.dtype = getattr(torch, name)
    return dtype


@dataclass
class Timing:
    """What a block of code cost."""

    seconds: float = 0.0  # wall-clock time
    # Peak bytes: torch's on a GPU, else the process's if on Linux.
    memory: int | None = None


@contextmanager
def stopwatch(device: str | torch.device = "cpu") -> Iterator[Timing]:
    """Measure the time and peak memory of a ``with`` block; a GPU's queued work is waited for."""
    import torch

    gpu = str(device).startswith("cuda")
    known = True
    timing = Timing()
    if gpu:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    else:
        try:  # start the kernel's high-water mark anew
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            known = False
    start = time.perf_counter()
    try:
        yield timing
    finally:
        if gpu:
            torch.cuda.synchronize(device)
            timing.memory = torch.cuda.max_memory_allocated(device)
        else:
            timing.memory = peak_memory() if known else None
        timing.seconds = time.perf_counter() - start


def peak_memory(pid: int | str = "self", mark: str = "VmHWM") -> int | None:
    """Return a process's peak resident bytes since its last `stopwatch`, or now's by ``VmRSS``."""
    # The process has ended, or the system is not Linux and keeps no such mark.
    with suppress(OSError):
        found = re.search(
            rf"^{mark}:\s*(\d+)", Path(f"/proc/{pid}/status").read_text(), re.M
        )
        if found:
            return int(found[1]) * 1024
    return None


def cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _processor() -> str:
    """Name the processor: by its model on Linux, else as Python does."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        text = info.read_text(encoding="utf-8")
        model = re.search(r"^model name.*?: *(.*)", text, re.M)
        if model:
            return model[1].strip()
    return platform.processor() or platform.machine()


def environment() -> dict[str, Any]:
    """Describe what a result may depend on; no host name, user name or path: it is committed."""
    import psutil
    import torch

    gpu = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": versions(),
        "cpu": _processor(),
        "cores": cores(),
        "memory": psutil.virtual_memory().total,
        "threads": torch.get_num_threads(),
        "accelerator": gpu.name if gpu else None,
        "accelerator_memory": gpu.total_memory if gpu else None,
    }


@cache
def versions() -> dict[str, str]:
    """List the versions of the installed packages that results may depend on; read once."""
    present = [
        name for name in PACKAGES if any(importlib.metadata.distributions(name=name))
    ]
    return {name: importlib.metadata.version(name) for name in present}


def progress(
    iterable: Iterable[Item], desc: str = "", total: int | None = None
) -> Iterable[Item]:
    """Show a progress bar around the first process's loop, in a terminal and in Jupyter.

    It is plain text: widgets leave dead boxes in a rendered page.
    """
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    kernel = getattr(shell, "kernel", None)
    if kernel is None:
        # A program without a console, as pythonw's, has no stderr.
        watched = sys.stderr is not None and sys.stderr.isatty()
    else:
        watched = getattr(kernel, "_allow_stdin", True)  # papermill's cannot ask
    if os.environ.get(QUIET) == "1" or not watched or processes()[0]:
        return iterable
    return tqdm(iterable, desc=desc or None, total=total, leave=False)
