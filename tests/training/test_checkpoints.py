"""An interrupted run goes on bit for bit, and damage is told by file."""

import itertools
import json
import math
import os
import shutil
import signal
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load, load_file, save
from torch import nn

from moebook import runtime
from moebook.errors import Refusal
from moebook.models import checkpoint
from moebook.training import checkpoints, fit
from moebook.training.checkpoints import Store
from tests.refusals import refused

pytestmark = pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing:FutureWarning"
)
SETTINGS = {
    "steps": 8,
    "batch": 4,
    "lr": 1e-2,
    "schedule": "cosine",
    "seed": 1,
    "pad_id": 2,
}


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def committed(folder):
    return sorted(path.name for path in folder.glob("*step-*"))


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one | other)


@pytest.fixture(scope="module")
def ends_whole(lora, rows):
    """Go on in a folder and compare with a run that nothing interrupted."""

    def trained(**more):
        model = lora()
        return fit(model, rows(), **SETTINGS, **more), weights(model)

    whole, parameters = trained()

    def check(folder, penalty=None):
        history, resumed = trained(output=folder, every=2, penalty=penalty)
        assert same(resumed, parameters)
        assert (history.loss, history.norm) == (whole.loss, whole.norm)
        assert history.seconds == sorted(history.seconds)
        assert committed(folder) == ["step-6", "step-8"]

    return check


@pytest.fixture(scope="module")
def once_interrupted(lora, rows, interrupt, tmp_path_factory):
    """A folder with checkpoints of steps 2 and 4 of the same run."""
    folder = tmp_path_factory.mktemp("interrupted")
    with pytest.raises(KeyboardInterrupt):
        fit(lora(), rows(), **SETTINGS, penalty=interrupt(6), output=folder, every=2)
    return folder


@pytest.fixture
def interrupted(once_interrupted, tmp_path):
    """A copy of that folder, to go on in or to damage."""
    return Path(shutil.copytree(once_interrupted, tmp_path / "run"))


def test_a_resumed_run_is_the_whole_one_bit_for_bit(
    lora, ends_whole, interrupt, interrupted
):
    ends_whole(interrupted)
    ends_whole(interrupted, interrupt(1))  # a finished run is read and not repeated
    tensors = load_file(interrupted / "step-8" / "tensors.safetensors")
    trained = {
        f"model.{name}" for name, p in lora().named_parameters() if p.requires_grad
    }
    assert {name for name in tensors if name.startswith("model.")} == trained
    # Each has a weight, two moments and the optimizer's own step.
    assert len(tensors) == 4 * len(trained)


@pytest.mark.parametrize("kind", ["AdamW8bit", "AdamW32bit"])
def test_the_state_of_bitsandbytes_optimizers_is_restored_bit_for_bit(kind):
    bits = pytest.importorskip("bitsandbytes").optim

    def steps(model, optimizer, seed):
        inputs = torch.randn(3, 4, 64, generator=torch.Generator().manual_seed(seed))
        for x in inputs:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    torch.manual_seed(0)
    one = nn.Linear(64, 128)
    other = nn.Linear(64, 128)
    mine, its = (
        getattr(bits, kind)(model.parameters(), lr=1e-2) for model in (one, other)
    )
    steps(one, mine, 1)
    checkpoints.restore(other, its, load(save(checkpoints.capture(one, mine))))
    for model, optimizer in ((one, mine), (other, its)):
        steps(model, optimizer, 2)
    assert torch.equal(one.weight, other.weight)


def test_a_run_killed_in_a_save_goes_on_from_the_one_before(
    lora, rows, ends_whole, tmp_path
):
    commit = checkpoint.commit

    def kill(stage, target):
        if target.name == "step-4":
            os.kill(os.getpid(), signal.SIGKILL)
        commit(stage, target)

    child = os.fork()
    if not child:
        checkpoint.commit = kill
        fit(lora(), rows(), **SETTINGS, output=tmp_path, every=2)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert committed(tmp_path)[:2] == [".stage-step-4", ".step-4.lock"]
    ends_whole(tmp_path)


def test_a_damaged_newest_checkpoint_is_named(lora, rows, interrupted, monkeypatch):
    os.truncate(interrupted / "step-4" / "tensors.safetensors", 100)
    with pytest.raises(Refusal, match=rf"E-HASH: {interrupted / 'step-4'}"):
        fit(lora(), rows(), **SETTINGS, output=interrupted)
    unreadable = interrupted / "sealed"  # its hashes fit
    monkeypatch.setattr(checkpoint, "packed", lambda tensors: b"no tensors")
    fit(lora(), rows(), **SETTINGS, output=unreadable)
    with pytest.raises(Refusal, match=f"E-FORMAT: {unreadable / 'step-8'}"):
        fit(lora(), rows(), **SETTINGS, output=unreadable)


