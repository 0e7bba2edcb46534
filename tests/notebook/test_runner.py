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
from pathlib import Path
from typing import Any

import pytest

from moebook import cli, results, runtime
from moebook.errors import Refusal
from moebook.notebook import runner
from moebook.notebook.compare import compare
from moebook.notebook.runner import Outcome, run_notebook
from moebook.notebook.session import ENVIRONMENT, GLUE
from moebook.notebook.verify import verify
from moebook.results import Record, Value

CANARY = "canary-in-the-environment"
PYTHONPATH = str(Path(results.__file__).parents[2])


def _files(folder: Path) -> dict[str, bytes]:
    """All files of a project with their bytes."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module", autouse=True)
def environment() -> Any:
    """The kernels find this package, and a secret to keep from them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", PYTHONPATH)
        patch.setenv("CANARY_TOKEN", CANARY)
        yield


@pytest.fixture(scope="module")
def ran(project: Path) -> Outcome:
    """One run of the toy at tier smoke, with a parameter of the reader's."""
    return run_notebook("toy", "smoke", {"top_k": 2}, folder=project)


@pytest.fixture(scope="module")
def studied(project: Path) -> Outcome:
    """One run of the toy at a committed tier."""
    return run_notebook("toy", "study", folder=project)


def _outputs(outcome: Outcome) -> list[Any]:
    notebook = json.loads(outcome.notebook.read_text())
    return [output for cell in notebook["cells"] for output in cell.get("outputs", [])]


def test_a_run_leaves_page_record_and_manifest_beside_one_another(
    ran: Outcome, project: Path
) -> None:
    assert ran.fresh
    assert ran.notebook == project / "book" / "notebooks" / "01_toy.ipynb"
    assert ran.path == project / "book" / "notebooks" / "01_toy.record.json"
    assert ran.record.values == (
        Value("toy/mean", 0.5, "share", items=(0.0, 1.0)),
        Value("toy/seeded", 2.0, "count", seed=0),
    )


def test_the_page_shows_text_and_tables_and_nothing_else(ran: Outcome) -> None:
    text = json.dumps(_outputs(ran))
    assert [out["text"] for out in _outputs(ran) if out["output_type"] == "stream"] == [
        "2 ipc 1 None\nnotebooks/x.py\n"
    ]
    assert "<table><tr><td>1</td></tr></table>" in text
    for gone in ("evil", "a warning", CANARY, str(Path.home()) + "/"):
        assert gone not in text
    assert ran.record.manifest["stripped"] == {"path": 1, "stderr": 1}
    (noted,) = (out for out in _outputs(ran) if ENVIRONMENT in out.get("data", {}))
    assert noted["metadata"]["scrapbook"]["mime_prefix"] == GLUE, "what hides it in the page"
    assert noted["data"][ENVIRONMENT] == ran.record.manifest["environment"]


def test_the_manifest_tells_what_ran_where_and_at_what_cost(ran: Outcome, project: Path) -> None:
    manifest = ran.record.manifest
    assert manifest["parameters"] == {"tier": "smoke", "top_k": 2, "fate": "well"}
    assert manifest["overrides"] == {"top_k": 2}
    assert manifest["hashes"] == {
        **results.current("toy", project),
        "executed": results.digest(ran.notebook),
        "record": results.digest(ran.path),
    }
    assert manifest["values"] == {"toy/mean": 0.5, "toy/seeded@0": 2.0}
    assert 0 < sum(manifest["cell_seconds"].values()) < manifest["seconds"] < 60
    assert len(manifest["cell_seconds"]) == 6, "five code cells and the injected one"
    assert 10e6 < manifest["peak_memory"] < 10e9
    assert str(project) not in json.dumps(manifest)


def test_a_study_is_kept_in_results_and_leaves_the_live_page_alone(
    ran: Outcome, studied: Outcome, project: Path
) -> None:
    assert studied.path == project / "results" / "toy" / "study" / "record.json"
    assert studied.notebook == studied.path.with_name("notebook.ipynb")
    assert set(results.records("toy", project)) == {"smoke", "study"}
    assert json.loads(ran.path.read_text())["scale"] == "smoke"


def test_an_equal_run_is_not_repeated_and_comes_back_whole(ran: Outcome, project: Path) -> None:
    before = _files(project / "book")
    shutil.rmtree(project / "book")
    again = run_notebook("toy", "smoke", {"top_k": 2}, folder=project)
    assert not again.fresh
    assert _files(project / "book") == before


class _Executed(Exception):
    """Raised in place of an execution."""


