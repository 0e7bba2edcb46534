"""The command line: what it prints, its exit codes, and how quickly it starts."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from papermill.exceptions import PapermillExecutionError

from moebook import cli, errors, storage
from moebook.lab import records
from moebook.lab.records import Run, store
from moebook.lab.run import runner
from tests.lab.conftest import make_project

ROOT = str(Path(cli.__file__).parents[1])
PARAMETERS = """\
tier: str = "cpu"  # scale {smoke, cpu, study}
seed: int = 0  # of everything random [0, 1000]
device: str = "auto"  # auto, cpu, cuda
top_k: int = 2  # experts per token [1, 64]"""
PROTOCOLS = {"nano": "tier: study\n", "odd": "tier: study\ndevice: cuda:99\n"}
MACHINE = {"accelerator": None, "cpu": "X 9000", "cores": 2}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project of one notebook, entered."""
    folder = make_project(tmp_path / "toy", "", PARAMETERS, (), PROTOCOLS)
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "E-USAGE: moebook: the following arguments are required: COMMAND"),
        ("rum", "E-USAGE: moebook: unknown 'rum'; did you mean 'run'?"),
        ("run", "E-USAGE: moebook run: the following arguments are required: notebook"),
        (
            "run toy --forse",
            "E-USAGE: moebook run: unknown '--forse'; did you mean '--force'?",
        ),
        (
            "run toy --on cpux",
            "E-PROTOCOL: toy has no protocol 'cpux' (01_toy.cpux.yaml); did you",
        ),
        ("run tyo", "E-NOTEBOOK: unknown notebook 'tyo': did you mean 'toy'?"),
        (
            "run toy -p topk=1",
            "E-PARAMETER: -p: unknown parameter 'topk'; did you mean 'top_k'?",
        ),
        (
            "run toy -p tier=cpu",
            "E-USAGE: the parameter tier is set by the protocol (--on)",
        ),
        ("book --only=", "E-USAGE: moebook book: only is empty"),
        ("run \x1b]0;owned\x07", r"E-NOTEBOOK: unknown notebook '\x1b]0;owned\x07'"),
        ("book --tier study", "E-USAGE: moebook book: unknown 'study'"),
        ("compare mine.ipynb", "E-NOFILE: no file mine.ipynb"),
        ("audit pesk", "E-NAME"),
        (
            "pretrain mano",
            "E-USAGE: moebook pretrain: unknown 'mano'; did you mean 'nano'?",
        ),
        ("verify toy", "E-NOTEBOOK: 'toy' has no runs"),
        ("plan", "E-USAGE: moebook plan: expected NOTEBOOK, --record, or --measure"),
        (
            "plan toy --on nano",
            "E-NOTEBOOK: toy trains nothing that a plan is known for; one of",
        ),
        (
            "plan toy --on nano --price much",
            "E-USAGE: moebook plan: argument --price: invalid float",
        ),
        (
            "study toy --on nano",
            "E-USAGE: moebook study: expected NAME --on PROTOCOL --seeds 0-9",
        ),
        (
            "study toy --on nano --seeds 0 --jobs 0",
            "E-RANGE: --jobs is 0: expected at least 1",
        ),
        (
            "study toy --on nano --seeds 0 --jobs 2 --engine ray",
            "E-RANGE: --jobs is 2: a cluster",
        ),
        (
            "study toy --on nano --seeds 0 --engine slurm",
            "E-USAGE: moebook study: unknown 'slurm'",
        ),
        (
            "study toy --on cpu --seeds 0",
            "E-TIER: no pool is kept of 'cpu' (tier cpu); use nano, odd",
        ),
        ("study toy --on nano --seeds 0", "E-GIT: "),
        (
            "study toy --on nano --seeds 0-9999999",
            "E-RANGE: --seeds 0-9999999 names 10,000,000 seeds;",
        ),
        (
            "study toy --on nano --seeds 1000-1001",
            "E-RANGE: toy at nano: seed = 1001: expected int in",
        ),
        (
            "run toy -p device=cdua",
            "E-DEVICE: unknown device 'cdua': did you mean 'cuda'?",
        ),
        (
            "study toy --on odd --seeds 0",
            "E-DEVICE: device 'cuda:99' is not on this machine",
        ),
        (
            "study toy --add my.ipynb",
            "E-USAGE: moebook study: --add takes a file and nothing else",
        ),
        (
            "study --add my.ipynb --jobs 0",
            "E-USAGE: moebook study: --add takes a file and nothing",
        ),
        (
            "study --add notebooks/01_toy.ipynb",
            "E-RUN: 01_toy.ipynb holds no recorded values",
        ),
    ],
)
def test_bad_input_ends_in_one_line_and_exit_code_2(
    project, capsys, arguments, message
):
    assert cli.main(arguments.split()) == 2
    told = capsys.readouterr()
    assert told.err.startswith(message)
    assert told.err.count("\n") == 1
    assert told.out == (
        "toy at nano: 1 seeds, 1 to run\n" if "E-GIT" in message else ""
    )
    assert not (project / "runs").exists()
    assert not (project / "results").exists()


def test_a_word_too_many_is_told_whole_without_options_for_it(project, capsys):
    assert cli.main(["compare", "a.ipynb", "my run.ipynb"]) == 2
    assert capsys.readouterr().err == (
        "E-USAGE: moebook compare: 'my run.ipynb' is one argument too many; "
        "see moebook compare --help\n"
    )


def test_a_path_that_counts_from_elsewhere_than_the_project_is_refused(
    project, monkeypatch, capsys
):
    files = ["mine/a.jsonl", "mine/b.jsonl", "a.jsonl"]
    for file in files:
        storage.write(project / file, "{}")
    monkeypatch.chdir(project / "mine")
    given = f"a.jsonl,gcd,b.jsonl:{project}/a.jsonl"
    assert cli.main(["run", "toy", "-p", f"device={given}"]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"E-PATH: -p device={given} names what is in {project}/mine")
    right = f"mine/a.jsonl,gcd,mine/b.jsonl:{project}/a.jsonl"
    assert f"paths count from {project}: write -p device={right}, or" in told
    assert told.count("\n") == 1
    runner.check_paths({"device": right, "top_k": 1}, project)
    monkeypatch.chdir(project)
    runner.check_paths({"device": given}, project)


def test_a_reader_that_has_gone_ends_the_command_in_silence():
    ours, theirs = os.pipe()
    os.close(ours)
    code = "import sys, moebook.cli as cli; sys.exit(cli.main(['audit', '--all']))"
    command = [sys.executable, "-c", code]
    root = ROOT
    done = subprocess.run(
        command, stdout=theirs, stderr=subprocess.PIPE, text=True, cwd=root
    )
    os.close(theirs)
    assert (done.returncode, done.stderr) == (141, "")


FULL = "E-DISK: OSError: [Errno 28] No space left on device: 'standard output'; make room there\n"


@pytest.mark.parametrize(
    ("words", "unbuffered"),
    [
        ("--help", ""),
        ("--version", "1"),
        ("plan --help", ""),
        ("list", "1"),
        ("list", ""),
        ("audit --all", ""),
    ],
)
def test_output_that_cannot_be_written_is_told(project, words, unbuffered):
    environment = {**os.environ, "PYTHONPATH": ROOT, "PYTHONUNBUFFERED": unbuffered}
    command = [sys.executable, "-m", "moebook.cli", *words.split()]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment
        )
    assert (done.returncode, done.stderr) == (2, FULL)


def test_a_missing_repository_and_what_the_system_refuses_are_told(
    project, monkeypatch, capsys
):
    (project / "recipes").mkdir()  # someone else's
    storage.write(project / "runs", "no folder")
    for words, code, message in (
        (
            ["pretrain", "nano"],
            "E-NOFILE: ",
            "has no recipes/pretrain.py, which is in the repository",
        ),
        (
            ["run", "toy"],
            "E-OS: nothing was run, ",
            "could not keep it: NotADirectoryError: ",
        ),
    ):
        assert cli.main(words) == 2
        told = capsys.readouterr()
        assert told.err.startswith(code)
        assert message in told.err
        assert told.err.count("\n") == 1
        assert told.out == ""


def test_verify_names_each_pool_and_exits_with_1_when_something_fails(
    project, monkeypatch, capsys
):
    for command, words in (
        ("list", "--on cpu      not measured"),
        ("verify", "nothing to"),
    ):
        assert cli.main([command]) == (command == "verify")
        assert words in capsys.readouterr().out
    manifest = {"date": "2026-01-02T03:04:05+00:00"}
    for notebook, protocol in (("toy", "nano"), ("bench", "cpu")):
        run = Run(notebook, protocol, "study", 0, (), manifest=manifest)
        place = project / "results" / notebook / protocol
        store.keep(run, place / "0.parquet", project)
    assert cli.main(["verify"]) == 0
    assert capsys.readouterr().out == (
        "ok    results/bench/cpu: seeds 0 agree; of 2026-01-02; code unchanged\n"
        "ok    results/toy/nano: seeds 0 agree; of 2026-01-02; code unchanged\n"
    )
    (project / "results" / "toy" / "nano" / "0.parquet").write_bytes(b"PAR1")
    assert cli.main(["verify", "bench"]) == 0
    assert cli.main(["verify"]) == 1
    told = "\nFAILS results/toy/nano: 0.parquet was altered; bring it back; E-RUN"
    assert told in capsys.readouterr().out
    monkeypatch.chdir(project.parent)
    assert cli.main(["list"]) == 2
    assert "E-PATH: no _config.yml" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("manifest", "told"),
    [
        ({}, "incomplete (KeyError"),
        ({"seconds": 1.0, "peak_memory": 5}, "incomplete (KeyError"),
        (
            {"seconds": 1.0, "peak_memory": 5, "environment": []},
            "incomplete (TypeError",
        ),
        (
            {"seconds": None, "peak_memory": 5, "environment": MACHINE},
            "incomplete (TypeError",
        ),
        (
            {"seconds": 75.0, "peak_memory": 5e6, "environment": MACHINE},
            "1 min 15 s, 5 MB on X 9",
        ),
        (
            {"seconds": 1.0, "peak_memory": None, "environment": MACHINE},
            "1.0 s, memory not meas",
        ),
    ],
)
def test_list_says_what_a_run_cost_or_what_its_manifest_lacks(
    project, capsys, manifest, told
):
    for seed in (0, 2):
        run = Run("toy", "nano", "study", seed, (), manifest=manifest)
        records.write_run(project / "results" / "toy" / "nano" / f"{seed}.parquet", run)
    code = cli.main(["list"])
    out, errors = capsys.readouterr()
    if "incomplete" in told:
        assert code == 2
        assert errors.count("\n") == 1
        assert errors.startswith("E-RUN: the manifest of toy, nano, seed 2 is " + told)
    else:
        assert code == 0
        assert f"  --on nano     seeds 0, 2, each {told}" in out


LIBRARY = "libopenblas.so: failed to map segment from shared object"
ADVICE = f"""

