"""Training a bank: cached, repeatable, the base untouched; the guard against leaks."""

import pytest
import torch

from moebook.data import tasks
from moebook.errors import Refusal
from moebook.methods import rocket
from moebook.methods.rocket import bank
from moebook.models.checkpoint import fingerprint

QUICK = {"rank": 4, "alpha": 8.0, "epochs": 1, "batch": 4, "lr": 1e-2, "max_length": 250}


@pytest.fixture
def sets():
    return {name: tasks.rows(name, "train", 8, 0) for name in ("sums", "gcd")}


def test_a_bank_is_trained_once_and_taken_from_its_folder_after(
    sets, base, tokenizer, tmp_path, monkeypatch
):
    model = base()
    before, learning = fingerprint(model), [p.requires_grad for p in model.parameters()]
    made = bank.train(model, tokenizer, sets, tmp_path, **QUICK)
    assert list(made) == ["sums", "gcd"]
    assert fingerprint(model) == before
    assert [p.requires_grad for p in model.parameters()] == learning
    assert not any("lora" in name for name, _ in model.named_modules())
    assert not hasattr(model, "peft_config")
    monkeypatch.setattr(bank, "tune", None)  # would fail if anything were trained again
    again = bank.train(model, tokenizer, sets, tmp_path, **QUICK)
    opened = bank.open(tmp_path, model)
    for name in made:
        assert made[name].digest == again[name].digest == opened[name].digest
        assert made[name].scale == 2.0
        assert made[name].targets == ("q_proj", "v_proj")


def test_training_repeats_bit_for_bit(sets, base, tokenizer, tmp_path):
    one = bank.train(base(), tokenizer, sets, tmp_path / "one", **QUICK)
    torch.rand(3)
    two = bank.train(base(), tokenizer, sets, tmp_path / "two", **QUICK)
    assert [lora.digest for lora in one.values()] == [lora.digest for lora in two.values()]
    other = bank.train(base(), tokenizer, sets, tmp_path / "three", seed=1, **QUICK)
    assert one["gcd"].digest != other["gcd"].digest


def test_a_trained_lora_models_its_own_data_better(sets, base, tokenizer, tmp_path):
    model = base()
    settings = {**QUICK, "epochs": 15}
    made = bank.train(model, tokenizer, sets, tmp_path, **settings)
    nats = {
        name: rocket.scoring.perplexity(model, tokenizer, made, rows).mean(axis=1)
        for name, rows in sets.items()
    }
    assert nats["gcd"]["gcd"] < nats["gcd"]["sums"]
    assert nats["sums"]["sums"] < nats["sums"]["gcd"]


def test_other_rows_or_settings_under_a_known_name_are_refused(sets, base, tokenizer, tmp_path):
    model = base()
    bank.train(model, tokenizer, sets, tmp_path, **QUICK)
    with pytest.raises(Refusal, match=r"E-EXISTS: .*sums was trained on other rows or settings"):
        bank.train(model, tokenizer, sets, tmp_path, **{**QUICK, "lr": 1e-3})
    with pytest.raises(Refusal, match="E-EXISTS"):
        fewer = {name: rows[:6] for name, rows in sets.items()}
        bank.train(model, tokenizer, fewer, tmp_path, **QUICK)


def test_the_guard_flags_names_and_prompts_in_common(sets, base, lora):
    model = base()
    known = {"prompts": bank.hashes(sets["gcd"]), "data": "gcd", "training": {}}
    mixed = {"prompts": bank.hashes([*sets["sums"], sets["gcd"][3]]), "data": "own"}
    made = {
        "gcd": lora(model, "gcd", 0, provenance=known),
        "mixed": lora(model, "mixed", 1, provenance=mixed),
        "clean": lora(model, "clean", 2, provenance={"prompts": ["00"], "data": "sums"}),
        "found": lora(model, "found", 3),
    }
    target = [*sets["gcd"], *tasks.rows("gcd", "test", 5)]
    flags = bank.leaks(made, target, task="gcd")
    assert flags["status"].to_dict() == {
        "gcd": "leak", "mixed": "leak", "clean": "clean", "found": "unknown",
    }  # fmt: skip
    assert flags["shared"].tolist() == [8, 1, 0, 0]
    assert list(bank.guarded(made, target, task="gcd")) == ["clean", "found"]
    by_name = bank.leaks(made, [], task="sums")["status"]
    assert by_name["clean"] == "leak"
    with pytest.raises(Refusal, match="E-BANK"):
        bank.guarded({name: made[name] for name in ("gcd", "clean")}, target, task="gcd")


def test_a_bank_tells_how_it_was_trained(base, make_bank):
    loras = make_bank(base(), 2)
    loras["a"].provenance.update(prompts=["x", "y"], losses=[4.0, *[2.0] * 19, 1.0])
    found = bank.trainings(loras)
    assert found.loc["a"].tolist() == pytest.approx([2, 21, 4, 1.95])
    assert found.loc["b", "rows"] == 0 and found.loc["b"].isna().sum() == 2
