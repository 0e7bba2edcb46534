"""A study of the toy: what it runs, from which code, and what survives whatever ends it."""

from __future__ import annotations

import importlib.util
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moebook import cli, results
from moebook.errors import Refusal
from moebook.notebook import study
from moebook.results import Pool, Run

PYTHONPATH = str(Path(results.__file__).parents[2])
SETTINGS = {"tier": "study", "top_k": 4, "fate": "well"}


def commit(folder: Path) -> Path:
    """Put a project into git: a study runs a commit."""
    (folder / ".gitignore").write_text("__pycache__/\nruns/\n")
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    for words in (("init", "-q"), ("add", "."), (*identity, "commit", "-qm", "toy")):
        subprocess.run(["git", *words], cwd=folder, check=True)
    return folder


def start(folder: Path, staging: str, *options: str) -> subprocess.Popen[str]:
    """Start a study of the toy as a reader does; its processes carry the name of the project."""
    # A shell starts background jobs with SIGINT ignored, and children inherit that.
    heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code = heard + "import sys; from moebook.cli import main; sys.exit(main())"
    return subprocess.Popen(
        [sys.executable, "-c", code, "study", "toy", "--on", "nano", *options],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": PYTHONPATH, "TMPDIR": staging, "STUDY": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def left(folder: Path) -> list[int]:
    """Processes of a project's study that are still there."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"STUDY={folder}".encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:
            continue  # another's, or it has just ended
    return found


def ended(folder: Path, seconds: float = 10.0) -> bool:
    """Whether all processes of a study end within so many seconds."""
    limit = time.monotonic() + seconds
    while left(folder) and time.monotonic() < limit:
        time.sleep(0.05)
    return not left(folder)


def kept(folder: Path) -> Pool:
    """The pool of the toy: reading it checks every file."""
    pool = results.pool("toy", "nano", folder)
    return pool or Pool("toy", "nano", ())


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    """The runs find this package, whatever the tests before have set."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", PYTHONPATH)
        yield


@pytest.mark.parametrize(
    ("text", "found"),
    [("0-9", [*range(10)]), ("3", [3]), ("0-2,7", [0, 1, 2, 7]), ("7, 0-1", [7, 0, 1])],
)
def test_seeds_are_numbers_and_ranges(text: str, found: list[int]) -> None:
    assert study.seeds(text) == found


@pytest.mark.parametrize(
    "text", ["5-2", "1,1", "0-3,2", "ten", "", "1,", "-1", "1-", "1.5", "0x1", "1-2-3", "12345678"]
)
def test_other_seeds_are_refused_in_a_line_that_repeats_them(text: str) -> None:
    with pytest.raises(Refusal, match=f"E-RANGE: --seeds {text}"):
        study.seeds(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("toy --on nano", "E-USAGE: moebook study: expected NAME --on PROTOCOL --seeds 0-9, or"),
        ("toy --on nano --seeds 5-2", "E-RANGE: --seeds 5-2"),
        ("toy --on nano --seeds 0 --jobs 0", "E-RANGE: --jobs is 0: expected at least 1"),
        ("toy --on nano --seeds 0 --jobs 2 --engine ray", "E-RANGE: --jobs is 2: a cluster"),
        ("toy --on nano --seeds 0 --engine slurm", "E-USAGE: moebook study: unknown 'slurm'"),
        ("tyo --on nano --seeds 0", "E-NOTEBOOK: unknown notebook 'tyo'"),
        ("toy --on nona --seeds 0", "E-PROTOCOL: toy has no protocol 'nona'"),
        ("toy --on smoke --seeds 0", "E-TIER: no pool is kept of 'smoke' (tier smoke); use nano"),
        ("toy --on cpu --seeds 0", "E-TIER: no pool is kept of 'cpu' (tier cpu); use nano, study"),
        ("toy --on nano --seeds 0", "E-GIT: "),
        ("toy --add my.ipynb", "E-USAGE: moebook study: --add takes a file and nothing else"),
        ("--add my.ipynb --jobs 0", "E-USAGE: moebook study: --add takes a file and nothing else"),
        ("--add my.ipynb", "E-NOFILE: no file my.ipynb"),
        ("--add notebooks/01_toy.ipynb", "E-RUN: 01_toy.ipynb holds no recorded values"),
    ],
)
def test_a_wrong_call_ends_in_one_line_and_runs_nothing(
    fresh: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: str,
    message: str,
) -> None:
    monkeypatch.chdir(fresh)
    assert cli.main(["study", *arguments.split()]) == 2
    told = capsys.readouterr().err
    assert told.startswith(message) and told.count("\n") == 1
    assert not (fresh / "runs").exists() and not (fresh / "results").exists()


