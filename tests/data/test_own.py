"""A user's own file: its schema, its splits, and refusals with file and line that keep its text."""

import json
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
from datasets import Dataset

from moebook import models, training
from moebook.data import hashes, hub, tasks
from moebook.data.tasks import Task
from moebook.methods import esft, upcycling
from moebook.models.skeleton import configuration
from tests.refusals import refused

SECRET = "the patient said"
ROW = {"prompt": f"{SECRET} 1", "answer": "yes"}


def put(folder, *rows, name="mine.jsonl"):
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def numbered(count, **more):
    return [{"prompt": f"{n} + 1 =", "answer": str(n + 1)} | more for n in range(count)]


def test_a_file_is_a_task_whose_rows_are_as_they_stand_in_it(tmp_path):
    given = [
        ROW | {"system": "Be short.", "rationale": "since", "domain": "code", "id": 7},
        {"prompt": "{braces} 2 + 2 =", "answer": 1, "choices": ["3", "4"]},
        {"prompt": "\n  def f():\n", "answer": "    return  1\n"},
    ]
    task = Task.from_jsonl(put(tmp_path, *given))
    rows = {row["prompt"]: row for row in task.rows("all", 3)}
    assert rows[ROW["prompt"]] == {
        "task": "own_mine",
        "domain": "code",
        "prompt": ROW["prompt"],
        "answer": "yes",
        "rationale": "since",
        "system": "Be short.",
    }
    assert rows["{braces} 2 + 2 ="]["answer"] == "4"
    assert rows["{braces} 2 + 2 ="]["domain"] == "own"
    assert rows["\n  def f():\n"]["answer"] == "    return  1\n"
    (item,) = (item for item in task.items("all") if item.choices)
    assert item.choices == ("3", "4")
    assert tasks.find(str(tmp_path / "mine.jsonl")).rows("all", 3) == task.rows(
        "all", 3
    )


def test_prompts_decide_the_splits_whatever_the_file_is_called_and_its_order(tmp_path):
    rows = [*numbered(50), {"prompt": " 7 + 1  =", "answer": "eight"}]
    task = Task.from_jsonl(put(tmp_path, *rows))
    sizes = {split: task.available(split) for split in (*tasks.SPLITS, "all")}
    assert sizes["all"] == 51 == sizes["train"] + sizes["validation"] + sizes["test"]
    assert 10 <= sizes["test"] <= 11
    assert 10 <= sizes["validation"] <= 11
    asked = [hashes(task.rows(split, sizes[split])) for split in tasks.SPLITS]
    for one, other in pairwise([*asked, asked[0]]):
        assert not one & other
    again = Task.from_jsonl(put(tmp_path, *rows[::-1], name="other.jsonl"))
    for split, prompts in zip(tasks.SPLITS, asked, strict=True):
        assert hashes(again.rows(split, again.available(split))) == prompts


def test_rows_that_name_their_splits_stay_there(tmp_path):
    rows = [*numbered(9, split="train"), ROW | {"split": "test"}]
    task = Task.from_jsonl(put(tmp_path, *rows))
    assert task.available("train") == 9
    assert [row["prompt"] for row in task.rows("test", 1)] == [ROW["prompt"]]
    words = (
        'mine.jsonl: no row is of split \'validation\'; give rows "split": "validation"'
    )
    refused(f"E-DATA: .*{words}", task.rows, "validation", 1)


@pytest.mark.parametrize(
    ("split", "rows"),
    [
        ("fresh", numbered(1, split="train")),
        ("fresh", numbered(4, split="test")),
        ("rest", numbered(4, split="test")),
    ],
)
def test_what_a_refusal_of_an_empty_part_of_train_says_is_enough(tmp_path, split, rows):
    task = Task.from_jsonl(put(tmp_path, *rows))
    words = f"E-DATA: .*no row is of split '{split}'; give two or more rows .split.: "
    refused(f'{words}"train"', task.rows, split, 1)
    more = [ROW | {"prompt": f"new {n}", "split": "train"} for n in range(2)]
    assert len(Task.from_jsonl(put(tmp_path, *more)).rows(split, 1)) == 1


