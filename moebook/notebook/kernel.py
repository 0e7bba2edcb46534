"""The kernel that a notebook runs in: this interpreter, closed sockets, a clean environment."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ipykernel.kernelspec import make_ipkernel_cmd
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpec
from jupyter_core.utils import run_sync

from moebook import runtime
from moebook.errors import refuse
from moebook.notebook import privacy

TRANSPORT = "tcp" if sys.platform == "win32" else "ipc"
"""Unix sockets in a private folder: no other user and no network can reach the kernel."""

LONGEST = 80
"""Bytes in the name of the sockets' folder: a Unix socket's whole name holds about 100."""


class Kernel(AsyncKernelManager):
    """A kernel of this very interpreter, whatever kernels the user has installed.

    Attributes:
        peak: Highest peak memory seen of its process, in bytes; None before the first look.
    """

    peak: int | None = None

    @property
    def kernel_spec(self) -> KernelSpec:
        """Start ``python -m ipykernel_launcher`` with the Python that runs now."""
        return KernelSpec(argv=make_ipkernel_cmd(), display_name="Python 3", language="python")

    def client(self, **options: Any) -> Any:
        """Connect, and remember the connection so that it can be closed."""
        self.connection = super().client(**options)
        return self.connection

    @property
    def pid(self) -> int | None:
        """Process id, None when it does not run."""
        return getattr(self.provisioner, "pid", None)

    @property
    def exit_code(self) -> int | None:
        """Exit status of a kernel that ended by itself, negative for a signal; else None."""
        process = getattr(self.provisioner, "process", None)
        return None if process is None else process.poll()

    def watch(self, stop: threading.Event) -> None:
        """Follow the process's peak memory until told to stop, ten times a second.

        The mark itself is exact; following it is needed since `runtime.stopwatch` resets it.
        """
        while True:
            self.peak = max(
                filter(None, (self.peak, runtime.peak_memory(self.pid or 0))), default=None
            )
            if stop.wait(0.1):
                return


@contextmanager
def kernel(folder: Path, directory: Path) -> Iterator[Kernel]:
    """Run a kernel for the length of the block; it is gone afterwards, whatever happens.

    Args:
        folder: Its working directory, the project.
        directory: A private, short-lived folder for its connection file and sockets.

    Raises:
        Refusal: ``E-PATH`` when the folder's name is too long for sockets.
    """
    if TRANSPORT == "ipc" and len(os.fsencode(directory)) > LONGEST:
        refuse("E-PATH", f"{directory} is too long for sockets; set TMPDIR to a shorter folder")
    manager = Kernel(
        kernel_name="python3", transport=TRANSPORT, connection_file=str(directory / "kernel.json")
    )
    environment = privacy.environment() | {runtime.QUIET: "1"}
    quiet = ["--HistoryManager.hist_file=:memory:"]
    run_sync(manager.start_kernel)(extra_arguments=quiet, env=environment, cwd=str(folder))
    stop = threading.Event()
    watcher = threading.Thread(target=manager.watch, args=(stop,), daemon=True)
    watcher.start()
    try:
        yield manager
    finally:
        stop.set()
        watcher.join()
        run_sync(_abandon)()
        if hasattr(manager, "connection"):
            manager.connection.stop_channels()
        run_sync(manager.shutdown_kernel)(now=True)


async def _abandon() -> None:
    """Cancel the tasks that an interrupt left waiting; else each would complain at the end."""
    waiting = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
