"""Users' own JSONL files: three forms of rows, and every bad line refused with its place."""

import json

import pytest

from moebook.data import files
from moebook.errors import Refusal

GOOD = b'{"prompt": "a", "answer": "b"}\n'


def written(folder, content):
    path = folder / "own.jsonl"
    path.write_bytes(content)
    return path


def test_the_three_forms_of_a_row_are_read_with_their_optional_fields(tmp_path):
    raw = [
        {"prompt": "a", "answer": "b", "task": "t", "domain": "d", "rationale": "r", "id": 1},
        {"instruction": "a", "input": "c", "output": "b"},
        {"instruction": "a", "output": "b", "system": None},
        {
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "b"},
            ]
        },
    ]
    path = written(tmp_path, "\n".join(json.dumps(row) for row in raw).encode())
    own = {"task": "own", "domain": "own"}
    assert files.read(path) == [
        {"prompt": "a", "answer": "b", "task": "t", "domain": "d", "rationale": "r"},
        own | {"prompt": "a\nc", "answer": "b"},
        own | {"prompt": "a", "answer": "b"},
        own | {"system": "s", "prompt": "a", "answer": "b"},
    ]


def test_a_byte_order_mark_crlf_and_empty_lines_are_accepted(tmp_path):
    path = written(tmp_path, b"\xef\xbb\xbf" + GOOD.replace(b"\n", b"\r\n") + b"\r\n\n")
    assert [row["prompt"] for row in files.read(path)] == ["a"]


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "own.jsonl:1: the file is empty"),
        (b"\n \n", "own.jsonl:1: the file is empty"),
        (GOOD + b'{"prompt": "a"', "own.jsonl:2: not JSON"),
        (GOOD + b"\n[1]", "own.jsonl:3: a row is list, expected an object"),
        (GOOD + b"[" * 100_000, "own.jsonl:2: JSON nested too deeply"),
        (GOOD + b'{"prompt": "a"}', "own.jsonl:2: field 'answer' is missing; the row has prompt"),
        (b'{"prompt": "a", "answer": 4}', "own.jsonl:1: field 'answer' is int, expected text"),
        (b'{"prompt": "a", "answer": null}', "field 'answer' is NoneType"),
        (b'{"prompt": " ", "answer": "b"}', "own.jsonl:1: prompt is empty"),
        (GOOD + b'{"prompt": "\xff", "answer": "b"}', "own.jsonl:2: invalid UTF-8 at byte 12"),
        (b'{"prompt": "\\ud800", "answer": "b"}', "field 'prompt' holds a lone surrogate at 0"),
        (
            b'{"messages": [{"role": "usr", "content": "x"}]}',
            "own.jsonl:1: unknown chat role 'usr': did you mean 'user'",
        ),
        (b'{"messages": [{"role": "user", "content": "x"}]}', "messages hold prompt"),
        (b'{"messages": [{"role": "user", "content": 3}]}', "role and content as text"),
        (b'{"messages": "user"}', "messages is str"),
        (b'{"messages": ["user"]}', "a message is str"),
        (b'{"messages": []}', "messages hold nothing"),
        (
            b'{"messages": [{"role": "user", "content": "\\ud800"}, '
            b'{"role": "assistant", "content": "b"}]}',
            "own.jsonl:1: field 'prompt' holds a lone",
        ),
        (GOOD + b'{"prompt": "c", "answer": "d"}\n' + GOOD, "jsonl:3: this row is already at .*:1"),
        (
            b'{"id": 7, "prompt": "a", "answer": "b"}\n{"id": 7, "prompt": "c", "answer": "d"}',
            "own.jsonl:2: id 7 is already at .*own.jsonl:1",
        ),
    ],
)
def test_bad_lines_are_refused_with_file_and_line(tmp_path, content, match):
    with pytest.raises(Refusal, match=f"E-DATA: .*{match}"):
        files.read(written(tmp_path, content))


def test_a_line_above_the_limit_is_refused_without_reading_it_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LONGEST_LINE", 100)
    with pytest.raises(Refusal, match=r"own.jsonl:2: line longer than 100 bytes"):
        files.read(written(tmp_path, GOOD + b'{"prompt": "' + b"a" * 200 + b'"}'))


def test_a_script_and_a_missing_file_are_refused(tmp_path):
    with pytest.raises(Refusal, match=r"E-REMOTECODE: .*load.py: a script is not data"):
        files.read(tmp_path / "load.py")
    with pytest.raises(Refusal, match=r"E-NOFILE: .*none.jsonl: no such file"):
        files.read(tmp_path / "none.jsonl")
