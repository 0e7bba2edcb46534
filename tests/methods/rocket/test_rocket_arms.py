"""The arms: what each changes, and which there are at which settings."""

from dataclasses import asdict

import pytest

from moebook.methods.rocket import Config, arms

SMALL = {"shots": 8, "candidates": 3, "experts": 2, "top_k": 2, "budget": 4}


@pytest.fixture
def every():
    return arms.every(Config(), strict=0.6)


def changed(arm, config):
    mine = asdict(arm.config)
    return {name: mine[name] for name, value in asdict(config).items() if mine[name] != value}


def test_each_arm_changes_one_step(every):
    mixture = every["mixture"]
    assert mixture == arms.Arm(config=Config())
    for name, arm in every.items():
        if name not in ("mixture", *arms.UNMIXED):
            steps = [arm.by != mixture.by, not arm.open_data, bool(changed(arm, Config()))]
            assert sum(steps) == (2 if name == "random_lora" else 1), name
    assert [every[name] for name in arms.UNMIXED] == [None, None]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("random_lora", {"experts": 1, "top_k": 1}),
        ("data_by_kde", {"sampler": "kde", "gamma": 10.0}),
        ("data_strictly_deduplicated", {"threshold": 0.6}),
        ("budget333", {"budget": 333}),
        ("budget4000", {"budget": 4000}),
        ("shots20", {"shots": 20}),
        ("experts8", {"experts": 8}),
        ("selected3", {"top_k": 3}),
    ],
)
def test_an_arm_is_what_it_is_called(every, name, change):
    assert changed(every[name], Config()) == change


def test_sizes_that_the_settings_do_not_allow_are_no_arms():
    names = arms.every(Config(**SMALL), strict=0.6)
    sized = [name for name in names if name.startswith(("shots", "experts", "selected", "budget"))]
    assert [name for name in sized if name[-1].isdigit()] == [
        "budget1", "budget16", "shots1", "shots5", "experts2", "selected1"
    ]  # fmt: skip
