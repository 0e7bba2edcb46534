"""`make gpu`: each call goes on where the last stopped, and every command that it lists exists."""

import json
import shlex
import shutil
import signal
from pathlib import Path

import pytest
import yaml

from moebook import cli
from moebook.lab.pages import pages
from moebook.lab.run import parameters, sources
from recipes import gpu

ROOT = Path(__file__).parents[2]
# Steps whose code other tests run on a CPU.
ELSEWHERE = ("kernels", "notebooks", "mid-moe")
TOY = """
import sys, time
from pathlib import Path
if sys.argv[1] == "slow" and not Path("been").exists():
    Path("been").touch()
    time.sleep(60)
sys.exit(sys.argv[1] == "bad")
"""


@pytest.mark.parametrize(
    ("goes_on", "second"),
    [
        ("from a checkpoint", ["slow", "bad"]),
        # Else one too long for a call would hold up the rest.
        ("from its start", ["bad", "slow"]),
    ],
)
def test_each_call_goes_on_where_the_last_stopped_and_says_what_ran(
    tmp_path, monkeypatch, capsys, goes_on, second
):
    both = {"code": "toys", "goes_on": goes_on}
    one = both | {"what": "A", "commands": ["toy bad", "toy well"]}
    two = both | {"what": "B", "on_cpu": ["toy slow"], "commands": ["toy x"]}
    steps = {"one": one, "two": two}
    for name, text in (
        ("_config.yml", ""),
        ("toys/a.py", "x = 1"),
        ("toy.py", TOY),
        ("recipes/gpu.yaml", yaml.safe_dump(steps)),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(gpu.MODULES, "toy", "toy")
    monkeypatch.setattr(gpu, "LEAST", 0)
    call = ["--device", "cpu", "--minutes", "0.39"]
    told = {}
    for ran, exits in ((["bad", "well", "slow"], [1, 0, None]), (second, [1, 0, 0])):
        assert gpu.main(call) == 1
        lines = [
            line for line in capsys.readouterr().out.splitlines() if ": toy " in line
        ]
        assert [line.split()[-1] for line in lines] == ran
        files = (tmp_path / "runs" / "gpu" / f"{name}.json" for name in steps)
        told = {}
        for file in files:
            told |= json.loads(file.read_text())
        assert [
            told[f"toy {name}"]["exit"] for name in ("bad", "well", "slow")
        ] == exits
    assert told["toy slow"].keys() >= {"device", "torch", "commit", "date", "code"}
    assert told["toy slow"]["seconds"] > 1  # of both calls
    assert pages.accelerated(tmp_path) == "- A: not run.\n- B: not run.\n"
    (tmp_path / "runs").rename(tmp_path / "results")
    assert "- A: 1 of 2 commands done (on " in (page := pages.accelerated(tmp_path))
    assert "behind" not in page
    assert "- B: not run." in page
    (tmp_path / "toys" / "a.py").write_text("x = 2")
    assert "); behind: toys has changed since." in pages.accelerated(tmp_path)


def test_a_command_that_does_not_end_when_it_is_asked_is_killed_and_goes_on_later(
    tmp_path, monkeypatch
):
    (tmp_path / "toy.py").write_text(TOY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(gpu.MODULES, "toy", "toy")
    monkeypatch.setattr(gpu, "GRACE", 0.1)
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which it inherits
    try:
        assert gpu.attempt("toy slow", "cpu", 0.1) is None
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("minutes", ["0", "0.5", "nan"])
def test_fewer_minutes_than_a_command_needs_are_refused(
    minutes, tmp_path, monkeypatch, capsys
):
    (tmp_path / "_config.yml").touch()
    monkeypatch.chdir(tmp_path)
    assert gpu.main(["--device", "cpu", "--minutes", minutes]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"E-USAGE: --minutes {minutes}: expected more than 0.5: ")
    assert told.count("\n") == 1


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_every_command_of_every_step_is_one_that_the_project_knows(device, tmp_path):
    for _, command, code in gpu.todo(ROOT, device, tmp_path):
        first, *words = shlex.split(command)
        assert first in gpu.MODULES
        assert (ROOT / code).exists()
        if first == "accelerate":  # launch --config_file FILE -m moebook.cli ...
            assert (ROOT / words[2]).exists()
            words = words[5:]
        if first == "pytest":
            assert (ROOT / words[-1]).exists()
        elif words[0] in ("run", "study"):
            options = cli._parse(words)
            notebook = sources.find(ROOT, options.notebook)
            assert options.protocol in notebook.protocols
            parameters.read_options(notebook.parameters, getattr(options, "p", []))
        else:
            assert cli._parse(words).command


STEPS = [
    command
    for name, command, _ in gpu.todo(ROOT, "cpu", ROOT / "none")
    if name not in ELSEWHERE
]
LIGHT = "moebook plan pesc --on smoke"  # the sibling of those that soak
HEAVY = [command for command in STEPS if command != LIGHT]


@pytest.fixture
def project(tmp_path, monkeypatch):
    """What a step reads: notebooks and recipes."""
    for name in ("notebooks", "recipes"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("_config.yml", "requirements.lock"):
        shutil.copy(ROOT / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)


def test_a_step_runs_on_a_cpu_in_this_process(project):
    assert LIGHT in STEPS
    assert cli.main(shlex.split(LIGHT)[1:]) == 0


@pytest.mark.soak
@pytest.mark.parametrize("command", HEAVY)
@pytest.mark.timeout(900)  # a step takes minutes where other processes share the cores
def test_every_step_runs_on_a_cpu_at_a_small_size(command, project):
    assert gpu.attempt(command, "cpu", 600) == 0
