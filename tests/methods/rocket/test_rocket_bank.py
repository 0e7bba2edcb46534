"""The bank: read in order, trained and reused, guarded; its sets of rows; the shipped one."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import lm_eval.tasks
import pytest
import torch

from moebook import models, runtime
from moebook.data import tasks
from moebook.errors import Refusal
from moebook.lab import papers
from moebook.methods import rocket
from moebook.methods.rocket import bank, loras
from moebook.models import checkpoint
from moebook.models.checkpoint import fingerprint
from tests.refusals import refused

QUICK = {"rank": 2, "alpha": 4.0, "dropout": 0.0, "epochs": 2, "batch": 4, "lr": 3e-2}


@pytest.fixture(scope="module")
def nano():
    return models.load("nano")


@pytest.fixture
def sets():
    return {name: tasks.rows(name, "train", 8, 0) for name in ("sums", "gcd")}


def test_a_bank_is_trained_once(sets, model, tokenizer, tmp_path, monkeypatch):
    before = fingerprint(model)
    learning = [p.requires_grad for p in model.parameters()]
    trained = bank.train(model, tokenizer, sets, tmp_path, **QUICK)
    assert fingerprint(model) == before
    assert [p.requires_grad for p in model.parameters()] == learning
    assert not any("lora" in name for name, _ in model.named_modules())
    assert not hasattr(model, "peft_config")
    monkeypatch.setattr(bank, "tune", None)  # would fail if anything were trained again
    again = bank.train(model, tokenizer, sets, tmp_path, **QUICK)
    opened = bank.read(tmp_path, model)
    assert list(trained) == list(again) == ["sums", "gcd"]
    for name, lora in trained.items():
        assert lora.digest == again[name].digest == opened[name].digest
        assert (lora.scale, lora.targets) == (2.0, ("q_proj", "v_proj"))
    fewer = {name: rows[:6] for name, rows in sets.items()}
    for rows, settings in ((sets, {**QUICK, "lr": 1e-3}), (fewer, QUICK)):
        with pytest.raises(
            Refusal, match=r"E-EXISTS: .*sums was trained on other rows or setti"
        ):
            bank.train(model, tokenizer, rows, tmp_path, **settings)


SHORT = QUICK | {"epochs": None, "steps": 2}


def test_a_lora_of_other_answers_or_an_other_order_is_not_taken(
    sets, model, tokenizer, tmp_path
):
    rows = sets["sums"]
    bank.train(model, tokenizer, {"sums": rows}, tmp_path, **SHORT)
    others = ([row | {"answer": "no"} for row in rows], rows * 2, rows[::-1])
    for other in (*others, [row | {"system": "Be short."} for row in rows]):
        assert bank.hashes(other) == bank.hashes(rows)
        words = "E-EXISTS: .*sums was trained on other rows or settings"
        given = (model, tokenizer, {"sums": other}, tmp_path)
        refused(words, bank.train, *given, **SHORT)


def test_a_lora_from_before_the_digest_is_taken_by_its_prompts(
    sets, model, tokenizer, tmp_path
):
    rows = sets["sums"]
    (lora,) = bank.train(model, tokenizer, {"sums": rows}, **SHORT).values()
    facts = lora.provenance["training"]
    assert len(facts.pop("digest")) == 64
    facts["output"] = "runs"  # which was among them
    loras.write(lora, tmp_path / "sums")
    given = (model, tokenizer, {"sums": rows[::-1]}, tmp_path)
    assert bank.train(*given, **SHORT)["sums"].digest == lora.digest
    refused("E-EXISTS", bank.train, *given, **SHORT | {"lr": 1e-3})
    refused("E-EXISTS", bank.train, *given[:2], {"sums": rows[:6]}, tmp_path, **SHORT)


def test_a_lora_is_known_again_by_settings_that_json_keeps_otherwise(
    sets, model, tokenizer, tmp_path, monkeypatch
):
    how = SHORT | {"betas": (0.9, 0.95), "rates": {"lora_B": 1e-2}}
    given = (model, tokenizer, sets, tmp_path)
    trained = bank.train(*given, **how)
    monkeypatch.setattr(bank, "tune", None)
    again = bank.train(*given, **how)
    assert [lora.digest for lora in again.values()] == [
        lora.digest for lora in trained.values()
    ]
    refused("E-EXISTS", bank.train, *given, **how | {"betas": (0.9, 0.99)})


@pytest.mark.parametrize("kind", [str, Path])
def test_each_lora_has_checkpoints_of_its_own_and_is_the_same_without(
    kind, sets, model, tokenizer, tmp_path, monkeypatch
):
    given = (model, tokenizer, sets, tmp_path / "bank")
    runs = kind(tmp_path / "runs")
    aside = {"milestones": [([1], fingerprint)], "label": "own", "pad_id": 0}
    bank.train(*given, output=runs, every=1, **aside, **SHORT)
    assert sorted(path.name for path in Path(runs).iterdir()) == ["gcd", "sums"]
    assert all(list(path.iterdir()) for path in Path(runs).iterdir())
    monkeypatch.setattr(bank, "tune", None)
    assert list(bank.train(*given, **SHORT)) == list(sets)


def test_what_cannot_be_kept_is_refused_before_anything_trains(
    sets, model, tokenizer, tmp_path, monkeypatch
):
    given = (model, tokenizer, sets)
    alone = bank.train(*given, penalty=lambda model: torch.zeros(()), **SHORT)
    assert alone["sums"].provenance["training"]["penalty"] is True
    monkeypatch.setattr(bank, "tune", None)
    for words, settings in (
        ("E-USAGE: penalty is a function", {"penalty": print}),
        ("E-TYPE: .*output", {"output": 5}),
    ):
        refused(words, bank.train, *given, tmp_path, **SHORT | settings)
    monkeypatch.undo()
    refused("E-PATH: output is empty", bank.train, *given, output=" ", **SHORT)


def test_one_set_is_trained_as_it_is_among_several(sets, base, tokenizer):
    """A single target has one LoRA of its own, from which nothing is chosen."""
    several = bank.train(base(), tokenizer, sets, **QUICK)
    (alone,) = bank.train(base(), tokenizer, {"sums": sets["sums"]}, **QUICK).values()
    assert alone.digest == several["sums"].digest


def test_training_repeats_bit_for_bit_and_a_lora_models_its_own_data_better(
    sets, base, tokenizer
):
    how = {**QUICK, "epochs": 15}
    one = bank.train(base(), tokenizer, sets, **how)
    torch.rand(3)
    two, other = (
        bank.train(base(), tokenizer, sets, seed=seed, **how) for seed in (0, 1)
    )
    assert [lora.digest for lora in one.values()] == [
        lora.digest for lora in two.values()
    ]
    assert one["gcd"].digest != other["gcd"].digest
    for name, rows in sets.items():
        nats = rocket.score.log_perplexity(base(), tokenizer, one, rows).mean(axis=1)
        assert nats.idxmin() == name


def test_the_guard_flags_names_and_prompts_in_common(sets, model, lora):
    known = {
        "gcd": {"prompts": bank.hashes(sets["gcd"]), "data": "gcd", "training": {}},
        "mixed": {
            "prompts": bank.hashes([*sets["sums"], sets["gcd"][3]]),
            "data": "own",
        },
        "clean": {"prompts": ["00"], "data": "sums"},
        "found": {},
    }
    members = {
        n: lora(model, n, seed, provenance=known[n]) for seed, n in enumerate(known)
    }
    target = [*sets["gcd"], *tasks.rows("gcd", "test", 5)]
    flags = bank.leaks(members, target, task="gcd")
    assert flags["status"].tolist() == ["leak", "leak", "clean", "unknown"]
    assert flags["shared"].tolist() == [8, 1, 0, 0]
    assert list(bank.guarded(members, target, task="gcd")) == ["clean", "found"]
    assert bank.leaks(members, [], task="sums")["status"]["clean"] == "leak"
    with pytest.raises(Refusal, match="E-BANK"):  # one LoRA is left
        bank.guarded(
            {name: members[name] for name in ("gcd", "clean")}, target, task="gcd"
        )


def test_an_empty_bank_has_no_leaks_and_is_refused_by_the_guard(sets):
    assert list(bank.leaks({}, sets["gcd"], task="gcd")) == ["status", "shared", "data"]
    refused("E-BANK: .*0 LoRAs", bank.guarded, {}, sets["gcd"], task="gcd")


def test_a_bank_is_made_in_the_folder_one_stands_in(nano, tmp_path, monkeypatch):
    (here := tmp_path / "bank").mkdir()
    monkeypatch.chdir(here)
    few = {"rows": 4, "steps": 2, "epochs": None}
    made = bank.load(*nano, ".", names=["gcd", "sums"], **few)
    assert list(made) == ["gcd", "sums"]
    # It is still the folder that one stands in, not the empty one that it replaced.
    assert Path.cwd() == here
    assert list(bank.load(*nano, ".")) == ["gcd", "sums"]


@pytest.mark.parametrize("names", [["gcd"], ["gcd", "gcd"]])
def test_a_bank_of_one_lora_is_refused_and_leaves_nothing(names, nano, tmp_path):
    few = {"rows": 4, "steps": 2, "epochs": None}
    words = "E-BANK: .*bank is to be made of 'gcd' alone, expected 2 names or more"
    refused(words, bank.load, *nano, tmp_path / "bank", names=names, **few)
    assert not list(tmp_path.iterdir())


def test_a_filled_folder_is_not_given_for_one_of_other_settings(nano, tmp_path):
    few = {"rows": 4, "steps": 2, "epochs": None}
    made = bank.load(*nano, tmp_path / "bank", names=["gcd", "sums"], **few)
    (one,) = bank.load(*nano, tmp_path / "bank", names=["gcd"], **few).values()
    assert one.digest == made["gcd"].digest
    for change, odd in (({"lr": 0.5}, "lr"), ({"rows": 3}, "prompts, digest")):
        words = rf"E-EXISTS: .*\({odd}\): remove it; or leave out rows, steps, epochs"
        refused(words, bank.load, *nano, tmp_path / "bank", **few | change)
    assert len(list((tmp_path / "bank").iterdir())) == 2


def test_a_bank_is_read_by_name_and_says_what_has_no_fingerprint(model, lora, tmp_path):
    loras.write(lora(model, "zeta", 1), tmp_path / "zeta")
    (tmp_path / "zeta" / checkpoint.DIGEST).unlink()
    refused("E-MANIFEST", bank.read, tmp_path, model)
    (tmp_path / "zeta" / checkpoint.MANIFEST).unlink()  # as from anywhere
    loras.write(lora(model, "alpha", 0), tmp_path / "alpha")
    (tmp_path / ".stage-x").mkdir()
    with pytest.warns(UserWarning, match="W-BASE: 1 of 2 LoRAs .*zeta"):
        assert list(bank.read(tmp_path, model)) == ["alpha", "zeta"]


def test_what_is_no_bank_or_no_set_is_refused(model, base, lora, make_bank, tmp_path):
    two = make_bank(model, 2)
    flat = base(num_hidden_layers=1)
    for message, function, *args in (
        (
            "E-BANK: .*'b' and 'c' are the same",
            bank.check,
            {**two, "c": lora(model, "c", 1)},
        ),
        ("rank: 4 and 8", bank.check, {**two, "c": lora(model, "c", 2, rank=8)}),
        (
            "'c' changes nothing",
            bank.check,
            {**two, "c": lora(model, "c", 2, size=0.0)},
        ),
        (
            "'a' and 'c' differ in layers: 4 and 2",
            bank.check,
            {**two, "c": lora(flat, "c", 2)},
        ),
        (  # whatever comes first does not know its base
            "'b' and 'c' differ in base: one and another",
            bank.check,
            {
                "a": replace(two["a"], base=None),
                "b": replace(two["b"], base="one"),
                "c": replace(lora(model, "c", 3), base="another"),
            },
        ),
        (r"E-BANK: .*holds 0 LoRAs \(none\)", bank.check, {}),
        (r"holds 1 LoRAs \(a\)", bank.check, {"a": two["a"]}),
        ("E-BANK: .*holds no LoRA", bank.read, tmp_path, model),
        (
            "E-DATA: unknown data set 'RACEs'; did you mean 'RACE'",
            bank.source_rows,
            "RACEs",
            None,
        ),
        ("E-PIN: ehovy/race: revision is 'main'", bank.source_rows, "RACE", "main"),
        (
            "E-DATA: no test rows are known for 'SiQA'",
            bank.targets,
            ["SiQA"],
            "hub",
            {},
        ),
        ("E-DATA: sets names no data set", bank.open_data, "", 3, "hub", {}),
        ("E-RANGE: sets lists 'RACEs': did", bank.open_data, "RACEs", 3, "hub", {}),
        ("E-RANGE: sets lists 'RACE' tw", bank.open_data, "RACE,RACE", 3, "hub", {}),
        (
            "E-DATA: no set of .* is 'gcdd'; did you mean 'gcd'",
            bank.make,
            *[None] * 2,
            ["gcdd"],
        ),
    ):
        refused(message, function, *args)


def test_the_shipped_bank_is_whole_and_trained_on_what_the_recipe_says(
    nano, tmp_path, monkeypatch
):
    def make(model, tokenizer, names, folder, **_):
        assert names == bank.EMBEDDED
        assert not list(target.iterdir())  # nobody sees a part of a bank
        shutil.copytree(bank.FOLDER, folder)

    (target := tmp_path / "bank").mkdir()
    monkeypatch.setattr(bank, "make", make)
    assert list(bank.load(*nano, target)) == sorted(bank.EMBEDDED)
    monkeypatch.delattr(bank, "make")
    (target := tmp_path / "notes").mkdir()
    (target / "read.me").touch()
    refused(r"E-BANK: .*notes holds no LoRA", bank.load, *nano, target)
    shipped = bank.load(*nano)
    assert set(shipped) == set(bank.load(*nano, bank.FOLDER)) == set(bank.EMBEDDED)
    sets = bank.embedded(bank.ROWS, seed=bank.RECIPE["seed"])
    for name, lora in shipped.items():
        known = lora.provenance
        assert known["prompts"] == bank.hashes(sets[name])
        assert {key: known["training"][key] for key in bank.RECIPE} == bank.RECIPE
        assert sum(known["losses"][-10:]) < sum(known["losses"][:10])


@pytest.mark.parametrize("name", ["numbers_es", *tasks.KSHOT])
def test_no_lora_of_the_bank_has_seen_a_k_shot_task(name, nano):
    task = tasks.find(name)
    rows = []
    for split in tasks.SPLITS:
        rows += task.rows(split, task.available(split))
    assert (bank.leaks(bank.load(*nano), rows, task=name)["status"] == "clean").all()


def test_the_first_steps_of_a_shipped_lora_repeat(nano, monkeypatch):
    monkeypatch.setattr(runtime, "progress", lambda steps, *_: steps[:4])
    shipped = bank.load(*nano)
    for name, lora in bank.make(*nano, ["names_de", "equations"]).items():
        losses = shipped[name].provenance["losses"][:4]
        assert lora.provenance["losses"] == pytest.approx(losses, rel=1e-3)


SHAPE = {
    "rank": 16,
    "alpha": 16.0,
    "targets": ["q_proj", "v_proj"],
    "dropout": 0.05,
    "format": "camel",
    "max_length": 1024,
}
PAPER = {"epochs": 3, "lr": 5e-5, "schedule": "cosine", "weight_decay": 1e-4}


@pytest.mark.parametrize(
    "recipe",
    [
        {},
        bank.RECIPE,
        {"rank": 3, "alpha": 6.0, "targets": ["o_proj"], "dropout": 0.2, "lr": 1e-3},
    ],
)
def test_a_lora_is_trained_by_the_recipe_or_by_table_12(recipe, nano, monkeypatch):
    fit = Mock(wraps=bank.training.fit)
    monkeypatch.setattr(bank.training, "fit", fit)
    sets = {name: tasks.rows(name, "train", 3, 0) for name in ("sums", "gcd")}
    own = {"seed": 5, "batch": 4}
    wanted = SHAPE | PAPER | recipe | own
    trained = bank.train(*nano, sets, **recipe | own)
    for lora, call in zip(trained.values(), fit.call_args_list, strict=True):
        facts = lora.provenance["training"]
        assert facts == wanted | {"digest": facts["digest"]}
        assert len(lora.provenance["losses"]) == wanted["epochs"]
        assert (lora.rank, lora.alpha) == (wanted["rank"], wanted["alpha"])
        targets = {path.rpartition(".")[2] for path in lora.down}
        assert targets == set(wanted["targets"])
        assert {len(down) for down in lora.down.values()} == {wanted["rank"]}
        assert call.args[0].peft_config["default"].lora_dropout == wanted["dropout"]
        given = {key: call.kwargs[key] for key in (*PAPER, *own)}
        assert given == {key: wanted[key] for key in given}


RAW = [
    (
        "WinoGrande",
        {
            "sentence": "John moved it because the _ is small.",
            "option1": "garage",
            "option2": "yard",
            "answer": "1",
        },
        "Which of the following is a good sentence:\nA. John moved it because the garage is small."
        "\nB. John moved it because the yard is small.\nAnswer:",
        "A. John moved it because the garage is small.",
    ),
    (
        "RACE",
        {
            "article": "He goes away.",
            "question": "Green Sea is _ the village.",
            "options": ["in", "next to", "near", "far from"],
            "answer": "D",
        },
        "He goes away.\nGreen Sea is _ the village.\nA. in\nB. next to\nC. near\nD. far from",
        "D. far from",
    ),
    (
        "Mathqa",
        {
            "Problem": "what is 1 + 1 ?",
            "options": "a ) 1 , b ) 2",
            "Rationale": '"two"',
        },
        "what is 1 + 1 ?\na ) 1 , b ) 2",
        "two",
    ),
    (
        "HellaSwag",
        {"ctx": "He sits", "endings": ["up", "down", "in", "on"], "label": "1"},
        "He sits\nQuestion: Which ending makes the most sense?\nA. up\nB. down\nC. in\nD. on",
        "B. down",
    ),
    (
        "Code-Alpaca",
        {"instruction": "Count vowels.", "input": "Hello", "output": "2"},
        "Count vowels.\nHello",
        "2",
    ),
]


@pytest.mark.parametrize(("name", "raw", "prompt", "answer"), RAW)
def test_rows_take_the_papers_form(name, raw, prompt, answer, monkeypatch):
    monkeypatch.setattr(bank.hub, "pinned", lambda *_: [("here:1", raw)])
    (row,) = bank.source_rows(name, "a" * 40)
    assert (row["task"], row["prompt"], row["answer"]) == (name, prompt, answer)


BENCHMARKS = {  # arc_challenge.yaml includes arc_easy.yaml
    "ARC-c": "arc/arc_easy.yaml",
    "ARC-e": "arc/arc_easy.yaml",
    "PIQA": "piqa/piqa.yaml",
    "BoolQ": "super_glue/boolq/default.yaml",
    "GSM8K": "gsm8k/gsm8k.yaml",
    "MBPP": "mbpp/mbpp.yaml",
}


def test_the_catalogue_is_tables_8_and_9_and_targets_have_the_benchmarks_split(
    monkeypatch,
):
    printed = papers.table("rocket", 8)
    asked = []
    assert set(printed["row"]) - {"ARC-c CoT-formatted"} == set(bank.SOURCES)
    assert (
        len(set(papers.table("rocket", 9)["row"]) - {"Base"}) == len(bank.SOURCES) == 38
    )
    assert all(
        re.fullmatch(r"[\w-]+/[\w.-]+", source.repo) for source in bank.SOURCES.values()
    )
    assert bank.SOURCES["ECQA"].files == "Chain-of-Thought/**/ecqa_train.json"
    monkeypatch.setattr(bank.hub, "pinned", lambda *args: asked.append(args[2]) or [])
    assert set(bank.QUESTIONS) < set(bank.HELD_OUT)
    for name, split in bank.HELD_OUT.items():
        text = (Path(lm_eval.tasks.__file__).parent / BENCHMARKS[name]).read_text(
            encoding="utf-8"
        )
        splits = dict(
            re.findall(r"^(test|validation)_split: (?!null)(\w+)", text, re.MULTILINE)
        )
        assert splits.get("test", splits.get("validation")) == split
    bank.targets(list(bank.TESTED), "hub", bank.NOWHERE)
    assert asked == [""] * 10 + list(bank.TESTED.values())


def test_embedded_targets_and_open_data_are_rows_of_the_tasks():
    annotated, held_out = bank.targets(["copyleft", "kinship_told"], "embedded", {})
    assert list(annotated) == list(held_out) == ["copyleft", "kinship_told"]
    for name, rows in annotated.items():
        assert len(rows) == tasks.find(name).available("train")
        assert held_out[name] == tasks.rows(name, "test", tasks.TEST)
    drawn = bank.embedded(3)
    assert list(drawn) == bank.EMBEDDED
    assert all(len(rows) == 3 for rows in drawn.values())
    assert bank.open_data("", 3, "embedded", {}) == [
        row for rows in drawn.values() for row in rows
    ]
    assert list(bank.embedded(3, names=["isa", "gcd"])) == ["gcd", "isa"]


def own_task(folder, name="teams"):
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.jsonl"
    splits = ("train", "test")
    rows = [
        {"prompt": f"{s}{n}", "answer": "a", "split": s} for s in splits for n in "12"
    ]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return tasks.Task.from_jsonl(path)


def test_own_targets_of_one_name_are_refused(tmp_path):
    one = own_task(tmp_path / "one")
    other = own_task(tmp_path / "other")
    clients = own_task(tmp_path / "other", "clients")
    for names in ([one, other], ["gcd", one, clients, other]):
        words = "E-DATA: two targets are called 'own_teams'"
        refused(words, bank.targets, names, "embedded", {})
    both = ["own_teams", "own_clients"]
    for names in ([one, clients], [one, clients, one]):  # the same one is no other
        annotated, held_out = bank.targets(names, "embedded", {})
        assert list(annotated) == list(held_out) == both


@pytest.mark.parametrize(
    ("source", "pins", "split", "message"),
    [
        ("hub", {}, "test", "E-PIN: no origin is given for 'PIQA'"),
        ("hub", {"GSM8K": "a" * 40}, "test", "E-PIN: no origin is given for 'PIQA'"),
        ("hub", {}, "validation", "E-CHOICE: split is 'validation'"),
        ("embedded", {}, "train", "E-CHOICE: split is 'train'"),
        ("embedded", {}, "Test", "E-CHOICE: split is 'Test'"),
    ],
)
def test_targets_of_no_known_place_or_split_are_refused(source, pins, split, message):
    name = "PIQA" if source == "hub" else "gcd"
    refused(message, bank.targets, [name], source, pins, split)
