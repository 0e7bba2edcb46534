"""The tables of arms: every arm of every notebook says in one line what it is."""

from pathlib import Path

import pytest

from moebook import lists
from moebook.experiments import banks, described, every
from moebook.lab.run import sources

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sources.notebooks(ROOT)
ARMS = every.arms({name: notebook.defaults for name, notebook in NOTEBOOKS.items()})


@pytest.mark.parametrize("notebook", ARMS)
def test_every_arm_says_what_it_is_and_no_two_say_the_same(notebook):
    texts = ARMS[notebook]
    assert texts
    assert all(texts.values())
    assert len(set(texts.values())) == len(texts)


@pytest.mark.parametrize(
    "name", [n for n in NOTEBOOKS if "arms" in NOTEBOOKS[n].defaults]
)
def test_the_arms_that_a_notebook_runs_by_itself_are_told(name):
    asked = NOTEBOOKS[name].defaults["arms"]
    assert lists.arms(asked, ARMS[name])  # refuses a name that is not among them


def test_every_choice_of_banks_is_told():
    assert set(ARMS["banks"]) == set(banks.CHOICES)


def test_the_table_marks_the_arms_of_a_run():
    table = described({"dense": "the base", "sparse": "adapters"}, {"sparse": None})
    assert table["in this run"].to_dict() == {"dense": "", "sparse": "yes"}
    assert table["what it is"].tolist() == ["the base", "adapters"]
