"""Raw rows from files and the hub: templates, draws, refusals with their place."""

import json
from collections import Counter
from unittest.mock import Mock

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from moebook.data import hub, reading, templates
from moebook.data.templates import final_number
from moebook.errors import Refusal
from tests.refusals import refused

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TALK = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a", "weight": 1.0}]
CHOICES = {"label": ["A", "B"], "text": ["x", "y"]}
PLAIN = {"prompt": "q", "answer": "a"}
ARC = {"prompt": "Question: q?\nA. x\nB. y\nAnswer:", "answer": "B. y"}
OPEN = {"prompt": "Question: q?\nAnswer:"}
ROWS = {  # a row as the hub has it, and what becomes of it
    "slimorca": (
        {"conversations": [{"from": "system", "value": "s", "weight": None}, *TALK]},
        PLAIN | {"system": "s"},
    ),
    "magicoder_oss": ({"lang": "python", "problem": "q", "solution": "a"}, PLAIN),
    "magicoder_evol": ({"instruction": "q", "response": "a"}, PLAIN),
    "metamathqa": ({"query": "q", "original_question": "o", "response": "a"}, PLAIN),
    "openorca": (
        {"id": "niv.1", "system_prompt": "s", "question": "q", "response": "a"},
        PLAIN | {"system": "s"},
    ),
    "wizardlm": ({"idx": "1", "conversations": TALK}, PLAIN),
    "commonsense_qa": (
        {
            "question": "q?",
            "question_concept": "c",
            "answerKey": "B",
            "choices": CHOICES,
        },
        {"prompt": "q?\nA. x\nB. y", "answer": "B. y"},
    ),
    "siqa": (
        {
            "context": "c",
            "question": "q?",
            "answerA": "x",
            "answerB": "y",
            "answerC": "z",
            "label": "3",
        },
        {"prompt": "c\nq?\nA. x\nB. y\nC. z", "answer": "C. z"},
    ),
    "piqa": (
        {"goal": "g", "sol1": "x", "sol2": "y", "label": 1},
        {"prompt": "Question: g\nA. x\nB. y\nAnswer:", "answer": "B. y"},
    ),
    "arc_easy": (
        {
            "question": "q?",
            "answerKey": "2",
            "choices": CHOICES | {"label": ["1", "2"]},
        },
        ARC,
    ),
    "arc_challenge": (
        {"question": "q?", "answerKey": "A", "choices": CHOICES},
        ARC | {"answer": "A. x"},
    ),
    "boolq": (
        {"question": "is it", "answer": True, "passage": "p"},
        {"prompt": "p\nQuestion: is it\nA. Yes\nB. No\nAnswer:", "answer": "A. Yes"},
    ),
    "gsm8k": (
        {"question": "q", "answer": "2+2 = <<2+2=4>>4\n#### 4"},
        {"prompt": "Question: q", "answer": "4", "rationale": "2+2 = <<2+2=4>>4"},
    ),
    "mbpp": (
        {"task_id": 1, "text": "q", "code": "a", "test_list": ["assert f() == 1"]},
        PLAIN | {"tests": "assert f() == 1"},
    ),
    **dict.fromkeys(
        ("arc_easy_open", "arc_challenge_open"),
        (
            {"question": "q?", "answerKey": "A", "choices": CHOICES},
            OPEN | {"answer": "x"},
        ),
    ),
    "openbookqa_open": (
        {"question_stem": "q", "answerKey": "B", "choices": CHOICES},
        {"prompt": "q", "answer": "y"},
    ),
    "boolq_closed": ({"question": "q", "answer": False}, OPEN | {"answer": "no"}),
    "piqa_open": (
        {"goal": "q?", "sol1": "x", "sol2": "y", "label": 1},
        OPEN | {"answer": "y"},
    ),
    "siqa_open": (
        {
            "context": "c",
            "question": "q?",
            "answerA": "x",
            "answerB": "y",
            "answerC": "z",
            "label": "3",
        },
        {"prompt": "Q: c q?\nA:", "answer": "z"},
    ),
    "winogrande_open": (
        {"sentence": "It _ barks.", "option1": "x", "option2": "y", "answer": "2"},
        {"prompt": "Complete: It ", "answer": "y barks."},
    ),
    "gsm8k_solution": (
        {"question": "q?", "answer": "2\n#### 2"},
        OPEN | {"answer": "2\n#### 2"},
    ),
}
RAW = {name: raw for name, (raw, _) in ROWS.items()}
GOOD = b'{"problem": "a", "solution": "b"}\n'


