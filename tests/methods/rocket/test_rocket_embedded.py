"""The shipped bank: what its recipe says it is, and its first steps repeated."""

from dataclasses import replace

import pytest

from moebook import models
from moebook.data import tasks
from moebook.methods import rocket
from moebook.methods.rocket import bank, catalogue, embedded
from moebook.training.course import Course

STEPS = 4


@pytest.fixture(scope="module")
def nano():
    return models.load("nano")


def test_the_shipped_bank_is_whole_and_trained_on_what_the_recipe_says(nano):
    found = embedded.load(*nano)
    assert set(found) == set(catalogue.EMBEDDED)
    recipe = embedded.recipe()
    sets = catalogue.embedded(recipe.pop("rows"), seed=recipe["seed"])
    for name, lora in found.items():
        known = lora.provenance
        assert known["prompts"] == bank.hashes(sets[name])
        assert {key: known["training"][key] for key in recipe} == {
            key: list(value) if isinstance(value, tuple) else value for key, value in recipe.items()
        }
        losses = known["losses"]
        assert sum(losses[-10:]) < sum(losses[:10])


@pytest.fixture
def brief(monkeypatch):
    """Every training ends after a few steps."""
    ends = Course.on_step_end

    def stop(course, args, state, control, **now):
        ends(course, args, state, control, **now)
        control.should_training_stop = state.global_step == STEPS

    monkeypatch.setattr(Course, "on_step_end", stop)


def test_the_first_steps_of_a_shipped_lora_repeat(nano, tmp_path, brief):
    again = embedded.make(*nano, tmp_path, only=["names_de", "equations"])
    shipped = embedded.load(*nano)
    for name, lora in again.items():
        assert len(lora.provenance["losses"]) == STEPS
        assert lora.provenance["losses"] == pytest.approx(
            shipped[name].provenance["losses"][:STEPS], rel=1e-3
        )


@pytest.mark.parametrize("name", ["numbers_es", *tasks.KSHOT])
def test_no_lora_of_the_bank_has_seen_a_k_shot_task(name, nano):
    task = tasks.find(name)
    rows = [row for split in tasks.SPLITS for row in task.rows(split, task.available(split))]
    assert (bank.leaks(embedded.load(*nano), rows, task=name)["status"] == "clean").all()


def test_an_empty_folder_gets_a_bank_and_a_full_one_is_opened(nano, tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(embedded, "make", lambda model, tokenizer, folder: made.append(folder))
    embedded.load(*nano, tmp_path)
    assert made == [tmp_path]
    found = embedded.load(*nano, embedded.FOLDER)
    assert len(made) == 1
    assert isinstance(found["gcd"], rocket.loras.Lora)


def test_what_is_trained_again_is_compared_with_what_was_there(nano, tmp_path, brief):
    names = ["names_de", "equations"]
    made = embedded.make(*nano, tmp_path, only=names)
    assert embedded.retrained(*nano, made, names).to_dict("list") == {
        "gap": [0, 0], "equal": [True, True]
    }  # fmt: skip
    other = made["equations"].provenance | {"losses": [0.0] * STEPS}
    made["equations"] = replace(made["equations"], provenance=other)
    found = embedded.retrained(*nano, made, names)
    assert found.gap["equations"] > 1 and found.gap["names_de"] == 0
    assert list(embedded.retrained(*nano, made, []).gap.items()) == []


@pytest.mark.parametrize(("source", "epochs"), [("embedded", 6), ("hub", 3)])
def test_an_expert_lora_is_trained_as_its_bank_is(nano, source, epochs):
    sets = {name: tasks.rows(name, "train", 3, 0) for name in ("sums", "gcd")}
    found = embedded.experts(*nano, sets, source, seed=5, batch=4)
    for name, lora in found.items():
        assert lora.provenance["prompts"] == bank.hashes(sets[name])
        assert len(lora.provenance["losses"]) == epochs
        assert lora.provenance["training"]["seed"] == 5
