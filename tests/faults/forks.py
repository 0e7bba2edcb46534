"""Commands of `moebook` and their kernels in forks of one process, since imports take longest."""

import gc
import json
import os
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
from moebook.lab import papers
from moebook.lab.run import pace
from moebook.lab.run.children import Fork

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

    def __init__(self, told, place):
        """Start the process that forks, itself a fork where a ``place`` of `warm` is given."""
        self.told = told
        inline = "module://matplotlib_inline.backend_inline"  # as a kernel sets it on its own
        env = os.environ | {"PYTHONPATH": str(REPOSITORY), "MPLBACKEND": inline}
        command = ["-c", "from tests.faults import forks; forks.serve()"]
        asked, asks = os.pipe()
        hears, answered = os.pipe()
        self.asks = os.fdopen(asks, "w")
        self.hears = os.fdopen(hears)
        if place:
            files = (asked, answered, sys.stderr.fileno())
            self.process = Fork(place, command, env=env, cwd=REPOSITORY, files=files)
        else:
            self.process = subprocess.Popen(
                [sys.executable, *command],
                env=env,
                cwd=REPOSITORY,
                stdin=asked,
                stdout=answered,
            )
        os.close(asked)
        os.close(answered)

    def begin(self, folder, temporary, *words):
        """Start a command and return its process; what it prints goes to the file ``told``."""
        asked = json.dumps([str(folder), str(temporary), str(self.told), *words])
        print(asked, file=self.asks, flush=True)
        return int(self.hears.readline())

    def end(self):
        """Wait for the command and return its status."""
        print(file=self.asks, flush=True)
        return int(self.hears.readline())

    def close(self):
        """End it, and all that it forked."""
        self.sweep()
        self.asks.close()
        self.process.wait()
        self.hears.close()

    def sweep(self):
        """Kill kernels that did not see that their parent was killed: those with its input."""
        pipe = f"pipe:[{os.fstat(self.asks.fileno()).st_ino}]"
        for path in Path("/proc").glob("[0-9]*/fd/0"):
            with suppress(OSError):
                pid = int(path.parts[2])
                if os.readlink(path) == pipe and pid != self.process.pid:
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
    sum(task.majority() for task in tasks.KNOWN.values())  # and tasks are split once
    papers.claims()  # and claims are read once
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