def test_a_file_without_splits_lacks_prompts_or_rows_of_train(tmp_path):
    task = Task.from_jsonl(put(tmp_path, *numbered(1)))
    words = "give 5 prompts or more, or two or more rows .split.: .train."
    refused(f"E-DATA: .*{words}", task.rows, "fresh", 1)
    assert Task.from_jsonl(put(tmp_path, *numbered(5))).rows("fresh", 1)


def test_answers_of_several_lines_are_compared_whole_and_lengths_hold_the_longest(
    tmp_path,
):
    one = Task.from_jsonl(put(tmp_path, ROW))
    assert one.normalise("yes.\nAnd so on") == one.normalise("yes")
    assert one.max_new_tokens == 4
    several = Task.from_jsonl(put(tmp_path, ROW | {"answer": "yes\nné"}))
    assert several.normalise("yes\nno") != several.normalise("yes\nné")
    assert several.max_new_tokens == len("yes\nné".encode()) + 1
    assert Task.from_jsonl(put(tmp_path, ROW), max_new_tokens=9).max_new_tokens == 9


def test_a_file_that_changes_is_read_again(tmp_path):
    path = put(tmp_path, ROW)
    assert tasks.find(str(path)).available("all") == 1
    first = tasks.content([str(path), "gcd"])
    put(tmp_path, ROW, *numbered(3))
    path.touch()
    assert tasks.find(str(path)).available("all") == 4
    assert tasks.content([str(path), "gcd"])[0] != first[0]
    assert first[1] == "gcd"


OTHERS = "prompt_id Prompts promptId answer_id answers system_id rationale_en domain_id"


@pytest.mark.parametrize("name", OTHERS.split())
def test_a_field_named_after_one_of_the_schema_is_left_alone(tmp_path, name):
    task = Task.from_jsonl(put(tmp_path, ROW | {name: 7}))
    assert task.rows("all", 1)[0]["prompt"] == ROW["prompt"]


@pytest.mark.parametrize("name", ["sytem", "System", "rationlae", "domian", "spilt"])
def test_a_misspelt_field_that_the_row_lacks_is_refused(tmp_path, name):
    words = f"E-DATA: .*:1: unknown field '{name}'; did you mean '"
    refused(words, Task.from_jsonl, put(tmp_path, ROW | {name: "a"}))


ODD = {
    "unknown field 'promt'; did you mean 'prompt'": {"promt": "a", "answer": "b"},
    "field 'prompt' is missing; the row has question, answer": {
        "question": SECRET,
        "answer": SECRET,
    },
    "field 'answer' is int, expected text": {"prompt": SECRET, "answer": 4},
    "field 'answer' is blank": {"prompt": SECRET, "answer": "  "},
    "field 'prompt' holds a lone surrogate": {"prompt": "\ud800", "answer": "a"},
    "field 'choices' is no list": {"prompt": SECRET, "answer": "a", "choices": {}},
    "field 'choices' is list": {"prompt": SECRET, "answer": 0, "choices": [[], "a"]},
    "field 'choices' holds a text twice": {
        "prompt": SECRET,
        "answer": 0,
        "choices": [SECRET, SECRET],
    },
    "field 'answer' is none of the choices; expected one of the 2": {
        "prompt": "a",
        "answer": SECRET,
        "choices": ["a", "b"],
    },
    "field 'split' is none of train, validation, test": ROW | {"split": SECRET},
    "field 'rationale' is list": ROW | {"rationale": [SECRET]},
    "names a split, unlike .*:1; expected every row or none": ROW | {"split": "test"},
}
ODD_PLACES = {True: "True", 2: "2", -1: "-1", None: "None", "A": "a letter"}


@pytest.mark.parametrize("words", ODD)
def test_a_row_of_another_form_is_refused_by_line_and_never_shown(tmp_path, words):
    path = put(tmp_path, numbered(1)[0], ODD[words])
    code = refused(f"E-DATA: .*mine.jsonl:2: {words}", Task.from_jsonl, path)
    assert SECRET not in str(code)


@pytest.mark.parametrize("answer", ODD_PLACES, ids=ODD_PLACES.values())
def test_an_answer_that_is_no_place_and_no_choice_is_refused(tmp_path, answer):
    path = put(tmp_path, {"prompt": "a", "choices": ["x", "y"], "answer": answer})
    refused("E-DATA: .*:1: field 'answer' is none of", Task.from_jsonl, path)


