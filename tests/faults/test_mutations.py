"""Files changed at random, of every kind that is read: one line, or the value that was there.

What a hash promises never reads as something else; nothing ends in a traceback or hangs.
"""

import json
import random
import resource
import signal
import struct
import unicodedata
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from kinds import KINDS, Kind

from moebook.errors import Refusal

MUTATIONS = 12  # of each kind
LIMIT = 10  # seconds, after which a read hangs
ROOM = 4 * 2**30  # bytes that a read may take beside what is taken already
DEEP = 10_000
WORDS = dict.fromkeys(("refused", "equal", "changed", "tracebacks", "hangs"), 0)
MARK = "\u2603deep"  # stands where a text cannot be built as a tree


class Hang(BaseException):
    """A read that takes too long; no `except Exception` stops it."""


def junk(draw: random.Random) -> Any:
    """A value of another type, a number beyond reason, or hostile text."""
    return draw.choice(
        [
            None,
            True,
            False,
            0,
            -1,
            3,
            10**7,
            2**63,
            10**400,
            0.5,
            1e308,
            float("nan"),
            float("inf"),
            "",
            "0",
            "x",
            "../../x",
            "a\x1b[2J\x07\r\nb",
            "\ud800",
            "\u202ex",
            "<script>",
            "x" * 5000,
            "!!python/name:os.system",
            [],
            [[]],
            [None],
            {},
            {"": {}},
            {"a": 1},
            [1] * 3000,
            MARK,
        ]
    )


def places(tree: Any) -> list[tuple[Any, Any]]:
    """Every container of a tree with each of its keys or indices."""
    pairs = []
    level = [tree]
    while level:
        container = level.pop()
        is_dict = isinstance(container, dict)
        for key, value in container.items() if is_dict else enumerate(container):
            pairs.append((container, key))
            if isinstance(value, dict | list):
                level.append(value)
    return pairs


def change_tree(tree: Any, draw: random.Random) -> Any:
    """Change one place of a tree of mappings and lists, or all of it."""
    if (
        not isinstance(tree, dict | list)
        or not (found := places(tree))
        or draw.random() < 0.05
    ):
        return junk(draw)
    where, key = draw.choice(found)
    kind = draw.randrange(6)
    if kind == 0:
        del where[key]
    elif kind == 1 and isinstance(where, dict):
        where[draw.choice(["x", "", key[::-1] if isinstance(key, str) else "y"])] = (
            where.pop(key)
        )
    elif kind == 2:
        other, second = draw.choice(found)
        where[key], other[second] = other[second], where[key]
    elif kind == 3 and isinstance(where[key], int | float):
        where[key] = draw.choice(
            [-where[key], where[key] * 10**6, where[key] + 1, where[key] / 3]
        )
    else:
        where[key] = junk(draw)
    return tree


def as_json(content: bytes, draw: random.Random) -> bytes:
    """Change a JSON file as a tree, or give an object a key twice."""
    text = json.dumps(change_tree(json.loads(content), draw))
    if draw.random() < 0.1:
        text = text.replace("{", '{"a": 1, "a": 2, ', 1)
    return text.replace(json.dumps(MARK), "[" * DEEP + "]" * DEEP).encode(
        "utf-8", "surrogatepass"
    )


