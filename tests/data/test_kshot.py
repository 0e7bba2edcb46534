"""The K-shot tasks: exact, disjoint from the tasks they are near to."""

import json

import pytest

from moebook.data import tasks
from moebook.data.tasks import kshot
from moebook.data.tasks.common_sense import kinship
from moebook.errors import Refusal
from moebook.methods.rocket import bank


def every(name, split):
    return tasks.rows(name, split, tasks.find(name).available(split))


@pytest.mark.parametrize("name", tasks.KSHOT)
def test_splits_are_disjoint_and_large_enough_for_fifty_shots(name):
    assert name not in tasks.CATALOGUE
    prompts = {split: {row["prompt"] for row in every(name, split)} for split in tasks.SPLITS}
    assert not prompts["train"] & (prompts["test"] | prompts["validation"])
    assert len(prompts["test"]) == 200
    assert len(prompts["train"]) >= 200
    assert all(row["rationale"] for row in every(name, "train"))


def test_equations_in_words_are_right_and_no_equation_of_the_catalogue():
    known = {
        item.slots["equation"] for split in tasks.SPLITS
        for item in tasks.find("equations")._items(split)
    }  # fmt: skip
    for split in tasks.SPLITS:
        for item in tasks.find("equation_words")._items(split):
            a, b, c = (int(item.slots[slot]) for slot in "abc")
            sign = {"plus": 1, "minus": -1}[item.slots["sign"]]
            assert a * int(item.answer) + sign * b == c
            assert f"{a}x {'-+'[sign > 0]} {b} = {c}" not in known


def test_families_told_the_other_way_round_are_new_and_keep_their_answers():
    known = {item.slots["facts"] for item in kinship()}
    unordered = {frozenset(text.removesuffix(".").split(". ")) for text in known}
    families, in_another_order = 0, 0
    for split in tasks.SPLITS:
        for item in tasks.find("kinship_told")._items(split):
            facts = [fact.strip(".").split() for fact in item.slots["facts"].split(". ")]
            turned = [(a, r, b.removesuffix("'s")) for b, r, _, a in facts]
            plain = [f"{a} is the {r} of {b}." for a, r, b in turned]
            assert " ".join(plain) not in known
            families += 1
            in_another_order += frozenset(fact.removesuffix(".") for fact in plain) in unordered
            assert f"{item.slots['a']} is the {item.answer} of" in item.rationale
    assert (families, in_another_order) == (1199, 1)  # as the module says


def test_new_intents_are_none_of_the_known_ones_and_hold_the_requests_words():
    known = {json.loads(row["answer"])["intent"] for row in every("intent_json", "train")}
    for row in every("intent_new", "train"):
        slots = json.loads(row["answer"])
        assert slots.pop("intent") not in known
        assert all(value in row["prompt"] for value in slots.values())


def test_both_kinds_of_clauses_are_frequent_and_none_is_in_the_bank():
    kinds = [row["answer"] for split in tasks.SPLITS for row in every("copyleft", split)]
    assert 0.4 < kinds.count("copyleft") / len(kinds) < 0.6
    assert set(kinds) == {"copyleft", "permissive"}
    texts = "\n".join(row["prompt"] for row in bank.embedded(2000)["licence"])
    assert not any(clause in texts for clause in kshot.reserved())


def test_they_are_found_by_name_like_any_other():
    assert tasks.rows("copyleft", "test", 2)[0]["task"] == "copyleft"
    with pytest.raises(Refusal, match="did you mean 'copyleft'"):
        tasks.find("copylef")
