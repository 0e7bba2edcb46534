"""Processes that find the libraries imported: forks of one that has done nothing else.

To import torch, transformers and peft takes seven seconds; a book starts some thirty processes
that need them. Inside `warm` one process (`forks`) imports them once, and each `Process` is a fork
of it. It runs its command as a new Python would, with arguments, environment, folder and files of
its own. Our own modules are still to be imported there: a run notes those that it loads, as ever.

Only on Linux, and not where there is a GPU: a fork of a process that has started CUDA cannot use
it, and a library may start it when it is imported.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

from jupyter_client.provisioning import KernelProvisionerFactory, LocalProvisioner

from moebook.errors import refuse
from moebook.notebook import children, forks

PLACE = "MOEBOOK_WARM"  # in the environment of those who may ask: the socket of the `forks`
LIBRARIES = """
torch transformers.models.llama.modeling_llama transformers.optimization peft accelerate datasets
pandas pyarrow.parquet scipy.stats sklearn.cluster sklearn.manifold matplotlib.pyplot
matplotlib_inline.backend_inline lm_eval.api.model lm_eval.tasks pydantic num2words lxml.html
jinja2 IPython ipykernel.ipkernel ipykernel.kernelapp papermill nbclient
""".split()
GPUS = ("/dev/nvidiactl", "/dev/kfd")  # of NVIDIA and of AMD
INLINE = "module://matplotlib_inline.backend_inline"  # what a kernel draws with


@contextmanager
def warm(
    directory: Path, environment: Mapping[str, str], libraries: Sequence[str] = LIBRARIES
) -> Iterator[str | None]:
    """Import libraries for the length of the block; yield the socket that a `Process` asks.

    It is None where nothing can be forked. No secret may stand in the ``environment``, which
    all forks can read; the socket lies in a private ``directory``.
    """
    if sys.platform != "linux" or any(Path(gpu).exists() for gpu in GPUS):
        yield None
        return
    place = directory / "warm"
    with socket.socket(socket.AF_UNIX) as listening, children.lifeline() as (waiting, end):
        listening.bind(str(place))
        listening.listen()
        process = subprocess.Popen(
            [sys.executable, forks.__file__, str(listening.fileno()), *libraries],
            env={**environment, "MPLBACKEND": INLINE},
            stdin=waiting,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[listening.fileno()],
            start_new_session=True,
        )
        listening.close()  # so that nobody waits for one that has ended
        try:
            yield str(place)
        finally:
            end()
            process.wait()


class Process:
    """A command that runs in a fork: as much of `subprocess.Popen` as we and kernels need."""

    stdin = stdout = stderr = None
    returncode: int | None = None  # negative: the signal that ended it
    seconds = 0.0  # CPU time of it and of what it started, once it has ended

    def __init__(
        self,
        place: str,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: str | Path,
        files: Sequence[int],
    ) -> None:
        """Start it in a session of its own; ``files`` are its input, output and errors."""
        asked = {"command": list(command), "env": dict(env), "cwd": str(cwd)}
        self._line = socket.socket(socket.AF_UNIX)
        try:
            self._line.connect(place)
            socket.send_fds(self._line, [b"\n"], files)
            self._line.sendall(json.dumps(asked).encode() + b"\n")
            self.pid = int(self._answer())
        except (OSError, ValueError):
            self._line.close()
            refuse("E-KERNEL", "the process that imports the libraries has ended; run it again")

    def poll(self) -> int | None:
        """Return how it ended, None while it runs."""
        if self.returncode is None and select.select([self._line], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self) -> int:
        """Wait for its end; return how it ended."""
        if self.returncode is None:
            answer = self._answer()
            # There is none where the process that forks was killed, with which its forks end.
            told = json.loads(answer) if answer else {"returncode": -signal.SIGKILL}
            self.returncode, self.seconds = told["returncode"], told.get("seconds", 0.0)
            self._line.close()
        return self.returncode

    def _answer(self) -> bytes:
        """Read a line; an empty one where the process that forks has ended."""
        line = b""
        while not line.endswith(b"\n"):
            if not (byte := self._line.recv(1)):
                return b""
            line += byte
        return line

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it."""
        self.send_signal(signal.SIGKILL)


class Provisioner(LocalProvisioner):
    """Starts kernels as forks, for jupyter_client; `register` makes it known there."""

    forked: Process  # stays when the kernel has ended

    async def launch_kernel(self, cmd: list[str], **options: Any) -> Any:
        """Start ``python -m ipykernel_launcher ...`` as a fork, and return how to connect."""
        environment = {**options["env"], "JPY_PARENT_PID": "the process that forks"}
        place = environment.pop(PLACE)
        command = cmd[cmd.index("-m") :]
        with open(os.devnull, "rb") as nothing:
            files = [nothing.fileno(), options["stdout"].fileno(), options["stderr"].fileno()]
            self.forked = Process(place, command, env=environment, cwd=options["cwd"], files=files)
        self.process = self.forked  # type: ignore[assignment]  # declared to be a Popen
        self.pid = self.pgid = self.forked.pid
        self.cwd = options["cwd"]
        return self.connection_info


def seconds(provisioner: object) -> float:
    """Return the CPU time of the kernel that a `Provisioner` started; another's starts no fork."""
    return provisioner.forked.seconds if isinstance(provisioner, Provisioner) else 0.0


def register() -> dict[str, Any]:
    """Make `Provisioner` known to jupyter_client; return what a kernel's metadata say of it."""
    name, value = "moebook-warm", f"{__name__}:{Provisioner.__name__}"
    factory = KernelProvisionerFactory.instance()
    factory.provisioners[name] = EntryPoint(name, value, factory.GROUP_NAME)
    return {"kernel_provisioner": {"provisioner_name": name}}