def test_files_of_another_kind_and_prompts_in_two_splits_are_refused(tmp_path):
    rows = [ROW | {"split": "train"}, ROW | {"split": "test", "prompt": f"{SECRET}  1"}]
    words = "E-LEAK: .*:2: this prompt is in split train too .*:1.; leave one"
    assert SECRET not in str(refused(words, Task.from_jsonl, put(tmp_path, *rows)))
    for name in ("mine.csv", "mine.json"):
        path = put(tmp_path, ROW, name=name)
        refused(f"E-DATA: .*{name}: expected JSON lines", Task.from_jsonl, path)
    refused(
        "E-NOFILE: .*none.jsonl: no such file", tasks.find, f"{tmp_path}/none.jsonl"
    )
    (tmp_path / "folder.jsonl").mkdir()
    refused(
        "E-NOFILE: .*folder.jsonl is a folder, expected a file of JSON lines$",
        Task.from_jsonl,
        tmp_path / "folder.jsonl",
    )
    path = put(tmp_path, ROW, name="my file.jsonl")
    refused(
        "E-PATH: .*my file.jsonl: expected a name of letters", Task.from_jsonl, path
    )
    (tmp_path / "half.jsonl").write_text(f'{{"prompt": "{SECRET}')
    told = refused(
        "E-DATA: .*half.jsonl:1: not JSON", Task.from_jsonl, tmp_path / "half.jsonl"
    )
    assert SECRET not in str(told)


def _a_checkpoint(place):
    model, _ = models.load("nano")
    upcycling.upcycle(model, upcycling.Config(experts=2, top_k=1))
    saved = upcycling.save(model, place)
    upcycling.load(models.load("nano")[0], place)
    shutil.rmtree(Path.home() / "own" / "checkpoint")
    return saved


def _a_training(place):
    model, _ = models.load("nano")
    ids = [[3, 4, 5, 6]] * 2
    rows = Dataset.from_dict({"input_ids": ids, "labels": ids})
    training.fit(model, rows, steps=2, batch=2, output=f"{place}/training")
    return sorted(path.name for path in Path.home().glob("own/training/*"))


PLACES = {
    "a task": lambda place: Task.from_jsonl(f"{place}/rows.jsonl").source,
    "a model": lambda place: models.fingerprint(models.load(f"{place}/nano")[0]),
    "a configuration": lambda place: configuration(f"{place}/nano").to_dict(),
    "a folder of data sets": lambda place: hub.folder(place),
    "the hub's files": lambda place: hub.contents(place),
    "a file of the hub's": lambda place: hub.load("gsm8k", path=f"{place}/gsm8k.jsonl"),
    "published scores": lambda place: esft.published(place, ["toy"]),
    "published routing": lambda place: esft.replay(
        f"{place}/1.txt", experts=2, top_k=1, pooling="tokens"
    ),
    "a selection": lambda place: esft.Selection.load(f"{place}/experts.json"),
    "a checkpoint": lambda place: _a_checkpoint(f"{place}/checkpoint"),
    "a training": _a_training,
}
"""Functions that take a place, of a folder ``own``."""


@pytest.mark.parametrize("call", PLACES.values(), ids=PLACES)
def test_a_place_may_begin_with_the_tilde_of_the_users_home(
    call, tmp_path, monkeypatch
):
    own = tmp_path / "own"
    own.mkdir()
    (own / "nano").symlink_to(Path(models.__file__).parent / "nano")
    (own / "rows.jsonl").write_text('{"prompt": "1 + 1 =", "answer": "2"}')
    (own / "gsm8k.jsonl").write_text(
        '{"question": "1 + 1", "answer": "So 2.\\n#### 2"}'
    )
    (own / "1.txt").write_text("0\t0\t1\t\t0.5\n")
    (own / "toy.scores.json").write_text("{}")
    (own / "experts.json").write_text(
        '{"experts": {"0": [1]}, "shared_experts": false, "non_expert_modules": false}'
    )
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert str(call("~/own")) == str(call(str(own)))
    assert not list(here.iterdir())
