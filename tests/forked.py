"""A program in a fork of the tests' own process, which has imported the libraries already.

To import torch, transformers and peft takes seven seconds. Our own modules are imported anew there.
"""

import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from typing import NamedTuple


class Ended(NamedTuple):
    """How a program ended, and what it printed."""

    returncode: int
    stdout: str
    stderr: str


def forked(program: Callable[[], None]) -> Ended:
    """Call a program in a fork that has none of our modules; return how it ended."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        pid = os.fork()
        if not pid:
            os.dup2(out.fileno(), 1)
            os.dup2(errors.fileno(), 2)
            become(program)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        out.seek(0)
        errors.seek(0)
        return Ended(status, out.read(), errors.read())


def become(program: Callable[[], None]) -> None:
    """Be the program until this process ends."""
    code = 1
    try:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
        for name in list(sys.modules):
            if name.partition(".")[0] == "moebook":
                del sys.modules[name]
        program()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
