"""Forks of a process that has imported: they run as a new Python would, and end with who asked."""

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moebook.lab.records import read_run
from moebook.lab.run import children, forks, publish, warm
from moebook.lab.run.study import Job, side_by_side
from tests.lab.conftest import REPOSITORY, TOY, make_project
from tests.refusals import refused

LOOK = """
import json, os, sys
told = {"path": sys.path, "argv": sys.argv, "folder": os.getcwd(), "name": __name__,
        "environment": dict(os.environ), "alone": os.getsid(0) == os.getpid(),
        "ours": [name for name in sys.modules if name.startswith("moebook")],
        "main": sys.modules["__main__"].__dict__ is globals(), "input": sys.stdin.read()}
print(json.dumps(told))
print("a complaint", file=sys.stderr)
sys.exit(7)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The socket of a process that forks, with a secret in our environment."""
    directory = tmp_path_factory.mktemp("w")
    with warm.warm(
        directory, publish.environment(), ["json", "ipykernel.kernelapp"]
    ) as place:
        if place is None:
            pytest.skip("nothing is forked here: no Linux, or a GPU")
        yield place


@pytest.fixture
def both(place, tmp_path, monkeypatch):
    """Run a command as a fork and as a new process; return what each left."""

    def run(*command):
        env = os.environ | {
            "PYTHONPATH": f"{tmp_path}{os.pathsep}{REPOSITORY}",
            "HERE": "ä",
        }
        ended = []
        for forked in (True, False):
            (tmp_path / "input").write_text("a question")
            with (
                open(tmp_path / "input") as given,
                open(tmp_path / "output", "w") as output,
                open(tmp_path / "errors", "w") as errors,
            ):
                files = [file.fileno() for file in (given, output, errors)]
                if forked:
                    process = children.Fork(
                        place, command, env=env, cwd=tmp_path, files=files
                    )
                    assert process.wait() == process.poll() == process.returncode
                    assert process.seconds > 0
                else:
                    process = subprocess.Popen(
                        [sys.executable, *command],
                        env=env,
                        cwd=tmp_path,
                        stdin=given,
                        stdout=output,
                        stderr=errors,
                        start_new_session=True,
                    )
                    process.wait()
            texts = [(tmp_path / name).read_text() for name in ("output", "errors")]
            ended.append((process.returncode, *texts))
        return ended

    return run


@pytest.mark.parametrize("way", ["-c", "-m"])
def test_a_fork_runs_a_command_as_a_new_python_does(both, tmp_path, way):
    (tmp_path / "look.py").write_text(LOOK)
    forked, new = both(way, LOOK if way == "-c" else "look", "--one", "two")
    status, output, errors = forked
    _, expected, _ = new
    told = json.loads(output)
    expected = json.loads(expected)
    if way == "-m":
        # A new Python names its folder in full; a fork has the working directory.
        expected["path"][0] = ""
    assert told == expected
    assert (status, errors, told["input"]) == (7, "a complaint\n", "a question")


@pytest.mark.parametrize(
    "code",
    [
        "import os; os.kill(os.getpid(), 9)",
        "1 / 0",
        "pass",
        "import os; os._exit(3)",
        "raise SystemExit('no')",
    ],
)
def test_a_fork_ends_as_a_new_python_does(both, code):
    forked, new = both("-c", code)
    assert forked[:2] == new[:2]
    assert forked[2].splitlines()[-1:] == new[2].splitlines()[-1:]


def test_no_secret_reaches_a_fork_that_was_not_given_it(both):
    code = "from pathlib import Path; print('canary' in Path('/proc/self/environ').read_text())"
    assert os.environ["CANARY_TOKEN"].startswith("canary")
    assert both("-c", code)[0][1] == "False\n"


def processes(folder):
    """The processes that work in a folder, and are not about to end."""
    for path in Path("/proc").glob("[0-9]*/cwd"):
        try:
            if path.readlink() == folder and int(path.parts[2]) != os.getpid():
                yield int(path.parts[2])
        except OSError:
            continue


