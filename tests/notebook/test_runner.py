"""Toy notebooks through papermill: what a run leaves, and what a failed one does not."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moebook import results, runtime
from moebook.errors import Refusal
from moebook.notebook import harvest, runner, study
from moebook.notebook.compare import compare, verify
from moebook.notebook.runner import Outcome, run_notebook
from moebook.notebook.session import GLUE, NOTE
from moebook.results import Value

CANARY = "canary-in-the-environment"
PYTHONPATH = str(Path(results.__file__).parents[2])
OURS = {"top_k": 4, "arms": "left"}


def _files(folder: Path) -> dict[str, bytes]:
    """All files of a project with their bytes, but those that Python keeps."""
    found = (p for p in sorted(folder.rglob("*")) if p.is_file() and p.suffix != ".pyc")
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    """The kernels find this package, and a secret to keep from them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", PYTHONPATH)
        patch.setenv("CANARY_TOKEN", CANARY)
        yield


@pytest.fixture(scope="module")
def ran(project: Path) -> Outcome:
    """One run of the toy at smoke, with parameters of the reader's."""
    outcome = run_notebook("toy", "smoke", OURS, folder=project)
    assert outcome is not None
    return outcome


def _outputs(outcome: Outcome) -> list[Any]:
    notebook = json.loads(outcome.notebook.read_text())
    return [output for cell in notebook["cells"] for output in cell.get("outputs", [])]


def test_a_run_leaves_page_and_run_beside_one_another_and_nothing_else(
    ran: Outcome, project: Path
) -> None:
    assert ran.fresh
    assert ran.notebook.parent == project / "runs" / "mine" / "toy"
    assert ran.path.stem == ran.notebook.stem and ran.path.stem.startswith("smoke-")
    assert set(_files(project / "runs")) == {
        f"mine/toy/{path.name}" for path in (ran.notebook, ran.path)
    }
    assert not (project / "book").exists() and not (project / "results").exists()
    told = f"executed in {ran.run.manifest['seconds']:.1f} s; runs/mine/toy/{ran.notebook.name}"
    assert ran.describe(project) == f"toy at smoke: {told}, 3 values in {ran.path.name} beside it"


def test_the_run_is_what_the_notebook_recorded_and_ran(ran: Outcome, project: Path) -> None:
    run = results.read_run(ran.path)
    assert run == ran.run
    assert (run.notebook, run.protocol, run.tier, run.seed) == ("toy", "smoke", "smoke", 0)
    assert run.values[:2] == (
        Value("toy/mean", 0.5, "share", items=(0.0, 1.0)),
        Value("toy/here", 1.0, "count"),
    )
    assert run.arms == ("left",) and run.manifest["known_arms"] == ["left", "right"]
    assert run.curves[0].y == run.values[2].items
    assert run.settings == {"tier": "smoke", "top_k": 4, "fate": "well"}
    assert set(run.rows) == {"train", "test"}
    assert run.code["notebook"] == results.source(project / "notebooks" / "01_toy.ipynb")
    assert {"notebook/session.py", "results/runs.py"} <= set(run.code["modules"])
    assert not {"cli.py", "notebook/runner.py", "training/fit.py"} & set(run.code["modules"])
    assert results.changed(run, project) == ()


def test_the_page_shows_text_and_tables_and_nothing_else(ran: Outcome) -> None:
    text = json.dumps(_outputs(ran))
    assert [out["text"] for out in _outputs(ran) if out["output_type"] == "stream"] == [
        "4 ipc 1 None\nnotebooks/x.py\n"
    ]
    assert "<table><tr><td>1</td></tr></table>" in text
    for gone in ("evil", "a warning", CANARY, str(Path.home()) + "/"):
        assert gone not in text
    assert ran.run.manifest["stripped"] == {"path": 1, "stderr": 1}
    noted = [out for out in _outputs(ran) if NOTE in out.get("data", {})]
    assert {out["metadata"]["scrapbook"]["mime_prefix"] for out in noted} == {GLUE}, "hides them"


def test_the_manifest_tells_what_ran_where_and_at_what_cost(ran: Outcome, project: Path) -> None:
    manifest = ran.run.manifest
    given = {"tier": "smoke", "seed": 0, "arms": "left", "top_k": 4, "fate": "well"}
    assert manifest["parameters"] == given
    assert manifest["overrides"] == OURS
    assert manifest["executed"] == results.digest(ran.notebook)
    assert manifest["environment"] == runtime.environment()
    assert 0 < sum(manifest["cell_seconds"].values()) < manifest["seconds"] < 60
    assert len(manifest["cell_seconds"]) == 7, "six code cells and the injected one"
    assert 10e6 < manifest["peak_memory"] < 10e9
    assert str(project) not in json.dumps(manifest)


class _Executed(Exception):
    """Raised in place of an execution."""