IMPORTANT: PLEASE READ THIS FOR ADVICE ON HOW TO SOLVE THIS ISSUE!

{"We have compiled some common reasons. " * 20}
Original error was: {LIBRARY}
"""


@pytest.mark.parametrize("error", [ImportError(ADVICE), ImportError(LIBRARY)])
def test_memory_that_ran_out_is_told_as_such_however_long_the_advice(error):
    """As NumPy gives it where its libraries find no room: `ulimit -v 60000; moebook list`."""
    refusal = errors.told(error)
    assert refusal.code == "E-MEMORY"
    assert f"{LIBRARY}); close other programs" in refusal.message
    assert "IMPORTANT" not in refusal.message
    of_a_cell = PapermillExecutionError(
        0, 3, "", ename="ImportError", evalue=str(error), traceback=[]
    )
    code, line = runner._in_cell(of_a_cell, "a cell")
    assert code == "E-MEMORY"
    assert f"{LIBRARY}); close other programs" in line


@pytest.mark.parametrize(
    "message",
    [
        "CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'",
        "Triton Error [CUDA]: out of memory",
        "NCCL error in: x.cpp:1, unhandled cuda error\nCuda failure 2 'out of memory'",
        "ncclUnhandledCudaError: Last error:\nCuda failure 'out of memory'",
    ],
)
def test_a_full_gpu_is_no_fault_of_ours(message):
    refusal = errors.told(RuntimeError(message))
    assert refusal.code == "E-MEMORY"
    (line,) = [line for line in message.splitlines() if "out of memory" in line]
    assert f"{line}); close other programs" in refusal.message


def test_a_fault_of_ours_is_one_line_and_a_report_to_send(project, monkeypatch, capsys):
    monkeypatch.setattr("moebook.storage.root", lambda: {}["\x1b[2J"])
    assert cli.main(["list"]) == 3
    told = capsys.readouterr()
    assert told.err.startswith(
        r"E-INTERNAL: KeyError: '\x1b[2J'; this is a fault of moebook"
    )
    assert told.err.count("\n") == 1
    assert told.out == ""
    report = Path(told.err.split()[-1])
    text = report.read_text()
    assert "['list']" in text
    assert "Traceback" in text
    assert f"moebook {cli.__version__}" in text
    report.unlink()


def test_a_book_is_made_and_an_audit_printed(project, monkeypatch, capsys):
    from moebook.lab.pages import book

    done: list[tuple[Any, ...]] = []
    monkeypatch.setattr(book, "make", lambda *given: done.append(given))
    assert cli.main(["book", "--tier", "smoke", "--only", "toy"]) == 0
    assert done == [("smoke", "toy", project)]
    assert cli.main(["audit", "pesc"]) == 0
    assert capsys.readouterr().out.startswith("pesc: ")


HEAVY = "torch transformers peft lm_eval pandas papermill IPython matplotlib scipy sklearn".split()


@pytest.mark.parametrize(
    "words", ["list", "verify", "verify toy", "plan --help", "--version"]
)
def test_a_command_imports_nothing_that_it_does_not_need(project, words):
    if words == "verify":  # of nothing: there is no run yet
        (project / "results").mkdir()
    else:
        manifest = {
            "seconds": 1.0,
            "peak_memory": 5,
            "environment": MACHINE,
            "date": "2026-01-02",
        }
        run = Run("toy", "nano", "study", 0, (), manifest=manifest)
        store.keep(run, project / "results" / "toy" / "nano" / "0.parquet", project)
    code = f"""
