"""The tables of arms: every arm of every notebook says in one line what it is."""

from pathlib import Path

import pytest

from moebook.experiments import (
    budgets,
    contest,
    described,
    esft,
    pesc,
    rivals,
    rocket,
    router_init,
    specialists,
    targets,
    together,
)
from moebook.lab.run import sources

ROOT = Path(__file__).resolve().parents[2]


def defaults(name):
    """Return a notebook's parameters as they are."""
    return sources.find(ROOT, name).defaults


def of_rocket():
    settings = defaults("rocket")
    every = rocket.arms(rocket.main(settings), strict=settings["strict"])
    return targets.what(every), every


def of_esft():
    every = esft.known(defaults("esft"))
    return specialists.what(every), every


def of_the_rivals():
    every = rivals.known(defaults("rivals"))
    return contest.what(every), every


def of_together(sparse):
    every = together.arms(sparse=sparse)
    return {name: budgets.WHAT[name] for name in every}, every


def of_arms(every):
    return {name: arm.what for name, arm in every.items()}, every


@pytest.mark.parametrize(
    "tell",
    [
        pytest.param(lambda: of_arms(pesc.ARMS), id="pesc"),
        pytest.param(lambda: of_arms(router_init.ARMS), id="router_init"),
        pytest.param(of_rocket, id="rocket"),
        pytest.param(of_esft, id="esft"),
        pytest.param(of_the_rivals, id="rivals"),
        pytest.param(lambda: of_together(sparse=False), id="together, dense"),
        pytest.param(lambda: of_together(sparse=True), id="together, sparse"),
    ],
)
def test_every_arm_says_what_it_is_and_no_two_say_the_same(tell):
    texts, every = tell()
    assert list(texts) == list(every)
    assert all(texts.values())
    assert len(set(texts.values())) == len(texts)


def test_the_table_marks_the_arms_of_a_run():
    table = described({"dense": "the base", "sparse": "adapters"}, {"sparse": None})
    assert table["in this run"].to_dict() == {"dense": "", "sparse": "yes"}
    assert table["what it is"].tolist() == ["the base", "adapters"]