@pytest.mark.parametrize(
    "change",
    ["nothing", "notebook", "parameter", "package", "lock", "protocol", "force", "page", "run"],
)
def test_a_run_is_repeated_when_anything_that_it_is_made_of_changes(
    ran: Outcome, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    def execute(*arguments: Any) -> None:
        raise _Executed

    monkeypatch.setattr(runner, "_execute", execute)
    folder = shutil.copytree(project, tmp_path / "copy")
    monkeypatch.setattr("moebook.results.files.PACKAGE", folder / "moebook")
    arguments: dict[str, Any] = {"protocol": "smoke", "overrides": dict(OURS), "folder": folder}
    notebook, page = (
        folder / "notebooks" / "01_toy.ipynb",
        folder / ran.notebook.relative_to(project),
    )
    match change:
        case "notebook":
            notebook.write_text(notebook.read_text().replace("A toy", "Another"))
        case "parameter":
            arguments["overrides"]["top_k"] = 3
        case "package":
            (folder / "moebook" / "notebook" / "session.py").write_text("x = 2\n")
        case "lock":
            (folder / "requirements.lock").write_text("torch==2.14.0\n")
        case "protocol":
            arguments["protocol"] = "cpu"
        case "force":
            arguments["force"] = True
        case "page":
            page.write_text(page.read_text() + " ")
        case "run":
            page.with_suffix(".parquet").write_bytes(b"cut")
    if change == "nothing":
        again = run_notebook("toy", **arguments)
        assert again is not None and not again.fresh and again.run == ran.run
    else:
        with pytest.raises(_Executed):
            run_notebook("toy", **arguments)


@pytest.mark.parametrize(
    ("fate", "message"),
    [
        ("error", r"E-CELL: cell In \[7\] of notebooks/01_toy.ipynb: ZeroDivisionError: division"),
        ("refusal", r"E-VALUE: cell In \[7\] of notebooks/01_toy.ipynb: toy/bad = 2"),
        ("killed", r"E-KERNEL: the kernel was killed by signal 9 .* in cell In \[7\]"),
        ("slow", r"E-TIMEOUT: cell In \[7\] .* longer than 10 seconds"),
        ("secret", r"E-SECRET: In \[7\] shows a Hugging Face token"),
        ("twice", r"E-VALUE: toy, seed 0: toy/mean is recorded twice"),
    ],
)
def test_a_failed_run_leaves_the_others_and_a_copy_aside(
    ran: Outcome, project: Path, fate: str, message: str
) -> None:
    before = _files(project / "runs" / "mine")
    with pytest.raises(Refusal, match=message) as refusal:
        run_notebook("toy", "smoke", {"fate": fate}, folder=project, cell_seconds=10)
    copy = str(refusal.value).rpartition("the failed copy is ")[2]
    assert copy.startswith("runs/failed/toy/smoke-")
    assert json.loads((project / copy).read_text())["cells"]
    assert _files(project / "runs" / "mine") == before
    assert not [name for name in _files(project) if "/." in name]


@pytest.mark.parametrize(
    ("protocol", "overrides", "code"),
    [
        ("smoke", {"topk": 1}, "E-PARAMETER"),
        ("smoke", {"top_k": 0}, "E-RANGE"),
        ("smoke", {"top_k": "1"}, "E-TYPE"),
        ("smoke", {"tier": "cpu"}, "E-USAGE"),
        ("smoke", {"fate": "hf_" + "a" * 30}, "E-RANGE"),
        ("smoke", {"arms": "hf_" + "a" * 30}, "E-SECRET"),
        ("gpu", {}, "E-PROTOCOL"),
    ],
)
def test_a_wrong_call_is_refused_before_anything_runs(
    fresh: Path, protocol: str, overrides: dict[str, Any], code: str
) -> None:
    before = _files(fresh)
    with pytest.raises(Refusal) as refusal:
        run_notebook("toy", protocol, overrides, folder=fresh)
    assert refusal.value.code == code
    assert _files(fresh) == before


def test_a_temporary_folder_that_sockets_cannot_use_is_refused(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = fresh / ("deep" * 25)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with pytest.raises(Refusal, match=r"E-PATH.*set TMPDIR"):
        run_notebook("toy", "smoke", folder=fresh)
    assert list(deep.iterdir()) == []


def _command(*arguments: str, folder: Path, staging: str) -> subprocess.Popen[str]:
    # A shell starts background jobs with SIGINT ignored, and children inherit that.
    heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    start = "import sys; from moebook.cli import main; sys.exit(main())"
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", heard + start, *arguments],
        cwd=folder,
        env={**os.environ, "TMPDIR": staging},
        stderr=subprocess.PIPE,
        text=True,
    )


TOLD = {130: "interrupted; nothing half-written was left\n", 143: ""}


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]
)
def test_an_interrupted_run_leaves_nothing(fresh: Path, number: signal.Signals, code: int) -> None:
    before, options = _files(fresh), ("--on", "smoke", "-p", "fate=slow")
    with tempfile.TemporaryDirectory() as staging:
        process = _command("run", "toy", *options, folder=fresh, staging=staging)
        while not (fresh / "started").exists() and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(number)
        try:
            _, told = process.communicate(timeout=60)
        finally:
            process.kill()
        staged = os.listdir(staging)
    (fresh / "started").unlink()
    assert process.returncode == code
    assert _files(fresh) == before
    if number != signal.SIGKILL:  # a process that is killed can neither speak nor tidy up
        assert told == TOLD[code]
        assert staged == []