def parquet(folder, *rows):
    path = folder / "train-00000-of-00001.parquet"
    datasets.Dataset.from_list(list(rows)).to_parquet(str(path))
    return path


def written(folder, content, name="train.jsonl"):
    (folder / name).write_bytes(content)
    return folder / name


def jsonl(folder, *rows):
    return written(folder, "".join(json.dumps(row) + "\n" for row in rows).encode())


def test_every_data_set_of_the_catalogue_is_tested_and_mixtures_are_made_of_them():
    assert set(ROWS) == set(hub.CATALOGUE)
    for sizes in hub.MIXTURES.values():
        for key in sizes:
            assert set(key.split("+")) <= set(hub.CATALOGUE)
    assert sum(hub.MIXTURES["idae-500k"].values()) == 500_000  # PESC, Table 5
    assert sum(hub.MIXTURES["idae-720k"].values()) == 720_000


@pytest.mark.parametrize("write", [parquet, jsonl])
@pytest.mark.parametrize("name", RAW)
def test_raw_rows_get_the_papers_templates(tmp_path, name, write):
    (row,) = hub.load(name, path=write(tmp_path, RAW[name]))
    assert row == {"task": name, "domain": hub.CATALOGUE[name].domain} | ROWS[name][1]


@pytest.mark.parametrize(
    ("name", "label", "answer"),
    [
        ("piqa", 1.0, "B. y"),
        ("siqa_open", 3.0, "z"),
        ("arc_easy", 2.0, "B. y"),
        ("piqa", float("nan"), None),
        ("piqa", 0.5, None),
        ("piqa", True, None),
        ("piqa", "1.0", None),
        ("boolq_closed", "false", None),
        ("boolq_closed", 0, None),
    ],
)
@pytest.mark.parametrize("write", [parquet, jsonl])
def test_a_label_that_pandas_made_a_float_is_read_whole_and_another_type_refused(
    tmp_path, name, label, answer, write
):
    path = write(tmp_path, RAW[name] | {hub.CATALOGUE[name].answer: label})
    if answer is None:
        refused("E-DATA: .*:1: answer .* is none of", hub.load, name, path=path)
    else:
        (row,) = hub.load(name, path=path)
        assert row["answer"] == answer


def test_a_draw_is_without_replacement_and_repeats_with_its_seed(tmp_path):
    path = jsonl(tmp_path, *({"text": f"q{i}", "code": "a"} for i in range(20)))
    drawn = hub.load("mbpp", path=path, size=10, seed=1)
    assert len({row["prompt"] for row in drawn}) == 10
    assert drawn == hub.load("mbpp", path=path, size=10, seed=1)
    assert drawn != hub.load("mbpp", path=path, size=10, seed=2)
    refused(
        "E-DATA: mbpp/train: have 20 rows, need 21",
        hub.load,
        "mbpp",
        path=path,
        size=21,
    )


def test_a_mixture_asks_the_hub_for_pinned_commits_and_pools_joined_names(monkeypatch):
    asked = []

    def fake(repo, config, *, data_files, split, revision):
        asked.append((repo, config, split, revision))
        name = next(key for key, source in hub.CATALOGUE.items() if source.repo == repo)
        return datasets.Dataset.from_list([RAW[name]] * 3)

    monkeypatch.setattr(datasets, "load_dataset", fake)
    pins = {name: f"{index:040x}" for index, name in enumerate(hub.CATALOGUE)}
    rows = hub.mixture({"metamathqa": 2, "magicoder_oss+magicoder_evol": 6}, pins)
    counts = Counter(row["task"] for row in rows)
    assert [counts[n] for n in ("metamathqa", "magicoder_oss", "magicoder_evol")] == [
        2,
        3,
        3,
    ]
    assert sum(counts.values()) == 8
    assert ("meta-math/MetaMathQA", None, "train", pins["metamathqa"]) in asked
    with pytest.raises(Refusal, match="E-PIN: Open-Orca/SlimOrca: revision is None"):
        hub.mixture({"slimorca": 1}, hub.pins(""))


