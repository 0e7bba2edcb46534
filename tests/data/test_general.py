"""General tasks: what the bases were taught, in splits that share no question."""

import random

import pytest

from moebook.data import refuse_leak, tasks
from recipes import families


def drawn(name: str, split: str) -> list[dict[str, str]]:
    return tasks.rows(name, split, tasks.find(name).available(split))


@pytest.mark.parametrize("name", tasks.GENERAL)
def test_splits_of_a_general_task_share_no_question(name: str) -> None:
    train, validation, test = (drawn(name, split) for split in ("train", "validation", "test"))
    refuse_leak(train, test)
    refuse_leak(train, validation)
    refuse_leak(validation, test)
    assert len(test) == len(validation) == 200
    assert len(train) >= 400
    assert tasks.majority(name) < 0.2


def test_every_family_of_the_corpus_is_asked_in_exactly_one_general_task() -> None:
    asked = [{row["prompt"] for row in drawn(name, "train")} for name in tasks.GENERAL]
    for family in families.FAMILIES:
        rng = random.Random(f"general/{family.__name__}")
        questions = {family(rng)[0] for _ in range(400)}
        assert [bool(questions & prompts) for prompts in asked].count(True) == 1


def test_general_tasks_are_no_target_tasks() -> None:
    assert not tasks.GENERAL.keys() & tasks.CATALOGUE.keys()
    targets = {row["prompt"] for name in tasks.CATALOGUE for row in tasks.rows(name, "test", 200)}
    assert not targets & {row["prompt"] for name in tasks.GENERAL for row in drawn(name, "train")}
