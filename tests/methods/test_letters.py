"""Who gives a setting by its paper's letter is told its name here."""

from dataclasses import fields

import pytest

from moebook.methods import esft, pesc, rocket, upcycling
from tests.refusals import refused

LETTERS = {
    esft.Config: {"p": "threshold"},
    pesc.Config: {
        "K": "top_k",
        "E": "experts",
        "R": "adapter_width",
        "alpha": "balance_weight",
    },
    rocket.Config: {
        "K": "shots",
        "k": "top_k",
        "N": "experts",
        "M": "candidates",
        "C": "budget",
        "tau": "threshold",
    },
    upcycling.Config: {"N": "experts", "k": "top_k", "alpha": "balance_weight"},
}


@pytest.mark.parametrize(
    ("config", "letter", "name"),
    [
        (config, letter, name)
        for config, own in LETTERS.items()
        for letter, name in own.items()
    ],
)
def test_a_papers_letter_is_told_as_our_setting(config, letter, name):
    line = (
        f"E-CHOICE: unknown setting '{letter}': the paper's {letter} is '{name}' here"
    )
    refused(line, config, **{letter: 1})
    if hasattr(config, "preset"):
        refused(line, config.preset, "paper", **{letter: 1})


@pytest.mark.parametrize("config", LETTERS)
def test_letters_stand_for_settings_and_others_are_told_the_nearest(config):
    assert set(config.LETTERS.values()) <= {field.name for field in fields(config)}
    refused(
        "E-CHOICE: unknown setting 'toppk'; (did you mean 'top_k'.)?", config, toppk=2
    )
