"""`moebook doctor` names what a machine lacks, and how to mend it."""

import importlib.metadata
import os
import platform
import shutil
import signal
import sys
import time
from collections import namedtuple
from importlib import import_module

import numpy as np
import psutil
import pytest

from moebook import cli, storage
from moebook.errors import refuse
from moebook.evaluation import sandbox
from moebook.lab.run import doctor
from tests.forked import Begun

Free = namedtuple("Free", "free available")


@pytest.fixture
def healthy(monkeypatch):
    """A machine that has all, whose smoke cell is short; tests take something away."""
    monkeypatch.setattr(shutil, "disk_usage", lambda place: Free(9e9, 0))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: Free(0, 9e9))
    monkeypatch.setattr(doctor, "SMOKE", "1 + 1")
    return monkeypatch


def _told(findings):
    return [str(finding) for finding in findings if finding.failures]


def test_a_healthy_machine_is_ready_and_its_smoke_cell_trains(healthy, capsys):
    code = doctor.SMOKE
    healthy.undo()
    exec(doctor.SMOKE, {})
    healthy.setattr(doctor, "SMOKE", code)
    assert cli.main(["doctor"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "this machine is ready"


def _line(findings, name):
    return next(str(finding) for finding in findings if finding.path == name)


def test_the_operating_system_is_named_with_what_is_tested_on_it(monkeypatch):
    for system, told in (
        ("Linux", "on which everything is tested"),
        (
            "Windows",
            "everything is tested on Linux; on macOS and Windows one notebook, at smoke",
        ),
        (
            "Darwin",
            "everything is tested on Linux; on macOS and Windows one notebook, at smoke",
        ),
    ):
        monkeypatch.setattr(platform, "system", lambda system=system: system)
        finding = doctor._system()
        assert not finding.failures
        assert system in finding.right
        assert told in finding.right


def test_a_sandbox_that_is_lacking_is_named_with_what_it_is_for_and_its_remedy(
    healthy, tmp_path
):
    def lacking():
        refuse("E-SANDBOX", "there is none (no bwrap): install bubblewrap")

    healthy.setattr(doctor, "_smoke", lambda folder: doctor.Finding("smoke cell", ()))
    healthy.setattr(sandbox, "ready", lacking)
    line = _line(doctor.examine(tmp_path), "sandbox (optional)")
    assert line.startswith("ok")
    assert "no bwrap" in line
    assert "install bubblewrap" in line
    assert "HumanEval and MBPP are refused here" in line
    healthy.setattr(sandbox, "ready", lambda: None)
    assert "can be judged" in _line(doctor.examine(tmp_path), "sandbox (optional)")


@pytest.mark.parametrize(
    ("take", "told"),
    [
        (
            (shutil, "disk_usage", lambda place: Free(1.5e9, 0)),
            "1.5 GB are free, 2.0 GB are needed",
        ),
        (
            (psutil, "virtual_memory", lambda: Free(0, 2e8)),
            "200 MB are free, 3.0 GB are needed: close",
        ),
        (
            (
                importlib.metadata,
                "requires",
                lambda name: ["numpy<1", "pip", "no-such", "x; extra=='x'"],
            ),
            f"packages: expected numpy<1 (found {np.__version__}), no-such (found none); "
            "pip install -U",
        ),
        (
            (doctor, "SMOKE", "raise OSError('libgomp.so.1')"),
            "OSError: libgomp.so.1; reinstall",
        ),
        (
            (doctor, "SMOKE", "raise MemoryError('2 GB')"),
            "ran out (MemoryError: 2 GB); close",
        ),
        (
            (doctor, "SMOKE", "raise OSError(28, 'No space left on device', '/x')"),
            "No space left on device: '/x'; make room there",
        ),
        (
            (
                doctor,
                "SMOKE",
                "from moebook.errors import refuse\nrefuse('E-PERM', 'x is shut: open it')",
            ),
            "smoke cell: E-PERM: x is shut: open it",
        ),
        (
            (doctor, "SMOKE", "import os; os.write(2, b'x\\ny\\n'); os._exit(7)"),
            "smoke cell: no kernel: it ended with status 7; its last lines: x | y; free memory",
        ),
    ],
)
def test_what_is_missing_is_named_with_its_remedy(healthy, tmp_path, take, told):
    if take[1] != "SMOKE":
        healthy.setattr(
            doctor, "_smoke", lambda folder: doctor.Finding("smoke cell", ())
        )
    healthy.setattr(*take)
    failures = _told(doctor.examine(tmp_path))
    assert len(failures) == 1
    assert told in failures[0]
    assert ("reinstall" in failures[0]) == ("reinstall" in told)
    assert "\n" not in failures[0]


@pytest.mark.parametrize(
    ("name", "kind"), [("requirements.lock", "lock"), ("results/SHA256SUMS", "sums")]
)
def test_windows_line_ends_are_named_where_bytes_are_hashed(
    healthy, tmp_path, name, kind
):
    healthy.setattr(doctor, "_smoke", lambda folder: doctor.Finding("smoke cell", ()))
    storage.write(tmp_path / "_config.yml", "")
    storage.write(tmp_path / "results" / "toy" / "0.parquet", b"PAR1\r\n")
    storage.write(tmp_path / name, f"{kind}\n")
    assert not _told(doctor.examine(tmp_path))
    storage.write(tmp_path / name, f"{kind}\r\n")
    (told,) = _told(doctor.examine(tmp_path))
    assert f"{name} have Windows' (CRLF)" in told
    assert "git restore ." in told


def test_windows_line_ends_in_the_package_are_counted(healthy, tmp_path):
    for name in ("a.yaml", "b/c.csv", "b/d.safetensors", "e.py", ".hidden.csv"):
        storage.write(tmp_path / name, "x\r\n")
    healthy.setattr("moebook.storage.files.PACKAGE", tmp_path)
    healthy.setattr(doctor, "_smoke", lambda folder: doctor.Finding("smoke cell", ()))
    (told,) = _told(doctor.examine(tmp_path))
    assert "a.yaml and 1 more have Windows'" in told


def test_ctrl_c_ends_it_in_one_line(tmp_path):
    started = tmp_path / "started"

    def program():
        # A shell starts background jobs with SIGINT ignored, and children inherit that.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        cli = import_module("moebook.cli")
        lengthy = f"import pathlib, time; pathlib.Path({str(started)!r}).touch(); time.sleep(60)"
        import_module("moebook.lab.run.doctor").SMOKE = lengthy
        os.chdir(tmp_path)
        sys.exit(cli.main(["doctor"]))

    begun = Begun(program)
    while not started.exists():
        time.sleep(0.05)
    os.kill(begun.pid, signal.SIGINT)
    code, _, told = begun.ended()
    assert (code, told) == (130, "interrupted; nothing half-written was left\n")


def test_of_two_installations_the_first_counts_and_one_without_metadata_is_passed_by(
    tmp_path, monkeypatch
):
    broken = tmp_path / "tqdm-4.70.dist-info"
    broken.mkdir()
    (broken / "RECORD").touch()
    older = tmp_path / "numpy-0.1.dist-info"
    older.mkdir()
    (older / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: numpy\nVersion: 0.1\n"
    )
    path = list(sys.path)
    monkeypatch.setattr(sys, "path", [*path, str(tmp_path)])
    assert doctor._packages().failures == ()
    monkeypatch.setattr(sys, "path", [str(tmp_path), *path])
    (told,) = doctor._packages().failures
    assert "numpy" in told
    assert "found 0.1" in told
