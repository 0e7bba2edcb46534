"""Rocket's targets: rates are chosen by rows that no arm was tuned on."""

from dataclasses import fields
from types import SimpleNamespace

import pytest

from moebook.experiments import targets
from moebook.methods import rocket
from tests.refusals import refused

SETTINGS = {"shots": 2, "seed": 0, "valid_rows": 3, "rates": "0.001,0.01"}


def rows(prompts):
    """A row for each letter."""
    return [{"prompt": prompt, "answer": "yes"} for prompt in prompts]


def pool(annotated, opened):
    return targets.Pool({"mine": rows(annotated)}, {}, rows(opened), {"mine": "mine"})


def test_rates_are_chosen_by_rows_that_are_neither_shots_nor_open_rows(monkeypatch):
    monkeypatch.setattr(targets.data, "encode", lambda rows, *_, **__: rows)
    blank = dict.fromkeys(field.name for field in fields(targets.Targets))
    made = targets.Targets(
        **blank
        | {
            "settings": SETTINGS,
            "pool": pool("abcdefgh", "gz"),
            "cases": {"mine": SimpleNamespace(shots=rows("dh"))},
        }
    )
    assert made.valid == {"mine": rows("cef")}


@pytest.mark.parametrize(
    ("annotated", "opened"),
    [("abcdefgh", "abcdefgh"), ("aaaaaa", ""), ("abcabc", "abc")],
)
def test_a_target_without_a_row_to_choose_a_rate_by_is_refused_before_it_trains(
    annotated, opened
):
    words = "E-DATA: valid_rows = 3: none of mine's . annotated rows is left"
    model = tokenizer = None  # nothing is encoded, nothing trains
    drawn = pool(annotated, opened)
    refused(words, targets.whole, SETTINGS, model, tokenizer, drawn, ["mixture"])


@pytest.mark.parametrize(
    ("rates", "arms"), [("0.001", ["mixture"]), ("0.001,0.01", ["expert_lora"])]
)
def test_no_row_is_asked_for_where_no_arm_chooses_a_rate_by_it(
    monkeypatch, rates, arms
):
    def train(model, tokenizer, sets, **recipe):
        raise InterruptedError

    monkeypatch.setattr(rocket.bank, "train", train)
    settings = SETTINGS | {
        "rates": rates,
        "whole_rows": 9,
        "source": "embedded",
        "accumulate": 1,
        "optimizer": "adamw",
        "bank_folder": "",
    }
    with pytest.raises(InterruptedError):
        targets.whole(settings, None, None, pool("abcdef", "abcdef"), arms)
