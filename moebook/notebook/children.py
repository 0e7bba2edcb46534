"""Processes that end with the one that started them, however that ends: killed, too."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

WATCH = """
import os, signal, threading

def watch():
    os.read(0, 1)  # nothing is ever written: this returns when the parent has ended
    os.kill(os.getpid(), signal.SIGTERM)

threading.Thread(target=watch, daemon=True).start()
"""


@contextmanager
def lifeline() -> Iterator[tuple[int, Callable[[], None]]]:
    """Yield what a `command` gets as its standard input, and a call that ends all who have it.

    It is one end of a pipe. The other is ours alone: the system closes it whatever ends this
    process, and the block closes it when it ends.
    """
    waiting, ours = os.pipe()
    with os.fdopen(waiting), os.fdopen(ours, "wb") as end:
        yield waiting, end.close


def command(code: str, *arguments: str) -> list[str]:
    """Return the command line of a Python that runs ``code`` until its `lifeline` closes."""
    return [sys.executable, "-c", WATCH + code, *arguments]