def test_plain_papermill_refuses_a_wrong_name(mill: Callable[..., tuple[Path, str]]) -> None:
    _, errors = mill("-p", "topk", "1")
    assert "unknown parameter 'topk'; did you mean 'top_k'" in errors


def test_the_copy_of_plain_papermill_is_compared_with_the_books_runs(
    milled: Path, fresh: Path
) -> None:
    run = harvest.read_notebook(milled, fresh)
    here = runtime.environment()
    other = {**here, "cpu": "X 9000", "versions": {**here["versions"], "torch": "1.0"}}
    theirs = {**run.manifest, "environment": other, "seconds": 100.0}
    settings = {**run.settings, "top_k": 8}
    study.add(replace(run, protocol="study", settings=settings, manifest=theirs, code={}), fresh)
    lines = compare(milled, fresh).splitlines()
    assert lines[:2] == [
        "milled.ipynb: notebook toy, tier study, 4 values",
        "beside the book's runs at study, seeds 5; differences (yours | book's):",
    ]
    assert lines[2:5] == [
        "  parameter top_k: 4 | 8",
        f"  version of torch: {here['versions']['torch']} | 1.0",
        f"  cpu: {here['cpu']} | X 9000",
    ]
    assert [line.split(":")[0] for line in lines[5:8]] == [
        "  hash of the notebook", "  hash of the lock", "  seconds",
    ]  # fmt: skip
    assert lines[9:11] == [
        "toy/mean: yours 0.5 | book's 0.5 share", "toy/here: yours 0 | book's 0 count"
    ]  # fmt: skip


@pytest.fixture
def book(ran: Outcome, project: Path, tmp_path: Path) -> Path:
    """A project that shows the run on a page, and has a pool of it."""
    folder = tmp_path / "copy"
    page = folder / "book" / "notebooks" / "01_toy.ipynb"
    page.parent.mkdir(parents=True)
    shutil.copyfile(ran.notebook, page)
    shutil.copyfile(ran.path, page.with_suffix(".parquet"))
    shutil.copytree(project / "notebooks", folder / "notebooks")
    shutil.copyfile(project / "requirements.lock", folder / "requirements.lock")
    for seed in (0, 1):
        study.add(replace(ran.run, protocol="nano", tier="study", seed=seed), folder)
    return folder


def test_verify_agrees_with_what_was_just_run(book: Path) -> None:
    day = f"of {time.strftime('%Y-%m-%d', time.gmtime())}; code unchanged"
    assert list(map(str, verify(folder=book))) == [
        f"ok    results/toy/nano: seeds 0, 1 agree; {day}",
        f"ok    book/notebooks/01_toy.parquet: values and page agree; {day}",
    ]
    (book / "requirements.lock").write_text("torch==2.14.0\n")
    for finding in verify("toy", book):
        assert not finding.failures and "changed since: lock" in str(finding)
    with pytest.raises(Refusal, match="E-NOTEBOOK: 'tyo' has no runs; did you mean 'toy'"):
        verify("tyo", book)


@pytest.mark.parametrize(
    ("file", "old", "new", "failure"),
    [
        ("results/toy/nano/0.parquet", b"toy", b"tay", "E-RUN"),
        ("results/toy/nano/0.parquet", b"", b"", "E-POOL"),
        ("book/notebooks/01_toy.parquet", b"toy", b"tay", "E-RUN"),
        ("book/notebooks/01_toy.ipynb", b"A toy", b"A lie", "hash of the executed copy"),
        ("book/notebooks/01_toy.ipynb", b'"value": 0.5', b'"value": 0.25', "E-VALUE"),
        ("book/notebooks/01_toy.ipynb", b'"value": 1.0', b'"value": 2.0', "is 1.0 in the run and"),
        ("book/notebooks/01_toy.ipynb", b'"toy/here"', b'"toy/h"', "run and absent in"),
        ("book/notebooks/01_toy.ipynb", b"{", b"", "is no notebook"),
        ("book/notebooks/01_toy.ipynb", b"", b"", "is missing"),
    ],
)  # fmt: skip
def test_verify_detects_a_change(
    book: Path, file: str, old: bytes, new: bytes, failure: str
) -> None:
    path = book / file
    data = path.read_bytes()
    assert old in data
    if old:
        path.write_bytes(data.replace(old, new, 1))
    elif path.suffix == ".ipynb":
        path.unlink()
    else:
        shutil.copyfile(path, path.with_name("copy.parquet"))
    failed = [str(finding) for finding in verify(folder=book) if finding.failures]
    assert len(failed) == 1
    assert failed[0].startswith(f"FAILS {'results/toy/nano' if 'results' in file else 'book'}")
    assert failure in failed[0]


def test_a_pool_without_runs_fails(book: Path) -> None:
    (book / "results" / "toy" / "empty").mkdir()
    failed = [finding for finding in verify(folder=book) if finding.failures]
    assert list(map(str, failed)) == ["FAILS results/toy/empty: it holds no run"]
