"""Processes that end with the one that started them, however that ends: killed, too.

A child is a new Python, or a fork of a process that has imported what it needs (`warm`).
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from threading import Thread

from moebook.errors import Refusal, lacks_memory, no_memory, refuse

LINES = 3  # of what a kernel wrote last, for the line that says how it ended
WATCH = """
import os, signal, threading

def watch():
    os.read(0, 1)  # nothing is ever written: this returns when the parent has ended
    os.kill(os.getpid(), signal.SIGTERM)

threading.Thread(target=watch, daemon=True).start()
"""
THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GOMP_SPINCOUNT": "0"}
PLACE = "MOEBOOK_WARM"  # in a fork's environment: the socket at which it asks for forks of its own
OURS = str(Path(__file__).parents[3])


@contextmanager
def lifeline() -> Iterator[tuple[int, Callable[[], None]]]:
    """Yield what a child gets as its standard input, and a call that ends all who have it.

    It is one end of a pipe. The other is ours alone: the system closes it whatever ends this
    process, and the block closes it when it ends.
    """
    waiting, ours = os.pipe()
    with os.fdopen(waiting), os.fdopen(ours, "wb") as end:
        yield waiting, end.close


def run(
    code: str, *arguments: str, folder: Path, waiting: int, place: str | None = None
) -> list[str]:
    """Run Python code to its end in a project, with its modules; return the lines it printed.

    What it refuses is refused here too: the last line that it wrote to its errors, if it failed.
    With a ``place`` of `warm` it is a fork.
    """
    output, printing = os.pipe()
    errors, complaining = os.pipe()
    # Both are read at once: a child waits where one is full. Nobody waits for the thread where
    # this one is interrupted, as the child's end ends it.
    complaints: Queue[str] = Queue()
    Thread(target=lambda: complaints.put(_text(errors)), daemon=True).start()
    try:
        files = (waiting, printing, complaining)
        process = start(code, *arguments, folder=folder, files=files, place=place)
    except BaseException:
        os.close(output)
        raise
    finally:
        os.close(printing)
        os.close(complaining)
    lines = _text(output).splitlines()
    status = process.wait()
    if status:
        raise _refusal(status, complaints.get())
    return lines


def _text(end: int) -> str:
    """Read what comes out of a pipe to its end, and close it."""
    with os.fdopen(end, errors="replace") as file:
        return file.read()


def _refusal(status: int, complaints: str) -> Refusal:
    """Tell why a process failed: it has refused something, or memory ran out, or it says why."""
    last = (complaints.strip().splitlines() or [""])[-1]
    code, _, text = last.partition(": ")
    if code.startswith("E-") and text:
        return Refusal(code, text)
    if lacks_memory(last):
        return Refusal("E-MEMORY", no_memory(last))
    return Refusal("E-RUN", f"it {ending(status)}{last_words(complaints)}")


def ending(status: int) -> str:
    """Say how a process ended."""
    if status >= 0:
        return f"ended with status {status}"
    number = -status
    guess = " (out of memory?)" if number == signal.SIGKILL else ""
    return f"was killed by signal {number}{guess}"


def last_words(text: str) -> str:
    """Quote the last lines that a process wrote, as the end of a sentence on how it ended."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"; its last lines: {' | '.join(lines[-LINES:])[-400:]}" if lines else ""


def start(
    code: str,
    *arguments: str,
    folder: Path,
    files: Sequence[int],
    place: str | None = None,
) -> Fork | subprocess.Popen[bytes]:
    """Start Python code in a project; the first of its three ``files`` is a `lifeline`.

    It has a session of its own: Ctrl-C is for the parent, whose end ends its children.
    """
    environment = {**os.environ, **THREADS, "PYTHONPATH": path(folder)}
    command = ["-c", WATCH + code, *arguments]
    if place:
        environment[PLACE] = place
        return Fork(place, command, env=environment, cwd=folder, files=files)
    return subprocess.Popen(
        [sys.executable, *command],
        env=environment,
        cwd=folder,
        stdin=files[0],
        stdout=files[1],
        stderr=files[2],
        start_new_session=True,
    )


def path(folder: Path) -> str:
    """Return a PYTHONPATH by which a project's own code is found first."""
    places = [str(folder), OURS, os.environ.get("PYTHONPATH", "")]
    return os.pathsep.join(filter(None, places))


class Fork:
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
            refuse(
                "E-KERNEL",
                "the process that imports the libraries has ended; run it again",
            )

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
            self.returncode = told["returncode"]
            self.seconds = told.get("seconds", 0.0)
            self._line.close()
        return self.returncode

    def _answer(self) -> bytes:
        """Read a line; an empty one where the process that forks has ended."""
        line = b""
        while not line.endswith(b"\n"):
            byte = self._line.recv(1)
            if not byte:
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

    def abandon(self) -> None:
        """Care no longer: it is asked to end, and its end is not waited for."""
        if self.returncode is None:
            self.returncode = -signal.SIGTERM  # by which it is asked
        self._line.close()