def test_a_folder_stands_in_for_the_hub_where_no_commit_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("DATA", str(tmp_path))
    pins = hub.pins(f"mbpp={COMMIT}", "$DATA")
    sets = hub.CATALOGUE
    for split, name in (
        ("google/boolq-closed-book/train", "boolq_closed"),
        ("baber/piqa/validation", "piqa_open"),
    ):
        path = tmp_path / f"{split}.jsonl"
        path.parent.mkdir(parents=True)
        jsonl(path.parent, *(RAW[name] | {"number": i} for i in range(4))).rename(path)
    (row,) = hub.mixture({"boolq_closed": 1}, pins)
    assert (row["task"], row["answer"], pins["mbpp"]) == ("boolq_closed", "no", COMMIT)
    for part, numbers in {"validation[:50%]": [0, 1], "": [2, 3]}.items():
        half = hub.pinned(sets["piqa_open"], tmp_path, part)
        assert [row["number"] for _, row in half] == numbers
    assert [*hub.contents("$DATA")] == [
        "baber/piqa/validation.jsonl",
        "google/boolq-closed-book/train.jsonl",
    ]
    assert hub.contents("") == {}
    with pytest.raises(
        Refusal, match=r"E-NOFILE: .*gsm8k/main: split 'train' is missing"
    ):
        hub.mixture({"gsm8k_solution": 1}, pins)
    refused(r"E-NOFILE: [$]NONE: no such folder", hub.pins, "", "$NONE")


def test_the_real_sets_give_the_rows_of_the_real_mixture(shared):
    rows = hub.mixture(hub.MIXTURES["real"], hub.pins("", shared / "data" / "real"))
    assert len(rows) == sum(hub.MIXTURES["real"].values())
    assert {row["domain"] for row in rows} == {"code", "common_sense", "mathematics"}


def test_commits_and_names_are_read_or_refused():
    assert hub.pins("") == {}
    pinned = {"gsm8k": COMMIT, "mbpp": "1"}
    assert hub.pins(f"gsm8k={COMMIT}, mbpp = 1") == pinned
    named = "Toolformer (th=0.6)"  # one of Rocket's bank
    pinned = {named: COMMIT, "mbpp": "1"}
    known = [*hub.CATALOGUE, named]
    assert hub.pins(f"{named}={COMMIT},mbpp=1", known=known) == pinned
    for text in (named, f"{named}={COMMIT}=1", f"{named}=1,{named}=1"):
        with pytest.raises(Refusal, match="E-PIN: revisions is 'Toolformer"):
            hub.pins(text, known=known)
    for name in ("gms8k", ""):
        words = f"E-PIN: revisions names no data set '{name}'; "
        refused(words, hub.pins, f"mbpp=1,{name}={COMMIT}" if name else f" ={COMMIT}")
    for text in ("gsm8k", "gsm8k=1=2", "gsm8k=1,gsm8k=2"):
        refused(f"E-PIN: revisions is '{text}', expected name=commit", hub.pins, text)
    for revision in (None, "main", "v1.0", "0" * 40, COMMIT[:12], COMMIT.upper()):
        with pytest.raises(
            Refusal, match=r"E-PIN: openai/gsm8k.*commit of 40 hexadecimal digits"
        ):
            hub.load("gsm8k", revision=revision)
    with pytest.raises(
        Refusal, match="E-DATA: unknown data set 'gsm8': did you mean 'gsm8k'"
    ):
        hub.load("gsm8", revision=COMMIT)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConnectionError("offline"), f"E-OFFLINE: ybisk/piqa@{COMMIT} is not cached"),
        (
            datasets.exceptions.DatasetNotFoundError("no such"),
            f"E-NOFILE: ybisk/piqa@{COMMIT}",
        ),
        (
            RuntimeError("Dataset scripts are no longer supported"),
            "E-REMOTECODE: .*refs/convert",
        ),
        (ValueError("Unknown split"), "E-DATA: ybisk/piqa@.*Unknown split"),
    ],
)
def test_what_the_hub_cannot_give_is_refused(monkeypatch, error, code):
    monkeypatch.setattr(datasets, "load_dataset", Mock(side_effect=error))
    refused(code, hub.load, "piqa", revision=COMMIT)


def test_a_byte_order_mark_crlf_and_empty_lines_are_accepted(tmp_path):
    content = b"\xef\xbb\xbf" + GOOD.replace(b"\n", b"\r\n") + b"\r\n\n" + GOOD
    path = written(tmp_path, content)
    assert [where.rpartition(":")[2] for where, _ in reading.local(path)] == ["1", "4"]
    assert [row["prompt"] for row in hub.load("magicoder_oss", path=path)] == ["a", "a"]


