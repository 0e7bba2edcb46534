"""What runs inside the sandbox, by Python's library alone: a program, or its judge.

Each has a sandbox of its own; a pair of sockets joins them. The judge runs the tests.
Where these call the candidate's function, arguments and results cross as JSON that
holds plain values only: a candidate sees neither the tests nor the judge's memory, and
all that it can do is return values.
"""

import ast
import builtins
import ctypes
import json
import os
import platform
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from types import ModuleType
from typing import Any, TextIO

SECONDS = 5  # of CPU time
LIMITS = {"AS": 1 << 30, "FSIZE": 1 << 20, "NOFILE": 32, "CORE": 0, "NPROC": 0}
"""Bytes and counts that a process may use."""
LONGEST = 5_000_000  # characters of a message
# Bits of an int that crosses in decimal digits, of which Python writes 4,300 at most.
WIDEST = 10_000
ALLOWED = """
read 0 63
write 1 64
close 3 57
fstat 5 80
lseek 8 62
mmap 9 222
mprotect 10 226
munmap 11 215
brk 12 214
rt_sigaction 13 134
rt_sigprocmask 14 135
rt_sigreturn 15 139
pread64 17 67
mremap 25 216
madvise 28 233
dup 32 23
nanosleep 35 101
getpid 39 172
exit 60 93
uname 63 160
fcntl 72 25
getcwd 79 17
gettimeofday 96 169
getuid 102 174
gettid 186 178
futex 202 98
getdents64 217 61
restart_syscall 219 128
clock_gettime 228 113
clock_nanosleep 230 115
exit_group 231 94
openat 257 56
newfstatat 262 79
unlinkat 263 35
readlinkat 267 78
getrandom 318 278
statx 332 291
rseq 334 293
stat 4 -
lstat 6 -
access 21 -
readlink 89 -
"""
"""Calls and their numbers on x86_64 and aarch64: memory, files, clocks, signals."""
MACHINES = {"x86_64": (1, 0xC000003E), "aarch64": (2, 0xC00000B7)}
"""Column of `ALLOWED`, and the kernel's AUDIT_ARCH."""
ENDED = "the program has ended, or says too much"
PLAIN = (list, tuple, set, frozenset, bytes)
# Operations of a filter (linux/filter.h): load a word, jump if equal, return.
LOAD = 0x20
JUMP = 0x15
RETURN = 0x06
KILL = 0
REFUSED = 0x00050001  # refused with EPERM
ALLOW = 0x7FFF0000


def confine() -> None:
    """Limit what this process may use, then allow it the calls above and no others.

    The filter is a list of BPF instructions: operation, how many lines to skip where a
    comparison holds and where not, and a value.
    """
    import resource  # which Windows lacks; `sandbox` imports this module there, too

    for name, limit in LIMITS.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
    # A signal, then the end.
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 1))

    column, machine = MACHINES[platform.machine()]
    calls = []
    for line in ALLOWED.split("\n")[1:-1]:
        number = line.split()[column]
        if number != "-":
            calls.append(int(number))
    # Calls of another architecture have other numbers; they end the process.
    lines = [
        (LOAD, 0, 0, 4),
        (JUMP, 1, 0, machine),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, 0),
    ]
    for place, call in enumerate(calls):
        lines.append((JUMP, len(calls) - place, 0, call))  # to the last line
    lines += [(RETURN, 0, 0, REFUSED), (RETURN, 0, 0, ALLOW)]
    instructions = b"".join(struct.pack("HBBI", *line) for line in lines)
    code = ctypes.create_string_buffer(instructions)
    program = struct.pack("HxxxxxxP", len(lines), ctypes.addressof(code))
    set_seccomp = 22
    by_filter = 2
    libc = ctypes.CDLL(None)
    if libc.prctl(set_seccomp, by_filter, ctypes.c_char_p(program), 0, 0):
        os._exit(3)


def packed(value: Any) -> Any:
    """Write a plain value so that JSON keeps its type; of a subclass what it holds."""
    if isinstance(value, int) and value.bit_length() > WIDEST:
        return {"int": hex(value)}
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, dict):
        return {"dict": [packed(pair) for pair in value.items()]}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    names = [kind.__name__ for kind in PLAIN if isinstance(value, kind)]
    if hasattr(value, "__next__"):
        names.append("iter")
    if names:
        return {names[0]: [packed(item) for item in value]}
    raise TypeError(f"{type(value).__name__} is no plain value")


def unpacked(written: Any) -> Any:
    """Read what `packed` wrote."""
    if not isinstance(written, dict):
        return written
    ((name, parts),) = written.items()
    if name == "int":
        return int(parts, 16)
    if name == "complex":
        return complex(*parts)
    makes: dict[str, Any] = {kind.__name__: kind for kind in (*PLAIN, dict, iter)}
    return makes[name]([unpacked(part) for part in parts])


def remote(name: str, requests: TextIO, replies: TextIO) -> Callable[..., Any]:
    """Return the candidate's function of this name, as the judge calls it."""

    def call(*given: Any, **named: Any) -> Any:
        request = json.dumps([name, packed(given), packed(named)])
        line = ""
        with suppress(OSError):
            if not replies.closed:
                print(request, file=requests, flush=True)
                line = replies.readline(LONGEST)
        if not line.endswith("\n"):
            replies.close()  # the rest of a reply would answer the next call
            raise RuntimeError(ENDED)
        kind, reply = json.loads(line)
        if kind != "value":
            raise RuntimeError(str(reply))
        return unpacked(reply)

    return call


def module(name: str) -> dict[str, Any]:
    """Begin a module, which a dataclass looks up by its name; return its names."""
    sys.modules[name] = ModuleType(name)
    return vars(sys.modules[name])


def judge(job: dict[str, Any], requests: TextIO, replies: TextIO) -> None:
    """Run the tests; names of its own, or not known here, are the candidate's."""
    names = module("judge")
    exec(job["given"], names)
    tree = ast.parse(job["tests"])
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    unknown = used - names.keys() - set(dir(builtins))
    for name in unknown | set(job["own"]):
        names[name] = remote(name, requests, replies)
    exec(compile(tree, "tests", "exec"), names)


def candidate(job: dict[str, Any], replies: TextIO, requests: TextIO) -> None:
    """Run the program, then the calls that come, until the judge closes the pipe."""
    names = module("candidate")
    exec(compile(job["program"], "program", "exec"), names)
    for line in requests:
        name, given, named = json.loads(line)
        try:
            value = names[name](*unpacked(given), **unpacked(named))
            reply = json.dumps(["value", packed(value)])
        except BaseException as error:
            reply = json.dumps(["raised", f"{type(error).__name__}: {error!s:.100}"])
        print(reply, file=replies, flush=True)


def main() -> None:
    """Do the job in the file with this number; a verdict goes where errors went."""
    with open(int(sys.argv[1]), encoding="utf-8") as file:
        job = json.load(file)
    writes = os.fdopen(os.dup(1), "w", encoding="utf-8")
    reads = os.fdopen(os.dup(0), encoding="utf-8")
    errors = os.dup(2)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nothing, number)  # what prints or asks for input reaches nothing
    confine()
    if "program" in job:
        candidate(job, writes, reads)
        return
    try:
        judge(job, writes, reads)
        verdict = "passed"
    except BaseException as error:
        verdict = f"failed: {type(error).__name__}: {error!s:.200}"
    os.write(errors, verdict.encode(errors="replace"))


if __name__ == "__main__":
    main()
