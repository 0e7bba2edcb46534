"""What is told of exceptions that are no refusals, in one line."""

import errno
import os

import pytest
from safetensors import SafetensorError

from moebook.errors import saving, told
from tests.refusals import refused


# That of tokenizers is a plain one.
@pytest.mark.parametrize("kind", [SafetensorError, Exception])
@pytest.mark.parametrize(
    ("number", "code", "fix"),
    [
        (errno.ENOSPC, "E-DISK", "; make room there"),
        (errno.EIO, "E-DISK", ""),
        (errno.EACCES, "E-PERM", ""),
        (errno.ENOENT, "E-OS", ""),
    ],
)
def test_a_library_in_rust_tells_the_systems_errors_like_python(
    kind, number, code, fix, tmp_path
):
    words = f"{os.strerror(number)} (os error {number})"
    refusal = told(kind(f"I/O error: {words}"))
    assert refusal.code == code
    assert refusal.message == f"{kind.__name__}: I/O error: {words}{fix}"

    def save(error):
        with saving(tmp_path):
            raise error

    for error in (kind(words), OSError(number, words)):
        refused(f"{code}: {tmp_path} is not saved: ", save, error)


def test_a_fault_while_a_folder_is_saved_stays_what_it_is(tmp_path):
    assert told(SafetensorError("header too large")).code == "E-INTERNAL"
    with pytest.raises(SafetensorError, match="too large"), saving(tmp_path):
        raise SafetensorError("header too large")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (FileNotFoundError(errno.ENOENT, "No such file", "/MemoryError.log"), "E-OS"),
        (OSError(errno.ENOSPC, "No space", "/not enough memory/x"), "E-DISK"),
        (OSError(errno.ENOMEM, "Kein Speicher", "/data"), "E-MEMORY"),
        (OSError("x.so: failed to map segment from shared object"), "E-MEMORY"),
        (OSError("plain"), "E-OS"),
    ],
)
def test_a_path_says_nothing_of_memory(error, code):
    assert told(error).code == code
