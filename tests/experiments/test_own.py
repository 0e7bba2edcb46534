"""Notebooks on a user's own files: ``-p mix=FILE``, ``-p tasks=FILE``, ``-p targets=FILE``."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from moebook import data, experiments, models
from moebook.data import tasks
from moebook.experiments import needs
from moebook.lab.run import sources
from moebook.methods import rocket
from tests.book import own
from tests.experiments.notebooks import given
from tests.refusals import refused

ROOT = Path(__file__).resolve().parents[2]
TESTED = {
    "pesc": "tasks",
    "router_init": "tasks_code",
    "together": "tasks",
    "rocket": "targets",
    "rivals": "targets",
    "esft": "tasks",
}
FEW = {
    "together": {"arms": "full", "again": ""},
    "rocket": {"arms": "mixture"},
    "esft": {"general": "gcd"},
}


@pytest.fixture
def file(tmp_path):
    rows = [
        {"prompt": f"{n} + 1 =", "answer": str(n + 1), "domain": domain}
        for n, domain in enumerate(["code", "mathematics", "text"] * 20)
    ]
    path = tmp_path / "sums.jsonl"
    write(path, rows)
    return path


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("name", ["pesc", "router_init"])
def test_a_mix_of_your_own_is_parted_in_trained_tested_and_validated_rows(name, file):
    arms = {"pesc": "all", "router_init": "su,trsu,crsu"}[name]  # of one task
    settings = given(name, arms=arms, mix=str(file), **{TESTED[name]: str(file)})
    experiments.check(name, settings)
    rows = getattr(experiments, name).rows(settings)
    task = tasks.find(str(file))
    assert data.hashes(rows.train) == data.hashes(task.rows("train", 36))
    assert data.hashes(rows.held_out) <= data.hashes(task.rows("test", 12))
    assert data.hashes(rows.valid) <= data.hashes(task.rows("validation", 12))
    first = json.dumps(rows.tested)
    file.write_text(file.read_text() + '{"prompt": "1 and 1?", "answer": "2"}\n')
    again = getattr(experiments, name).rows(settings)
    assert json.dumps(again.tested) != first  # runs on another file are no pool


@pytest.mark.parametrize("name", TESTED)
def test_your_own_task_is_one_among_the_tasks_and_a_bad_one_stops_before_any_work(
    name, file
):
    changes = {TESTED[name]: f"python_eval,{file}", **FEW.get(name, {})}
    experiments.check(name, given(name, **changes))
    file.write_text('{"prompt": "a", "answer": 4}\n')
    words = "E-RANGE: .*t.* lists .*sums.jsonl:1: field 'answer' is int"
    refused(words, experiments.check, name, given(name, **changes))
    write(file, [{"prompt": "a", "answer": "b", "split": "train"}])
    words = "E-RANGE: .*t.* lists .*sums.jsonl: no row is of split '(test|validation)'"
    refused(words, experiments.check, name, given(name, **changes))


@pytest.mark.parametrize("name", TESTED)
def test_two_files_whose_tasks_have_one_name_are_told_apart_by_you(
    name, file, tmp_path
):
    (tmp_path / "more").mkdir()
    other = tmp_path / "more" / file.name
    other.write_text(file.read_text())
    changes = {TESTED[name]: f"{file},{other}", **FEW.get(name, {})}
    words = "E-RANGE: .*more/sums.jsonl': its task is called own_sums, as that of"
    refused(words, experiments.check, name, given(name, **changes))


@pytest.mark.parametrize("path", ["mine.jsonl", "./mine.jsonl", "d/mine.jsonl"])
def test_a_new_task_is_not_new_by_another_path_or_in_another_folder(
    path, file, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d").mkdir()
    for place in ("mine.jsonl", "d/mine.jsonl", "d/sums.jsonl"):
        (tmp_path / place).write_text(file.read_text())
    some = {"tasks": "mine.jsonl,gcd", **FEW["together"]}
    experiments.check("together", given("together", **some, new="d/sums.jsonl"))
    words = f"E-RANGE: new = '{path}': tasks trains on own_mine, so it is not new"
    refused(words, experiments.check, "together", given("together", **some, new=path))


def test_a_target_of_your_own_has_shots_and_is_tested_by_itself(file):
    settings = given("rocket", targets=f"kinship_told,{file}", arms="mixture")
    experiments.check("rocket", settings)
    pool = experiments.targets.rows(settings)
    task = tasks.find(str(file))
    assert list(pool.tested) == list(pool.annotated) == ["kinship_told", "own_sums"]
    assert data.hashes(pool.annotated["own_sums"]) == data.hashes(
        task.rows("train", 36)
    )
    assert data.hashes(pool.held_out["own_sums"]) == data.hashes(task.rows("test", 12))
    assert pool.asked("own_sums") is task
    assert pool.asked("kinship_told") == "kinship_told"
    for name, arm in (("rocket", "mixture"), ("rivals", "random")):
        many = given(name, targets=str(file), shots=36, arms=arm)
        words = "E-RANGE: .*shots = 36: .*sums.jsonl has 36 annotated rows.*1 to 35"
        refused(words, experiments.check, name, many)


def test_specialists_train_and_test_on_files_and_keep_their_own_rows(file, tmp_path):
    other = tmp_path / "kept.jsonl"
    write(other, [{"prompt": f"{n} times?", "answer": "1"} for n in range(20)])
    settings = given(
        "esft",
        tasks=f"{file}:gcd,isa:{file}",
        general=str(other),
        alignment=f"gcd,{other}",
    )
    experiments.check("esft", settings)
    pool = experiments.specialists.rows(settings)
    assert pool.tested == {"own_sums": "gcd", "isa": "own_sums"}
    assert pool.general == ["own_kept"]
    assert {row["task"] for row in pool.kept} == {"gcd", "own_kept"}
    train = data.hashes(tasks.find(str(file)).rows("train", 36))
    assert data.hashes(pool.train["own_sums"]) <= train
    asked = {row["task"] for row in pool.asked}
    assert asked == {"gcd", "own_sums", "own_kept"}


def test_a_pair_of_task_and_test_is_parted_at_its_colon_and_not_at_a_drives(file):
    pairs = r"C:\mine\a.jsonl:gcd,isa:D:\b.jsonl,C:/c.jsonl,metamathqa:gsm8k"
    assert experiments.esft.tested({"tasks": pairs}) == {
        r"C:\mine\a.jsonl": "gcd",
        "isa": r"D:\b.jsonl",
        "C:/c.jsonl": "C:/c.jsonl",
        "metamathqa": "gsm8k",
    }


def test_what_is_tested_is_not_trained_on(file, tmp_path):
    other = tmp_path / "other.jsonl"
    train = tasks.find(str(file)).rows("train", 3)
    rows = [{"prompt": r["prompt"], "answer": "1", "split": "test"} for r in train]
    write(other, rows)
    settings = given("pesc", mix=str(file), tasks=str(other))
    refused("E-LEAK: 3 of 3", experiments.pesc.rows, settings)


def test_what_tests_the_new_task_is_not_trained_on(file, tmp_path):
    turned = tmp_path / "turned.jsonl"
    train = tasks.find(str(file)).rows("train", 20)
    parts = ["train", "test"] * 10
    rows = [
        {"prompt": row["prompt"], "answer": row["answer"], "split": part}
        for row, part in zip(train, parts, strict=True)
    ]
    write(turned, rows)
    few = {"new": str(turned), "new_shots": 4, "test_rows": 10, "rows_per_task": 36}
    settings = given("together", tasks=f"{file},gcd", **FEW["together"], **few)
    words = "E-LEAK: test rows of the new task: 10 of 10 evaluation prompts"
    refused(words, experiments.budgets.rows, settings)


def test_a_domain_that_routers_start_from_and_the_file_lacks_is_told(file):
    file.write_text('{"prompt": "a", "answer": "b", "domain": "code"}\n')
    settings = given("router_init", mix=str(file), arms="trsu")
    words = "E-RANGE: .*sums.jsonl.*'domain' is 'mathematics', and it has none"
    refused(words, experiments.check, "router_init", settings)


def test_a_choice_that_is_a_pattern_takes_a_files_name_and_nothing_else():
    mix = sources.find(ROOT, "pesc").parameters["mix"]
    assert mix.read("data/my.jsonl", "-p") == "data/my.jsonl"
    for text in (".jsonl", "my.json", "idae"):
        refused("E-RANGE: .*one of: .*jsonl", mix.read, text, "-p")
    assert list(needs.files({"mix": "embedded", "tasks": "gcd"})) == []


@pytest.mark.filterwarnings("ignore:W-BASE")
def test_a_lora_of_a_targets_whole_set_is_of_the_kind_of_a_strangers_bank(tmp_path):
    own.make(tmp_path)
    model, tokenizer = models.load(tmp_path / "my-model")
    settings = given(
        "rocket",
        bank_folder=str(tmp_path / "my-loras"),
        members="",
        targets=str(tmp_path / "train.jsonl"),
        arms="expert_lora",
        rates="0.01",
    )
    experiments.check("rocket", settings)
    bank = experiments.targets.load_bank(settings, model, tokenizer)
    assert {lora.rank for lora in bank.values()} == {4}
    pool = experiments.targets.rows(settings)
    arms = ["expert_lora"]
    whole, _ = experiments.targets.whole(settings, model, tokenizer, pool, arms)
    (lora,) = whole.values()
    rocket.loras.check_alike([*bank.values(), lora])
    assert (lora.name, lora.rank) == ("own_train", 4)
    again = given("rivals", **{"bank_folder": settings["bank_folder"], "members": ""})
    (lora,) = experiments.contest.whole(again, model, tokenizer, pool).values()
    assert lora.rank == 4


def test_the_bank_is_scored_on_shots_of_your_own_file_by_its_task(file, monkeypatch):
    class Reached(Exception):
        pass

    def score_bank(*_, task, own=(), **__):
        raise Reached(task, own)

    settings = given("rivals", targets=str(file), arms="random", shots=3)
    pool = experiments.targets.rows(settings)
    monkeypatch.setattr(rocket.case, "score_bank", score_bank)
    monkeypatch.setattr(rocket.bank, "guarded", lambda bank, *_, **__: bank)
    encoder = SimpleNamespace(blocks=lambda rows: [np.zeros((len(rows), 2))])
    tokenizer = SimpleNamespace(pad_token_id=0)
    with pytest.raises(Reached) as reached:
        experiments.contest.prepare(settings, None, tokenizer, {}, pool, encoder)
    assert reached.value.args == ("own_sums", {"own_sums": tasks.find(str(file))})


def test_a_target_that_shots_and_open_rows_use_up_is_named(file, monkeypatch):
    settings = given("rivals", targets=str(file), arms="random", shots=3)
    pool = experiments.targets.rows(settings)
    everything = pool.annotated["own_sums"]
    monkeypatch.setattr(rocket.case, "score_bank", lambda *_, **__: None)
    monkeypatch.setattr(rocket.bank, "guarded", lambda bank, *_, **__: bank)
    pipeline = experiments.contest.pipeline
    monkeypatch.setattr(pipeline, "experts", lambda *_, **__: ())
    monkeypatch.setattr(pipeline, "rows", lambda *_: everything)
    monkeypatch.setattr(data, "encode", lambda rows, **_: rows)
    encoder = SimpleNamespace(blocks=lambda rows: [np.zeros((len(rows), 2))])
    tokenizer = SimpleNamespace(pad_token_id=0)
    words = r"E-DATA: valid_rows = 2: none of own_sums's \d+ annotated rows is left"
    prepare = experiments.contest.prepare
    refused(words, prepare, settings, None, tokenizer, {}, pool, encoder)


@pytest.mark.parametrize("parameter", ["tasks", "alignment", "general"])
def test_a_file_that_trains_and_another_that_tests_do_not_have_one_name(
    parameter, file, tmp_path
):
    (tmp_path / "more").mkdir()
    other = tmp_path / "more" / file.name
    other.write_text(file.read_text())
    changes = {
        "tasks": {"tasks": f"{file}:{other}"},
        "alignment": {"tasks": "isa", "general": str(file), "alignment": str(other)},
        "general": {"tasks": f"{file}:gcd", "general": str(other)},
    }[parameter]
    words = "E-RANGE: .*sums.jsonl': its task is called own_sums, as that of"
    refused(words, experiments.check, "esft", given("esft", **changes))
    same = {name: text.replace("more/", "") for name, text in changes.items()}
    experiments.check("esft", given("esft", **same))