import atexit, sys
atexit.register(lambda: print("loaded:", *{{*{HEAVY}}} & {{*sys.modules}}))
from moebook.cli import main
print("code:", main({words.split()}))"""
    environment = {**os.environ, "PYTHONPATH": ROOT}
    told = subprocess.check_output(
        [sys.executable, "-c", code], text=True, env=environment
    )
    # Runs are read with pandas.
    loaded = "loaded: pandas" if words == "verify toy" else "loaded:"
    assert told.splitlines()[-1] in (loaded, "loaded:")
    assert (
        "--help" in words
        or "--version" in words
        or f"code: {int(words == 'verify')}" in told
    )


def test_each_command_names_the_protocol_that_it_takes_by_default(capsys):
    for command, protocol in (("run", "cpu"), ("plan", "paper")):
        with pytest.raises(SystemExit):
            cli._parse([command, "--help"])
        told = " ".join(capsys.readouterr().out.split())
        assert f"such as nano (default: {protocol})" in told


def test_libraries_add_nothing_to_the_line(project):
    code = """
import logging, sys, warnings
from moebook import cli

@cli.command()
def noisy(options):
    "Make the noise that libraries make."
    from datasets.utils.tqdm import tqdm as bar_of_datasets
    from tqdm import tqdm

    warnings.warn("odd")
    logging.getLogger("library").error("odd")
    list(tqdm(range(3)))
    list(bar_of_datasets(range(3)))
    cli.refuse("E-DATA", "the line")

