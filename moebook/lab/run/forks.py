"""The process behind `warm`: it imports libraries, then forks for each command that comes.

It is run by its path, so that nothing of ours is imported. It has one thread and computes nothing:
a fork of it is as good as a new Python. The process behind `warm.prepared` is one of these forks.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import types
from contextlib import suppress
from typing import Any

PARENT = 0  # standard input: a pipe, which closes when the parent has ended


def main() -> None:
    """Import, then fork at the socket that the command line names; in a fork, run its command.

    Behind the socket's number come names of libraries, or of functions (``module:name``) to call.
    """
    number, *names = sys.argv[1:]
    # Ctrl-C is for the parent, whose end ends this.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()  # imports make little garbage, and looking for it takes a fifth of their time
    for name in names:
        module, _, function = name.partition(":")
        imported = importlib.import_module(module)
        if function:
            getattr(imported, function)()
    gc.freeze()  # what all forks share is not touched when one of them looks for garbage
    gc.enable()
    asked = serve(socket.socket(fileno=int(number)))
    if asked is not None:
        become(**asked)


def serve(listening: socket.socket) -> dict[str, Any] | None:
    """Fork for each command that comes; return it in the fork, and None when the parent ends.

    A client sends three open files, then a line of JSON. It is told the fork's number, and in the
    end a line with how it ended and its CPU time. The end of a client ends its fork.
    """
    woken, wakes = socket.socketpair()
    wakes.setblocking(False)
    signal.set_wakeup_fd(wakes.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    clients: dict[int, socket.socket] = {}  # by the number of their fork
    with selectors.DefaultSelector() as events:
        # A set: a fork of `warm.prepared` listens at its standard input, and has no parent there.
        for source in {PARENT, listening.fileno(), woken.fileno()}:
            events.register(source, selectors.EVENT_READ)
        while True:
            for event, _ in events.select():
                if event.fd == woken.fileno():
                    woken.recv(4096)
                    for pid in list(clients):
                        tell(pid, clients, events)
                elif event.fd == listening.fileno():
                    asked = answer(listening, clients, events)
                    if asked is not None:
                        for one in (listening, woken, wakes):
                            one.close()
                        return asked
                elif event.fd == PARENT:
                    for pid in clients:
                        end(pid)
                    return None
                elif event.data in clients:  # it says nothing more: it has ended
                    events.unregister(event.fileobj)
                    end(event.data)
                # Else its fork ended at the same time, and `tell` has closed its line.


def answer(
    listening: socket.socket,
    clients: dict[int, socket.socket],
    events: selectors.BaseSelector,
) -> dict[str, Any] | None:
    """Fork for the client that has come; return what it asks for in the fork, and None here."""
    client, _ = listening.accept()
    asked = receive(client)
    if asked is None:
        client.close()
        return None
    try:
        pid = os.fork()
    except OSError:  # the system has no room for one more; those that run go on
        close(asked["files"])
        client.close()
        return None
    if pid == 0:
        for one in (client, *clients.values()):
            one.close()
        return asked
    close(asked["files"])
    clients[pid] = client
    events.register(client, selectors.EVENT_READ, pid)
    with suppress(OSError):
        client.sendall(b"%d\n" % pid)
    return None


def receive(client: socket.socket) -> dict[str, Any] | None:
    """Read what a client asks for; None where it ended before it had said it, or is no client."""
    client.settimeout(10)
    files: list[int] = []
    asked = None
    with suppress(OSError, ValueError):
        _, files, _, _ = socket.recv_fds(client, 1, 3)
        with client.makefile("rb") as lines:
            asked = json.loads(lines.readline())
    if not isinstance(asked, dict):
        close(files)
        return None
    return {**asked, "files": files}


def close(files: list[int]) -> None:
    """Close open files by their numbers."""
    for file in files:
        os.close(file)


def tell(
    pid: int, clients: dict[int, socket.socket], events: selectors.BaseSelector
) -> None:
    """Tell the client of a fork that has ended how it ended."""
    done, status, used = os.wait4(pid, os.WNOHANG)
    if done:
        code = os.waitstatus_to_exitcode(status)
        told = {"returncode": code, "seconds": used.ru_utime + used.ru_stime}
        with clients.pop(pid) as client:
            with suppress(KeyError):  # it has ended, and is no longer listened to
                events.unregister(client)
            with suppress(OSError):  # it ends in this moment
                client.sendall(json.dumps(told).encode() + b"\n")


def end(pid: int) -> None:
    """Ask a fork and what it started to end."""
    try:
        os.killpg(pid, signal.SIGTERM)
    except ProcessLookupError:  # it has no group yet: it has just begun
        os.kill(pid, signal.SIGTERM)


def become(command: list[str], env: dict[str, str], cwd: str, files: list[int]) -> None:
    """Run a command as a new Python would: ``-c CODE`` or ``-m MODULE``, and its arguments.

    A new one would have its own session, files, signals, folder, environment and search path.
    """
    os.setsid()
    take_files(files)
    forget_signals()
    os.chdir(cwd)
    sys.path[:] = search_path(env)
    importlib.invalidate_caches()
    take_environment(env)

    flag, text, *arguments = command
    if flag == "-m":
        sys.argv = [text, *arguments]
        runpy.run_module(text, run_name="__main__", alter_sys=True)
    else:
        sys.argv = [flag, *arguments]
        module = types.ModuleType("__main__")
        sys.modules["__main__"] = module
        # Without the imports from __future__ of this file, which it would take over.
        code = compile(text, "<string>", "exec", dont_inherit=True)
        exec(code, vars(module))


def take_files(files: list[int]) -> None:
    """Make open files this process's input, output and errors: numbers 0, 1 and 2."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)


def forget_signals() -> None:
    """Take back what `main` and `serve` said of signals."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def search_path(env: dict[str, str]) -> list[str]:
    """Return where a new Python looks for modules: its folder, its PYTHONPATH, and what is usual.

    Usual is what this process has but for its own PYTHONPATH.
    """
    own = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    usual = [place for place in sys.path if place not in ("", *own)]
    named = [place for place in env.get("PYTHONPATH", "").split(os.pathsep) if place]
    return ["", *named, *usual]


def take_environment(env: dict[str, str]) -> None:
    """Replace the environment of this process."""
    os.environ.clear()
    os.environ.update(env)
    if "JPY_PARENT_PID" in env:
        # A kernel ends when this is no longer its parent: the process that forked it.
        os.environ["JPY_PARENT_PID"] = str(os.getppid())


if __name__ == "__main__":
    if __spec__ is None:  # run by its path
        del sys.path[0]  # the folder of this file
    main()