@pytest.mark.parametrize(
    "change", ["nothing", "notebook", "parameter", "package", "lock", "tier", "force", "store"]
)
def test_a_run_is_repeated_when_any_part_of_its_key_changes(
    ran: Outcome,
    project: Path,
    package: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: str,
) -> None:
    def execute(*arguments: Any) -> None:
        raise _Executed

    monkeypatch.setattr(runner, "_execute", execute)
    folder = shutil.copytree(project, tmp_path / "copy")
    arguments: dict[str, Any] = {"tier": "smoke", "overrides": {"top_k": 2}, "folder": folder}
    notebook, store = folder / "notebooks" / "01_toy.ipynb", folder / "runs" / "executed"
    match change:
        case "notebook":
            notebook.write_text(notebook.read_text().replace("A toy", "Another"))
        case "parameter":
            arguments["overrides"] = {"top_k": 3}
        case "package":
            changed = shutil.copytree(package, tmp_path / "package")
            (changed / "notebook.py").write_text("x = 2\n")
            monkeypatch.setattr("moebook.results.reach.PACKAGE", changed)
        case "lock":
            (folder / "requirements.lock").write_text("torch==2.14.0\n")
        case "tier":
            arguments["tier"] = "cpu"
        case "force":
            arguments["force"] = True
        case "store":
            (kept,) = store.glob("01_toy.smoke.*.ipynb")
            kept.write_text(kept.read_text() + " ")
    if change == "nothing":
        assert not run_notebook("toy", **arguments).fresh
    else:
        with pytest.raises(_Executed):
            run_notebook("toy", **arguments)


@pytest.mark.parametrize(
    ("fate", "message"),
    [
        ("error", r"E-CELL: cell In \[6\] of notebooks/01_toy.ipynb: ZeroDivisionError: division"),
        ("refusal", r"E-VALUE: cell In \[6\] of notebooks/01_toy.ipynb: toy/bad = 2"),
        ("killed", r"E-KERNEL: the kernel was killed by signal 9 .* in cell In \[6\]"),
        ("slow", r"E-TIMEOUT: cell In \[6\] .* longer than 10 seconds"),
        ("secret", r"E-SECRET: In \[6\] shows a Hugging Face token"),
        ("twice", r"E-VALUE: toy records toy/seeded@0 twice"),
    ],
)
def test_a_failed_run_leaves_the_old_page_and_a_copy_aside(
    ran: Outcome, project: Path, fate: str, message: str
) -> None:
    before = _files(project / "book")
    with pytest.raises(Refusal, match=message) as refusal:
        run_notebook("toy", "smoke", {"fate": fate}, folder=project, cell_seconds=10)
    assert "the failed copy is runs/failed/01_toy.smoke.ipynb" in str(refusal.value)
    assert json.loads((project / "runs" / "failed" / "01_toy.smoke.ipynb").read_text())["cells"]
    assert _files(project / "book") == before
    assert not [name for name in _files(project) if "/." in name]


@pytest.mark.parametrize(
    ("tier", "overrides", "code"),
    [
        ("smoke", {"topk": 1}, "E-PARAMETER"),
        ("smoke", {"top_k": 0}, "E-RANGE"),
        ("smoke", {"top_k": "1"}, "E-TYPE"),
        ("smoke", {"tier": "cpu"}, "E-USAGE"),
        ("gpu", {}, "E-TIER"),
    ],
)
def test_a_wrong_call_is_refused_before_anything_runs(
    fresh: Path, tier: str, overrides: dict[str, Any], code: str
) -> None:
    before = _files(fresh)
    with pytest.raises(Refusal) as refusal:
        run_notebook("toy", tier, overrides, folder=fresh)
    assert refusal.value.code == code
    assert _files(fresh) == before


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


def test_a_temporary_folder_that_sockets_cannot_use_is_refused(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = fresh / ("deep" * 25)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with pytest.raises(Refusal, match=r"E-PATH.*set TMPDIR"):
        run_notebook("toy", "smoke", folder=fresh)
    assert list(deep.iterdir()) == []


TOLD = {130: "interrupted; nothing half-written was left\n", 143: ""}


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]
)
def test_an_interrupted_run_keeps_the_old_page_and_leaves_nothing(
    fresh: Path, number: signal.Signals, code: int
) -> None:
    results.write(fresh / "book" / "notebooks" / "01_toy.ipynb", "old")
    before, options = _files(fresh), ("--tier", "smoke", "-p", "fate=slow")
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