ASK = """
import sys, tempfile, time
from pathlib import Path
from moebook.lab.run import publish, study, warm
with tempfile.TemporaryDirectory() as directory:
    with warm.warm(Path(directory), publish.environment(), ["json"]) as place:
        jobs = [study.Job("toy", "smoke", {"fate": "slow"})]
        list(study.side_by_side(jobs, Path.cwd(), 1, {"toy": place}))
"""


@pytest.mark.parametrize("victim", ["parent", "runner", "forks"])
def test_whoever_is_killed_nobody_who_depends_on_it_stays(fresh, light, place, victim):
    begun = {**os.environ, "PYTHONPATH": light}
    asker = subprocess.Popen([sys.executable, "-c", ASK], cwd=fresh, env=begun)
    limit = time.monotonic() + 60
    while not (fresh / "started").exists() and time.monotonic() < limit:
        time.sleep(0.05)
    several = sorted(processes(fresh))
    # The parent, the process that forks, the runner and its kernel.
    assert len(several) == 4
    number = {"parent": 0, "forks": 1, "runner": 2}[victim]
    os.kill(several[number], signal.SIGKILL)
    asker.wait(timeout=30)
    limit = time.monotonic() + 30  # of the 60 seconds that the fork sleeps
    while list(processes(fresh)) and time.monotonic() < limit:
        time.sleep(0.05)
    assert list(processes(fresh)) == []


def test_a_client_that_ended_before_it_was_told_is_not_listened_to_any_more():
    pid = os.posix_spawn(sys.executable, [sys.executable, "-c", ""], os.environ)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    client, ours = socket.socketpair()
    with selectors.DefaultSelector() as events:
        events.register(ours, selectors.EVENT_READ, pid)
        client.close()
        forks.tell(pid, {pid: ours}, events)
        # Else the number of its line, which the next client may get, would seem to be taken.
        assert not events.get_map()


def open_files():
    return sorted(os.listdir("/proc/self/fd"))


def test_a_fork_that_the_system_refuses_ends_its_client_alone(tmp_path, monkeypatch):
    def full():
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(forks.os, "fork", full)
    with (
        socket.socket(socket.AF_UNIX) as listening,
        socket.socket(socket.AF_UNIX) as client,
        selectors.DefaultSelector() as events,
    ):
        listening.bind(str(tmp_path / "place"))
        listening.listen()
        client.connect(str(tmp_path / "place"))
        before = open_files()
        socket.send_fds(client, [b"\n"], [0, 1, 2])
        client.sendall(b'{"command": [], "env": {}, "cwd": ""}\n')
        clients = {}
        assert forks.answer(listening, clients, events) is None
        assert client.recv(1) == b"", "it waits for nothing"
        assert not clients
        assert not events.get_map()
        assert open_files() == before


@pytest.mark.parametrize("line", [b"5", b"[]", b"{", b'{"files": 5}'])
def test_a_stranger_at_the_socket_ends_no_fork(place, tmp_path, line):
    with open(os.devnull, "r+b") as nothing:
        files = [nothing.fileno()] * 3
        ask = {"env": {}, "cwd": tmp_path, "files": files}
        sleeping = children.Fork(place, ["-c", "import time; time.sleep(60)"], **ask)
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(place)
            socket.send_fds(stranger, [b"\n"], files)
            stranger.sendall(line + b"\n")
            stranger.recv(1)
        assert children.Fork(place, ["-c", "pass"], **ask).wait() == 0
        assert sleeping.poll() is None
        sleeping.kill()
        sleeping.wait()


def test_a_client_may_end_at_the_instant_at_which_its_fork_does(place, tmp_path):
    def ask(code):
        with open(tmp_path / "told", "w+") as file:
            files = [file.fileno()] * 3
            command = ["-c", code]
            return children.Fork(place, command, env={}, cwd=tmp_path, files=files)

    fork = ask("import time; time.sleep(60)")
    # While the process that forks waits for what another asks, it hears of neither end; then it
    # hears of both at once.
    with socket.socket(socket.AF_UNIX) as other:
        other.connect(place)
        time.sleep(0.2)
        os.kill(fork.pid, signal.SIGKILL)
        time.sleep(0.2)
        fork.abandon()
    assert ask("print(1)").wait() == 0


