"""Rocket's targets: rates are chosen by rows that no arm was tuned on."""

from dataclasses import fields
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from moebook.experiments import contest, targets
from moebook.methods import rocket
from moebook.methods.rocket.loras import Lora
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


@pytest.mark.parametrize("way", ["tuned", "tuned_alone"])
@pytest.mark.parametrize("fails", ["training", "block"])
def test_the_mixture_is_taken_off_the_base_whatever_fails(monkeypatch, way, fails):
    def tune(model, *_, **__):
        model.rocket = rocket.apply.Origin(
            base="0",
            config=rocket.Config(experts=1, top_k=1),
            experts=("a",),
            scales=(1.0,),
            rank=2,
            paths=(),
        )
        if fails == "training":
            raise InterruptedError

    monkeypatch.setattr(targets.pipeline, "tune", tune)
    blank = dict.fromkeys(field.name for field in fields(targets.Targets))
    known = {
        "settings": SETTINGS | {"epochs": 0, "experts": 1, "selected": 1},
        "model": torch.nn.Linear(1, 1),
        "bank": {"a": None},
        "cases": {"mine": SimpleNamespace(shots=[])},
        "arms": {"a": SimpleNamespace(config=None)},
    }
    made = targets.Targets(**blank | known)
    monkeypatch.setattr(targets.Targets, "recipe", {})
    monkeypatch.setattr(targets.Targets, "experts", lambda *_: ["a"])
    monkeypatch.setattr(targets.Targets, "rows", lambda *_: [])
    monkeypatch.setattr(targets.checks, "main", lambda _: None)
    with pytest.raises(InterruptedError), getattr(made, way)("mine", "a", 0.1):
        raise InterruptedError
    assert not hasattr(made.model, "rocket")


def test_what_perplexity_foretells_has_the_signs_that_its_claims_read():
    """By hand, of squared differences of ranks: 1 - 6 (1 + 1) / (4 (4^2 - 1)) is 0.8."""
    loras = pd.MultiIndex.from_product(
        [["mine"], ["a", "b", "c", "d"]], names=["task", "lora"]
    )
    paired = pd.DataFrame(
        {
            "bare answers": [1.0, 2.0, 3.0, 4.0],
            "with rationales": [4.0, 3.0, 2.0, 1.0],
            "after": [0.4, 0.3, 0.2, 0.1],
            "gain": [0.4, 0.2, 0.3, 0.1],
        },
        index=loras,
    )
    values = {}
    run = SimpleNamespace(record=lambda name, value, unit: values.update({name: value}))
    targets.record_foretold(run, paired)
    assert values == pytest.approx(
        {
            "rocket/random_lora_on_shots/accuracy": 0.25,
            "rocket/perplexity/gain_correlation": 0.8,
            "rocket/perplexity/reasoning_minus_plain/correlation": 2.0,
        }
    )


@pytest.mark.parametrize("part", ["annotated", "held_out"])
def test_a_lora_that_saw_a_targets_rows_is_not_chosen_for_it(part):
    def lora(name, scale, seen):
        prompts = rocket.bank.hashes(rows(seen))
        factors = {"layer": scale * torch.eye(2)}
        known = {"data": name, "prompts": prompts}
        return Lora(name, 2, 1.0, factors, factors, provenance=known)

    bank = {
        "gcd": lora("gcd", 1, "abc"),
        "sums": lora("sums", 2, "de"),
        "copyleft": lora("copyleft", 3, "f"),
    }
    of_target = {"annotated": rows("x"), "held_out": rows("y"), part: rows("c")}
    drawn = targets.Pool(
        {"mine": of_target["annotated"], "yours": rows("u")},
        {"mine": of_target["held_out"], "yours": rows("e")},
        [],
        {"mine": "mine", "yours": "yours"},
    )
    clean = contest._without_leaks(bank, drawn)
    assert {target: list(left) for target, left in clean.items()} == {
        "mine": ["sums", "copyleft"],
        "yours": ["gcd", "copyleft"],
    }
