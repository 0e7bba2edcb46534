"""Hostile programs, all harmless: forged results, and probes of what a program reaches."""

import ctypes
import errno
import os
import resource
import socket
import threading
from pathlib import Path

EQUAL = """
class Y(list):
    __eq__, __len__ = lambda *_: True, lambda _: 3
def f(x): return Y()"""
FORGERIES = [
    EQUAL,
    *"""
def f(x): raise SystemExit(0)
---
import os
def f(x): os._exit(0)
---
import sys; sys.exit()
---
def f(x): return x
def size(x): return 3
---
import builtins
builtins.len, f = lambda x: 3, list
---
import sys
def f(x): sys._getframe(1).f_globals["size"] = lambda x: 3; return x
---
import os
for end in range(2, 32):
    try: os.write(end, b"passed\\n")
    except OSError: pass
f = list
---
import json
json.dumps = lambda x: '["value", 3]'
def f(x): return x
---
import os
os.write(4, b'["value", {"passed": []}]\\n')
f = list
---
import gc
def f(x): return [y for y in gc.get_objects() if "assert" in str(y)]
---
def f(x):
    y = []
    for _ in range(900): y = [y]
    return y
---
import sys
sys.modules["builtins"].AssertionError = ZeroDivisionError
f = list
---
import atexit, os
atexit.register(os.write, 2, b"passed")
f = list""".split("---"),
]
PATHS = (
    "/proc/self/maps",
    "/proc/sys/kernel",
    "/sys/kernel",
    "/etc/passwd",
    "/var",
    "/dev/zero",
)
CALLS = {  # of the C library, with arguments that change nothing where they are allowed
    "unshare": (0x10000000,),
    "setns": (-1, 0),
    "ptrace": (16, 0, 0, 0),
    "mount": (0, 0, 0, 0, 0),
    "umount2": (b"/nowhere", 0),
    "chroot": (b"/nowhere",),
    "inotify_init": (),
    "eventfd": (0, 0),
    "epoll_create": (1,),
    "shmget": (0, 4096, 0o1600),
    "memfd_create": (b"x", 0),
    "personality": (0xFFFFFFFF,),
    "prctl": (3, 0, 0, 0, 0),
    "setuid": (0,),
    "nice": (1,),
}


def forked():
    child = os.fork()
    if not child:
        os._exit(0)
    return os.waitpid(child, 0)


def threaded():
    seen = []
    thread = threading.Thread(target=seen.append, args=[1])
    thread.start()
    thread.join()
    return seen


def done(call, *given):
    call(*given)
    return True


def flood():
    for number in range(64):
        Path(f"/tmp/flood{number}").write_bytes(bytes(1 << 20))


def everywhere(canary, port, host):
    """Probes that succeed where there is no barrier."""
    return {
        "read": lambda: Path(canary).read_text(),
        "write": lambda: Path(canary).write_text("dead"),
        "unlink": lambda: done(os.unlink, f"{canary}.copy"),
        "list": lambda: os.listdir(os.path.dirname(canary)),
        "variable": lambda: os.environ["CANARY"],
        "fork": forked,
        "thread": threaded,
        "exec": lambda: os.spawnv(os.P_WAIT, "/bin/true", ["true"]) == 0,
        "shell": lambda: os.system("exit 0") == 0,
        "network": lambda: socket.create_connection(("127.0.0.1", port), 1),
        "socket": lambda: socket.socket(socket.AF_UNIX),
        "signal": lambda: done(os.kill, os.getppid(), 0),
        "name": lambda: os.uname().nodename == host,
        "user": lambda: os.getuid() != 65534,
        **{path: lambda path=path: os.stat(path) for path in PATHS},
    }


def reached(call, *given):
    """Whether the kernel looked at a call: whatever else it says, a filter says EPERM."""
    ctypes.set_errno(0)
    return call(*given) >= 0 or ctypes.get_errno() != errno.EPERM


def barred():
    """Probes that must fail in the sandbox and are not tried outside."""
    tried = {
        "limit": lambda: done(resource.setrlimit, resource.RLIMIT_NOFILE, (99, 99)),
        "system": lambda: done(Path("/usr/canary").touch),
        "top": lambda: done(Path("/canary").touch),
        "memory": lambda: bytearray(1 << 31),
        "files": lambda: done(flood),
        "one file": lambda: Path("/tmp/large").write_bytes(bytes(2 << 20)),
        "open files": lambda: [os.dup(1) for _ in range(64)],
    }
    library = ctypes.CDLL(None, use_errno=True)
    calls = {name: getattr(library, name) for name in CALLS}
    return tried | {n: lambda n=n: reached(calls[n], *CALLS[n]) for n in CALLS}


def escapes(everything, *where):
    """Name the probes that got somewhere."""
    escaped = []
    for name, probe in {
        **everywhere(*where),
        **(barred() if everything else {}),
    }.items():
        try:
            escaped += [name] if probe() else []
        except BaseException:
            continue
    return escaped
