"""A study of the toy: what it runs, from which code, and what survives whatever ends it."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from contextlib import chdir, closing, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from papermill import PapermillExecutionError, execute_notebook

from moebook import cli, lists, storage
from moebook.errors import Refusal
from moebook.lab import records
from moebook.lab.records import Run, store
from moebook.lab.run import children, study
from moebook.lab.run.study import Job, side_by_side
from tests import history
from tests.refusals import refused

SETTINGS = {"tier": "study", "top_k": 4, "fate": "well"}
# A shell starts background jobs with SIGINT ignored, and children inherit that.
HEARD = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
DISK = """
from moebook.lab.run import study

def full(*given, **more):
    raise OSError(28, "No space left on device", "/place")

study.run_notebook = full
study.child()"""
MAIN = "import sys; from moebook.cli import main; sys.exit(main())"


def commit(folder):
    """Put a project into git: a study runs a commit."""
    (folder / ".gitignore").write_text("__pycache__/\nruns/\n")
    return history.commit(folder)


@pytest.fixture(scope="module", autouse=True)
def light_kernels(environment, project, light):
    """All runs here do without torch."""
    environment.setenv("PYTHONPATH", light)


def start(folder, staging, *options, **more):
    """Start a study of the toy as a reader does; its processes carry the name of the project."""
    command = [
        sys.executable,
        "-c",
        HEARD + MAIN,
        "study",
        "toy",
        "--on",
        "nano",
        *options,
    ]
    env = {**os.environ, "TMPDIR": staging, "STUDY": str(folder), **more}
    reading = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=folder, env=env, **reading)


def processes(file, text):
    """The processes one of whose files in /proc (``environ``, ``cmdline``) holds a text."""
    every = []
    for path in Path("/proc").glob(f"[0-9]*/{file}"):
        with suppress(OSError):  # another's, or it has just ended
            if text.encode() in path.read_bytes():
                every.append(path.parent)
    return every


def ended(folder, seconds=10.0):
    """Whether all processes of a study end within so many seconds."""
    limit = time.monotonic() + seconds
    while (
        left := processes("environ", f"STUDY={folder}\0")
    ) and time.monotonic() < limit:
        time.sleep(0.05)
    return not left


def stored(folder):
    """The runs in the pool of the toy: reading it checks every file."""
    pool = store.pool("toy", "nano", folder)
    return pool.runs if pool else ()


def same_bits(one, other):
    assert one.values
    assert one.curves
    for part in ("seed", "values", "curves", "arms", "settings", "rows", "code"):
        assert getattr(one, part) == getattr(other, part), part


def test_other_seeds_than_ranges_a_changed_protocol_and_arms_without_any_are_refused(
    fresh,
):
    seeds = {"0-9": [*range(10)], "3": [3], "0-2,7": [0, 1, 2, 7], "7, 0-1": [7, 0, 1]}
    assert {text: lists.seeds("--seeds", text) for text in seeds} == seeds
    for text in [*"5-2 1,1 0-3,2 ten 1, -1 1- 1.5 0x1 1-2-3 1234567890".split(), ""]:
        refused(f"E-RANGE: --seeds {text}", lists.seeds, "--seeds", text)
    most = "names 10,000,000 seeds; expected at most 1,000 a call, since each is a run"
    refused(f"E-RANGE: --seeds 0-9999999 {most}", lists.seeds, "--seeds", "0-9999999")
    assert len(lists.seeds("--seeds", "0-998,2000")) == 1000
    refused(
        "E-RANGE: toy at nano: seed = 1001",
        study.study,
        "toy",
        "nano",
        [1001],
        folder=fresh,
    )
    for arms in (",", " ", "one,one"):
        given = {"folder": fresh, "arms": arms}
        refused("E-RANGE: --arms", study.study, "toy", "nano", [0], **given)
    study.add(
        Run("toy", "nano", "study", 0, (), settings={**SETTINGS, "top_k": 3}), fresh
    )
    with pytest.raises(
        Refusal, match=r"E-POOL: protocol nano says top_k = 4, .* made with 3"
    ):
        study.study("toy", "nano", [1], folder=fresh)
    path = fresh / "notebooks" / "01_toy.ipynb"
    path.write_text(path.read_text().replace("arms: str", "rest: str"))
    refused(
        "E-RANGE: toy has no arms",
        study.study,
        "toy",
        "study",
        [0],
        arms="left",
        folder=fresh,
    )


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
        (("left",), "left,", None),
        (("right",), "left,right", "left"),
        (("right",), "third, left", "third,left"),
        (("left",), "third", "third"),
    ],
)
def test_of_each_seed_what_is_missing_runs(
    fresh, monkeypatch, capsys, arms, asked, wanted
):
    begun = []
    monkeypatch.setattr(study, "_run_all", lambda todo, *_: begun.extend(todo))
    (fresh / "notebooks" / "01_toy.nano.yaml").write_text(
        "tier: study\ntop_k: 4\narms: right\n"
    )
    both = {"known_arms": ["left", "right"], "seconds": 1.0}
    run = Run("toy", "nano", "study", 3, (), settings=SETTINGS, manifest=both)
    if arms is not None:
        study.add(replace(run, arms=arms), fresh)
    study.add(replace(run, arms=("left", "right"), seed=4), fresh)
    study.study("toy", "nano", [3, 4], arms=asked, folder=fresh)
    expected = [{"seed": 3, "arms": wanted}] if wanted else []
    # Of the other seed every arm but this one is there.
    expected += [{"seed": 4, "arms": "third"}] if "third" in str(asked) else []
    assert [job.overrides for job in begun] == expected
    assert capsys.readouterr().out.startswith(
        f"toy at nano: 2 seeds, {len(begun)} to run\n"
    )


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (
            "raise MemoryError",
            r"E-MEMORY: memory ran out \(MemoryError\); close other programs",
        ),
        (
            "import os; os.kill(os.getpid(), 9)",
            r"E-RUN: it was killed by signal 9 \(out of mem",
        ),
        (
            "raise KeyError('x')",
            "E-RUN: it ended with status 1; its last lines: .* KeyError: 'x'",
        ),
        ("import sys; sys.exit('E-DISK: no room')", "E-DISK: no room"),
        (
            DISK,
            r"E-DISK: OSError: \[Errno 28\] No space left on device: '/place'; make room there",
        ),
    ],
)
def test_what_ended_a_run_is_told_in_one_line(tmp_path, monkeypatch, code, told):
    monkeypatch.setattr(study, "CHILD", code)
    ((_, outcome),) = side_by_side([Job("toy", "nano")], tmp_path, 1)
    assert isinstance(outcome, Refusal)
    assert "\n" not in str(outcome)
    assert re.match(told, str(outcome)), outcome


@pytest.mark.timeout(60)
def test_a_child_may_say_more_than_a_pipe_holds_on_both_of_them(tmp_path):
    code = "import sys; print('x' * 200_000); sys.stderr.write('y' * 200_000)"
    with children.lifeline() as (waiting, _):
        lines = children.run(code, folder=tmp_path, waiting=waiting)
    assert lines == ["x" * 200_000]


def test_a_child_may_write_bytes_that_are_no_text(tmp_path):
    code = (
        "import os, sys; os.write(1, b'\\xff!\\n'); os.write(2, b'\\xff?\\n'); "
        "sys.exit(int(sys.argv[-1]))"
    )
    with children.lifeline() as (waiting, _):
        given = {"folder": tmp_path, "waiting": waiting}
        assert children.run(code, "0", **given) == ["\ufffd!"]
        told = "E-RUN: it ended with status 3; its last lines: \ufffd\\?$"
        refused(told, children.run, code, "3", **given)


def test_an_interrupt_ends_all_processes_and_starts_no_more(tmp_path, monkeypatch):
    waits = "import sys, time; 'long' in sys.argv[-1] and time.sleep(60); print('done')"
    monkeypatch.setattr(study, "CHILD", waits)
    jobs = [Job(name, "smoke") for name in ("short", "long", "long", "long", "long")]
    begun = time.monotonic()
    with (
        pytest.raises(KeyboardInterrupt),
        closing(side_by_side(jobs, tmp_path, 3)) as outcomes,
    ):
        for job, outcome in outcomes:
            assert (job.notebook, outcome) == ("short", Path("done"))
            raise KeyboardInterrupt
    assert time.monotonic() - begun < 30


@pytest.fixture(scope="module")
def committed(tmp_path_factory, project):
    """The toy with modules of its own, in git."""
    return commit(shutil.copytree(project, tmp_path_factory.mktemp("one") / "toy"))


@pytest.fixture
def cloned(tmp_path, committed):
    subprocess.run(
        ["git", "clone", "-q", str(committed), str(tmp_path / "toy")], check=True
    )
    return tmp_path / "toy"


@pytest.fixture
def staging():
    """A folder for temporary files, with a short name; in the end none of them is left."""
    with tempfile.TemporaryDirectory() as folder:
        yield folder
        assert os.listdir(folder) == []


@pytest.fixture(scope="module")
def studied(tmp_path_factory, committed):
    """Seeds 0, 1 and one that fails, two at a time, after edits that were not committed."""
    folder = shutil.copytree(committed, tmp_path_factory.mktemp("two") / "toy")
    edits = {
        "notebooks/01_toy.ipynb": ("0.125 * top_k", "0.1 * top_k"),
        "moebook/lab/run/session.py": ("    gc.freeze()", "    1 / 0"),
    }
    for name, (old, new) in edits.items():
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new))
    with tempfile.TemporaryDirectory() as staging:
        process = start(folder, staging, "--seeds", "0,1,13", "--jobs", "2")
        out, errors = process.communicate()
        assert os.listdir(staging) == []
    assert (process.returncode, errors) == (1, "")
    return folder, out


def test_a_study_runs_the_commit_without_edits_and_goes_on_after_a_seed_that_fails(
    studied,
):
    folder, out = studied
    assert [run.seed for run in stored(folder)] == [0, 1]
    begun, warned, *lines = out.splitlines()
    assert begun == "toy at nano: 3 seeds, 3 to run"
    assert warned == "uncommitted changes are not part of this study"
    by_seed = {line.split(":")[0]: line for line in lines}
    assert set(by_seed) == {"seed 0", "seed 1", "seed 13"}
    good = r"seed 0: \d+ s, 4 values in results/toy/nano/0.parquet \(\d of 3, about \d+ min left\)"
    assert re.fullmatch(good, by_seed["seed 0"])
    assert re.search(r"\(3 of 3\)$", lines[-1])
    bad = r"seed 13: failed: E-CELL: cell In \[7\] .*ZeroDivisionError.*; the failed copy is (\S+)"
    match = re.match(bad, by_seed["seed 13"])
    assert match
    assert (folder / match[1]).is_file()
    head = subprocess.check_output(
        ["git", "rev-parse", "HEAD"], cwd=folder, text=True
    ).strip()
    assert study.freeze(copy := folder / "runs" / "frozen" / head[:12]) == copy
    for run in stored(folder):
        values = {value.name: value.value for value in run.values}
        assert values["toy/mean"] == 0.5
        assert values["toy/here"] == 1.0, "the package of the copy"
        assert run.manifest["commit"] == {"id": head, "dirty": False}
        assert "notebook" in records.runs.changed(run, folder)
    assert not list(folder.glob("runs/mine/**/*.ipynb")), "what readers ran is theirs"


def test_a_failed_copy_is_named_where_it_lies_or_as_one_on_another_node(tmp_path):
    copy = tmp_path / "runs" / "frozen" / "abc"
    place = "runs/failed/toy/nano-1.ipynb"
    refusal = Refusal("E-CELL", f"cell In [3]: x; the failed copy is {place}")

    def line():
        told, good = study._taken(refusal, copy, tmp_path, str)
        assert not good
        return told.rpartition("the failed copy is ")[2]

    assert line() == f"{place} on its node"
    storage.write(copy / place, "{}")
    assert line() == f"runs/frozen/abc/{place}"
    refusal = Refusal("E-CELL", f"no runs/failed; the failed copy is {place}")
    told, _ = study._taken(refusal, copy, tmp_path, str)
    assert told == f"failed: E-CELL: no runs/failed; the failed copy is {line()}"


def test_a_study_says_that_banks_and_settings_of_the_book_are_those_of_the_commit(
    tmp_path, capsys
):
    for name in ("moebook/code.py", "results/banks/own.json", "_config.yml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    commit(tmp_path)
    study.freeze(tmp_path)
    assert capsys.readouterr().out == ""
    for name in ("results/banks/own.json", "_config.yml"):
        (tmp_path / name).write_text("2")
        copy = study.freeze(tmp_path)
        warned = capsys.readouterr().out
        assert warned == "uncommitted changes are not part of this study\n", name
        assert (copy / name).read_text() == "1"
        (tmp_path / name).write_text("1")


def _commit_a_module(folder):
    """A project of one module and one bank, in git."""
    storage.write(folder / "moebook" / "a.py", "x = 1\n")
    storage.write(folder / "results" / "banks" / "own.json", "1")
    return commit(folder)


TOUCHED = {
    "edited": lambda copy: storage.write(copy / "moebook" / "a.py", "x = 2\n"),
    "gone": lambda copy: (copy / "results" / "banks" / "own.json").unlink(),
    "new": lambda copy: storage.write(copy / "notebooks" / "x.yaml", "tier: cpu\n"),
    "of an older version": lambda copy: (copy / study.SEAL).unlink(),
    "empty": lambda copy: (shutil.rmtree(copy), copy.mkdir()),
}


@pytest.mark.parametrize("touch", TOUCHED.values(), ids=TOUCHED)
def test_a_frozen_copy_that_is_not_as_it_was_exported_is_refused(tmp_path, touch):
    copy = study.freeze(_commit_a_module(tmp_path))
    touch(copy)
    refused(f"E-HASH: {copy} is not as .* delete it", study.freeze, tmp_path)
    if (copy / storage.files.FROZEN).is_file():
        refused(f"E-HASH: {copy} is not as .* delete it", study.freeze, copy)
    shutil.rmtree(copy)
    assert (study.freeze(tmp_path) / "moebook" / "a.py").read_text() == "x = 1\n"


def test_what_runs_leave_in_a_frozen_copy_does_not_touch_it(tmp_path):
    copy = study.freeze(_commit_a_module(tmp_path))
    for name in (
        "moebook/__pycache__/a.cpython-313.pyc",
        "moebook/__pycache__/a.cpython-313.pyc.140",
        "notebooks/.ipynb_checkpoints/x.ipynb",
        "results/banks/nano/3.parquet",
        "results/toy/nano/0.parquet",
        "results/SHA256SUMS",
        "runs/failed/x.ipynb",
    ):
        storage.write(copy / name, "left")
    assert study.freeze(tmp_path) == study.freeze(copy) == copy


def test_a_frozen_copy_holds_what_the_commit_does_whatever_lies_there_now(tmp_path):
    _commit_a_module(tmp_path)
    shutil.rmtree(tmp_path / "results")
    storage.write(tmp_path / "requirements.lock", "not committed")
    copy = study.freeze(tmp_path)
    assert (copy / "results" / "banks" / "own.json").read_text() == "1"
    assert not (copy / "requirements.lock").exists()


def test_recorded_seeds_run_once_more_beside_the_record_and_the_pool_stays(
    studied, staging, tmp_path
):
    folder = shutil.copytree(studied[0], tmp_path / "again")
    before = {path: path.read_bytes() for path in (folder / "results").rglob("*.*")}
    told = []
    for count in (2, 0):
        process = start(folder, staging, "--seeds", "0,1", "--repeat")
        out, errors = process.communicate()
        assert (process.returncode, errors) == (0, "")
        assert f"toy at nano, once more: 2 seeds, {count} to run\n" in out
        told.append(out)
    for out in told:
        for seed in (0, 1):
            assert re.search(
                rf"seed {seed}: .*\b(\d+) of \1 values are as recorded", out
            )
            assert (folder / "runs/repeated/toy/nano" / f"{seed}.parquet").is_file()
    assert before == {
        path: path.read_bytes() for path in (folder / "results").rglob("*.*")
    }
    words = (
        "E-RANGE: --seeds: toy at nano has seed 0, 1 on record, not 7; leave --repeat"
    )
    refused(words, study.repeat, "toy", "nano", [0, 7], folder=folder)


def test_beside_the_record_stands_what_differs_most_and_no_time(fresh):
    value = records.Value
    recorded = [
        value("toy/loss", 1.0, "nats"),
        value("toy/accuracy", 0.5, "share"),
        value("toy/time", 3.0, "seconds"),
    ]
    by_name = {one.name: one for one in recorded}
    run = Run("toy", "nano", "study", 3, tuple(recorded), settings=SETTINGS)
    assert study._beside(run, by_name) == "2 of 2 values are as recorded"
    loss = replace(recorded[0], value=1.25)
    run = replace(run, values=(loss, *recorded[1:]))
    words = (
        "1 of 2 values are as recorded; furthest is toy/loss: 1.25 here, 1 on record"
    )
    assert study._beside(run, by_name) == words


def test_ctrl_c_keeps_what_is_finished_and_one_job_gives_the_bits_of_two(
    studied, cloned, staging
):
    process = start(cloned, staging, "--seeds", "0,60", "--jobs", "1")
    while not list(cloned.glob("runs/frozen/*/started")) and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (
        130,
        "interrupted; nothing half-written was left\n",
    )
    assert out.count("seed 0: ") == 1
    assert "seed 60" not in out
    assert ended(cloned)
    assert os.listdir(staging) == []
    (alone,) = stored(cloned)
    same_bits(alone, stored(studied[0])[0])


@pytest.mark.soak  # a study that Ctrl-C ends is its sibling
def test_a_killed_study_keeps_what_it_told_and_goes_on(studied, cloned, staging):
    """At one moment; `make soak` kills at any (tests/faults/test_kills.py)."""
    process = start(cloned, staging, "--seeds", "0,1", "--jobs", "1")
    lines = iter(process.stdout.readline, "")
    assert any(line.startswith("seed 0: ") for line in lines)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert ended(cloned)
    assert 0 in [run.seed for run in stored(cloned)]
    rest = start(cloned, staging, "--seeds", "0,1", "--jobs", "1")
    out, errors = rest.communicate(timeout=100)
    assert rest.returncode == 0, errors
    assert "seed 0: " not in out
    for again, whole in zip(stored(cloned), stored(studied[0]), strict=True):
        same_bits(again, whole)
    left = {path.name for path in (*cloned.rglob("*.lock"), *cloned.rglob("*.part"))}
    assert left == {"requirements.lock"}


def test_without_ray_or_a_cluster_of_it_a_line_says_so(fresh, monkeypatch):
    commit(fresh)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "ray", None)
        with pytest.raises(
            Refusal, match="E-DEP: --engine ray needs the package ray: pip install"
        ):
            study.study("toy", "nano", [0], engine="ray", folder=fresh)
    ray = pytest.importorskip("ray")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(fresh))
    # Clusters of other tests on this machine are not found.
    monkeypatch.setattr(ray._private.services, "find_gcs_addresses", cache(set))
    with pytest.raises(Refusal, match="E-CLUSTER: no Ray cluster is running here"):
        study.study("toy", "nano", [0], engine="ray", folder=fresh)


@pytest.fixture(scope="module")
def cluster():
    """A Ray cluster of one CPU, to which tests add nodes."""
    utils = pytest.importorskip("ray.cluster_utils")
    head = {
        "num_cpus": 1,
        "include_dashboard": False,
        "object_store_memory": 80 * 2**20,
    }
    made = utils.Cluster(initialize_head=True, head_node_args=head)
    yield made
    made.shutdown()


def at_work():
    """The processes that run a notebook in the folder that Ray brought."""
    children = processes("cmdline", "study.child()")
    return [path for path in children if "ray" in os.readlink(path / "cwd")]


def waits(running, until):
    while not until() and running.poll() is None:
        time.sleep(0.1)


@pytest.mark.soak
@pytest.mark.timeout(240)
def test_a_cluster_gives_the_same_bits_and_survives_the_loss_of_a_node(
    studied, cloned, cluster
):
    node = cluster.add_node(num_cpus=1, object_store_memory=80 * 2**20)
    options = ("--seeds", "0,1", "--engine", "ray")
    running = start(
        cloned, tempfile.gettempdir(), *options, RAY_ADDRESS=cluster.address
    )
    waits(running, lambda: len(at_work()) == 2)
    cluster.remove_node(node, allow_graceful=False)
    out, errors = running.communicate(timeout=200)
    assert running.returncode == 0, out + errors
    for apart, beside in zip(stored(cloned), stored(studied[0]), strict=True):
        same_bits(apart, beside)


# tests/test_cluster.py asks the same of a cluster that is a table.
@pytest.mark.soak
@pytest.mark.timeout(280)
def test_a_run_gets_its_gpu_and_what_no_node_can_give_any_more_is_told_at_once(
    cloned, cluster
):
    def begin(gpus, seeds):
        options = ("--seeds", seeds, "--engine", "ray", "--gpus-per-run", gpus)
        return start(
            cloned, tempfile.gettempdir(), *options, RAY_ADDRESS=cluster.address
        )

    node = cluster.add_node(num_cpus=1, num_gpus=1, object_store_memory=80 * 2**20)
    lacks = "E-CLUSTER: a run needs 1 CPU and {} GPU of one node, which none has (most GPUs: {})"
    out, errors = begin("3", "0").communicate(timeout=200)
    assert errors == lacks.format(3, 1) + "; add such a node\n"
    running = begin("0.5", "0,60")
    waits(running, lambda: stored(cloned) and at_work())
    environment = (at_work()[0] / "environ").read_bytes().split(b"\0")
    assert b"CUDA_VISIBLE_DEVICES=0" in environment
    cluster.remove_node(node, allow_graceful=False)
    out, errors = running.communicate(timeout=200)
    assert running.returncode == 1, errors
    assert f"seed 60: failed: {lacks.format(0.5, 0)}; add such a node (2 of 2)\n" in out
    assert [run.seed for run in stored(cloned)] == [0]


def test_gpus_of_a_run_are_of_a_cluster_and_a_part_of_one_or_whole(
    fresh, monkeypatch, capsys
):
    monkeypatch.chdir(commit(fresh))
    command = ["study", "toy", "--on", "nano", "--seeds", "0", "--gpus-per-run"]
    assert cli.main([*command, "1"]) == 2
    assert (
        capsys.readouterr().err
        == "E-USAGE: moebook study: --gpus-per-run needs --engine ray\n"
    )
    for gpus in ("1.5", "-1", "nan", "inf", "0.00001"):
        assert cli.main([*command, gpus, "--engine", "ray"]) == 2
        assert capsys.readouterr().err.startswith("E-RANGE: GPUs of a run are")


def test_tasks_of_a_slurm_array_fill_one_pool_at_once(cloned, staging, tmp_path):
    script = Path(study.__file__).parents[3] / "recipes" / "study.sbatch"
    subprocess.run(["bash", "-n", script], check=True)
    place = tmp_path / "bin"
    place.mkdir()
    command = place / "moebook"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{MAIN}" "$@"\n')
    command.chmod(0o755)
    env = {
        **os.environ,
        "TMPDIR": staging,
        "STUDY": str(cloned),
        "SLURM_SUBMIT_DIR": str(cloned),
        "PATH": f"{place}{os.pathsep}{os.environ['PATH']}",
    }
    piped = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
        "cwd": tmp_path,
    }

    def task(seed, *words):
        given = env | ({"SLURM_ARRAY_TASK_ID": seed} if seed else {})
        return subprocess.Popen(["bash", script, *words], env=given, **piped)

    expected = "study.sbatch: expected sbatch"
    for seed, words, told in (
        ("", ("toy", "nano"), expected),
        ("3", ("toy",), expected),
    ):
        wrong = task(seed, *words)
        _, errors = wrong.communicate()
        assert wrong.returncode == 2
        assert errors.startswith(told)
    tasks = [task(seed, "toy", "nano", "--arms", "left") for seed in ("3", "4")]
    ends = [each.communicate(timeout=200) for each in tasks]
    assert [each.returncode for each in tasks] == [0, 0], ends
    assert [(run.seed, run.arms) for run in stored(cloned)] == [
        (3, ("left",)),
        (4, ("left",)),
    ]
    assert store.unsealed(cloned) == {}, "the list of hashes has both"


def mill(source, copy, **settings):
    """Run plain papermill from another folder, as its command line does; return its errors."""
    with chdir(copy.parent), warnings.catch_warnings(action="ignore"):
        try:
            execute_notebook(
                source,
                copy,
                settings,
                kernel_name="python3",
                progress_bar=False,
            )
        except PapermillExecutionError as error:
            return str(error)
    return ""


def test_what_plain_papermill_left_is_taken_in_once(
    fresh, tmp_path, monkeypatch, capsys
):
    source = fresh / "notebooks" / "01_toy.ipynb"
    milled = tmp_path / "out.ipynb"
    errors = mill(source, tmp_path / "wrong.ipynb", topk=1)
    assert "unknown parameter 'topk'; did you mean 'top_k'" in errors
    options = {"tier": "study", "top_k": 4, "seed": 5}
    assert mill(source, milled, **options) == ""
    monkeypatch.chdir(fresh)
    assert cli.main(["study", "--add", str(milled)]) == 0
    assert (
        capsys.readouterr().out == "toy at nano, seed 5: results/toy/nano/5.parquet\n"
    )
    (run,) = stored(fresh)
    assert (run.seed, run.arms, run.settings) == (5, ("left", "right"), SETTINGS)
    assert run.code["notebook"] == storage.files.source(source)
    assert 0 < run.manifest["seconds"] < 60
    assert records.runs.day(run)
    for command, words in (("list", "--on nano     "), ("verify", "seeds 5 agree")):
        assert cli.main([command]) == 0
        assert words in capsys.readouterr().out
    path = fresh / "results" / "toy" / "nano" / "5.parquet"
    text = milled.read_text()
    before = path.read_bytes()
    other = fresh / "other.ipynb"
    for old, new, message in (
        (
            "seed = 5",
            "seed = 5",
            "E-POOL: toy/nano, seed 5: two files hold the arm left",
        ),
        (
            "top_k = 4",
            "top_k = 3",
            "E-PARAMETER: other.ipynb: top_k should be 3, and the kernel",
        ),
        (
            '"end_time": "',
            '"end": "',
            "E-RUN: other.ipynb does not say when it was executed",
        ),
        (
            "toy/",
            "tyo/",
            "E-NOTEBOOK: other.ipynb records values of 'tyo'; did you mean 'toy'",
        ),
    ):
        assert old in text
        other.write_text(text.replace(old, new))
        assert cli.main(["study", "--add", str(other)]) == 2
        assert capsys.readouterr().err.startswith(message)
        assert [p.read_bytes() for p in path.parent.iterdir()] == [before]
    for change, message in (
        ({"top_k": 3}, "; beside 'nano' top_k = 3"),
        ({"tier": "cpu"}, ""),
    ):
        assert mill(source, other, **options | change) == ""
        assert cli.main(["study", "--add", str(other)]) == 2
        told = capsys.readouterr().err
        assert told.startswith(f"E-PROTOCOL: other.ipynb is of no protocol{message}")
