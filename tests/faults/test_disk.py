"""The disk fails at every call of a save and of a publication: what was there stays, or is new."""

import builtins
import errno
import hashlib
import io
import os
import re
import shutil
import tarfile
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from kinds import training

from moebook import storage
from moebook.errors import Refusal, told
from moebook.lab import records
from moebook.lab.pages import book
from moebook.lab.records import Run, Value, store
from moebook.lab.run import study
from moebook.models import checkpoint
from moebook.training.checkpoints import History, Store
from tests.lab.conftest import TOY, make_project
from tests.lab.run import test_study

FREEING = ("unlink", "rmdir", "rename", "replace")
CALLS = (*FREEING, "open", "write", "fsync", "mkdir", "chmod")
HANDLES = ("write", "fsync")  # take an open file: the system's complaint names none
ERRORS = (errno.ENOSPC, errno.EACCES, errno.EIO)


class Disk:
    """Counts the calls that write; the call ``at`` fails, and on a full disk all after it."""

    def __init__(self, at: int = 0, number: int = 0) -> None:
        self.at = at
        self.number = number
        self.calls = 0

    def step(self, frees: bool = False, name: Any = None) -> None:
        self.calls += 1
        full = self.number == errno.ENOSPC and 0 < self.at < self.calls and not frees
        if self.calls == self.at or full:
            raise OSError(
                self.number, os.strerror(self.number), *([name] if name else [])
            )

    def watched(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            if name != "open" or args[1] & (os.O_WRONLY | os.O_RDWR):
                self.step(name in FREEING, None if name in HANDLES else args[0])
            return None if name == "fsync" else real(*args, **more)

        return call

    def opened(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(file: Any, mode: str = "r", *args: Any, **more: Any) -> Any:
            if not set("wax+") & set(mode):
                return real(file, mode, *args, **more)
            if not isinstance(file, int):  # which is open already
                self.step(name=file)
            return Writer(real(file, mode, *args, **more), self)

        return call

    def __enter__(self) -> "Disk":
        self.patch = pytest.MonkeyPatch()
        for name in CALLS:
            self.patch.setattr(os, name, self.watched(name, getattr(os, name)))
        for module, name in ((io, "open"), (builtins, "open"), (tarfile, "bltn_open")):
            self.patch.setattr(module, name, self.opened(getattr(module, name)))
        return self

    def __exit__(self, *_: Any) -> None:
        self.patch.undo()


class Writer:
    """A file each of whose writes is counted."""

    def __init__(self, file: Any, disk: Disk) -> None:
        self.file = file
        self.disk = disk

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def write(self, content: Any) -> int:
        self.disk.step()
        return self.file.write(content)

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *_: Any) -> None:
        self.file.close()


def run(value: float, text: str = "") -> Run:
    manifest = {
        "date": "2026-11-01",
        "seconds": 1.0,
        "peak_memory": None,
        "environment": {},
    }
    manifest["executed"] = hashlib.sha256(text.encode()).hexdigest()
    values = (Value("toy/x", value, "count"),)
    return Run("toy", "nano", "study", int(value), values, manifest=manifest)


PAGE = '{"nbformat": 4, "cells": [], "metadata": {}, "x": %d}'


def save(folder: Path, value: int) -> None:
    """A checkpoint of a model."""
    tensors = checkpoint.packed({"x": torch.full((3,), float(value))})
    checkpoint.write(
        folder / f"model-{value}", {checkpoint.TENSORS: tensors}, value=value
    )


def saved(folder: Path) -> Any:
    paths = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    return [checkpoint.verify(path)["value"] for path in paths]


def train(folder: Path, value: int) -> None:
    """A checkpoint of a training, the second of which drops none."""
    model, optimizer, _ = training()
    step = list(range(1, value + 1))
    store = Store(folder=folder, run={"seed": 0}, every=1)
    with store.locked():
        store.save(
            model, optimizer, History(step, *([0.5] * value for _ in range(4)), step)
        )


def trained(folder: Path) -> Any:
    store = Store(folder=folder, run={"seed": 0}, every=1)
    return [store.restore(*training(), step) for step in store.steps()]


def publish(folder: Path, value: int) -> None:
    """A page of the book and its run."""
    text = PAGE % value
    executed = folder / "executed.ipynb"
    executed.write_text(text)
    records.write_run(executed.with_suffix(".parquet"), run(value, text))
    book._publish(executed, "01_toy", folder)


def published(folder: Path) -> Any:
    page = folder / "book" / "notebooks" / "01_toy.ipynb"
    told = records.read_run(page.with_suffix(".parquet"))
    if told.manifest["executed"] != storage.digest(page):
        return None  # counts as missing, and is executed again
    return told.values[0].value


def keep(folder: Path, value: int) -> None:
    """A run of a study in its pool."""
    store.keep(
        run(value), folder / "results" / "toy" / "nano" / f"{value}.parquet", folder
    )


def kept(folder: Path) -> Any:
    if store.unsealed(folder):
        return None  # a whole run that the list lacks, which `verify` tells
    pools = store.pools("toy", folder)
    return [one.values[0].value for one in pools["nano"].runs] if pools else []


def left(folder: Path) -> list[str]:
    """What a later success should not find: stages, locks and parts."""
    names = (str(path) for path in folder.rglob("*"))
    marks = re.compile(r"/\.(stage|trash)|(?<!requirements)\.(lock|part)$")
    return [name for name in names if marks.search(name)]


@pytest.mark.parametrize(
    "act, state", [(save, saved), (train, trained), (publish, published), (keep, kept)]
)
def test_a_disk_that_fails_at_any_call_loses_nothing(
    act, state, tmp_path, times, figures
):
    folder = tmp_path / "now"
    old = tmp_path / "old"
    folder.mkdir()
    act(folder, 1)
    shutil.copytree(folder, old)
    before = state(folder)
    with Disk() as disk:
        act(folder, 2)
    after = state(folder)
    told = 0
    assert disk.calls > 5
    assert before != after
    assert not left(folder)
    every = [(at, number) for at in range(1, disk.calls + 1) for number in ERRORS]
    for at, number in (
        every if times > 1 else [every[3 * n + n % 3] for n in range(disk.calls)]
    ):
        shutil.rmtree(folder)
        shutil.copytree(old, folder)
        try:
            with Disk(at, number):
                act(folder, 2)
        except (OSError, Refusal) as error:
            told += 1
            assert "\n" not in str(error)
        found = state(folder)
        assert found in (before, after, None), f"call {at}: {found}"
        if found != after:
            act(folder, 2)
        if found == before:
            state_now = "old"
        elif found == after:
            state_now = "new"
        else:
            state_now = "missing"
        fault = f"{act.__name__}, {errno.errorcode[number]}"
        figures("disk", fault, faults=1, **{state_now: 1})
        # Where all is new, a lock may be left that could not be removed, until the next sweep.
        rest = [
            name
            for name in left(folder)
            if found != after or not name.endswith(".lock")
        ]
        assert state(folder) == after and not rest, f"call {at}: {rest}"
        assert not store.unsealed(folder)
    assert told > len(every) / 6


class Full(Disk):
    """A disk without room from one call on; what frees room goes well."""

    def __init__(self, at: int = 0) -> None:
        super().__init__(at, errno.ENOSPC)

    def step(self, frees: bool = False, name: Any = None) -> None:
        if not frees:
            super().step(frees, name)


def first(folder: Path) -> None:
    """The first run of a pool."""
    study.add(run(1), folder)


def freeze(folder: Path) -> None:
    """The commit that a study runs."""
    study.freeze(folder)


@pytest.mark.parametrize("act", [first, freeze])
def test_a_full_disk_in_a_study_is_told_with_its_place_and_leaves_nothing(
    act, tmp_path
):
    project = test_study.commit(make_project(tmp_path / "toy", *TOY))
    for at in count(1):
        folder = shutil.copytree(project, tmp_path / f"full-{at}")
        line = ""
        with Full(at) as disk:
            try:
                act(folder)
            except (OSError, Refusal) as error:
                line = str(told(error))
        if disk.calls < at:  # there was room for all of it
            break
        assert line.startswith("E-DISK: ")
        assert str(folder) in line
        assert "make room there" in line
        assert not left(folder) and not [*folder.glob("results/*")], f"call {at}"
        act(folder)
        assert not left(folder)
        assert not store.unsealed(folder)
    assert at > 10
    assert not line
