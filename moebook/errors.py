"""The vocabulary of refusals: bad input ends in one line: what, where, and how to fix it."""

from __future__ import annotations

import difflib
import errno
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NoReturn

__all__ = [
    "Refusal",
]

LONGEST = 2000  # characters of a message
SYSTEM = dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EIO), "E-DISK")
SYSTEM |= dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "E-PERM")
FULL = (errno.ENOSPC, errno.EDQUOT)
LESS = (
    "close other programs, or ask for less at once: a smaller base or batch, fewer jobs"
)
# What says that memory ran out: exceptions of Python, NumPy, Arrow and torch by their names, a
# GPU's libraries, and the system where a process, a thread or a mapped file finds no room.
_MEMORY = re.compile(
    r"MemoryError|OutOfMemoryError|bad_alloc|ALLOC_FAILED|an't start new thread"
    r"|[Cc]an(not|'t) allocate memory|not enough memory"
    r"|(CUDA|HIP)( error|\]): out of memory|Cuda failure( \d+)? 'out of memory'"
    r"|failed to map segment from shared object(?!: )"  # a colon and another reason may follow
)
# How libraries in Rust tell the number of what the system refuses.
_NUMBER = re.compile(r"\(os error (\d+)\)")
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Spell out what steers a terminal or starts a line: controls, turned text, lone surrogates."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


class Refusal(Exception):
    """Input that cannot be used, told in one line: what is wrong, where, and what was expected.

    Control characters in what it quotes are escaped, the middle of a very long one is
    left out.
    """

    def __init__(self, code: str, message: str) -> None:
        self.code = code
        line = printable(" ".join(message.split()))
        if len(line) > LONGEST:
            line = f"{line[: LONGEST // 2]} ... {line[-LONGEST // 3 :]}"
        self.message = line
        super().__init__(f"{self.code}: {self.message}")

    def __reduce__(self) -> tuple[type[Refusal], tuple[str, str]]:
        """Pass from one process to another as what it was made of."""
        return (Refusal, (self.code, self.message))

    def _render_traceback_(self) -> list[str]:
        """IPython's hook: a notebook shows the one line, not a traceback."""
        return [str(self)]


def refuse(code: str, message: str) -> NoReturn:
    """Raise a `Refusal` with this code and message."""
    raise Refusal(code, message)


@contextmanager
def located(where: object, code: str = "", fix: str = "") -> Iterator[None]:
    """Say in a block's refusals where the values come from; give them a ``code`` and a ``fix``."""
    try:
        yield
    except Refusal as problem:
        message = problem.message
        if where:
            message = f"{where}: {message}"
        if fix:
            message = f"{message}; {fix}"
        refuse(code or problem.code, message)


@contextmanager
def extra(name: str, what: str) -> Iterator[None]:
    """Say in one line what to install where a block imports a package of an extra.

    ``name`` is the extra's in pyproject.toml, ``what`` needs it. E-DEP where the
    package is not here; a fault of our own imports stays what it is.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "moebook"):
            raise
        command = f"pip install 'moebook[{name}]'"
        refuse("E-DEP", f"{what} needs the package {package}: {command}")


def lacks_memory(text: str) -> bool:
    """Whether an exception's name and message, or a process's last lines, say so."""
    return bool(_MEMORY.search(text))


def no_memory(reason: str) -> str:
    """Say what to free where memory ran out, for the ``reason`` that was given.

    Of a long one, as NumPy gives where its libraries find no room, the line that says
    so is quoted.
    """
    lines = [line for line in reason.splitlines() if lacks_memory(line)] or [reason]
    return f"memory ran out ({lines[0].strip()[:400]}); {LESS}"


def told(error: Exception, what: str = "") -> Refusal:
    """Tell in one line what ended a piece of work, after ``what`` came of it.

    A refusal keeps its code. Others get E-MEMORY where memory ran out, E-DISK, E-PERM
    or E-OS for what the system refuses, and E-INTERNAL, a fault of ours, for the rest.
    """
    if isinstance(error, Refusal):
        code = error.code
        reason = error.message
    else:
        code, reason = _read(error)
    return Refusal(code, f"{what}: {reason}" if what else reason)


def _read(error: Exception) -> tuple[str, str]:
    """Return the code of an exception that is no refusal, and what it says, with a fix."""
    whole = f"{type(error).__name__}: {error!s}"
    if _by_memory(error, whole):
        return "E-MEMORY", no_memory(whole.removesuffix(": "))
    reason = f"{type(error).__name__}: {error!s:.400}".removesuffix(": ")
    number = _of_system(error)
    if number is None:
        return "E-INTERNAL", reason
    if number in FULL:
        reason += "; make room there"
    return SYSTEM.get(number, "E-OS"), reason


def _by_memory(error: Exception, whole: str) -> bool:
    """Whether memory ran out; the path that an error of the system names says nothing of it."""
    if isinstance(error, OSError) and error.strerror:
        return error.errno == errno.ENOMEM or lacks_memory(error.strerror)
    return lacks_memory(whole)


def _of_system(error: Exception) -> int | None:
    """Return the number of what the system refused, 0 for one without, None for another error.

    Exceptions of safetensors and tokenizers are no OSError, and say it in their text.
    """
    if isinstance(error, OSError):
        return error.errno or 0
    found = _NUMBER.search(str(error))
    return int(found[1]) if found else None


@contextmanager
def saving(folder: object) -> Iterator[None]:
    """Tell in one line what the system refuses where a block saves a folder."""
    try:
        yield
    except Exception as error:
        if isinstance(error, Refusal) or _of_system(error) is None:
            raise
        raise told(error, f"{folder} is not saved") from None


@contextmanager
def placed(where: object) -> Iterator[None]:
    """Name the file or folder that a block writes in what a full disk says, which names none."""
    try:
        yield
    except OSError as error:
        if error.filename is None and SYSTEM.get(error.errno or 0) == "E-DISK":
            error.filename = str(where)
        raise


def nearest(name: str, choices: Iterable[str]) -> str:
    """Name the closest of the choices, then list them all: the tail of an "unknown ..." message."""
    names = sorted(map(str, choices))
    close = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    guess = f"did you mean '{close[0]}'? " if close else ""
    return f"{guess}one of: {', '.join(names)}"


def refuse_unknown(name: str, choices: Iterable[str], code: str, message: str) -> None:
    """Refuse a name that is none of the choices; the `nearest` of them follow the message."""
    if not isinstance(name, str) or name not in choices:  # a list has no hash
        refuse(code, f"{message} {nearest(name, choices)}")


def shown(value: object) -> str:
    """Write a value for a refusal: the beginning of its ``repr``, or its type where it has none."""
    try:
        return repr(value)[:200]
    except (RecursionError, ValueError):
        # Nested too deeply, or an int of more than 4,300 digits.
        return f"a {type(value).__name__} too large to show"
