"""JSONL files and messages: every bad line refused with its place."""

import json

import pytest

from moebook.data import files, hub
from moebook.errors import Refusal

GOOD = b'{"problem": "a", "solution": "b"}\n'


def written(folder, content):
    path = folder / "own.jsonl"
    path.write_bytes(content)
    return path


def test_a_byte_order_mark_crlf_and_empty_lines_are_accepted(tmp_path):
    path = written(tmp_path, b"\xef\xbb\xbf" + GOOD.replace(b"\n", b"\r\n") + b"\r\n\n" + GOOD)
    assert [where.rpartition(":")[2] for where, _ in files.objects(path)] == ["1", "4"]
    assert [row["prompt"] for row in hub.load("magicoder_oss", path=path)] == ["a", "a"]


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "own.jsonl:1: the file is empty"),
        (b"\n \n", "own.jsonl:1: the file is empty"),
        (GOOD + b'{"problem": "a"', "own.jsonl:2: not JSON"),
        (GOOD + b"\n[1]", "own.jsonl:3: a row is list, expected an object"),
        (GOOD + b"[" * 100_000, "own.jsonl:2: JSON nested too deeply"),
        (GOOD + b'{"problem": "a"}', "own.jsonl:2: field 'solution' is missing; the row has prob"),
        (b'{"problem": "a", "solution": 4}', "own.jsonl:1: field 'solution' is int, expected text"),
        (b'{"problem": "a", "solution": null}', "field 'solution' is NoneType"),
        (GOOD + b'{"problem": "\xff", "solution": "b"}', "own.jsonl:2: invalid UTF-8 at byte 13"),
        (b'{"problem": "\\ud800", "solution": "b"}', "'problem' holds a lone surrogate at 0"),
    ],
)
def test_bad_lines_are_refused_with_file_and_line(tmp_path, content, match):
    with pytest.raises(Refusal, match=f"E-DATA: .*{match}"):
        hub.load("magicoder_oss", path=written(tmp_path, content))


USER, REPLY = {"role": "user", "content": "a"}, {"from": "gpt", "value": "b"}


def test_an_exchange_has_a_prompt_an_answer_and_perhaps_a_system_message():
    exchange = {"prompt": "a", "answer": "b"}
    assert files.exchange([USER, REPLY], "x") == exchange
    system = {"role": "system", "content": "s"}
    assert files.exchange([system, USER, REPLY], "x") == exchange | {"system": "s"}


@pytest.mark.parametrize(
    ("messages", "match"),
    [
        ([{"role": "usr", "content": "x"}], "x:1: unknown chat role 'usr': did you mean 'user'"),
        ([USER], "messages hold prompt"),
        ([{"role": "user", "content": 3}], "role and content as text"),
        ([USER, {"role": "gpt", "content": "\ud800"}], "field 'answer' holds a lone surrogate"),
        ("user", "messages is str"),
        (["user"], "a message is str"),
        ([], "messages hold nothing"),
    ],
)
def test_conversations_that_are_no_exchange_are_refused(messages, match):
    with pytest.raises(Refusal, match=f"E-DATA: .*{match}"):
        files.exchange(messages, "x:1")


def test_a_line_above_the_limit_is_refused_without_reading_it_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LONGEST_LINE", 100)
    long = json.dumps({"problem": "a" * 200}).encode()
    with pytest.raises(Refusal, match=r"own.jsonl:2: line longer than 100 bytes"):
        list(files.objects(written(tmp_path, GOOD + long)))


def test_a_script_and_a_missing_file_are_refused(tmp_path):
    with pytest.raises(Refusal, match=r"E-REMOTECODE: .*load.py: a script is not data"):
        list(files.objects(tmp_path / "load.py"))
    with pytest.raises(Refusal, match=r"E-NOFILE: .*none.jsonl: no such file"):
        list(files.objects(tmp_path / "none.jsonl"))