def test_json_lines_in_a_json_file_keep_their_lines(tmp_path):
    path = written(tmp_path, GOOD + b"\n \n" + GOOD, "train.json")
    assert [where for where, _ in reading.local(path)] == [f"{path}:1", f"{path}:4"]
    written(tmp_path, GOOD + b'\n \n{"problem": "a"}', "train.json")
    words = "E-DATA: .*train.json:4: field 'solution' is missing"
    refused(words, hub.load, "magicoder_oss", path=path)


def test_rows_of_a_json_list_are_told_by_number(tmp_path):
    content = json.dumps([{"a": 1}, {"a": 2}], indent=1).encode()
    path = written(tmp_path, content, "train.json")
    assert [where for where, _ in reading.local(path)] == [f"{path}:1", f"{path}:2"]


def test_brackets_in_a_name_are_no_pattern(tmp_path):
    for name in ("rows[1]", "rows1"):
        table = pa.table({"name": [name]})
        pq.write_table(table, tmp_path / f"{name}.parquet")
    rows = reading.local(tmp_path / "rows[1].parquet")
    assert [row["name"] for _, row in rows] == ["rows[1]"]


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"\n \n", "1: the file is empty"),
        (GOOD + b'{"problem": "a"', "2: not JSON"),
        (GOOD + b"\n[1]", "3: a row is list, expected an object"),
        (GOOD + b"[" * 100_000, "2: JSON nested too deeply"),
        (
            GOOD + b'{"problem": "a"}',
            "2: field 'solution' is missing; the row has prob",
        ),
        (
            b'{"problem": "a", "solution": 4}',
            "1: field 'solution' is int, expected text",
        ),
        (GOOD + b'{"problem": "\xff", "solution": "b"}', "2: invalid UTF-8 at byte 13"),
        (
            b'{"problem": "\\ud800", "solution": "b"}',
            "1: field 'problem' holds a lone surrogate",
        ),
        (GOOD + b'{"problem": "' + b"a" * 100_001, "2: line longer than 100,001 bytes"),
    ],
    ids=range(9),
)
def test_bad_lines_are_refused_with_file_and_line(
    tmp_path, monkeypatch, content, match
):
    monkeypatch.setattr(reading, "LONGEST_LINE", 100_001)
    with pytest.raises(Refusal, match=f"E-DATA: .*train.jsonl:{match}"):
        hub.load("magicoder_oss", path=written(tmp_path, content))


@pytest.mark.parametrize(
    ("name", "change", "match"),
    [
        ("gsm8k", {"answer": "4"}, "no last line '#### number'"),
        ("gsm8k", {"answer": "four\n#### four"}, "no last line '#### number'"),
        ("gsm8k", {"answer": "x\n#### 5\nmore 7"}, "no last line '#### number'"),
        ("gsm8k", {"answer": "x\n#### 5 and 7"}, "no last line '#### number'"),
        ("metamathqa", {"query": None}, "field 'query' is NoneType"),
        ("arc_easy", {"answerKey": "9"}, "answer '9' is none of"),
        (
            "arc_easy",
            {"choices": ["x"]},
            "field 'choices.text' is missing, expected a list",
        ),
        (
            "arc_easy",
            {"choices": {"text": ["a", "b", "c"], "label": ["B", "C"]}},
            "3 options have the labels .*'B', 'C'.; expected one for each, all different",
        ),
        ("arc_easy", {"choices": CHOICES | {"label": ["A", "A"]}}, "2 options have"),
        ("arc_easy", {"choices": CHOICES | {"label": [*"ABC"]}}, "2 options have"),
        ("piqa", {"label": -1}, "answer -1 is none of .*unlabelled splits"),
        (
            "slimorca",
            {"conversations": [{"from": "bot", "value": ""}]},
            "unknown chat role 'bot'",
        ),
        (
            "slimorca",
            {"conversations": [TALK[0], TALK[1] | {"value": " \n"}]},
            "the answer is blank, expected text",
        ),
    ],
)
def test_rows_that_do_not_fit_are_refused_with_file_and_line(
    tmp_path, name, change, match
):
    path = jsonl(tmp_path, RAW[name], RAW[name] | change)
    refused(f"E-DATA: .*train.jsonl:2: .*{match}", hub.load, name, path=path)


