"""Up to eight processes write to one store at the same instant: nothing is torn, none crashes."""

import errno
import json
import multiprocessing
import os
import tempfile
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import nbformat
import pytest
from nbformat.v4 import output_from_msg

from moebook import storage
from moebook.errors import Refusal
from moebook.lab import records
from moebook.lab.pages import book
from moebook.lab.records import Value, plain, store
from moebook.lab.run import runner, sources, study
from moebook.lab.run.session import VALUE
from moebook.lab.run.verifying import verify
from tests.lab.conftest import make_project, ran

PARAMETERS = """\
tier: str = "smoke"  # scale {smoke, study}
seed: int = 0  # of everything random [0, 1000]
arms: str = "all"  # names with commas between them, or all"""
ROUNDS = 5


def executed(request, staged):
    """Stand in for papermill: the notebook with one value, which tells the process."""
    notebook = nbformat.read(request.notebook.path, as_version=4)
    value = plain(Value("toy/process", float(os.getpid()), "number"))
    content = {"data": {VALUE: value}, "metadata": {}, "transient": {}}
    message = {"header": {"msg_type": "display_data"}, "content": content}
    notebook.cells[-1].outputs.append(output_from_msg(message))
    ran(notebook, **request.notebook.defaults | request.settings)
    nbformat.write(notebook, staged)
    return {}


def outcome(call, *given, **named):
    """The code of a refusal, the exception, or what it did."""
    try:
        return call(*given, **named)
    except Refusal as refusal:
        return refusal.code
    except BaseException as error:
        return repr(error)


def torn(folder):
    """Count the notebooks that lie beside another run's values."""
    count = 0
    for path in (folder / "runs" / "mine" / "toy").glob("*.ipynb"):
        run = records.read_run(path.with_suffix(".parquet"))
        shown = json.loads(path.read_text())["cells"][-1]["outputs"][0]["data"][VALUE]
        hashes = run.manifest["executed"], storage.digest(path)
        count += len({*hashes}) > 1 or shown != plain(run.values[0])
    return count


def write(number, processes, folder, meet, met, told):
    """Run, publish and add to a pool, each time at once with the others; tell what became of it."""

    def held(request, staged):
        """Hold the first place until another process has met its lock, or half a minute."""
        met.wait(30)
        met.set()
        return executed(request, staged)

    runner._papermill = held
    for turn in range(ROUNDS):
        # First all processes run one key, then each its own.
        for seed in (0, turn * processes + number + 1):
            meet.wait(60)
            more = {"folder": folder, "force": True}
            done = outcome(runner.run_notebook, "toy", "smoke", {"seed": seed}, **more)
            if done == "E-LOCKED":
                met.set()
            told.put(done if isinstance(done, str) else "kept")
        meet.wait(60)
        if number == 0:  # the others run nothing before the next turn
            found = outcome(torn, folder)
            told.put(found if isinstance(found, str) else "torn" if found else "whole")
        shown = outcome(lambda it: book._publish(it.notebook, "01_toy", folder), done)
        told.put(shown if isinstance(shown, str) else "published")
        added = {
            "protocol": "nano",
            "tier": "study",
            "seed": turn,
            "arms": (f"a{number}",),
        }
        added |= {"settings": {"tier": "study"}, "values": ()}
        kept = outcome(
            lambda it, more: study.add(replace(it.run, **more), folder), done, added
        )
        told.put("added" if isinstance(kept, Path) else kept)


def project(place):
    protocols = {"smoke": "tier: smoke\n", "nano": "tier: study\n"}
    return make_project(place, "import moebook", PARAMETERS, (), protocols)


