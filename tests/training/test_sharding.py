"""FSDP2 on CPUs: two processes train as one, in shards that come back and outlive a kill."""

import json
import math
import os
import re
import shutil
import signal
import socket
import time
import traceback
import warnings
from pathlib import Path

import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command, launch_command_parser
from torch.distributed.checkpoint import HuggingFaceStorageWriter

from moebook.errors import Refusal
from moebook.training import sharding
from tests.refusals import refused
from tests.training.courses import METHODS, course

ROOT = Path(__file__).resolve().parents[2]
CONFIGURATIONS = sorted((ROOT / "recipes").glob("fsdp2_*.yaml"))
FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
}
# What ends a process whose heap was torn, as glibc and the system tell it.
TORN = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS)
on_cpu = pytest.mark.skipif(
    torch.accelerator.is_available(), reason="needs the GPU hidden"
)


def alike(found, expected):
    for name in ("loss", "penalty", "norm", "weights"):
        assert found[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-9), name


TELL = """
import json, os, sys

with open(os.path.join(sys.argv[1], os.environ["RANK"]), "w") as file:
    json.dump(dict(os.environ), file)"""


@pytest.fixture(scope="module")
def settings_of_two(tmp_path_factory):
    """What `accelerate launch` tells two processes by our configuration, in a fork of this one."""
    folder = tmp_path_factory.mktemp("told")
    script = folder / "tell.py"
    script.write_text(TELL)
    configuration = str(ROOT / "recipes" / "fsdp2_two_cpus.yaml")
    words = ["--config_file", configuration, str(script), str(folder)]
    child = os.fork()
    if not child:
        try:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
            launch_command(launch_command_parser().parse_args(words))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    told = [json.loads((folder / rank).read_text()) for rank in "01"]
    assert [(each["RANK"], each["WORLD_SIZE"]) for each in told] == [
        ("0", "2"),
        ("1", "2"),
    ]
    of_ours = ("ACCELERATE_", "FSDP_")
    settings = {n: text for n, text in told[0].items() if n.startswith(of_ours)}
    assert FSDP2.items() <= settings.items()
    return settings


@pytest.fixture
def launched(tmp_path):
    """Fork processes that train one course together; return what each found or was refused."""

    def launch(count, **given):
        found, ends = once(count, **given)
        if any(os.WIFSIGNALED(end) and os.WTERMSIG(end) in TORN for end in ends):
            # This process has threads, so that a fork of it may find the heap in disorder.
            # A fault of ours would show again.
            found, _ = once(count, **given)
        return found

    def once(count, *, shards=True, name="esft", settings=None, **more):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        there = {
            "WORLD_SIZE": str(count),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        children = []
        for rank in range(count):
            child = os.fork()
            if child:
                children.append(child)
                continue
            try:
                warnings.simplefilter("ignore")
                os.environ |= settings or (FSDP2 if shards else {})
                os.environ |= {**there, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                try:
                    found = course(name, **more)
                except Refusal as refusal:
                    found = str(refusal)
                (tmp_path / f"{rank}.json").write_text(json.dumps(found))
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        ends = [os.waitpid(child, 0)[1] for child in children]
        files = [tmp_path / f"{rank}.json" for rank in range(count)]
        found = [
            json.loads(file.read_text()) if file.exists() else None for file in files
        ]
        for file in files:
            file.unlink(missing_ok=True)
        return found, ends

    return launch


@on_cpu
@pytest.mark.parametrize("name", METHODS)
def test_two_processes_train_every_method_in_shards_as_one_does_whole(
    launched, settings_of_two, name
):
    wanted = course(name, accumulate=2)  # a balance loss is that of a part
    for found in launched(2, name=name, settings=settings_of_two):
        assert found["sharded"]
        alike(found, wanted)


@on_cpu
def test_a_host_in_16_bits_trains_in_shards_of_float32(launched):
    wanted = course("halved", accumulate=2)
    for found in launched(2, name="halved"):
        assert found["sharded"]
        assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-3)


def steps(folder):
    return sorted(path.name for path in folder.glob("*step-*[0-9]"))


@on_cpu
@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param((2, True), (1, True), marks=pytest.mark.soak),
        pytest.param((2, True), (1, False), marks=pytest.mark.soak),
        ((1, True), (3, True)),  # the third holds no part of two experts
        ((1, False), (2, True)),  # the one without FSDP2
    ],
)
def test_a_checkpoint_comes_back_on_other_processes(launched, tmp_path, before, after):
    expected = course("esft")
    folder = tmp_path / "run"
    for count, shards in (before, after):
        for found in launched(count, shards=shards, output=folder, every=4):
            alike(found, expected)
            assert found["sharded"] == shards
        assert steps(folder) == ["step-4", "step-6"]
        assert len([*folder.glob("step-6/*.safetensors")]) == count
        shutil.rmtree(folder / "step-6")