def test_files_that_are_scripts_missing_broken_or_without_the_fields_are_refused(
    tmp_path,
):
    canary = tmp_path / "ran"
    written(tmp_path, f"open({str(canary)!r}, 'w')".encode(), "piqa.py")
    written(tmp_path, b"PAR1 is not parquet PAR1", "broken.parquet")
    parquet(tmp_path, {"text": "x"}).rename(tmp_path / "other.parquet")
    datasets.Dataset.from_dict({"goal": []}).to_parquet(str(tmp_path / "empty.parquet"))
    pq.write_table(pa.table({"goal": pa.array([], "string")}), tmp_path / "no.parquet")
    written(tmp_path, b"goal,label\nq,1\n", "rows.csv")
    written(tmp_path, b"ARROW1\x00\x00\xff\xff\xff\xff", "rows.arrow")
    kinds = "files that are read end in .jsonl, .json, .parquet, .jsonl.gz"
    for file, match in {
        "piqa.py": "E-REMOTECODE: .*piqa.py: a script is not data",
        "none.parquet": "E-NOFILE: .*none.parquet: no such file",
        "none.jsonl": "E-NOFILE: .*none.jsonl: no such file",
        "broken.parquet": "E-DATA: .*: not a readable parquet",
        "other.parquet": "E-DATA: .*parquet:1: field 'sol1' is missing; the row has text",
        "empty.parquet": "E-DATA: .*empty.parquet:1: the file is empty",
        "no.parquet": "E-DATA: .*no.parquet:1: the file is empty; expected at least one",
        "rows.csv": f"E-DATA: .*rows.csv:1: not JSON .*; {kinds}",
        "rows.arrow": f"E-DATA: .*rows.arrow:1: invalid UTF-8 .*; {kinds}",
    }.items():
        refused(match, hub.load, "piqa", path=tmp_path / file)
    assert not canary.exists()


USER = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("messages", "match"),
    [
        (
            [{"role": "usr", "content": "x"}],
            "x:1: unknown chat role 'usr': did you mean 'user'",
        ),
        ([USER], "messages hold prompt"),
        ([{"role": "user", "content": 3}], "content as text"),
        (
            [USER, {"role": "gpt", "content": "\ud800"}],
            "field 'answer' holds a lone surrogate",
        ),
        ("user", "messages is str"),
        (["user"], "a message is str"),
        ([], "messages hold nothing"),
    ],
)
def test_an_exchange_has_a_prompt_an_answer_and_perhaps_a_system_message(
    messages, match
):
    turns = [{"role": "system", "content": "s"}, USER, {"from": "gpt", "value": "b"}]
    assert templates.exchange(turns[1:], "x") == {"prompt": "a", "answer": "b"}
    assert templates.exchange(turns, "x") == {
        "prompt": "a",
        "answer": "b",
        "system": "s",
    }
    refused(f"E-DATA: .*{match}", templates.exchange, messages, "x:1")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("It is 24, in all 72.", "72"),
        ("-1,080.50", "-1080.5"),
        ("10-3=7", "7"),
        ("none", ""),
        ("from 5 to 12,000,", "12000"),
        ("$18.00", "18"),
        ("May 2-3", "3"),
        ("\u22127", "-7"),
        ("it is .50", "0.5"),
        ("1000", "1000"),
    ],
)
def test_a_solutions_final_number_is_its_last_one_plainly_written(text, number):
    assert final_number(text) == number


@pytest.mark.parametrize("output", ["", "  \n"])
def test_an_instruction_without_an_answer_is_refused_as_an_own_row_is(output):
    raw = {"instruction": "Add.", "input": "1 1", "output": output}
    refused("E-DATA: x:3: the answer is blank, exp", templates.instruction, raw, "x:3")


@pytest.mark.parametrize("split", ["validation[", "validation[]", "validation[5"])
def test_half_a_part_of_a_split_is_not_all_of_it(split, tmp_path):
    folder = tmp_path / "baber/piqa"
    folder.mkdir(parents=True)
    jsonl(folder, RAW["piqa_open"]).rename(folder / "validation.jsonl")
    words = "E-DATA: split is 'validation.*expected a part as validation.50%:."
    refused(words, hub.pinned, hub.CATALOGUE["piqa_open"], tmp_path, split)


@pytest.mark.parametrize(
    ("row", "there"), [({1: "a", "answer": "b"}, "1, answer"), ({}, "no fields")]
)
def test_a_row_without_a_field_is_told_with_those_that_it_has(row, there):
    words = f"E-DATA: x:3: field 'prompt' is missing; the row has {there}$"
    refused(words, reading.field, row, "prompt", "x:3")
