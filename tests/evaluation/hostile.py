"""Harmless probes of what a program reaches: each gives something true if it got there."""

import ctypes
import os
import resource
import socket
import threading
from pathlib import Path


def forked():
    if not (child := os.fork()):
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
        "process": lambda: os.listdir("/proc"),
        "home": lambda: os.stat(os.path.expanduser("~")),
        "accounts": lambda: Path("/etc/passwd").read_text(),
        "name": lambda: os.uname().nodename == host,
        "user": lambda: os.getuid() != 65534,
        "devices": lambda: set(os.listdir("/dev")) - {"null", "urandom"},
        "priority": lambda: done(os.sched_setscheduler, 0, os.SCHED_OTHER, os.sched_param(0)),
    }


def barred():
    """Probes that must fail in the sandbox and are not tried outside."""
    return {
        "limit": lambda: done(resource.setrlimit, resource.RLIMIT_NOFILE, (99, 99)),
        "system": lambda: open("/usr/canary", "w"),
        "top": lambda: open("/canary", "w"),
        "root": lambda: done(os.setuid, 0),
        "change root": lambda: done(os.chroot, "/tmp"),
        "spaces": lambda: ctypes.CDLL(None).unshare(0x10000000) == 0,
        "trace": lambda: ctypes.CDLL(None).ptrace(0, 0, 0, 0) == 0,
        "mount": lambda: ctypes.CDLL(None).mount(b"none", b"/tmp", b"tmpfs", 0, None) == 0,
        "memory": lambda: bytearray(1 << 31),
        "files": lambda: done(flood),
        "one file": lambda: Path("/tmp/large").write_bytes(bytes(2 << 20)),
        "open files": lambda: [os.dup(1) for _ in range(64)],
    }


def escapes(everything, *where):
    """Name the probes that got somewhere."""
    found = []
    for name, probe in {**everywhere(*where), **(barred() if everything else {})}.items():
        try:
            found += [name] if probe() else []
        except BaseException:
            continue
    return found