BOTH = {"known_arms": ["left", "right"], "seconds": 1.0}


@pytest.mark.parametrize(
    ("arms", "asked", "wanted"),
    [
        (None, None, "right"),
        (None, "all", "all"),
        (None, "left", "left"),
        (("left",), None, "right"),
        (("right",), None, None),
        (("left", "right"), "all", None),
        (("left",), "all", "right"),
        (("left",), "left", None),
        (("right",), "left,right", "left"),
        (("left",), "third", "third"),
    ],
)
def test_of_each_seed_what_is_missing_runs_and_nothing_else(
    fresh: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arms: tuple[str, ...] | None,
    asked: str | None,
    wanted: str | None,
) -> None:
    begun: list[Any] = []

    def execute(todo: list[Any], *_: Any) -> Iterator[tuple[Any, Path]]:
        for job in todo:
            begun.append(job)
            yield job, fresh

    monkeypatch.setattr(study, "side_by_side", execute)
    monkeypatch.setattr(study, "freeze", lambda folder: folder)
    monkeypatch.setattr(study, "_take_in", lambda *_: ("taken", True))
    (fresh / "notebooks" / "01_toy.nano.yaml").write_text("tier: study\ntop_k: 4\narms: right\n")
    run = Run("toy", "nano", "study", 3, (), settings=SETTINGS, manifest=BOTH)
    if arms is not None:
        study.add(replace(run, arms=arms), fresh)
    study.add(replace(run, arms=("left", "right"), seed=4), fresh)
    assert study.study("toy", "nano", [3, 4], arms=asked, folder=fresh) == 0
    rest = [] if asked != "third" else [{"seed": 4, "arms": "third"}]
    first = [{"seed": 3, "arms": wanted}] if wanted else []
    assert [dict(job.overrides) for job in begun] == first + rest
    told = capsys.readouterr().out
    assert told.startswith(f"toy at nano: 2 seeds, {len(first + rest)} to run\n")


def test_a_protocol_that_changed_since_its_runs_is_refused(fresh: Path) -> None:
    settings = {**SETTINGS, "top_k": 3}
    study.add(Run("toy", "nano", "study", 0, (), settings=settings), fresh)
    with pytest.raises(Refusal, match=r"E-POOL: protocol nano says top_k = 4, .* made with 3"):
        study.study("toy", "nano", [1], folder=fresh)


def test_a_notebook_without_arms_takes_none(fresh: Path) -> None:
    path = fresh / "notebooks" / "01_toy.ipynb"
    path.write_text(path.read_text().replace("arms: str", "rest: str"))
    with pytest.raises(Refusal, match="E-RANGE: toy has no arms"):
        study.study("toy", "nano", [0], arms="left", folder=fresh)


@pytest.mark.parametrize("cluster", [False, True])
def test_ray_that_is_missing_or_has_no_cluster_is_told_in_one_line(
    fresh: Path, cluster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(fresh)
    hidden = "sys.modules['ray'] = None"
    if cluster:
        if importlib.util.find_spec("ray") is None:
            pytest.skip("Ray is not installed; pip install 'moebook[cluster]'")
        # Clusters of other tests on this machine are not found.
        hidden = "import functools, ray._private.services as ray; "
        hidden += "ray.find_gcs_addresses = functools.cache(set)"
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
    code = f"import sys; {hidden}; from moebook.cli import main; sys.exit(main())"
    options = ("--on", "nano", "--seeds", "0", "--engine", "ray")
    with tempfile.TemporaryDirectory() as empty:
        done = subprocess.run(
            [sys.executable, "-c", code, "study", "toy", *options],
            cwd=fresh,
            env={**os.environ, "RAY_TMPDIR": empty},
            capture_output=True,
            text=True,
        )
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if line.startswith("E-")]
    assert lines == [done.stderr.strip()]
    assert lines[0].startswith("E-CLUSTER: no Ray cluster" if cluster else "E-DEP: --engine ray")