sys.argv = ["moebook", "noisy"]
sys.exit(cli.main())"""
    environment = {**os.environ, "PYTHONPATH": ROOT}
    for options, told in (
        ((), "E-DATA: the line\n"),
        (("-W", "default"), "UserWarning: odd"),
    ):
        command = [sys.executable, *options, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 2
        assert told in done.stderr
        assert options or done.stderr == told


def test_without_docstrings_a_command_lacks_its_help_alone(project):
    environment = {**os.environ, "PYTHONPATH": ROOT}
    command = [sys.executable, "-OO", "-m", "moebook.cli"]
    for words in ("list", "--help"):
        told = subprocess.check_output([*command, words], text=True, env=environment)
        assert ("01_toy.ipynb" if words == "list" else "verify") in told


def test_a_command_whose_prompts_are_cut_says_so_in_one_line(project):
    row = {"prompt": "one and two " * 200, "answer": "three", "split": "test"}
    (project / "long.jsonl").write_text(json.dumps(row))
    command = [sys.executable, "-m", "moebook.cli", "evaluate", "nano"]
    done = subprocess.run(
        [*command, "--tasks", "long.jsonl"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": ROOT},
    )
    assert done.returncode == 0, done.stderr
    told = "1 of 1 prompts were cut on the left to fit the model's 512 tokens"
    assert done.stderr == f"W-LONG: {told}\n"


def test_a_task_that_is_listed_twice_is_refused(capsys):
    assert cli.main(["evaluate", "nano", "--tasks", "gcd,isa,gcd"]) == 2
    assert capsys.readouterr().err == "E-RANGE: --tasks lists 'gcd' twice\n"
