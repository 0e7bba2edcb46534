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


class Begun:
    """A program in a fork that has none of our modules."""

    def __init__(self, program: Callable[[], None]) -> None:
        self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.pid = os.fork()
        if not self.pid:
            os.dup2(self._output.fileno(), 1)
            os.dup2(self._errors.fileno(), 2)
            become(program)

    def ended(self) -> Ended:
        """Wait for its end; return how it ended."""
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        told = []
        for file in (self._output, self._errors):
            with file:
                file.seek(0)
                told.append(file.read())
        return Ended(status, *told)


def forked(program: Callable[[], None]) -> Ended:
    """Call a program in a fork; return how it ended."""
    return Begun(program).ended()


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
    except SystemExit as left:
        code = left.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