@pytest.fixture(scope="module")
def studied(tmp_path_factory: pytest.TempPathFactory, committed: Path) -> tuple[Path, str, str]:
    """Seeds 0, 1 and one that fails, two at a time, after edits that were not committed."""
    folder = shutil.copytree(committed, tmp_path_factory.mktemp("two") / "toy")
    notebook = folder / "notebooks" / "01_toy.ipynb"
    notebook.write_text(notebook.read_text().replace("0.125 * top_k", "0.1 * top_k"))
    session = folder / "moebook" / "notebook" / "session.py"
    session.write_text(session.read_text().replace("    gc.freeze()", "    1 / 0"))
    with tempfile.TemporaryDirectory() as staging:
        process = start(folder, staging, "--seeds", "0,1,13", "--jobs", "2")
        out, errors = process.communicate()
        assert os.listdir(staging) == []
    assert process.returncode == 1, errors
    return folder, out, errors


@pytest.fixture(scope="module")
def committed(tmp_path_factory: pytest.TempPathFactory, project: Path) -> Path:
    """The toy with modules of its own, in git."""
    return commit(shutil.copytree(project, tmp_path_factory.mktemp("one") / "toy"))


def test_a_seed_that_fails_is_told_and_the_others_go_on(studied: tuple[Path, str, str]) -> None:
    folder, out, errors = studied
    assert list(kept(folder).seeds) == [0, 1]
    assert errors == ""
    lines = out.splitlines()
    assert lines[:2] == [
        "toy at nano: 3 seeds, 3 to run",
        "uncommitted changes of the code are not part of this study",
    ]
    told = {line.split(":")[0]: line for line in lines[2:]}
    assert set(told) == {"seed 0", "seed 1", "seed 13"}
    good = r"seed 0: \d+ s, 4 values in results/toy/nano/0.parquet \(\d of 3, about \d+ min left\)"
    assert re.fullmatch(good, told["seed 0"])
    assert re.search(r"\(3 of 3\)$", lines[-1])
    bad = r"seed 13: failed: E-CELL: cell In \[7\] .*ZeroDivisionError.*; the failed copy is (\S+)"
    match = re.match(bad, told["seed 13"])
    assert match and (folder / match[1]).is_file()


def test_a_study_runs_the_commit_and_not_what_was_edited_since(
    studied: tuple[Path, str, str],
) -> None:
    folder, _, _ = studied
    head = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=folder, text=True).strip()
    assert "    1 / 0" in (folder / "moebook" / "notebook" / "session.py").read_text()
    runs = kept(folder).runs
    assert len(runs) == 2
    for run in runs:
        found = {value.name: value.value for value in run.values}
        assert found["toy/mean"] == 0.5
        assert found["toy/here"] == 1.0, "the package of the copy"
        assert run.manifest["commit"] == {"id": head, "dirty": False}
        assert "notebook" in results.changed(run, folder)
    assert not list(folder.glob("runs/mine/**/*.ipynb")), "what readers ran is theirs"


def test_ctrl_c_keeps_what_is_finished_and_one_job_gives_the_bits_of_two(
    studied: tuple[Path, str, str], committed: Path
) -> None:
    with tempfile.TemporaryDirectory() as staging:
        process = start(committed, staging, "--seeds", "0,60", "--jobs", "1")
        copies = committed / "runs" / "frozen"
        while not list(copies.glob("*/started")) and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=30)
        assert process.returncode == 130
        assert errors == "interrupted; nothing half-written was left\n"
        assert out.count("seed 0: ") == 1 and "seed 60" not in out
        assert ended(committed, 1.0) and os.listdir(staging) == []
        assert list(kept(committed).seeds) == [0]
        process = start(committed, staging, "--seeds", "0,1", "--jobs", "1")
        out, errors = process.communicate()
    assert (process.returncode, errors) == (0, "")
    assert out.startswith("toy at nano: 2 seeds, 1 to run\nseed 1: ")
    for alone, beside in zip(kept(committed).runs, kept(studied[0]).runs, strict=True):
        assert alone.values and alone.curves
        for part in ("seed", "values", "curves", "arms", "settings", "rows", "code"):
            assert getattr(alone, part) == getattr(beside, part), part