@pytest.mark.parametrize("processes", [3, pytest.param(8, marks=pytest.mark.soak)])
def test_aligned_writers_tear_nothing(tmp_path, monkeypatch, processes, times, figures):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    count = Counter()
    for number in range(times):
        folder = project(tmp_path / f"{number}")
        fork = multiprocessing.get_context("fork")
        meet = fork.Barrier(processes)
        met = fork.Event()
        told = fork.SimpleQueue()
        every = [
            fork.Process(target=write, args=(one, processes, folder, meet, met, told))
            for one in range(processes)
        ]
        for process in every:
            process.start()
        count.update(told.get() for _ in range((4 * processes + 1) * ROUNDS))
        for process in every:
            process.join()
        assert count.keys() <= {"whole", "kept", "published", "added", "E-LOCKED"}, (
            count
        )
        findings = verify(None, folder)
        assert len(findings) == 2 and not any(
            finding.failures for finding in findings
        ), findings
        assert {*store.pool("toy", "nano", folder).arms.values()} == {
            tuple(range(ROUNDS))
        }
        left = {*folder.rglob("*.lock"), *folder.rglob("*.part")}
        left = {path.name for path in left}
        assert left == {"requirements.lock"}
    figures("store", f"{processes} processes", **count)
    done = times * ROUNDS * processes
    assert count["whole"] == times * ROUNDS
    assert count["published"] == count["added"] == done
    assert done < count["kept"] == 2 * done - count["E-LOCKED"]
    assert count["E-LOCKED"] >= times


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run of a project that takes no time, with a folder for temporary files, and its request."""
    monkeypatch.setattr(runner, "_papermill", executed)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    folder = project(tmp_path / "toy")
    request = runner.Request(sources.find(folder, "toy"), "smoke", folder)
    return partial(runner.run_notebook, "toy", "smoke", folder=folder), request


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.ENOSPC, "E-DISK: nothing was run, .* could not keep it"),
        (errno.EROFS, "E-PERM: "),
        (None, r"E-LOCKED: .*/smoke-\w+.lock is held by process %d; wait"),
    ],
)
def test_a_place_that_cannot_take_a_run_is_refused_at_once(
    run, monkeypatch, number, message
):
    begin, request = run
    place = nullcontext()
    monkeypatch.setattr(runner, "_papermill", None)
    if number:
        monkeypatch.setattr(
            tempfile, "TemporaryFile", Mock(side_effect=OSError(number, "no"))
        )
    else:
        place = runner._place(request)
    with place, pytest.raises(Refusal, match=message.replace("%d", str(os.getpid()))):
        begin()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OSError(errno.ENOSPC, "No space left"), "E-DISK"),
        (KeyError("a fault"), "E-INTERNAL"),
    ],
)
@pytest.mark.parametrize("full", [False, True])
def test_whatever_fails_while_a_run_is_kept_its_copy_is_named(
    run, monkeypatch, error, code, full
):
    begin, request = run
    message = f"{error.args[-1]}.*; the failed copy is "
    with (
        monkeypatch.context() as patch,
        pytest.raises(Refusal, match=message) as refusal,
    ):
        patch.setattr(records.runs, "packed", Mock(side_effect=error))
        if full:
            patch.setattr(
                storage, "write", Mock(side_effect=OSError(errno.ENOSPC, "No space"))
            )
        begin()
    assert refusal.value.code == code
    copy = request.folder / str(refusal.value).rpartition("copy is ")[2]
    assert copy.is_relative_to(request.folder) != full
    begin()  # sweeps what is left, but no copy
    assert nbformat.read(copy, as_version=4).cells[-1].outputs


def test_the_next_run_sweeps_what_killed_ones_left_and_nothing_that_lives(run):
    begin, request = run
    temporary = Path(tempfile.gettempdir())
    store = request.store
    resume = request.resume
    dead = [
        temporary / "moebook-0000dead/kernel.json",
        temporary / "moebook-0000dead.lock",
        temporary / "moebook-0005afe0/kernel.json",
        temporary / "moebook-0000fade.lock",
        store.with_name(".other.ipynb.part"),
        store.with_name("other.lock"),
        resume.with_name(f"{store.stem}-code") / "001/step-1/facts.json",
        resume / "001/step-1/facts.json",
    ]
    live = [
        temporary / "moebook-000a11fe/kernel.json",
        store.with_name(".more.ipynb.part"),
        resume.with_name("smoke-other-code") / "001/step-1/facts.json",
    ]
    for path in dead + live:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    with storage.locked(temporary / "moebook-000a11fe.lock"), storage.locked(live[1]):
        begin()
        assert all(path.exists() for path in live)
    assert not any(path.exists() for path in dead)
    assert set(temporary.iterdir()) == {live[0].parent}