def as_yaml(content: bytes, draw: random.Random) -> bytes:
    """Change a YAML file as a tree; or put an anchor, a tag or a bomb into its text."""
    if draw.random() < 0.2:
        lines = content.decode().splitlines(keepends=True)
        odd = [
            "x: &a [1]\ny: *a\n",
            "x: !!python/object:os.x {}\n",
            "  - [\n",
            "\t x: 1\n",
            "t: 1:30\n",
            "a: 1\na: 2\n",
            lines[-1],
            "%YAML 9\n",
            "? [a]\n: 1\n",
        ]
        lines.insert(draw.randrange(len(lines) + 1), draw.choice(odd))
        return "".join(lines).encode()
    text = yaml.dump(
        change_tree(yaml.load(content, yaml.CSafeLoader), draw), allow_unicode=True
    )
    deep = "[" * (DEEP // 10) + "]" * (DEEP // 10)
    return text.replace(MARK, deep).encode("utf-8", "surrogatepass")


def as_safetensors(content: bytes, draw: random.Random) -> bytes:
    """Change the header of a safetensors file, or the length that it states."""
    size = struct.unpack("<Q", content[:8])[0]
    if draw.random() < 0.2:
        stated = draw.choice([0, size - 1, size + 8, 2**40, 2**63, 2**64 - 1])
        return struct.pack("<Q", stated) + content[8:]
    header = json.dumps(change_tree(json.loads(content[8 : 8 + size]), draw))
    header = header.replace(json.dumps(MARK), "[" * DEEP + "]" * DEEP).encode()
    return struct.pack("<Q", len(header)) + header + content[8 + size :]


def as_run(path: Path, draw: random.Random) -> None:
    """Change what a run's file says of itself, or one of its numbers; the parquet stays whole."""
    table = pq.read_table(path)
    if draw.random() < 0.3:
        lines = table.to_pylist()
        with suppress(TypeError, ValueError):  # what no column can hold
            table = type(table).from_pylist(change_tree(lines, draw), table.schema)
    head = json.loads(table.schema.metadata[b"moebook"])
    told = json.dumps(change_tree(head, draw)).replace(
        json.dumps(MARK), "[" * DEEP + "]" * DEEP
    )
    pq.write_table(table.replace_schema_metadata({b"moebook": told.encode()}), path)


def as_bytes(content: bytes, draw: random.Random) -> bytes:
    """Flip, cut, extend, blank, splice or prefix bytes."""
    at, end = sorted(draw.randrange(len(content) + 1) for _ in range(2))
    odd = draw.choice([b"\xff\xfe", b"\x00", b"\x1b[2J", b"\r\n", b"\xed\xa0\x80"])
    return draw.choice(
        [
            lambda: (
                content[:at]
                + bytes([content[at] ^ 1 << draw.randrange(8)])
                + content[at + 1 :]
                if at < len(content)
                else b""
            ),
            lambda: content[:at],
            lambda: content[:at] + content[end:],
            lambda: content[:at] + bytes(end - at) + content[end:],
            lambda: content[:at] + content[at:end] * 2 + content[end:],
            lambda: content + draw.randbytes(9),
            lambda: content[:at] + odd + content[at:],
            lambda: b"\xef\xbb\xbf" + content,
            lambda: content.replace(b"\n", b"\r\n"),
            lambda: content[end:] + content[:end],
            lambda: b"",
        ]
    )()


def as_table(content: bytes, draw: random.Random) -> bytes:
    """Change the YAML header of a table of a paper, as a tree."""
    lines = content.decode().splitlines()
    head = [line for line in lines if line.startswith("#")]
    changed = as_yaml("\n".join(line[2:] for line in head).encode(), draw).splitlines()
    return b"\n".join(
        [*(b"# " + line for line in changed), *map(str.encode, lines[len(head) :])]
    )


BY_ENDING: dict[str, Callable[[bytes, random.Random], bytes]] = {
    ".json": as_json,
    ".ipynb": as_json,
    ".yaml": as_yaml,
    ".yml": as_yaml,
    ".safetensors": as_safetensors,
    ".csv": as_table,
}


def mutate(path: Path, draw: random.Random) -> None:
    """Change a file: as what its name says it is, or as bytes; once in a while it is no file."""
    content = path.read_bytes()
    way = BY_ENDING.get(path.suffix)
    if draw.random() < 0.02:
        path.unlink()
        if draw.random() < 0.5:
            path.mkdir()
    elif path.suffix == ".parquet" and path.stem != "rows" and draw.random() < 0.6:
        as_run(path, draw)
    else:
        chosen = way if way and draw.random() < 0.7 else as_bytes
        path.write_bytes(chosen(content, draw))


def outcome(kind: Kind, folder: Path, whole: Any) -> tuple[str, str]:
    """Read a changed file, and say what came of it: a word, and what is to be shown."""

    def stop(*_: Any) -> None:
        raise Hang(f"took more than {LIMIT} s")

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = signal.signal(signal.SIGALRM, stop)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, limits[1]))
    signal.alarm(LIMIT)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            value = kind.read(folder)
    except Refusal as refusal:
        odd = [
            c
            for c in str(refusal)
            if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp")
        ]
        return "refused" if not odd and len(str(refusal)) < 2100 else "tracebacks", str(
            refusal
        )
    except Hang as hang:
        return "hangs", str(hang)
    except BaseException as error:
        return "tracebacks", f"{type(error).__name__}: {error!s:.150}"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, limits)
    return ("equal" if value == whole else "changed"), f"{value!s:.150}"


@pytest.mark.parametrize("name", KINDS)
def test_a_changed_file_is_refused_or_reads_as_it_was(
    name, tmp_path, request, times, figures
):
    kind = KINDS[name]
    kind.make(tmp_path, request.getfixturevalue)
    path = tmp_path / kind.file
    whole = kind.read(tmp_path)
    wrong = []
    content = path.read_bytes()
    for number in range(MUTATIONS * times):
        mutate(path, random.Random(f"{name}/{number}"))
        word, shown = outcome(kind, tmp_path, whole)
        figures("mutations", name, mutations=1, **WORDS | {word: 1})
        if word in ("tracebacks", "hangs") or (word == "changed" and kind.promised):
            wrong.append(f"{number}: {word}: {shown}")
        if path.is_dir():
            path.rmdir()
        path.write_bytes(content)
    assert not wrong, f"{len(wrong)} of {name}\n" + "\n".join(wrong[:12])