def test_a_notebook_leaves_in_a_fork_what_it_leaves_in_a_new_kernel(fresh, place):
    runs = []
    for where in (place, None):
        jobs = [Job("toy", "smoke", {"arms": "left"})]
        ((_, page),) = side_by_side(jobs, fresh, 1, {"toy": where})
        runs.append(read_run(page.with_suffix(".parquet")))
        page.unlink()
    forked, new = runs
    for part in ("values", "curves", "arms", "settings", "rows", "code"):
        assert getattr(forked, part) == getattr(new, part), part
    same = {
        name: (forked.manifest[name], new.manifest[name])
        for name in ("environment", "stripped")
    }
    assert all(one == other for one, other in same.values())
    assert forked.manifest["cpu_seconds"] > 0
    assert new.manifest["cpu_seconds"] > 0
    assert forked.manifest["peak_memory"] > 10e6


DRAW = """\
import matplotlib.pyplot as plt
figure, axes = plt.subplots()
axes.plot([1, 2])
plt.close(figure)
figure"""


def test_a_figure_is_a_picture_in_a_fork_too(tmp_path, tmp_path_factory):
    # Matplotlib's inline backend makes pictures only where it finds a kernel when it is imported.
    drawing = [name for name in warm.LIBRARIES if "matplotlib" in name]
    assert drawing
    imports, parameters, (_, *rest), protocols = TOY
    cells = (DRAW, *rest)
    project = make_project(tmp_path / "toy", imports, parameters, cells, protocols)
    libraries = [*drawing, "ipykernel.kernelapp"]
    directory = tmp_path_factory.mktemp("w")
    with warm.warm(directory, publish.environment(), libraries) as place:
        if place is None:
            pytest.skip("nothing is forked here: no Linux, or a GPU")
        jobs = [Job("toy", "smoke", {"arms": "left"})]
        ((_, page),) = side_by_side(jobs, project, 1, {"toy": place})
    cells = json.loads(page.read_text())["cells"]
    left = [output for cell in cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in left)


@pytest.mark.parametrize("end", ["poll", "wait", "terminate", "kill"])
def test_a_fork_that_nobody_cares_for_may_still_be_asked(place, tmp_path, end):
    code = "import time; time.sleep(60)"
    with open(os.devnull, "r+b") as nothing:
        files = [nothing.fileno()] * 3
        fork = children.Fork(place, ["-c", code], env={}, cwd=tmp_path, files=files)
    fork.abandon()
    getattr(fork, end)()
    assert fork.poll() == fork.returncode == -signal.SIGTERM


@pytest.mark.parametrize("socket_", ["warm", "prepared"])
def test_where_a_folders_name_leaves_no_room_for_a_socket_nothing_is_forked(
    tmp_path, socket_
):
    """Linux takes 107 bytes: here the name of one of the two has 108."""
    longer = tmp_path / ("d" * (108 - len(f"{tmp_path}//{socket_}")))
    longer.mkdir()
    with (
        socket.socket(socket.AF_UNIX) as other,
        pytest.raises(OSError, match="path too long"),
    ):
        other.bind(str(longer / socket_))
    with warm.warm(longer, publish.environment(), ["json"]) as place:
        assert place is None


def test_where_there_is_a_gpu_nothing_is_forked(tmp_path, monkeypatch):
    (tmp_path / "nvidiactl").touch()
    monkeypatch.setattr(warm, "GPUS", (str(tmp_path / "nvidiactl"),))
    with warm.warm(tmp_path, {}) as place:
        assert place is None


def test_a_process_that_could_not_import_is_told_in_one_line(tmp_path):
    with warm.warm(tmp_path, publish.environment(), ["no_such_library"]) as place:
        ask = (place, ["-c", "pass"])
        refused(
            "E-KERNEL: the process that imports the libraries has ended",
            lambda: children.Fork(*ask, env={}, cwd=tmp_path, files=[0, 1, 2]),
        )
