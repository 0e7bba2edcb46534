"""Commands of `moebook` and their kernels in forks of one process, since imports take longest."""

import gc
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import jupyter_client.launcher
from ipykernel import kernelapp

from moebook import cli, storage
from moebook.data import tasks
from moebook.lab.run import pace

REPOSITORY = Path(__file__).parents[2]
THEIRS = """
datasets ipykernel.ipkernel transformers.models.llama.modeling_llama
pandas.plotting scipy.stats sklearn.cluster sklearn.manifold
"""
OURS = """
evaluation experiments lab.bench lab.plotting lab.run.runner together
methods.esft methods.pesc methods.rivals methods.rocket methods.upcycling
"""
PRELOADED = [*THEIRS.split(), *(f"moebook.{name}" for name in OURS.split())]


class Forks:
    """Runs one command at a time, in a project, with a folder for temporary files."""

    def __init__(self, told):
        self.told = told
        mark = secrets.token_hex(8)
        self.mark = mark.encode()
        inline = "module://matplotlib_inline.backend_inline"  # as a kernel sets it on its own
        env = os.environ | {
            "FORKS": mark,
            "PYTHONPATH": str(REPOSITORY),
            "MPLBACKEND": inline,
        }
        command = [
            sys.executable,
            "-c",
            "from tests.faults import forks; forks.serve()",
        ]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env=env, **pipes)

    def begin(self, folder, temporary, *words):
        """Start a command and return its process; what it prints goes to the file ``told``."""
        asked = json.dumps([str(folder), str(temporary), str(self.told), *words])
        print(asked, file=self.process.stdin, flush=True)
        return int(self.process.stdout.readline())

    def end(self):
        """Wait for the command and return its status."""
        print(file=self.process.stdin, flush=True)
        return int(self.process.stdout.readline())

    def sweep(self):
        """Kill kernels that did not see that their parent was killed."""
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                pid = int(path.parts[2])
                marked = self.mark in path.read_bytes()
                if marked and pid != self.process.pid:
                    os.kill(pid, signal.SIGKILL)


class Kernel:
    """Stands in for the process that jupyter_client starts: a fork that waits to become it."""

    stdout = stderr = returncode = None
    fork = 0
    pipe = 0

    def __init__(self, command, *, env, cwd, **_):
        with os.fdopen(self.pipe, "w") as pipe:
            json.dump([command[command.index("-m") + 2 :], env, cwd], pipe)
        self.pid = self.fork
        self.stdin = open(os.devnull)  # noqa: SIM115

    def poll(self):
        if self.returncode is None and (done := os.waitpid(self.pid, os.WNOHANG))[0]:
            self.returncode = os.waitstatus_to_exitcode(done[1])
        return self.returncode

    def wait(self, timeout=None):
        while self.poll() is None:
            os.sched_yield()
        return self.returncode

    def send_signal(self, number):
        os.kill(self.pid, number)


def serve():
    """Fork for each line that comes, and again for its kernel."""
    gc.disable()  # as `moebook.lab.run.forks` does
    for name in PRELOADED:
        import_module(name)
    gc.freeze()
    gc.enable()
    storage.files.loaded()  # what a notebook hashes is hashed once
    sum(task.majority for task in tasks.KNOWN.values())  # and tasks are split once
    measured = pace.pace()
    pace.pace = lambda: measured
    jupyter_client.launcher.Popen = Kernel
    for line in sys.stdin:
        folder, tempfile.tempdir, told, *words = json.loads(line)
        run = os.fork()
        if not run:
            os.chdir(folder)
            sys.path.insert(0, folder)
            printed = os.open(told, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(printed, 1)
            os.dup2(printed, 2)
            read, Kernel.pipe = os.pipe()
            kernel = os.fork()
            if not kernel:
                os.close(Kernel.pipe)
                become_kernel(read)
            os.close(read)
            Kernel.fork = kernel
            os._exit(cli.main(words))
        print(run, flush=True)
        sys.stdin.readline()
        print(os.waitstatus_to_exitcode(os.waitpid(run, 0)[1]), flush=True)


def become_kernel(read):
    """Wait for what a kernel is started with, and be one; end where none is started."""
    os.setsid()
    with os.fdopen(read) as pipe:
        text = pipe.read() or os._exit(0)
    arguments, environment, place = json.loads(text)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(place)
    kernelapp.launch_new_instance(argv=arguments)
    os._exit(0)