def test_folders_of_others_or_in_use_and_files_are_refused(
    lora, rows, once_interrupted, tmp_path
):
    for lr, seed, data, words in [
        (3e-2, 0, 20, "lr 0.01 -> 0.03"),
        (1e-2, 1, 20, "model "),
        (1e-2, 0, 21, "data "),
    ]:
        with pytest.raises(Refusal, match=f"E-CONFIGDIFF: .*{words}"):
            fit(
                lora(seed),
                rows(data),
                **{**SETTINGS, "lr": lr},
                output=once_interrupted,
            )
    # What another method is about to write into the folder is not swept.
    stage = tmp_path / ".stage-task"
    stage.mkdir()
    with Store(folder=tmp_path, run={}, every=1).locked():
        assert stage.is_dir()
    stage.rmdir()
    held = Store(folder=tmp_path, run={}, every=1).locked()
    with held, pytest.raises(Refusal, match=f"process {os.getpid()}"):
        fit(lora(), rows(), steps=2, output=tmp_path)
    for empty in ("", " "):
        refused("E-PATH: output is empty", fit, lora(), rows(), steps=1, output=empty)
    (tmp_path / "run").touch()
    refused("E-PATH", fit, lora(), rows(), steps=2, output=tmp_path / "run")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("file/ck", "E-OS: .* cannot be used: NotADirectoryError"),
        ("broken", "E-OS: .* cannot be used: FileExistsError"),
        ("x" * 300, "E-OS: .* cannot be used: OSError"),
        ("barred", "E-PERM: .* cannot be used: PermissionError"),
        ("file", "E-PATH: .* is a file"),
    ],
)
def test_a_folder_that_cannot_be_used_is_told_in_one_line(
    name, message, tmp_path, monkeypatch
):
    (tmp_path / "file").touch()
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    if name == "barred":  # root may write anywhere
        barred = Mock(side_effect=PermissionError(13, "Permission denied"))
        monkeypatch.setattr(checkpoints.storage.files.os, "open", barred)
    store = Store(folder=tmp_path / name, run={}, every=1)
    refused(message, store.locked().__enter__)


def test_what_fails_while_a_folder_is_held_passes_and_lets_it_go(tmp_path):
    store = Store(folder=tmp_path, run={}, every=1)
    with pytest.raises(OSError, match="of the block"), store.locked():
        raise OSError("of the block")
    assert list(tmp_path.iterdir()) == []


def test_other_threads_are_told_and_a_full_disk_keeps_the_old(
    lora, rows, interrupted, monkeypatch
):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 99)
    monkeypatch.setattr(
        checkpoint, "seal", Mock(side_effect=OSError(28, "No space left"))
    )
    with (
        pytest.warns(UserWarning, match="W-REPRO"),
        pytest.raises(Refusal, match="E-DISK"),
    ):
        fit(lora(), rows(), **SETTINGS, output=interrupted, every=2)
    assert committed(interrupted) == ["step-2", "step-4"]


def test_tensors_not_finite_or_of_another_shape_are_refused_and_change_nothing(
    tiny, tmp_path
):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    for number in (torch.nan, torch.inf):
        nn.init.constant_(model.weight, number)
        with pytest.raises(Refusal, match=r"E-NONFINITE: .*model\.weight"):
            Store(folder=tmp_path, run={}, every=1).save(
                model, optimizer, checkpoints.History()
            )
        assert list(tmp_path.iterdir()) == []
    model = tiny()
    optimizer = torch.optim.AdamW(model.parameters())
    # Other numbers than the model's, so that a copy of them would be seen.
    tensors = {f"model.{name}": p.detach() + 1 for name, p in model.named_parameters()}
    before = weights(model)
    norm = "model.model.norm.weight"
    others = {name: tensor for name, tensor in tensors.items() if name != norm}
    moments = {
        "optimizer." + norm[6:] + part: torch.zeros(7) for part in (".step", ".exp_avg")
    }
    whole = {**moments, "optimizer." + norm[6:] + ".exp_avg_sq": torch.zeros(7)}
    misfits = (others, {**others, norm: torch.zeros(7)}, {**tensors, **moments})
    for misfit in (*misfits, {**tensors, **whole}):
        with pytest.raises(
            Refusal, match=r"E-SHAPE: [13] tensors .*model\.norm\.weight"
        ):
            checkpoints.restore(model, optimizer, misfit)
    assert same(weights(model), before)
    assert not optimizer.state


