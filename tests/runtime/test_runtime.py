"""Seeds, devices, clock, memory and progress bars."""

import io
import json
import logging
import mmap
import os
import random
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from moebook import runtime
from moebook.errors import Refusal
from tests.refusals import refused


def test_the_same_seed_gives_the_same_numbers_from_all_generators():
    def draw():
        runtime.seed_everything(7)
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    assert draw() == draw()


@pytest.mark.parametrize(
    ("gpus", "name", "wanted"),
    [
        (0, "auto", "cpu"),
        (0, "cpu", "cpu"),
        (2, "auto", "cuda"),
        (2, "cuda:1", "cuda:1"),
        (0, "cuda", "not on this machine"),
        (0, "cuda:0", "not on this machine"),
        (0, "cpus", "did you mean 'cpu'"),
        (2, "cuda:2", "2 GPUs"),
        (2, "cuda:x", "unknown device"),
    ],
)
def test_devices_are_resolved_or_refused(gpus, name, wanted, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    if " " not in wanted:
        assert runtime.resolve_device(name) == torch.device(wanted)
    else:
        refused(f"E-DEVICE.*{wanted}", runtime.resolve_device, name)


def test_dtypes_are_resolved_or_refused(monkeypatch):
    assert runtime.resolve_dtype("auto", "cpu") == torch.float32
    assert runtime.resolve_dtype("bfloat16", "cpu") == torch.bfloat16
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda: False)
    assert runtime.resolve_dtype("auto", "cuda") == torch.float32
    for name, device in (("float16", "cpu"), ("bfloat16", "cuda")):
        with pytest.raises(
            Refusal, match=f"E-DTYPE: dtype {name} needs a GPU that has it"
        ):
            runtime.resolve_dtype(name, device)
    refused("did you mean 'bfloat16'", runtime.resolve_dtype, "bfloat", "cpu")


def test_a_stopwatch_measures_time_and_the_blocks_own_peak_memory():
    # Mapped memory is never reused memory.
    with runtime.stopwatch() as big, mmap.mmap(-1, 240_000_000) as fresh:
        for page in range(0, len(fresh), mmap.PAGESIZE):
            fresh[page] = 1
    with runtime.stopwatch() as lap:
        time.sleep(0.05)
    assert 0.05 <= lap.seconds < 5
    if sys.platform == "linux":
        assert big.memory is not None
        assert lap.memory is not None
        assert big.memory - lap.memory > 200_000_000
    assert runtime.peak_memory(2**22 + 1) is None, "of a process that is gone"


def test_the_environment_is_plain_json_without_host_or_paths():
    found = runtime.environment()
    assert json.loads(json.dumps(found)) == found
    # Packages built for CUDA are called 2.13.0, where torch says 2.13.0+cu130.
    release, _, _ = torch.__version__.partition("+")
    assert found["versions"]["torch"] in (release, torch.__version__)
    assert found["threads"] == torch.get_num_threads()
    assert "/" not in json.dumps(found)
    if sys.platform == "linux":
        pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        assert found["memory"] == pages


@pytest.mark.parametrize(
    ("terminal", "asks", "process", "quiet", "shown"),
    [
        (True, None, "0", "0", True),
        (True, None, "0", "1", False),
        (False, None, "0", "0", False),
        # a notebook's frontend, papermill, a second process
        (False, True, "0", "0", True),
        (False, False, "0", "0", False),
        (False, True, "1", "0", False),
    ],
)
def test_progress_is_shown_where_someone_watches(
    terminal, asks, process, quiet, shown, monkeypatch
):
    kernel = None if asks is None else SimpleNamespace(_allow_stdin=asks)
    monkeypatch.setattr("IPython.get_ipython", lambda: SimpleNamespace(kernel=kernel))
    launched = {
        "LOCAL_RANK": process,
        "RANK": process,
        "WORLD_SIZE": "2",
        runtime.QUIET: quiet,
    }
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stderr", screen := io.StringIO())
    screen.isatty = lambda: terminal
    assert list(runtime.progress(range(3), "steps")) == [0, 1, 2]
    assert ("steps" in screen.getvalue()) == shown


def test_a_program_without_a_console_has_no_progress_bar(monkeypatch):
    monkeypatch.setattr("IPython.get_ipython", lambda: None)
    monkeypatch.setattr(sys, "stderr", None)
    assert list(runtime.progress(range(3), "steps")) == [0, 1, 2]


def test_random_states_come_back_on_all_gpus(monkeypatch):
    states = []
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_rng_state", lambda gpu: f"of {gpu}")
    monkeypatch.setattr("torch.cuda.set_rng_state", lambda *given: states.append(given))
    before = torch.get_rng_state()
    with runtime.random_states_kept():
        torch.manual_seed(5)
    assert torch.equal(torch.get_rng_state(), before)
    assert states == [("of 0", 0), ("of 1", 1)]


@pytest.mark.parametrize(
    ("local", "rank", "world"),
    [
        ("0", "5", "2"),
        ("0", "2", "2"),
        ("0", "-1", "2"),
        ("-1", "0", "1"),
        ("0", "0", "0"),
        ("", "0", "2"),
        ("x", "0", "2"),
    ],
)
def test_a_place_that_is_none_is_refused(local, rank, world, monkeypatch):
    given = {"LOCAL_RANK": local, "RANK": rank, "WORLD_SIZE": world}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    words = f"E-USAGE: LOCAL_RANK={local}, RANK={rank}, WORLD_SIZE={world} is no place"
    refused(words, runtime.processes)


def test_a_process_launched_with_others_has_a_number_and_a_gpu_of_its_own(monkeypatch):
    assert runtime.processes() == (0, 1)
    for name, value in {"LOCAL_RANK": "1", "RANK": "3", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert runtime.processes() == (3, 4)
    assert {runtime.resolve_device(name) for name in ("cuda", "auto")} == {
        torch.device("cuda:1")
    }
    monkeypatch.setenv("WORLD_SIZE", "many")
    refused(
        "E-USAGE: LOCAL_RANK=1, RANK=3, WORLD_SIZE=many is no place", runtime.processes
    )
    monkeypatch.delenv("LOCAL_RANK")
    assert runtime.processes() == (0, 1)  # a cluster's variables alone start nothing
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    refused(
        "E-USAGE: accelerate launch started one process of several", runtime.processes
    )


def test_a_wanted_absence_is_not_reported_and_everything_else_is(caplog):
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    logger.warning("Failed to load CPU gemm_4bit_forward from the hub: %s", "no module")
    logger.warning("out of order")
    assert caplog.messages == ["out of order"]