def test_a_study_that_is_killed_loses_at_most_what_was_running(
    tmp_path: Path, committed: Path
) -> None:
    folder = tmp_path / "toy"
    subprocess.run(["git", "clone", "-q", str(committed), str(folder)], check=True)
    draw, done, killed = random.Random(0), set[int](), list[bool]()
    moments = (draw.uniform(0, 4), draw.uniform(4, 8), None)
    with tempfile.TemporaryDirectory() as staging:
        for moment in moments:
            process = start(folder, staging, "--seeds", "0-2", "--jobs", "2")
            try:
                if moment is None:  # as soon as one more was told
                    assert process.stdout is not None
                    told = [process.stdout.readline() for _ in range(2)]
                    time.sleep(draw.uniform(0, 0.5))
                else:
                    time.sleep(moment)
            finally:
                process.kill()
            told = [*(told if moment is None else []), *process.communicate()[0].splitlines()]
            killed.append(process.returncode == -signal.SIGKILL)
            assert ended(folder), "its children end by themselves"
            said = {int(match[1]) for line in told if (match := re.match(r"seed (\d+): \d", line))}
            now = set(kept(folder).seeds)
            assert done | said <= now
            done = now
        assert done and killed[0]
        process = start(folder, staging, "--seeds", "0-2", "--jobs", "2")
        out, errors = process.communicate()
        assert (process.returncode, errors) == (0, "")
        assert out.startswith(f"toy at nano: 3 seeds, {3 - len(done)} to run\n")
        assert list(kept(folder).seeds) == [0, 1, 2]
        assert os.listdir(staging) == []


def _edited(path: Path, old: str, new: str, copy: Path) -> Path:
    text = path.read_text()
    assert old in text
    copy.write_text(text.replace(old, new))
    return copy


def test_what_plain_papermill_left_is_taken_in_under_its_protocol_and_once(
    milled: Path,
    fresh: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(fresh)
    assert cli.main(["study", "--add", str(milled)]) == 0
    assert capsys.readouterr().out == "toy at nano, seed 5: results/toy/nano/5.parquet\n"
    (run,) = kept(fresh).runs
    assert (run.seed, run.arms, run.settings) == (5, ("left", "right"), SETTINGS)
    assert run.code["notebook"] == results.source(fresh / "notebooks" / "01_toy.ipynb")
    assert 0 < run.manifest["seconds"] < 60 and results.day(run)
    for command, told in (("list", "--on nano     "), ("verify", "seeds 5 agree")):
        assert cli.main([command]) == 0
        assert told in capsys.readouterr().out
    path = fresh / "results" / "toy" / "nano" / "5.parquet"
    before = path.read_bytes()
    for old, new, message in (
        ("seed = 5", "seed = 5", "E-POOL: toy/nano, seed 5: two files hold the arm left"),
        ("top_k = 4", "top_k = 3", "E-PROTOCOL: other.ipynb is of no protocol; beside 'nano' top"),
        ('tier = \\"study\\"', 'tier = \\"cpu\\"', "E-PROTOCOL: other.ipynb is of no protocol"),
        ('"end_time": "', '"end": "', "E-RUN: other.ipynb does not say when it was executed"),
        ("toy/", "tyo/", "E-NOTEBOOK: other.ipynb records values of 'tyo'; did you mean 'toy'"),
    ):
        other = _edited(milled, old, new, tmp_path / "other.ipynb")
        assert cli.main(["study", "--add", str(other)]) == 2
        assert capsys.readouterr().err.startswith(message)
        assert [p.read_bytes() for p in path.parent.iterdir()] == [before]