@pytest.fixture
def process(lora, rows, tmp_path, monkeypatch):
    """Train twice as a new process of one run of a notebook does; measure with random numbers."""
    monkeypatch.setenv(runtime.RESUME, str(tmp_path))

    def begin(*penalties, **more):
        monkeypatch.setattr(checkpoints, "_numbers", itertools.count(1))
        ends = []
        draw = [((0, 2, 3, 8), lambda model: float(torch.rand(())))]
        for penalty in penalties or (None, None):
            model = lora()
            history = fit(
                model, rows(), **SETTINGS, **more, milestones=draw, penalty=penalty
            )
            ends.append((history.loss, history.milestones, weights(model)))
        return ends

    return begin


def found(folder):
    return {
        path.parent.name[:3]: json.loads(path.read_text())
        for path in folder.glob("*/found*")
    }


def test_trainings_go_on_and_tell_the_time_found(
    process, interrupt, tmp_path, monkeypatch
):
    monkeypatch.delenv(runtime.RESUME)
    whole = process()
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv(runtime.RESUME, str(tmp_path))
    monkeypatch.setattr(checkpoints, "PAUSE", 0.0)
    monkeypatch.setattr(checkpoints, "RATE", math.inf)
    with pytest.raises(KeyboardInterrupt):
        process(None, interrupt(6))
    one, two = sorted(tmp_path.iterdir())
    assert committed(one) == ["step-2", "step-3", "step-7", "step-8"], (
        "marks and the newest two"
    )
    assert committed(two) == ["step-2", "step-3", "step-4", "step-5"], (
        "a long time after each"
    )
    assert found(tmp_path) == {}
    for (loss, measured, end), (loss_, measured_, end_) in zip(
        whole, process(), strict=True
    ):
        assert (loss, measured) == (loss_, measured_)
        assert same(end, end_)
    assert found(tmp_path).keys() == {"001", "002"}
    assert min(found(tmp_path).values()) > 0
    monkeypatch.setattr(
        checkpoints, "environment", lambda: {"cpu": "another", "memory": 2**40}
    )
    process()
    assert len(list(tmp_path.iterdir())) == 4, "another machine begins anew"
    monkeypatch.setattr(checkpoints, "PAUSE", 300.0)
    monkeypatch.setattr(checkpoints, "RATE", 1.0)
    monkeypatch.setattr(
        checkpoints, "environment", lambda: {"cpu": "a third", "memory": 2**40}
    )
    process()
    assert sum(bool(committed(folder)) for folder in tmp_path.iterdir()) == 4, (
        "faster anew"
    )


def test_a_run_without_room_for_checkpoints_is_trained_to_the_end(
    process, monkeypatch, tmp_path
):
    monkeypatch.setattr(
        checkpoint, "seal", Mock(side_effect=OSError(28, "No space left"))
    )
    assert len(process()) == 2
    assert checkpoint.seal.call_count == 2, (
        "one without a milestone before it would be of no use"
    )
    monkeypatch.setattr(checkpoints, "environment", lambda: {"memory": 1000})
    process()
    assert checkpoint.seal.call_count == 2
    assert not list(tmp_path.glob("*/step-*"))


@pytest.mark.parametrize(
    "name, change, words",
    [
        ("facts.json", {"settings": 3}, "E-FORMAT: .*facts.json does not hold"),
        (
            "facts.json",
            {"history": {"step": [1, 2, 3, "4"]}},
            "E-TYPE: .*step.3 is '4'",
        ),
        (
            "facts.json",
            {"history": {"steps": []}},
            "E-CHOICE: .*unknown setting 'steps'",
        ),
        (
            "facts.json",
            {"history": {"step": [1, 2, 3, 4]}},
            "E-FORMAT: .*each of 4 steps",
        ),
        ("MANIFEST.json", {"versions": None}, "E-TYPE: .*versions is None"),
        ("MANIFEST.json", {"threads": "1"}, "E-TYPE: .*threads is '1'"),
    ],
)
def test_nonsense_under_a_new_seal_is_refused(
    lora, rows, interrupted, name, change, words
):
    folder = interrupted / "step-4"
    facts = json.loads((folder / "MANIFEST.json").read_text())
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    facts |= json.loads((folder / "MANIFEST.json").read_text())
    for mark in (checkpoint.MANIFEST, checkpoint.DIGEST):
        (folder / mark).unlink()
    checkpoint.seal(
        folder, **{key: facts[key] for key in ("step", "versions", "threads")}
    )
    refused(words, fit, lora(), rows(), **SETTINGS, output=interrupted)
