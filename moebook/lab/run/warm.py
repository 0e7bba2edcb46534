"""Processes that find the libraries imported: forks of one that has done nothing else.

To import torch, transformers and peft takes seven seconds; a book starts some thirty processes
that need them. Inside `warm` one process (`forks`) imports them once, and each `children.Fork` is a
fork of it. It runs its command as a new Python would, with arguments, environment, folder and files
of its own. Our own modules are still to be imported there: a run notes those that it loads, as
ever. Inside `prepared` a fork goes further, and forks in turn.

Only on Linux, and not where there is a GPU: a fork of a process that has started CUDA cannot use
it, and a library may start it when it is imported. Nor where the name of the folder for temporary
files (``TMPDIR``) leaves no room for a socket's.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

from jupyter_client.provisioning import KernelProvisionerFactory, LocalProvisioner

from moebook.lab.run import children, forks
from moebook.lab.run.children import PLACE, Fork

# Not matplotlib's inline backend, which makes pictures of figures only where it is imported by a
# kernel.
LIBRARIES = """
torch transformers.models.llama.modeling_llama transformers.optimization peft accelerate datasets
pandas pyarrow.parquet scipy.stats sklearn.cluster sklearn.manifold matplotlib.pyplot
lm_eval.api.model lm_eval.tasks pydantic num2words lxml.html
jinja2 IPython ipykernel.ipkernel ipykernel.kernelapp papermill nbclient
""".split()
GPUS = ("/dev/nvidiactl", "/dev/kfd")  # of NVIDIA and of AMD
INPUT = 0  # the number of a process's standard input
INLINE = "module://matplotlib_inline.backend_inline"  # what a kernel draws with
LONGEST = 107  # bytes that Linux takes for the place of a socket


@contextmanager
def warm(
    directory: Path,
    environment: Mapping[str, str],
    libraries: Sequence[str] = LIBRARIES,
) -> Iterator[str | None]:
    """Import libraries for the length of the block; yield the socket at which one asks for forks.

    It is None where nothing can be forked. No secret may stand in the ``environment``, which
    all forks can read; the socket lies in a private ``directory``, whose name must leave room
    for it and for that of `prepared`.
    """
    too_long = len(os.fsencode(directory / "prepared")) > LONGEST
    has_gpu = any(Path(gpu).exists() for gpu in GPUS)
    if sys.platform != "linux" or has_gpu or too_long:
        yield None
        return
    with (
        _listening(directory / "warm") as listening,
        children.lifeline() as (waiting, end),
    ):
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
            yield str(directory / "warm")
        finally:
            end()
            process.wait()


@contextmanager
def prepared(
    place: str,
    directory: Path,
    environment: Mapping[str, str],
    folder: Path,
    function: str,
) -> Iterator[str]:
    """Let a fork call a project's function, ``module:name``, and yield where it forks in turn.

    What all of those would do is so done once. They have its modules.
    """
    environment = {**environment, "PYTHONPATH": children.path(folder)}
    with (
        _listening(directory / "prepared") as listening,
        open(os.devnull, "r+b") as nothing,
    ):
        files = [listening.fileno(), nothing.fileno(), nothing.fileno()]
        command = ["-m", forks.__name__, str(INPUT), function]
        forker = Fork(place, command, env=environment, cwd=folder, files=files)
        listening.close()
        try:
            yield str(directory / "prepared")
        finally:
            forker.abandon()


@contextmanager
def _listening(place: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(place))
        listening.listen()
        yield listening


class Provisioner(LocalProvisioner):
    """Starts kernels as forks, for jupyter_client; `register` makes it known there."""

    forked: Fork  # stays when the kernel has ended

    async def launch_kernel(self, cmd: list[str], **options: Any) -> Any:
        """Start ``python -m ipykernel_launcher ...`` as a fork, and return how to connect."""
        environment = {**options["env"], "JPY_PARENT_PID": "the process that forks"}
        place = environment.pop(PLACE)
        command = cmd[cmd.index("-m") :]
        with open(os.devnull, "rb") as nothing:
            files = [
                nothing.fileno(),
                options["stdout"].fileno(),
                options["stderr"].fileno(),
            ]
            self.forked = Fork(
                place, command, env=environment, cwd=options["cwd"], files=files
            )
        self.process = self.forked  # type: ignore[assignment]  # declared to be a Popen
        self.pid = self.pgid = self.forked.pid
        self.cwd = options["cwd"]
        return self.connection_info


def seconds(provisioner: object) -> float:
    """Return the CPU time of the kernel that a `Provisioner` started; another's starts no fork."""
    return provisioner.forked.seconds if isinstance(provisioner, Provisioner) else 0.0


def register() -> dict[str, Any]:
    """Make `Provisioner` known to jupyter_client; return what a kernel's metadata say of it."""
    name = "moebook-warm"
    value = f"{__name__}:{Provisioner.__name__}"
    factory = KernelProvisionerFactory.instance()
    factory.provisioners[name] = EntryPoint(name, value, factory.GROUP_NAME)
    return {"kernel_provisioner": {"provisioner_name": name}}