def _papermill(project: Path, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run plain papermill from another directory, as its command line does."""
    start = "from papermill.cli import papermill; papermill()"
    source, copy = project / "notebooks" / "01_toy.ipynb", folder / "out.ipynb"
    command = [sys.executable, "-c", start, str(source), str(copy), "--kernel", "python3"]
    return subprocess.run(
        [*command, "--no-progress-bar", *options],
        cwd=folder,
        env={**os.environ, "MOEBOOK_QUIET": "1"},
        capture_output=True,
        text=True,
    )


def test_the_copy_of_plain_papermill_is_compared_with_the_books_run(
    project: Path, tmp_path: Path
) -> None:
    tier = project / "notebooks" / "01_toy.study.yaml"
    done = _papermill(project, tmp_path, "-f", str(tier), "-p", "top_k", "1")
    assert done.returncode == 0, done.stderr
    mine, book = tmp_path / "mine.ipynb", tmp_path / "results" / "pesc" / "study"
    mine.write_text((tmp_path / "out.ipynb").read_text().replace("toy/", "pesc/"))
    here = runtime.environment()
    other = {**here, "cpu": "X 9000", "versions": {**here["versions"], "torch": "1.0"}}
    parameters = {"tier": "study", "top_k": 4, "fate": "well"}
    record = Record("pesc", "study", (Value("pesc/mean", 1.0, "share"),))
    results.write(book / "record.json", record.to_text())
    manifest = {"parameters": parameters, "environment": other}
    results.write(book / "manifest.json", json.dumps(manifest))
    text = compare(mine, tmp_path)
    differences = [line for line in text.splitlines() if line.startswith("  ") and " | " in line]
    assert differences[:-1] == [
        "  parameter top_k: 1 | 4",
        f"  version of torch: {here['versions']['torch']} | 1.0",
        f"  cpu: {here['cpu']} | X 9000",
    ]
    assert differences[-1].startswith("  seconds: ")


def test_plain_papermill_refuses_a_wrong_name(project: Path, tmp_path: Path) -> None:
    done = _papermill(project, tmp_path, "-p", "topk", "1")
    assert done.returncode != 0
    assert "unknown parameter 'topk'; did you mean 'top_k'" in done.stderr


def test_verify_agrees_with_what_was_just_run(
    ran: Outcome, studied: Outcome, project: Path
) -> None:
    found = verify(folder=project)
    assert {finding.path for finding in found} == {
        "book/notebooks/01_toy.record.json",
        "results/toy/study/record.json",
    }
    assert not any(f.failures or f.behind for f in found), found
    with pytest.raises(Refusal, match="E-NOTEBOOK: 'tyo' has no records; did you mean 'toy'"):
        verify("tyo", project)


@pytest.mark.parametrize(
    ("file", "old", "new", "failure"),
    [
        ("results/toy/study/record.json", '"value": 4.0', '"value": 5.0', "is 5.0 in the record"),
        ("results/toy/study/record.json", '"seed": 0', '"seed": 1', "toy/seeded@1 is 4.0"),
        ("results/toy/study/record.json", '"study"', '"paper"', "folder of toy/study"),
        ("results/toy/study/record.json", "{", "", "E-RECORD"),
        ("results/toy/study/notebook.ipynb", "A toy", "A lie", "hash of the executed copy"),
        ("results/toy/study/manifest.json", '"top_k": 4', '"top_k": 3', "manifest's key"),
        ("results/toy/study/manifest.json", '"toy/mean": 1.0', '"toy/mean": 0.9', "its values"),
        ("book/notebooks/01_toy.ipynb", "A toy", "A lie", "hash of the executed copy"),
        ("book/notebooks/01_toy.ipynb", '"value": 0.5', '"value": 0.25', "E-VALUE"),
        ("book/notebooks/01_toy.manifest.json", '"smoke"', '"cpu"', "another notebook or tier"),
    ],
)
def test_verify_detects_a_change(
    ran: Outcome, studied: Outcome, project: Path, tmp_path: Path,
    file: str, old: str, new: str, failure: str,
) -> None:  # fmt: skip
    folder = shutil.copytree(project, tmp_path / "copy")
    text = (folder / file).read_text()
    assert old in text
    (folder / file).write_text(text.replace(old, new, 1))
    failed = [str(finding) for finding in verify(folder=folder) if finding.failures]
    assert len(failed) == 1
    assert failure in failed[0]


def test_verify_tells_records_that_are_behind_the_code(
    studied: Outcome, project: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(project, tmp_path / "copy")
    (folder / "requirements.lock").write_text("torch==2.14.0\n")
    (finding,) = (f for f in verify("toy", folder) if "study" in f.path)
    assert not finding.failures
    assert str(finding).endswith("hashes and values agree; behind the code: lock changed since")


def test_the_book_command_runs_every_notebook_and_then_builds(
    ran: Outcome, project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    built: list[tuple[str, Path]] = []
    book = type(sys)("moebook.notebook.book")
    book.build = lambda tier, folder: built.append((tier, folder))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "moebook.notebook.book", book)
    monkeypatch.chdir(project / "notebooks")
    run_notebook("toy", "study", folder=project)
    assert cli.main(["book", "--tier", "study"]) == 0
    assert built == [("study", project)]
    assert "toy at tier study: unchanged, not executed again" in capsys.readouterr().out
