"""Import every module of the package as on a system without POSIX; run as a program.

Modules and names that only POSIX has are hidden from our own code alone: other packages choose
theirs by `sys.platform`, which cannot be changed without breaking Python's own library. A text file
that is opened without an encoding, by the imports or by `moebook list`, which runs afterwards, is
an error too: elsewhere the default is not UTF-8. What other code of ours opens is not seen here.
Left out is `moebook.kernels._triton`, which is imported only where Triton runs.
"""

import builtins
import importlib
import io
import pkgutil
import sys
from types import ModuleType

MODULES = set("fcntl grp posix pty pwd resource syslog termios tty".split())
NAMES = {
    "os": "O_CLOEXEC O_DIRECTORY O_NOFOLLOW O_NONBLOCK WNOHANG chown fchown fork forkpty getegid"
    " geteuid getgid getgroups getloadavg getpgid getuid killpg lchown mkfifo nice openpty"
    " posix_spawn pread pwrite register_at_fork sched_getaffinity sched_setaffinity setegid"
    " seteuid setgid setpgid setsid setuid statvfs sysconf uname wait wait4",
    "select": "epoll poll",
    "signal": "SIGALRM SIGCHLD SIGHUP SIGKILL SIGPIPE SIGQUIT SIGUSR1 SIGUSR2 SIGXCPU alarm pause"
    " pthread_sigmask setitimer sigwait",
    "socket": "AF_UNIX CMSG_LEN SCM_RIGHTS recv_fds send_fds",
    "time": "clock_getres clock_gettime tzset",
}

plain = builtins.__import__
plain_open = builtins.open


class Less(ModuleType):
    """A module of Python's library as it is elsewhere: without some names."""

    def __init__(self, name):
        super().__init__(name)
        self.__dict__.update(whole=plain(name), lacking=set(NAMES[name].split()))

    def __getattr__(self, name):
        if name in self.lacking:
            raise AttributeError(f"only POSIX has {self.__name__}.{name}")
        return getattr(self.whole, name)


elsewhere = {name: Less(name) for name in NAMES}


def without_posix(name, globals=None, locals=None, fromlist=(), level=0):
    """Import for our own code what a system without POSIX has, and for others as ever."""
    ours = str((globals or {}).get("__name__")).split(".")[0] == "moebook"
    if ours and not level:
        if name in MODULES:
            raise ImportError(f"only POSIX has the module {name}")
        if name in elsewhere:
            return elsewhere[name]
    return plain(name, globals, locals, fromlist, level)


def tell(name):
    raise ImportError(f"{name} does not import")


def told_encoding(encoding, stacklevel=2):
    """Stand in for `io.text_encoding`, which pathlib and others ask: ours say their encoding."""
    if encoding is None:
        refuse_ours(sys._getframe(stacklevel))
        return "locale"
    return encoding


def told_open(file, mode="r", *given, **more):
    """Open a file; ours say the encoding of a text."""
    if "b" not in mode and not more.get("encoding") and len(given) < 2:
        refuse_ours(sys._getframe(1))
    return plain_open(file, mode, *given, **more)


def refuse_ours(frame):
    """Raise where a frame is of our own code."""
    name = str(frame.f_globals.get("__name__"))
    if name.split(".")[0] == "moebook":
        raise EncodingWarning(f"{name} opens a text without its encoding")


def main():
    io.text_encoding = told_encoding
    builtins.open = told_open
    builtins.__import__ = without_posix
    package = importlib.import_module("moebook")
    imported = []
    for module in pkgutil.walk_packages(package.__path__, "moebook.", onerror=tell):
        if "._triton" not in module.name and not module.name.endswith("__main__"):
            importlib.import_module(module.name)
            imported.append(module.name)
    assert len(imported) > 100
    importlib.import_module("moebook.cli").main(["list"])
    # What every record and checkpoint describes.
    assert importlib.import_module("moebook.runtime").environment()["memory"] > 0


if __name__ == "__main__":
    main()
