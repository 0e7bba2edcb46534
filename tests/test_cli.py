"""The command line: what it prints, its exit codes, and how quickly it starts."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moebook import cli

PARAMETERS = 'tier: str = "cpu"  # scale {smoke, cpu}\ntop_k: int = 2  # experts per token [1, 64]'


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project of one notebook, entered."""
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "_config.yml").touch()
    cell = {"cell_type": "code", "metadata": {"tags": ["parameters"]}, "source": PARAMETERS}
    notebook = {"nbformat": 4, "cells": [cell]}
    (tmp_path / "notebooks" / "01_toy.ipynb").write_text(json.dumps(notebook))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "E-USAGE: moebook: the following arguments are required: COMMAND"),
        ("rum", "E-USAGE: moebook: unknown 'rum'; did you mean 'run'?"),
        ("run", "E-USAGE: moebook run: the following arguments are required: notebook"),
        ("run toy --forse", "E-USAGE: moebook run: unknown '--forse'; did you mean '--force'?"),
        ("run toy --tier smoky", "E-USAGE: moebook run: unknown 'smoky'; did you mean 'smoke'?"),
        ("bench route --peers", "E-USAGE: moebook bench: --peers takes neither an op nor"),
        ("bench --rounds 0 --peers", "E-USAGE: moebook bench: --peers takes neither"),
        ("run tyo", "E-NOTEBOOK: unknown notebook 'tyo': did you mean 'toy'?"),
        ("run toy --tier gpu", "E-TIER: toy has no tier 'gpu'"),
        ("run toy -p topk=1", "E-PARAMETER: -p: unknown parameter 'topk'; did you mean 'top_k'?"),
        ("run toy -p top_k=0", "E-RANGE: -p: top_k = 0: expected int in [1, 64]"),
        ("run toy -p top_k=two", "E-TYPE: -p: top_k = 'two': expected int, found str"),
        ("run toy -p top_k", "E-USAGE: -p top_k: expected name=value"),
        ("run toy -p tier=cpu", "E-USAGE: the parameter tier is set by --tier"),
        ("book --only tyo", "E-NOTEBOOK: unknown notebook 'tyo'"),
        ("compare mine.ipynb", "E-NOFILE: no file mine.ipynb"),
        ("audit pesk", "E-NAME"),
        ("pretrain mano", "E-USAGE: moebook pretrain: unknown 'mano'; did you mean 'nano'?"),
        ("pretrain nano --steps 0", "E-RANGE: steps is 0, expected at least 1"),
        ("pretrain nano --steps -3", "E-RANGE: steps is -3, expected at least 1"),
        ("verify toy", "E-NOTEBOOK: 'toy' has no records"),
    ],
)
def test_bad_input_ends_in_one_line_and_exit_code_2(
    project: Path, capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    assert cli.main(arguments.split()) == 2
    told = capsys.readouterr()
    assert told.err.startswith(message)
    assert told.err.count("\n") == 1 and told.out == ""


def test_what_the_system_refuses_is_told_in_one_line(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "notebooks" / "02_folder.ipynb").mkdir()
    assert cli.main(["list"]) == 2
    told = capsys.readouterr()
    assert told.err.startswith("E-OS: IsADirectoryError: ") and "02_folder.ipynb" in told.err
    assert told.err.count("\n") == 1 and told.out == ""


def test_a_reader_that_has_gone_ends_the_command_in_silence() -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    code = "import sys; from moebook.cli import main; sys.exit(main(['audit', '--all']))"
    command = [sys.executable, "-c", code]
    folder = Path(cli.__file__).parents[1]
    done = subprocess.run(command, stdout=theirs, stderr=subprocess.PIPE, text=True, cwd=folder)
    os.close(theirs)
    assert (done.returncode, done.stderr) == (141, "")


def test_outside_a_project_the_command_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["list"]) == 2
    assert "E-PATH: no _config.yml" in capsys.readouterr().err


def test_list_and_verify_work_before_anything_was_run(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["list"]) == 0
    assert "--tier cpu    not measured" in capsys.readouterr().out
    assert cli.main(["verify"]) == 0
    assert "nothing was run yet" in capsys.readouterr().out


def test_verify_exits_with_1_when_something_fails(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = project / "results" / "toy" / "study" / "record.json"
    record.parent.mkdir(parents=True)
    record.write_text('{"notebook": "toy", "scale": "study", "values": []}')
    assert cli.main(["verify"]) == 1
    assert "FAILS results/toy/study/record.json: E-RECORD" in capsys.readouterr().out


def test_verify_checks_the_records_of_the_benchmark_too(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = project / "results" / "bench" / "cpu" / "record.json"
    record.parent.mkdir(parents=True)
    record.write_text('{"notebook": "kernels", "scale": "cpu", "values": []}')
    hashes = {"record": hashlib.sha256(record.read_bytes()).hexdigest()}
    manifest = {"notebook": "kernels", "tier": "cpu", "hashes": hashes}
    record.with_name("manifest.json").write_text(json.dumps(manifest))
    assert cli.main(["verify", "bench"]) == 0
    assert "results/bench/cpu/record.json: hash and tier agree" in capsys.readouterr().out
    record.write_text(record.read_text() + "\n")
    assert cli.main(["verify"]) == 1
    assert "its hash is not the manifest's" in capsys.readouterr().out


def test_an_incomplete_manifest_is_named(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    notebook = project / "notebooks" / "01_toy.ipynb"
    notebook.write_text(notebook.read_text().replace("smoke, cpu", "smoke, cpu, study"))
    notebook.with_name("01_toy.study.yaml").write_text("top_k: 1\n")
    record = project / "results" / "toy" / "study" / "record.json"
    record.parent.mkdir(parents=True)
    record.write_text('{"notebook": "toy", "scale": "study", "values": []}')
    for text in ("{}", '{"seconds": 1.0}', '{"parameters": [1], "hashes": null}'):
        record.with_name("manifest.json").write_text(text)
        assert cli.main(["list"]) == 2
        told = capsys.readouterr().err
        assert told.startswith("E-RECORD: results/toy/study/manifest.json is incomplete (KeyError")
        assert told.count("\n") == 1
        assert cli.main(["verify"]) == 1
        assert "FAILS results/toy/study/record.json: " in capsys.readouterr().out


def test_the_audit_of_one_paper_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["audit", "pesc"]) == 0
    assert capsys.readouterr().out.startswith("pesc: ")


def test_listing_imports_nothing_heavy(project: Path) -> None:
    code = (
        "import sys; from moebook.cli import main; main(['list']);"
        "print(*{'torch', 'papermill', 'transformers', 'IPython', 'pandas'} & set(sys.modules))"
    )
    root = str(Path(cli.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {root!r}); {code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == ""