@on_cpu
def test_two_processes_that_hold_the_whole_model_train_as_one(launched, tmp_path):
    expected = course("esft")
    folder = tmp_path / "run"
    for found in launched(2, shards=False, output=folder, every=4):
        alike(found, expected)
        assert not found["sharded"]
    assert steps(folder) == ["step-4", "step-6"]


@on_cpu
def test_a_shard_that_is_missing_or_damaged_is_named(launched, tmp_path):
    folder = tmp_path / "run"
    launched(2, output=folder, every=4)
    shard = max((folder / "step-6").glob("shard-*"))
    content = shard.read_bytes()
    shard.write_bytes(content[:-7] + b"\0" * 7)
    told = launched(2, output=folder)
    assert told[0] == told[1]
    assert re.match(f"E-HASH: {shard}: .* was sealed as", told[0])
    shard.unlink()
    told = launched(2, output=folder)
    assert told[0] == told[1]
    assert re.match(f"E-MANIFEST: .*step-6: .*{shard.name}", told[0])
    shard.write_bytes(content)
    assert steps(folder) == ["step-4", "step-6"]
    alike(launched(2, output=folder)[1], course("esft"))


def once(step, what):
    """Make a penalty of 0 that does something in the second process, at one step."""
    done = []

    def penalty(model):
        done.append(step)
        if len(done) == step and os.environ["RANK"] == "1":
            return what()
        return torch.zeros(())

    return penalty


@on_cpu
def test_a_killed_process_ends_the_other_in_one_line_and_training_goes_on(
    launched, tmp_path
):
    folder = tmp_path / "run"
    begun = time.monotonic()
    kill = once(5, lambda: os.kill(os.getpid(), signal.SIGKILL))
    told, killed = launched(2, output=folder, every=2, penalty=kill)
    assert time.monotonic() - begun < 60
    assert killed is None
    assert told.startswith("E-PROCESS: another process of this training has ended (")
    assert steps(folder) == ["step-2", "step-4"]
    expected = course("esft")
    for found in launched(2, output=folder, every=2):
        alike(found, expected)


@on_cpu
def test_what_goes_wrong_in_one_process_is_refused_in_both(
    launched, tmp_path, monkeypatch
):
    nan = once(4, lambda: torch.tensor(math.nan))
    told = launched(2, output=tmp_path / "nan", every=2, penalty=nan)
    words = r"E-NONFINITE: step 4: .* as after step 3 \(last checkpoint: step 2\)"
    assert told[0] == told[1]
    assert re.match(words, told[0])

    def full(writer, plan, planner):
        if os.environ["RANK"] == "1" and writer.path.parent.name == "disk":
            raise OSError(28, "No space left")
        return write(writer, plan, planner)

    write = HuggingFaceStorageWriter.write_data
    monkeypatch.setattr(HuggingFaceStorageWriter, "write_data", full)
    told = launched(2, output=tmp_path / "disk", every=2)
    assert all(
        re.match("E-DISK: step 2 not saved, .*No space left", line) for line in told
    )
    assert steps(tmp_path / "disk") == []


@on_cpu
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"FSDP_VERSION": "1"}, "fsdp_version: 1"),
        ({"FSDP_OFFLOAD_PARAMS": "true"}, "fsdp_offload_params: true"),
        (
            {"FSDP_CPU_RAM_EFFICIENT_LOADING": "true"},
            "fsdp_cpu_ram_efficient_loading: true",
        ),
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, "mixed_precision: bf16"),
    ],
)
def test_settings_that_would_not_be_obeyed_are_refused(
    launched, monkeypatch, settings, words
):
    monkeypatch.setattr("tests.training.test_sharding.FSDP2", FSDP2 | settings)
    (told,) = launched(1)
    assert told.startswith(f"E-CHOICE: accelerate's configuration says {words}")


def test_two_dtypes_that_train_together_are_refused():
    model = torch.nn.Linear(2, 2)
    model.bias.data = model.bias.data.double()
    refused(
        "E-DTYPE: torch.float32 and torch.float64 train together", sharding.twin, model
    )


@pytest.mark.parametrize("path", CONFIGURATIONS, ids=lambda path: path.stem)
def test_accelerate_reads_our_configurations(path):
    config = load_config_from_file(str(path))
    expected = {"one_gpu": (1, 1), "node": (8, 1), "nodes": (16, 2), "two_cpus": (2, 1)}
    counts = (config.num_processes, config.num_machines)
    assert (config.distributed_type, counts) == (
        "FSDP",
        expected[path.stem.removeprefix("fsdp2_")],
    )
    assert config.mixed_precision == "no"
    assert config.fsdp_config == {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_reshard_after_forward": True,
        "fsdp_offload_params": False,
        "fsdp_cpu_ram_efficient_loading": False,
    }
    parser = launch_command_parser()
    known = vars(parser.parse_args(["--config_file", str(path), "script"]))
    assert config.fsdp_config.keys() <= known.keys()
    assert path.name in path.read_text().split("compute_environment")[0]
