"""Runs of a notebook are killed at any moment until they end: nothing is lost, no bit differs.

MOEBOOK_FAULTS=10 kills 160 times.
"""

import os
import random
import re
import shutil
import signal
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from moebook import storage
from moebook.lab import records
from moebook.lab.run import runner
from moebook.lab.run.verifying import verify
from tests.lab.conftest import REPOSITORY, TORCH, TOY, make_project
from tests.lab.run import test_study

pytestmark = pytest.mark.timeout(600 * int(os.environ.get("MOEBOOK_FAULTS", "1")))
soak = pytest.mark.soak

IMPORTS = """\
import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM
from moebook.lab.run import begin
from moebook.training import fit"""
PARAMETERS = """\
tier: str = "smoke"  # scale {smoke, study}
seed: int = 0  # of everything random [0, 1000]"""
TRAIN = """\
shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 32}
shape |= {"num_attention_heads": 1, "attention_dropout": 0.1}
rows = torch.randint(3, 32, (20, 9)).tolist()
rows, steps = Dataset.from_dict({"input_ids": rows, "labels": rows}), (0, 8, 20, 24)
for arm in ("left", "right"):
    model = LlamaForCausalLM(LlamaConfig(**shape))
    marks = [(steps, lambda model: float(torch.rand(()) + model.lm_head.weight[0, 0]))]
    history = fit(model, rows, steps=24, batch=4, lr=0.1, every=1, milestones=marks, seed=seed)
    run.record(f"toy/{arm}", sum(float(p.detach().sum()) for p in model.parameters()), "number")
    run.curve(f"toy/{arm}/loss", history.loss, "nats")
    run.curve(f"toy/{arm}/measured", history.milestones[0].values(), "number")
run.record("toy/drawn", float(torch.rand(())), "share")"""


class Toy:
    """Runs the toy; kills it and tells what is there."""

    def __init__(self, forks, folder, temporary):
        self.forks = forks
        self.folder = folder / "toy"
        self.temporary = temporary
        self.draw = random.Random(0)

    def run(self, moment=None):
        """Run it; kill it after so many seconds, half the time without its kernel."""
        pid = self.forks.begin(self.folder, self.temporary, "run", "toy", "--on=smoke")
        if moment is not None:
            time.sleep(moment)
            kernels = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            if self.draw.random() >= 0.5:
                kernels = []
            for process in (pid, *kernels):
                os.kill(int(process), signal.SIGKILL)
        return self.forks.end()

    def steps(self):
        """The newest checkpoint of each training, and whether one was being saved."""
        newest = Counter()
        for path in self.folder.glob("runs/resume/toy/[!.]*/*/step-*"):
            number = path.parent.name[:3]
            newest[number] = max(newest[number], int(path.name[5:]))
        return newest, any(self.folder.glob("runs/resume/toy/*/*/.stage-*"))

    def kept(self):
        """The run in the store, which has its page, or None."""
        for path in self.folder.glob("runs/mine/toy/*.parquet"):
            run = records.read_run(path)
            assert run.manifest["executed"] == storage.digest(
                path.with_suffix(".ipynb")
            )
            return run
        return None

    def left(self):
        """How many files are left, a run's two among them, once orphaned kernels have ended."""
        limit = time.monotonic() + 60
        left = 3
        while left > 2 and time.monotonic() < limit:
            every = (*self.folder.glob("runs/**/*"), *self.temporary.glob("**/*"))
            left = sum(path.is_file() for path in every)
            time.sleep(0.01)
        return left


@pytest.fixture
def temporary():
    """A folder with a name short enough for sockets."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.fixture
def toy(forks, tmp_path, temporary):
    make_project(
        tmp_path / "toy", IMPORTS, PARAMETERS, (TRAIN,), {"smoke": "tier: smoke\n"}
    )
    yield Toy(forks, tmp_path, temporary)
    forks.sweep()


@pytest.mark.parametrize("kills", [2, pytest.param(12, marks=soak)])
def test_killed_runs_go_on_from_where_they_were_and_end_with_the_same_bits(
    toy, kills, times, figures
):
    started = time.monotonic()
    assert toy.run() == 0, toy.forks.told.read_text()
    took = time.monotonic() - started
    whole = toy.kept()
    assert whole.values
    assert whole.curves
    assert "resumed" not in whole.manifest
    shutil.rmtree(toy.folder / "runs")
    draw = random.Random(1)
    count = Counter(killed=0, saving=0, lost=0, ended=0)
    before = Counter()
    resumed = 0
    # However fast the machine is, one run at least goes on from a checkpoint.
    while count["killed"] < kills * times or before or not resumed:
        last = count["killed"] >= kills * times and before
        started = time.monotonic()
        code = toy.run(None if last else draw.uniform(0, took))
        assert code in (0, -signal.SIGKILL), toy.forks.told.read_text()
        newest, saving = toy.steps()
        run = toy.kept()
        count.update(killed=code != 0, saving=saving, ended=run is not None)
        if run is None:
            count["lost"] += any(newest[name] < step for name, step in before.items())
            before = newest
            continue
        for part in ("values", "curves", "arms", "settings", "rows", "code"):
            assert getattr(run, part) == getattr(whole, part), part
        if not code:
            took = min(took, time.monotonic() - started)
            assert toy.left() == 2
            resumed += run.manifest.get("resumed", 0)
        before = Counter()
        shutil.rmtree(toy.folder / "runs")
    figures("kills", "notebook run", **count)
    assert not count["lost"]


@soak  # its sibling is in tests/lab/run/test_study.py
@pytest.mark.parametrize("kills", [4])
def test_killed_studies_keep_what_they_told(
    tmp_path, temporary, monkeypatch, kills, times, figures
):
    (tmp_path / "torch.py").write_text(TORCH)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{REPOSITORY}")
    folder = test_study.commit(make_project(tmp_path / "toy", *TOY))
    begin = partial(test_study.start, folder, str(temporary), "--seeds", "0-1")
    count = Counter(killed=0, lost=0, ended=0)
    draw = random.Random(2)
    done = set()
    whole = ()
    took = 0.0
    while count["killed"] < kills * times or done:
        started = time.monotonic()
        process = begin()
        if whole and count["killed"] < kills * times:
            time.sleep(draw.uniform(0, took))
            process.kill()
        out, errors = process.communicate()
        assert process.returncode in (0, -signal.SIGKILL), out + errors
        assert test_study.ended(folder), out + errors
        runs = test_study.stored(folder)
        told = set(map(int, re.findall(r"^seed (\d+): \d", out, re.MULTILINE)))
        now = {run.seed for run in runs}
        count["killed"] += process.returncode != 0
        count["lost"] += len((done | told) - now)
        done = now
        if process.returncode == 0:
            whole = whole or runs
            took = time.monotonic() - started
            for one, other in zip(runs, whole, strict=True):
                test_study.same_bits(one, other)
            count["ended"] += 1
            done = set()
            # A kernel that dies may write once more: the next run sweeps that.
            with monkeypatch.context() as patch:
                patch.setattr(tempfile, "tempdir", str(temporary))
                with runner.staging():
                    pass
            assert not list(temporary.iterdir())
            assert not verify(None, folder)[0].failures
            left = [*folder.rglob("*.lock"), *folder.rglob("*.part")]
            assert {path.name for path in left} == {"requirements.lock"}
            shutil.rmtree(folder / "results")
            shutil.rmtree(folder / "runs")
    figures("kills", "study", **count)
    assert not count["lost"]
    assert count["ended"]
